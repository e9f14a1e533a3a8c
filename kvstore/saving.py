"""What a save is before anything is written: the manifest that it makes, which of its objects the caller holds, and what comes of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from .digest import ContentDigest, SnapshotDigest
from .errors import InputInvalid
from .identity import Identity
from .items import Item
from .layout import BLOCK, Layout, blocks_of
from .snapshot import Coverage, Lineage, Receipt, Snapshot

Contents = tuple[ContentDigest, ...]
"""Of one block: the digest of each group's object, in layout order."""

Expected = SnapshotDigest | Literal["anything"] | None
"""Where a name must stand to be moved: at a snapshot, nowhere (None), or it doesn't matter."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What `Store.save` published. ``snapshot`` is None (and so ``digest``) when an unnamed save was dropped whole.

    ``dropped_from``: the first block that an unnamed save left out because its tokens are here with other bytes.
    ``written_bytes`` counts object files with their headers; objects that were here already cost nothing.
    """

    digest: SnapshotDigest | None
    snapshot: Snapshot | None = field(repr=False)
    coverage: Coverage | None = field(repr=False)
    written_objects: int
    written_bytes: int
    dropped_from: int | None


NOTHING_SAVED = Saved(None, None, None, 0, 0, 0)
"""Of an unnamed save whose first block is here with other bytes."""


def require_name(name: str | None, expect: Expected) -> None:
    """Raises `InputInvalid` where something is expected of a name that isn't given."""
    if name is None and expect != "anything":
        raise InputInvalid(f"expect: expected a name that is to stand at {expect}, found none. Give name= too.")


def held_places(
    layout: Layout, tokens: int, covered: Sequence[int] | None, known: Sequence[Contents]
) -> set[tuple[int, int]]:
    """The (block, group) objects of which the caller's memory holds every row. ``covered``: its first row of each group, 0 by default.

    `InputInvalid` where a block is neither held nor known.
    """
    first = tuple(covered) if covered is not None else (0,) * len(layout.groups)
    if len(known) > tokens // BLOCK:
        raise InputInvalid(f"known: expected at most {tokens // BLOCK} full blocks, found {len(known)}")
    groups = range(len(layout.groups))
    places = [(b, g) for b in range(blocks_of(tokens)) for g in groups]
    held = {(b, g) for b, g in places if b * BLOCK >= first[g]}
    lost = [(b, g) for b, g in places if b >= len(known) and (b, g) not in held]
    if lost:
        raise InputInvalid(
            f"rows: expected rows from token {lost[0][0] * BLOCK} of group {layout.groups[lost[0][1]].name}, "
            f"found rows from token {first[lost[0][1]]} on and no known digest for that block"
        )
    return held


def made_snapshot(
    layout: Layout,
    identity: Identity,
    items: Sequence[Item],
    namespace: str,
    contents: Sequence[Contents],
    lineage: Sequence[Lineage],
    pending: int | None,
    head: str | None,
    receipt: Receipt | None,
    model: str,
) -> Snapshot:
    """The snapshot of all ``items``, as `Store.save` is given it. ``lineage``: of each block; ``head`` counts with a pending token only."""
    table = tuple(dict.fromkeys(lineage))
    places = tuple(table.index(one) for one in lineage)
    snapshot = Snapshot(identity, layout, namespace, tuple(items), tuple(contents), table, places, model=model)
    return replace(snapshot, pending=pending, head=None if pending is None else head, receipt=receipt)


def beginning(snapshot: Snapshot, blocks: int) -> Snapshot:
    """Its first ``blocks`` blocks, which are full: what follows them is not known of a beginning."""
    lineage = [snapshot.lineages[i] for i in snapshot.lineage[:blocks]]
    items, contents = snapshot.items[: blocks * BLOCK], snapshot.blocks[:blocks]
    return made_snapshot(
        snapshot.layout, snapshot.identity, items, snapshot.namespace, contents, lineage, None, None, None, snapshot.model
    )  # fmt: skip
