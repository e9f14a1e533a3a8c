"""Tables of 64 numbers for fp16 weights: k-means on a line.

The numbers are sorted once; then a table's shares are runs of the line, and their counts, sums and squared errors follow from running sums: a round
costs a few binary searches however many numbers there are. So all of them count, and it runs until nothing moves. Deterministic, and the same on
every machine: only IEEE operations in a fixed order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ENTRIES = 64
#: Far more than it ever needs: there so that no input can run for ever.
_ROUNDS, _MOVES = 300, 200
_BINS = 512

Floats = NDArray[np.float64]


def cluster(values: NDArray[np.float16]) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
    """The table of 64 numbers (ascending) for fp16 ``values`` [n], and each value's index: of its nearest entry."""
    bits = values.view(np.uint16)
    # the order of floating-point numbers as that of integers, which sort six times faster
    keys = np.where(bits & 0x8000, ~bits, bits | 0x8000)
    order = np.argsort(keys, kind="stable")
    line = values[order].astype(np.float64)
    steps = np.flatnonzero(np.diff(line))
    if len(steps) < ENTRIES:  # no more distinct numbers than entries: nothing is lost
        distinct = line[np.append(steps, len(line) - 1)]
        found = np.append(distinct, np.repeat(distinct[-1], ENTRIES - len(distinct)))
    else:
        found = _Line(line).table()
    table = found.astype(np.float16)
    edges = _edges(line, table.astype(np.float64))
    indices = np.empty(len(values), np.uint8)
    indices[order] = np.repeat(np.arange(ENTRIES, dtype=np.uint8), np.diff(edges))
    return table, indices


def _edges(line: Floats, table: Floats) -> NDArray[np.intp]:
    """Where on the line each entry's share begins, and the line's end: 65 numbers."""
    inner = np.searchsorted(line, (table[:-1] + table[1:]) / 2)
    return np.concatenate(([0], inner, [len(line)]))


class _Line:
    """Ascending numbers with their running sums, which give any run's mean and squared error."""

    def __init__(self, line: Floats) -> None:
        self._line = line
        self._sums = np.concatenate(([0.0], np.cumsum(line)))
        self._squares = np.concatenate(([0.0], np.cumsum(line * line)))

    def table(self) -> Floats:
        """Means that no round of k-means moves, and from which no entry is worth moving elsewhere."""
        table, edges, error = self._settled(self._start())
        for _ in range(_MOVES):
            moved = self._moved(table, edges)
            if moved is None:
                break
            found = self._settled(moved)
            if not found[2] < error:
                break
            table, edges, error = found
        return table

    def _means(self, start: Any, stop: Any) -> Floats:
        means: Floats = (self._sums[stop] - self._sums[start]) / np.maximum(stop - start, 1)
        return means

    def _errors(self, start: Any, stop: Any) -> Floats:
        """Squared distances of runs from their means, added up."""
        whole = self._sums[stop] - self._sums[start]
        errors: Floats = self._squares[stop] - self._squares[start] - whole * whole / np.maximum(stop - start, 1)
        return errors

    def _start(self) -> Floats:
        """Entries as dense as the cube root of the numbers' density: where the best table of many entries has them."""
        counts, bounds = np.histogram(self._line, _BINS, (self._line[0], self._line[-1]))
        share = np.concatenate(([0.0], np.cumsum(np.cbrt(counts.astype(np.float64)))))
        found: Floats = np.interp((np.arange(ENTRIES) + 0.5) / ENTRIES * share[-1], share, bounds)
        return found

    def _settled(self, table: Floats) -> tuple[Floats, NDArray[np.intp], float]:
        """Rounds of k-means until none moves anything: the means, their edges, and the squared error."""
        for _ in range(_ROUNDS):
            edges = _edges(self._line, table)
            means = np.where(np.diff(edges) > 0, self._means(edges[:-1], edges[1:]), table)
            if np.array_equal(means, table):
                break
            table = means
        edges = _edges(self._line, table)
        return table, edges, float(self._errors(edges[:-1], edges[1:]).sum())

    def _moved(self, table: Floats, edges: NDArray[np.intp]) -> Floats | None:
        """The table with two neighbours made one and another entry made two; None where that costs more than it saves.

        k-means alone never does that: an entry can't pass its neighbours.
        """
        start, stop = edges[:-1], edges[1:]
        errors = self._errors(start, stop)
        middle = np.clip(np.searchsorted(self._line, table), start, stop)
        saved = errors - self._errors(start, middle) - self._errors(middle, stop)
        two = int(np.argmax(saved))
        cost = self._errors(start[:-1], stop[1:]) - errors[:-1] - errors[1:]
        cost[max(two - 1, 0) : two + 1] = np.inf
        one = int(np.argmin(cost))
        if not cost[one] < saved[two]:
            return None
        halves = self._means(np.array([start[two], middle[two]]), np.array([middle[two], stop[two]]))
        joined = self._means(start[one], stop[one + 1])
        return np.sort(np.concatenate((np.delete(table, [one, one + 1, two]), [joined], halves)))
