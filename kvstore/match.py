"""What of a snapshot can be continued, for tokens that are asked for. Pure; the rules are in `docs/format.md`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .digest import SnapshotDigest
from .items import Item, common_prefix
from .layout import BLOCK, Layout, Run, allows, usable
from .snapshot import Coverage, Lineage, Snapshot


@dataclass(frozen=True, slots=True)
class Match:
    """One chain, and how much of it serves.

    ``n``: tokens to reuse, the position after loading. ``runs``: per group, the tokens ``[first, n)`` whose rows are loaded.
    ``common``: leading tokens equal to those asked for; ``asked``: how many were asked for. ``pending``: the next token when
    ``n`` is the whole snapshot and the same head chose it, else None. ``reason``: why not more, for people.
    """

    digest: SnapshotDigest
    snapshot: Snapshot = field(repr=False)
    n: int
    runs: tuple[Run, ...]
    common: int
    asked: int
    pending: int | None
    reason: str

    @property
    def first_difference(self) -> int | None:
        """Index of the first token asked for that the snapshot has otherwise or not at all; None if it has all."""
        return self.common if self.common < self.asked else None

    @property
    def lineage(self) -> Lineage | None:
        """Who computed the last reused block; None if nothing is reused."""
        return self.snapshot.lineages[self.snapshot.lineage[(self.n - 1) // BLOCK]] if self.n else None

    def objects(self) -> list[tuple[int, int]]:
        """The (block, group) objects that loading reads."""
        return [
            (block, g)
            for g, (first, last) in enumerate(self.runs)
            if first < last
            for block in range(first // BLOCK, -(-last // BLOCK))
        ]


def match_items(
    digest: SnapshotDigest, snapshot: Snapshot, coverage: Coverage, items: Sequence[Item], head: str | None
) -> Match:
    """How far ``items`` can be continued from ``snapshot``; ``n`` may be 0. ``head`` is the asker's head digest."""
    common = common_prefix(snapshot.items, items)
    asked = len(items)
    pending = snapshot.pending if head is not None and head == snapshot.head else None
    whole = common == asked == snapshot.tokens and pending is not None
    # Without a pending token the last one is decoded again, to choose the next.
    limit = asked if whole else min(common, asked - 1)
    n, runs = usable_at(snapshot, coverage, limit)
    if whole and n < asked:
        whole, limit = False, asked - 1
        n, runs = usable_at(snapshot, coverage, limit)
    if n < limit:
        reason = f"rows that continuing at {limit} reads are not in this store"
    elif common < asked:
        reason = f"token {common} differs" if common < snapshot.tokens else f"the snapshot ends at {common} tokens"
    elif not whole:
        reason = "no pending token of this head here: the last token is decoded again"
    else:
        reason = "all of it"
    return Match(digest, snapshot, n, runs, common, asked, pending if whole else None, reason)


def bounds(layout: Layout, tokens: int, runs: Sequence[Sequence[Run]], common: int, asked: int) -> tuple[int, int]:
    """The least and the most that `match_items` can give for a snapshot of ``tokens`` tokens and the present blocks ``runs``.

    ``common`` of its tokens are equal to the ``asked`` ones. More than the least needs the pending token of the asker's head.
    """
    least = _usable(layout, tokens, runs, min(common, asked - 1))[0]
    return least, max(least, _usable(layout, tokens, runs, asked)[0]) if common == asked == tokens else least


def usable_at(snapshot: Snapshot, coverage: Coverage, limit: int) -> tuple[int, tuple[Run, ...]]:
    """The longest P <= limit that every group allows, and the token runs to read for it; (0, empty runs) if none."""
    return _usable(snapshot.layout, snapshot.tokens, coverage.runs, limit)


def _usable(layout: Layout, end: int, runs: Sequence[Sequence[Run]], limit: int) -> tuple[int, tuple[Run, ...]]:
    groups = [(g.window, present) for g, present in zip(layout.groups, runs, strict=True)]
    while limit > 0:
        lowest = min(usable(window, present, limit, end)[0] for window, present in groups)
        found = [allows(window, present, lowest, end) for window, present in groups]
        whole_runs = tuple(run for run in found if run is not None)
        if lowest > 0 and len(whole_runs) == len(groups):
            return lowest, whole_runs
        limit = min(lowest, limit - 1)
    return 0, ((0, 0),) * len(groups)


def made_by(match: Match, lineage: Lineage | None) -> bool:
    """Whether the last reused block has all the fields of ``lineage``; which functions computed it may differ from block to block."""
    return match.lineage is not None and lineage is not None and set(lineage.fields) <= set(match.lineage.fields)
