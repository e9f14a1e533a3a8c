"""A snapshot: which tokens, whose KV, which objects, what comes next. Values only; `codec` writes them down."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property

from .digest import (
    BlockId,
    ContentDigest,
    PrefixKey,
    SnapshotDigest,
    check_namespace,
    child_block,
    child_key,
    root_block,
    root_key,
)
from .errors import InputInvalid
from .identity import Identity
from .items import MAX_ID, Item, encode_items
from .layout import Layout, Run, block_span, blocks_of, trim_start

MAX_TOKENS = 2**20


@dataclass(frozen=True, slots=True)
class Lineage:
    """Who computed a block and how: engine, function widths, compute, BLAS, core type, OS. Recorded, not identity."""

    fields: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Lineage:
        return cls(tuple(sorted(fields.items())))


@dataclass(frozen=True, slots=True)
class Receipt:
    """The next greedy tokens that the producer decoded after the snapshot, and why it stopped (`finish`).

    ``asked``: how many were asked for. ``finish``: ``eos``, ``cap`` or ``contextFull``.
    """

    tokens: tuple[int, ...]
    asked: int
    finish: str


@dataclass(frozen=True, slots=True)
class Link:
    """One block of a chain: its items (encoded), key, id, and its groups' contents."""

    items: bytes
    key: PrefixKey
    id: BlockId
    contents: tuple[ContentDigest, ...]


@dataclass(frozen=True)
class Snapshot:
    """The same value whole or trimmed: which objects are *here* is `Coverage`'s business.

    ``blocks``: per block, the content digest of each group's object in layout order. ``lineage``: per block, an index
    into ``lineages``. ``pending``: the next token, chosen by the head ``head`` and not yet fed; None when unknown.
    ``model``: a name for people.
    """

    identity: Identity
    layout: Layout
    namespace: str
    items: tuple[Item, ...]
    blocks: tuple[tuple[ContentDigest, ...], ...]
    lineages: tuple[Lineage, ...]
    lineage: tuple[int, ...]
    pending: int | None = None
    head: str | None = None
    receipt: Receipt | None = None
    model: str = ""

    def __post_init__(self) -> None:
        n = len(self.items)
        if not 1 <= n <= MAX_TOKENS:
            raise InputInvalid(f"tokens: expected 1 to {MAX_TOKENS}, found {n}")
        if len(self.blocks) != blocks_of(n) or any(len(b) != len(self.layout.groups) for b in self.blocks):
            raise InputInvalid(
                f"blocks: expected {blocks_of(n)} of {len(self.layout.groups)} groups, found {len(self.blocks)}"
            )
        check_namespace(self.namespace)
        if len(self.lineage) != len(self.blocks) or any(i not in range(len(self.lineages)) for i in self.lineage):
            raise InputInvalid(
                f"lineage: expected an index below {len(self.lineages)} for each of {len(self.blocks)} blocks, found "
                f"{self.lineage!r:.100}"
            )
        if (self.pending is None) != (self.head is None):
            raise InputInvalid(
                f"pending: expected a pending token together with the head that chose it, found {self.pending} and {self.head!r:.80}"
            )
        if self.pending is not None and not 0 <= self.pending <= MAX_ID:
            raise InputInvalid(f"pending: expected a token id of 0 to {MAX_ID}, found {self.pending}")
        if self.receipt is not None:
            told = self.receipt
            if self.pending is None:
                raise InputInvalid("receipt: expected a pending token beside it, found none")
            if not len(told.tokens) <= told.asked <= MAX_TOKENS or any(not 0 <= t <= MAX_ID for t in told.tokens):
                raise InputInvalid(f"receipt: expected at most {told.asked} token ids of 0 to {MAX_ID}, found others")

    @property
    def tokens(self) -> int:
        return len(self.items)

    @cached_property
    def root(self) -> PrefixKey:
        return root_key(self.identity.digest, self.layout.digest, self.namespace)

    def chain(self) -> Iterator[Link]:
        """The blocks from the root down."""
        key, parent = self.root, root_block(self.root)
        for b, contents in enumerate(self.blocks):
            start, stop = block_span(b, self.tokens)
            items = encode_items(self.items[start:stop])
            key = child_key(key, items)
            parent = child_block(parent, key, contents)
            yield Link(items, key, parent, contents)

    def object_bytes(self, block: int, group: int) -> int:
        """Content length of one object."""
        start, stop = block_span(block, self.tokens)
        return (stop - start) * self.layout.row_bytes(group)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which objects of a snapshot a store promises: per group, the present blocks as ascending, separate runs."""

    snapshot: SnapshotDigest
    runs: tuple[tuple[Run, ...], ...]

    def __post_init__(self) -> None:
        for runs in self.runs:
            flat = [edge for run in runs for edge in run]
            if any(a >= b for a, b in itertools.pairwise(flat)) or (flat and flat[0] < 0):
                raise InputInvalid(f"coverage: expected ascending separate runs of blocks, found {runs}")

    def has(self, block: int, group: int) -> bool:
        return any(a <= block < b for a, b in self.runs[group])

    def blocks(self, group: int) -> Iterator[int]:
        for a, b in self.runs[group]:
            yield from range(a, b)

    def without(self, places: Set[tuple[int, int]]) -> Coverage:
        """All but these (block, group) objects."""
        left = [runs_of({b for b in self.blocks(g) if (b, g) not in places}) for g in range(len(self.runs))]
        return Coverage(self.snapshot, tuple(left))

    def union(self, other: Coverage) -> Coverage:
        assert self.snapshot == other.snapshot
        merged = [runs_of(set(self.blocks(g)) | set(other.blocks(g))) for g in range(len(self.runs))]
        return Coverage(self.snapshot, tuple(merged))


def runs_of(blocks: set[int]) -> tuple[Run, ...]:
    """A set of blocks as ascending, separate runs."""
    runs: list[list[int]] = []
    for b in sorted(blocks):
        if runs and runs[-1][1] == b:
            runs[-1][1] = b + 1
        else:
            runs.append([b, b + 1])
    return tuple((a, b) for a, b in runs)


def whole(digest: SnapshotDigest, snapshot: Snapshot) -> Coverage:
    """Coverage of everything."""
    return Coverage(digest, (((0, len(snapshot.blocks)),),) * len(snapshot.layout.groups))


def trimmed(digest: SnapshotDigest, snapshot: Snapshot) -> Coverage:
    """Coverage of what continuing from the end needs: full groups whole, windowed ones from `layout.trim_start`."""
    n = len(snapshot.blocks)
    starts = [trim_start(g.window, snapshot.tokens) for g in snapshot.layout.groups]
    return Coverage(digest, tuple(((start, n),) for start in starts))


@dataclass(frozen=True, slots=True)
class Ref:
    """A name for a snapshot. ``updated``: Unix seconds, for people only; nothing depends on it."""

    label: str
    snapshot: SnapshotDigest
    updated: int
