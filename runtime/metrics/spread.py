"""Median and percentiles of any number of values in bounded memory.

Values are counted at four significant digits. Rounding keeps their order, so a median or a percentile is the true one at four digits; least
and most are kept as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

_WRITTEN = "%.4g".__mod__
"""A value at four digits, as the key of its counter: this way the counting runs without a line of Python for each value."""

LARGEST, SMALLEST = 1e12, 1e-9
"""Beyond these, values are counted as these, and as zero: so that there are only so many different ones, whatever a file says."""


@dataclass(slots=True)
class Spread:
    """Values so far, none of them NaN."""

    count: int = 0
    least: float = 0.0
    most: float = 0.0
    _counts: Counter[str] = field(default_factory=Counter)

    def add(self, value: float) -> None:
        self.extend((value,))

    def extend(self, values: Sequence[float]) -> None:
        if not values:
            return
        least, most = min(values), max(values)
        self.least = min(self.least, least) if self.count else least
        self.most = max(self.most, most) if self.count else most
        self.count += len(values)
        if least < SMALLEST or most > LARGEST:
            values = [_bounded(value) for value in values]
        self._counts.update(map(_WRITTEN, values))

    def at(self, rank: int) -> float:
        """The value that ``rank`` others, 0 to count − 1, are not above."""
        for value, count in sorted((float(written), count) for written, count in self._counts.items()):
            rank -= count
            if rank < 0:
                return value
        raise IndexError("a rank beyond the last value")

    def median(self) -> float | None:
        """The upper one, where two are in the middle, as the app takes it; None without values."""
        return self.at(self.count // 2) if self.count else None

    def p95(self) -> float | None:
        """The least value that 95 % of all do not pass; None without values."""
        return self.at(-(-self.count * 95 // 100) - 1) if self.count else None

    @property
    def distinct(self) -> int:
        """How many values are kept: what it costs."""
        return len(self._counts)


def _bounded(value: float) -> float:
    return 0.0 if abs(value) < SMALLEST else max(-LARGEST, min(LARGEST, value))
