"""K or V as attention reads them: the host's fp16 rows with this call's new rows in their slots.

The program writes that as cache · (1 − onehot) + onehotᵀ · rows over the whole context. Here nothing is written:
whoever needs slots [a, b) gets those, widened, with the new rows put in.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.engine import InputMismatch
from runtime.ops.widen import Widen, widened


class Cache(Protocol):
    """K or V of one layer during one call."""

    def fetch(self, start: int, out: NDArray[np.float32], shown: tuple[int, int]) -> None:
        """Fills ``out`` [n, D] with slots start, start + 1, …; those outside [shown[0], shown[1]) become zero.

        Nobody sees those, but they are multiplied by 0 and must be finite.
        """
        ...


class Rows:
    """New rows alone, float32 [n, D] in slots 0..n−1: a plain prefill, which has no cache behind it."""

    def __init__(self, rows: NDArray[np.float32]) -> None:
        self._rows = rows

    def fetch(self, start: int, out: NDArray[np.float32], shown: tuple[int, int]) -> None:
        """See ``Cache.fetch``."""
        first, last = _inside(start, out, shown)
        out[first:last] = self._rows[start + first : start + last]


class Placed:
    """The host's array [1, CTX, D] fp16, read only, under new rows float32 [n, D] in ``slots`` (−1: nowhere)."""

    def __init__(
        self, base: NDArray[Any], rows: NDArray[np.float32] | None, slots: tuple[int, ...], widen: Widen
    ) -> None:
        self._base = base[0]
        self._rows = rows
        self._slots = slots
        self._widen = widen

    def fetch(self, start: int, out: NDArray[np.float32], shown: tuple[int, int]) -> None:
        """See ``Cache.fetch``."""
        first, last = _inside(start, out, shown)
        self._widen(self._base[start + first : start + last], out[first:last])
        if self._rows is not None:
            for slot, row in zip(self._slots, self._rows, strict=True):
                if first <= slot - start < last:
                    out[slot - start] = row

    def stored(self, start: int, stop: int) -> NDArray[np.float16]:
        """Slots [start, stop) as the program returns them: a new fp16 array [1, stop − start, D].

        That is old · (1 − hit) + new, computed: an old −0 that is kept may come back as +0.
        """
        kept = widened(self._base[start:stop], self._widen)
        if self._rows is None:
            return kept.astype(np.float16)[np.newaxis]
        hit = np.zeros((len(kept), 1), np.float32)
        new = np.zeros_like(kept)
        for slot, row in zip(self._slots, self._rows, strict=True):
            if start <= slot < stop:
                hit[slot - start] = 1
                new[slot - start] = row
        if len(self._rows) == 1:
            new = hit * self._rows
        kept *= 1 - hit
        kept += new
        return kept.astype(np.float16)[np.newaxis]


def _inside(start: int, out: NDArray[np.float32], shown: tuple[int, int]) -> tuple[int, int]:
    """Which rows of ``out`` are shown; zeroes the others."""
    first, last = max(0, shown[0] - start), min(len(out), shown[1] - start)
    out[:first] = 0
    out[last:] = 0
    return first, last


def slots_of(onehot: NDArray[Any], where: str) -> tuple[int, ...]:
    """The slot that each one-hot row names, −1 for a row of zeros; ``onehot`` is [CTX] or [N, CTX].

    Raises ``InputMismatch`` (``where`` names the function) for anything that isn't one-hot, or for a slot named twice.
    """
    rows = onehot.reshape(-1, onehot.shape[-1])
    # searched as bits: numpy looks for non-zero halves fifty times slower
    row, slot = np.nonzero(np.ascontiguousarray(rows).view(np.uint16))
    if (
        (rows[row, slot] != 1).any()
        or (len(row) > 1 and not (np.diff(row) > 0).all())
        or len(set(slot.tolist())) != len(slot)
    ):
        raise InputMismatch(
            f"{where}: input onehot: expected at most one 1 a row, in distinct slots, found something else",
            function=where,
            input="onehot",
        )
    slots = [-1] * len(rows)
    for r, s in zip(row.tolist(), slot.tolist(), strict=True):
        slots[r] = s
    return tuple(slots)
