"""Why asked-for tokens are not all here: the snapshot that begins most like them, whosever it is, and what keeps it from serving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from .digest import SnapshotDigest, root_key
from .errors import Corrupt, FormatTooNew, SnapshotMissing
from .identity import Identity, Value, differences, layout_text
from .index import Index
from .items import Item
from .layout import Layout
from .match import Match, match_items
from .snapshot import Snapshot
from .store import Store

TRIES = 16
"""Snapshots with equally many tokens in common that are read, to show the one of which most can be used."""


@dataclass(frozen=True, slots=True)
class Nearest:
    """The snapshot with the longest common beginning. ``differences``: (field, asked for, found) of everything that makes it another's KV:
    identity, ``layout``, ``namespace``; none for the asker's own. ``match``: what would serve, were it theirs."""

    match: Match
    names: tuple[str, ...]
    differences: tuple[tuple[str, Value, Value], ...] = field(repr=False)

    @property
    def snapshot(self) -> Snapshot:
        return self.match.snapshot

    @property
    def usable(self) -> int:
        """Tokens of it that can be reused."""
        return 0 if self.differences else self.match.n

    @property
    def same_tokenizer(self) -> bool:
        """Whether its ids are the asker's."""
        return not any(name == "tokenizer" for name, _, _ in self.differences)


def nearest(
    store: Store, layout: Layout, identity: Identity, items: Sequence[Item], *, namespace: str, head: str | None = None
) -> Nearest | None:
    """None where no snapshot has the first item in common. Of equally near ones the asker's own, then the one of which most can be used.

    A damaged snapshot is passed over. Changes nothing.
    """
    own = root_key(identity.digest, layout.digest, namespace)

    def run(index: Index) -> list[SnapshotDigest]:
        return _proposed(index, items, own)

    best: Nearest | None = None
    for digest in store.searched(run):
        try:
            snapshot = store.shelf.records.snapshot(digest)
            coverage = store.shelf.records.coverage(digest, snapshot)
        except (Corrupt, FormatTooNew, SnapshotMissing):
            continue
        match = match_items(digest, snapshot, coverage, items, head)
        found = Nearest(match, (), _differences(layout, identity, namespace, snapshot))
        if best is None or _rank(found) > _rank(best):
            best = found
    if best is None:
        return None
    names = sorted(ref.label for ref in store.shelf.records.readable_refs() if ref.snapshot == best.match.digest)
    return Nearest(best.match, tuple(names), best.differences)


def _rank(found: Nearest) -> tuple[int, bool, int]:
    return found.match.common, not found.differences, found.match.n


def _proposed(index: Index, items: Sequence[Item], own: object) -> list[SnapshotDigest]:
    """The snapshots with the most items in common, the asker's own and the most recently used first."""
    near: list[tuple[int, bool, int]] = []
    for root in index.roots():
        for common, equal in groupby(index.candidates(root, items), key=lambda one: one[0]):
            near += [(common, root == own, block) for _, block in equal]
            break
    most = max((common for common, _, _ in near), default=0)
    found: dict[SnapshotDigest, None] = {}
    for _, _, block in sorted((one for one in near if one[0] == most), key=lambda one: not one[1]):
        found |= dict.fromkeys(digest for digest, *_ in index.holders(block))
        if len(found) >= TRIES:
            break
    return list(found)[:TRIES]


def _differences(
    layout: Layout, identity: Identity, namespace: str, snapshot: Snapshot
) -> tuple[tuple[str, Value, Value], ...]:
    found = list(differences(identity, snapshot.identity))
    if layout.digest != snapshot.layout.digest:
        found.append(("layout", layout_text(layout), layout_text(snapshot.layout)))
    if namespace != snapshot.namespace:
        found.append(("namespace", namespace, snapshot.namespace))
    return tuple(found)
