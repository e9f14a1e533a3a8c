"""How KV lies in memory, in blocks and in objects; and what of it a continuation reads.

A *block* is 64 consecutive tokens on a fixed grid from position 0; the last may be short. A *group* is the layers
of one attention kind. One (block, group) is one *object*: for each of the group's layers in ascending order its K
rows, then its V rows, each row-major ``[tokens, kv_heads * head_dim]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import msgpack

from .digest import LayoutDigest, layout_digest
from .errors import InputInvalid

if TYPE_CHECKING:
    from typing_extensions import Buffer

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
            raise InputInvalid(f"dtype: expected one of {sorted(ITEM_BYTES)}, found {self.dtype!r:.80}")
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise InputInvalid(f"groups: expected 1 to {MAX_GROUPS}, found {len(self.groups)}")
        layers = [i for g in self.groups for i in g.layers]
        if not layers or len(set(layers)) != len(layers) or not all(0 <= i < MAX_LAYERS for i in layers):
            raise InputInvalid(
                f"layers: expected each of 0 to {MAX_LAYERS - 1} at most once and one at least, found {layers!r:.100}"
            )
        if len({g.name for g in self.groups}) != len(self.groups):
            raise InputInvalid(f"group names: expected distinct ones, found {[g.name for g in self.groups]!r:.100}")
        for g in self.groups:
            if list(g.layers) != sorted(g.layers):
                raise InputInvalid(f"group {g.name:.80}: expected ascending layers, found {list(g.layers)!r:.100}")
            if g.window is not None and (g.window < BLOCK or g.window % BLOCK):
                raise InputInvalid(
                    f"group {g.name:.80}: window: expected a multiple of {BLOCK} tokens, found {g.window}"
                )
            if not (1 <= g.kv_heads <= 1024 and 1 <= g.head_dim <= 65536):
                raise InputInvalid(
                    f"group {g.name:.80}: kv_heads and head_dim: expected 1 to 1024 and 1 to 65536, found {g.kv_heads} and {g.head_dim}"
                )
        for i, g in enumerate(self.groups):
            if not 0 < BLOCK * self.row_bytes(i) <= MAX_OBJECT:
                raise InputInvalid(
                    f"group {g.name:.80}: block: expected 1 to {MAX_OBJECT} bytes, found {BLOCK * self.row_bytes(i)}"
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


_HALF, _BYTES = ("e", "<e"), ("B", "b", "c")


class ArrayRows:
    """`Rows` over a K and a V buffer for each layer: numpy arrays, bytearrays, mapped files.

    Each holds ``tokens`` rows, C-contiguous fp16 ``[tokens, kv_heads * head_dim]``, as fp16 elements or as bytes; axes may be split or have
    length 1. They stay the caller's and are read and written in place, so `Store.load` needs writable ones. Raises `InputInvalid`, naming the
    layer, for a missing or extra layer and a buffer of another kind or length.
    """

    def __init__(self, layout: Layout, layers: Mapping[int, tuple[Buffer, Buffer]]) -> None:
        expected = sorted(i for g in layout.groups for i in g.layers)
        if sorted(layers) != expected:
            raise InputInvalid(f"layers: expected K and V of {expected} (the layout's), found {sorted(layers)}")
        self.layout = layout
        self._views: list[list[memoryview]] = []
        self._strides: list[int] = []
        counts: dict[int, str] = {}
        for group in layout.groups:
            stride = group.row_elements * ITEM_BYTES[layout.dtype]
            views = [_bytes(layers[i][j], f"layer {i} {'KV'[j]}", stride) for i in group.layers for j in (0, 1)]
            for at, view in enumerate(views):
                counts.setdefault(len(view) // stride, f"layer {group.layers[at // 2]} {'KV'[at % 2]}")
            self._views.append(views)
            self._strides.append(stride)
        if len(counts) != 1:
            told = ", ".join(f"{n} in {where}" for n, where in sorted(counts.items()))
            raise InputInvalid(f"rows: expected as many tokens in every buffer, found {told}")
        (self.tokens,) = counts

    def spans(self, group: int, start: int, stop: int) -> Sequence[memoryview]:
        """See `Rows.spans`."""
        if not 0 <= start <= stop <= self.tokens:
            raise InputInvalid(f"rows: expected a range within 0 to {self.tokens}, found {start} to {stop}")
        stride = self._strides[group]
        return [view[start * stride : stop * stride] for view in self._views[group]]


def _bytes(buffer: Buffer, where: str, stride: int) -> memoryview:
    view = memoryview(buffer)
    if view.format not in (*_HALF, *_BYTES):
        raise InputInvalid(f"{where}: expected fp16 elements (format 'e') or bytes, found format {view.format!r}")
    if not view.c_contiguous or not view.nbytes or view.nbytes % stride:
        raise InputInvalid(
            f"{where}: expected contiguous rows of {stride} bytes, found {view.nbytes} bytes of shape {view.shape}"
            f"{'' if view.c_contiguous else ', not contiguous (copy it first)'}"
        )
    return view.cast("B")


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
