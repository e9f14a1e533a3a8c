"""Which snapshot serves asked-for tokens best: the index proposes, the files decide."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from .digest import PrefixKey, SnapshotDigest
from .errors import Corrupt, FormatTooNew, KVError, SnapshotMissing
from .index import Index
from .items import Item
from .layout import Layout
from .match import Match, bounds, match_items
from .records import Records
from .snapshot import Lineage

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


def search(records: Records, index: Index, query: Query, *, strict: bool) -> Match | None:
    """The best match, as `Store.find` says. ``strict``: `Behind` where the index promised more than the files hold."""
    passed: dict[SnapshotDigest, tuple[int, KVError]] = {}  # damaged ones, with the most that they could give
    before = -1
    match = None
    while before < len(passed):
        before = len(passed)
        match = _best(records, _propose(index, query, passed), query, passed, strict)
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
    records: Records,
    proposals: Sequence[_Proposal],
    query: Query,
    passed: dict[SnapshotDigest, tuple[int, KVError]],
    strict: bool,
) -> Match | None:
    """The best of ``proposals`` by what the files say. Adds damaged ones to ``passed``."""
    best: Match | None = None
    tries = LINEAGE_TRIES
    for proposal in proposals:
        if best is not None and proposal.most <= best.n:
            if proposal.most < best.n or query.lineage is None or _made(best, query.lineage) or not tries:
                break
            tries -= 1
        try:
            snapshot = records.snapshot(proposal.digest)
            coverage = records.coverage(proposal.digest, snapshot)
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
        own = best is not None and not _made(best, query.lineage) and _made(match, query.lineage)
        if match.n > (best.n if best is not None else 0) or (best is not None and match.n == best.n and own):
            best = match
    return best


def _made(match: Match, lineage: Lineage | None) -> bool:
    """Whether the last reused block has all the fields of ``lineage``; which functions computed it may differ from block to block."""
    return match.lineage is not None and lineage is not None and set(lineage.fields) <= set(match.lineage.fields)
