"""Which snapshot serves asked-for tokens best: the index proposes, the files decide."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from .digest import ContentDigest, PrefixKey, SnapshotDigest
from .errors import Corrupt, FormatTooNew, KVError, SnapshotMissing
from .index import Index
from .items import Item
from .layout import Layout
from .match import Match, bounds, made_by, match_items
from .objects import Objects
from .shelf import Shelf
from .snapshot import Coverage, Lineage, Snapshot

LINEAGE_TRIES = 8
"""Equally long snapshots that are read in search of one's own lineage."""


class Behind(Exception):
    """The index proposed what the files don't hold: it has to catch up. Not for callers of the store."""


@dataclass(frozen=True, slots=True)
class Query:
    """What `Store.find` is asked for."""

    layout: Layout
    root: PrefixKey
    items: Sequence[Item]
    head: str | None
    lineage: Lineage | None


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A snapshot that can give ``least`` tokens by the index, and ``most`` if its pending token can be used."""

    digest: SnapshotDigest
    least: int
    most: int
    used: float


def search(shelf: Shelf, index: Index, query: Query, *, strict: bool) -> Match | None:
    """The best match, as `Store.find` says. ``strict``: `Behind` where the index promised more than the files hold."""
    here = _Here(shelf.objects)
    passed: dict[SnapshotDigest, tuple[int, KVError]] = {}  # damaged ones, with the most that they could give
    holed: dict[SnapshotDigest, Match] = {}  # those of which objects are gone, with what is left
    before = -1
    match = None
    while before < len(passed) + len(holed):  # what the index thinks better of them hides others from it
        before = len(passed) + len(holed)
        proposals = _propose(index, query, passed.keys() | holed.keys())
        match = _best(shelf, here, proposals, query, passed, holed, strict)
    match = max([*([] if match is None else [match]), *holed.values()], key=lambda one: one.n, default=None)
    if match is not None and match.n == 0:
        match = None
    most, error = max(passed.values(), key=lambda one: one[0], default=(0, None))
    if error is None or (match is not None and match.n >= most):
        return match
    if match is None:
        raise error
    return replace(match, reason=f"{match.reason}; up to {most} tokens may lie in what can't be read: {error}")


def _propose(index: Index, query: Query, without: Container[SnapshotDigest]) -> list[_Proposal]:
    """Snapshots by the most that they can give, then by last use."""
    found: dict[SnapshotDigest, _Proposal] = {}
    sure = 0
    groups = len(query.layout.groups)
    for common, block in index.candidates(query.root, query.items):
        if common < sure:
            break
        for digest, tokens, used, runs in index.holders(block):
            if digest not in found and digest not in without:
                padded = (*runs, *[()] * (groups - len(runs)))
                least, most = bounds(query.layout, tokens, padded, common, len(query.items))
                found[digest] = _Proposal(digest, least, most, used)
                sure = max(sure, least)
    return sorted((p for p in found.values() if p.most), key=lambda p: (p.most, p.used), reverse=True)


def _best(
    shelf: Shelf,
    here: _Here,
    proposals: Sequence[_Proposal],
    query: Query,
    passed: dict[SnapshotDigest, tuple[int, KVError]],
    holed: dict[SnapshotDigest, Match],
    strict: bool,
) -> Match | None:
    """The best of ``proposals`` by what the files say. Adds damaged ones to ``passed``, and those that lack objects to ``holed``."""
    best: Match | None = None
    tries = LINEAGE_TRIES
    for proposal in proposals:
        if best is not None and proposal.most <= best.n:
            if proposal.most < best.n or query.lineage is None or made_by(best, query.lineage) or not tries:
                break
            tries -= 1
        try:
            snapshot = shelf.records.snapshot(proposal.digest)
            coverage = shelf.records.coverage(proposal.digest, snapshot)
        except (Corrupt, FormatTooNew) as error:
            passed[proposal.digest] = (proposal.most, error)
            continue
        except SnapshotMissing as error:
            if strict:
                raise Behind from error
            continue
        match = match_items(proposal.digest, snapshot, coverage, query.items, query.head)
        if strict and match.n < proposal.least:
            raise Behind
        whole = match.n
        match = _shortened(match, coverage, query, here)
        if match.n < whole:
            holed[proposal.digest] = match
            continue
        own = best is not None and not made_by(best, query.lineage) and made_by(match, query.lineage)
        if match.n > (best.n if best is not None else 0) or (best is not None and match.n == best.n and own):
            best = match
    return best


class _Here:
    """Which objects are really here: each is looked for once in a search."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._known: dict[ContentDigest, bool] = {}

    def lacking(self, snapshot: Snapshot, places: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
        """Those (block, group) objects that are not there."""
        new = {snapshot.blocks[b][g] for b, g in places} - self._known.keys()
        absent = self._objects.absent(new)
        self._known |= {name: name not in absent for name in new}
        return {(b, g) for b, g in places if not self._known[snapshot.blocks[b][g]]}


def _shortened(match: Match, coverage: Coverage, query: Query, here: _Here) -> Match:
    """The match as far as the objects that it reads are there: somebody may have deleted what the coverage promises."""
    gone = 0
    while lacking := here.lacking(match.snapshot, match.objects()):
        gone += len(lacking)
        coverage = coverage.without(lacking)
        match = match_items(match.digest, match.snapshot, coverage, query.items, query.head)
    if not gone:
        return match
    told = f"{gone} of its objects that this store promises are gone (`kvferry check` lists them)"
    return replace(match, reason=f"{match.reason}; {told}")
