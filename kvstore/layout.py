"""How KV lies in memory, in blocks and in objects; and what of it a continuation reads.

A *block* is 64 consecutive tokens on a fixed grid from position 0; the last may be short. A *group* is the layers
of one attention kind. One (block, group) is one *object*: for each of the group's layers in ascending order its K
rows, then its V rows, each row-major ``[tokens, kv_heads * head_dim]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import msgpack

from .digest import LayoutDigest, layout_digest
from .errors import InputInvalid

BLOCK = 64
"""Tokens in a block; fixed in format 1."""

MAX_GROUPS = 8
MAX_LAYERS = 1024
MAX_OBJECT = 1 << 30
"""Largest content of an object, in bytes."""
ITEM_BYTES = {"float16": 2}

Run = tuple[int, int]
"""A half-open range of blocks, or of tokens where said."""


@dataclass(frozen=True, slots=True)
class Group:
    """The layers of one attention kind. ``window`` counts the visible tokens including the reading one."""

    name: str
    window: int | None
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int

    @property
    def row_elements(self) -> int:
        """Elements of K (or of V) that one token has in one layer."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Layout:
    """The KV layout of a model: its groups in a fixed order, every layer in exactly one."""

    groups: tuple[Group, ...]
    dtype: str = "float16"

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise InputInvalid(f"dtype: expected one of {sorted(ITEM_BYTES)}, found {self.dtype!r}")
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise InputInvalid(f"groups: expected 1 to {MAX_GROUPS}, found {len(self.groups)}")
        layers = [i for g in self.groups for i in g.layers]
        if not layers or len(set(layers)) != len(layers) or not all(0 <= i < MAX_LAYERS for i in layers):
            raise InputInvalid(f"layers: each of 0 to {MAX_LAYERS - 1} at most once and one at least, found {layers}")
        if len({g.name for g in self.groups}) != len(self.groups):
            raise InputInvalid(f"group names: expected distinct ones, found {[g.name for g in self.groups]}")
        for g in self.groups:
            if list(g.layers) != sorted(g.layers):
                raise InputInvalid(f"group {g.name}: expected ascending layers, found {list(g.layers)}")
            if g.window is not None and (g.window < BLOCK or g.window % BLOCK):
                raise InputInvalid(f"group {g.name}: window is a multiple of {BLOCK} tokens, found {g.window}")
            if not (1 <= g.kv_heads <= 1024 and 1 <= g.head_dim <= 65536):
                raise InputInvalid(f"group {g.name}: kv_heads {g.kv_heads} or head_dim {g.head_dim} out of range")
        for i, g in enumerate(self.groups):
            if not 0 < BLOCK * self.row_bytes(i) <= MAX_OBJECT:
                raise InputInvalid(
                    f"group {g.name}: a block is 1 to {MAX_OBJECT} bytes, found {BLOCK * self.row_bytes(i)}"
                )

    def row_bytes(self, group: int) -> int:
        """Bytes that one token has in one group: K and V of all its layers."""
        g = self.groups[group]
        return 2 * len(g.layers) * g.row_elements * ITEM_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        return sum(self.row_bytes(i) for i in range(len(self.groups)))

    def wire(self) -> list[object]:
        """The canonical msgpack value."""
        groups = [[g.name, g.window, list(g.layers), g.kv_heads, g.head_dim] for g in self.groups]
        return [self.dtype, groups]

    @cached_property
    def digest(self) -> LayoutDigest:
        return layout_digest(msgpack.packb(self.wire()))


class Rows(Protocol):
    """Host memory that KV is saved from and loaded into; arrays stay on the owner's side."""

    def spans(self, group: int, start: int, stop: int) -> Sequence[memoryview]:
        """The bytes of rows ``[start, stop)`` (tokens) of ``group``: per layer in order K, then V.

        Each is a contiguous one-dimensional byte view of the live memory, ``(stop - start) * row_elements * 2``
        long. The caller reads them (save) or writes them (load) before it returns and keeps none.
        """
        ...


def blocks_of(tokens: int) -> int:
    """How many blocks ``tokens`` tokens occupy."""
    return -(-tokens // BLOCK)


def block_span(block: int, tokens: int) -> Run:
    """The tokens ``[start, stop)`` of a block in a sequence of ``tokens`` tokens."""
    return block * BLOCK, min((block + 1) * BLOCK, tokens)


def first_read(window: int | None, position: int) -> int:
    """The first row that decoding at ``position`` reads: 0, or ``max(0, position - window + 1)``."""
    return 0 if window is None else max(0, position - window + 1)


def trim_start(window: int | None, end: int) -> int:
    """The first *block* that a snapshot of ``end`` tokens keeps when trimmed.

    ``window`` rows are kept, not ``window - 1``: decoding the last token again starts at ``end - 1``.
    """
    return 0 if window is None else max(0, end - window) // BLOCK


def usable(window: int | None, runs: Sequence[Run], match: int, end: int) -> tuple[int, Run]:
    """The longest continuation point ``P <= match`` that the present blocks ``runs`` of one group allow.

    ``end``: tokens of the snapshot; ``runs``: present blocks, ascending, disjoint, not adjacent. Returns (P, the run of
    *tokens* to read it from); P is 0 when nothing is usable. A run ``[a, b)`` allows ``min(match, b)`` if a = 0, and else
    any P with ``a + window - 1 <= P <= b``.
    """
    best: tuple[int, Run] = (0, (0, 0))
    for first, last in runs:
        a, b = first * BLOCK, min(last * BLOCK, end)
        p = min(match, b)
        if (a == 0 or (window is not None and p >= a + window - 1)) and p > best[0]:
            best = (p, (a, p))
    return best


def allows(window: int | None, runs: Sequence[Run], position: int, end: int) -> Run | None:
    """The run of tokens from which exactly ``position`` can be continued, or None."""
    p, run = usable(window, runs, position, end)
    return run if p == position else None
