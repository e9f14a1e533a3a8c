"""The KV cache as plain host memory: one K and one V array for every layer that owns KV.

What it promises: a row outside ``[covered, position)`` is zero, always. So a row that attention masks out multiplies as
``0 * 0`` and never as ``0 * NaN``, and what memory holds is a function of the held rows alone, whatever was held before.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InputInvalid, NotCovered
from kvstore.layout import ITEM_BYTES, Layout, first_read

Rows16 = NDArray[np.float16]


class HostKV:
    """K and V of ``ctx`` positions, fp16, every array page-aligned and contiguous in one anonymous mapping.

    Pages that were never written take no memory. Implements `kvstore.layout.Rows`. Not thread-safe but for
    `spans`, which the store calls from several threads at once.
    """

    def __init__(self, layout: Layout, ctx: int) -> None:
        if ctx < 1:
            raise InputInvalid(f"ctx: expected at least 1 token, found {ctx}")
        self.layout = layout
        self.ctx = ctx
        self._position = 0
        self._lock = threading.Lock()  # of _written
        self._written = 0  # no row from here on was ever written: it is still a zero page, and stays one
        self._covered = [0] * len(layout.groups)
        row_bytes = {layer: g.row_elements * ITEM_BYTES[layout.dtype] for g in layout.groups for layer in g.layers}
        sizes = {layer: -(-ctx * size // mmap.PAGESIZE) * mmap.PAGESIZE for layer, size in row_bytes.items()}
        memory = mmap.mmap(-1, 2 * sum(sizes.values()))
        self._arrays: dict[int, tuple[Rows16, Rows16]] = {}
        at = 0
        for layer in sorted(sizes):
            pair: list[Rows16] = []
            for _ in "kv":
                array = np.frombuffer(memory, np.float16, ctx * row_bytes[layer] // 2, at)
                pair.append(array.reshape(ctx, -1))
                at += sizes[layer]
            self._arrays[layer] = (pair[0], pair[1])
        self._bytes = [
            [(a.reshape(-1).view(np.uint8).data, row_bytes[i]) for i in group.layers for a in self._arrays[i]]
            for group in layout.groups
        ]

    @property
    def position(self) -> int:
        """How many tokens have their rows here; the next one's row goes to this index."""
        return self._position

    @property
    def covered(self) -> tuple[int, ...]:
        """Per group in layout order, the first row (token) that is held."""
        return tuple(self._covered)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that own KV, ascending."""
        return tuple(self._arrays)

    def inputs(self, layer: int) -> tuple[Rows16, Rows16]:
        """K and V of ``layer``, [1, ctx, kv_heads * head_dim] each: read-only views of the live memory, for an engine to read in
        place during one call."""
        k, v = (array[np.newaxis].view() for array in self._arrays[layer])
        k.flags.writeable = v.flags.writeable = False
        return k, v

    def spans(self, group: int, start: int, stop: int) -> Sequence[memoryview]:
        """`kvstore.layout.Rows.spans`. Writing through them moves neither `position` nor `covered`: see `hold`."""
        if not 0 <= start <= stop <= self.ctx:
            raise InputInvalid(f"rows: expected a range within 0 to {self.ctx}, found {start} to {stop}")
        with self._lock:
            self._written = max(self._written, stop)
        return [view[start * row : stop * row] for view, row in self._bytes[group]]

    def write_rows(self, layer: int, start: int, k: Rows16, v: Rows16) -> None:
        """Copy ``k`` and ``v``, [n, kv_heads * head_dim] fp16 (leading axes of length 1 allowed), to rows ``start``, ….

        Only at or above `position`: held rows are written once. The caller moves `position` with `advance` when every layer has its
        rows.
        """
        for array, rows in zip(self._arrays[layer], (k, v), strict=True):
            assert rows.dtype == np.float16 and start >= self._position
            flat = rows.reshape(-1, array.shape[1])
            assert start + len(flat) <= self.ctx
            self._written = max(self._written, start + len(flat))
            array[start : start + len(flat)] = flat

    def advance(self, position: int) -> None:
        """Rows up to ``position`` are now held in every layer."""
        assert self._position <= position <= self.ctx
        self._position = position

    def hold(self, position: int, starts: Sequence[int]) -> None:
        """Rows ``[starts[g], position)`` of each group were just written through `spans` into an empty HostKV."""
        assert self._position == 0 and position <= self.ctx and len(starts) == len(self._covered)
        self._covered = list(starts)
        self._position = position

    def require(self, position: int) -> None:
        """Raises `NotCovered` unless decoding at ``position`` would find every row that it reads."""
        if not 0 <= position <= self._position:
            raise InputInvalid(
                f"position: expected 0 to {self._position} tokens (what is held), found {position}",
                expected=self._position,
                found=position,
            )
        for group, first in zip(self.layout.groups, self._covered, strict=True):
            needed = first_read(group.window, position)
            if needed < min(first, position):
                raise NotCovered(
                    f"group {group.name}: continuing at token {position} reads rows from {needed}, but rows from {first} on "
                    f"are here, as in a trimmed snapshot. Restore the whole snapshot, or prefill again.",
                    group=group.name,
                    expected=needed,
                    found=first,
                )

    def rollback(self, position: int) -> None:
        """Drop the rows from ``position`` on (they become zero). Refused as `require` refuses; then nothing changes."""
        self.require(position)
        self._position = position
        self._covered = [min(first, position) for first in self._covered]
        self._clear()

    def reset(self) -> None:
        """Empty, every row zero: also after a load that failed half-way, when `position` says nothing about memory."""
        self._position = 0
        self._covered = [0] * len(self._covered)
        self._clear()

    def _clear(self) -> None:
        for pair in self._arrays.values():
            for array in pair:
                array[self._position : self._written] = 0
        self._written = self._position
