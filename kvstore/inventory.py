"""Every object file of a store by name and size, in little memory; and which of them a check reads, in which order.

The names are digests, so that their first three digits cut them into 4,096 parts of about the same size. A check reads whole parts, those
first that have waited longest. That is counted in runs, not in time: no clock is read, and one that jumps changes nothing.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from .digest import SIZE, ContentDigest
from .objects import Objects

PARTS = 4096
"""Parts that are checked whole: by the first three hex digits of a name."""


@dataclass(frozen=True, slots=True)
class Level:
    """How much of the objects a check reads: ``share`` of their bytes, 0 to 1, and for at most ``seconds`` where that is given.

    Presence, sizes and records are examined at every level.
    """

    share: float
    seconds: float | None = None

    @property
    def name(self) -> str:
        """``quick``, ``sample`` or ``full``."""
        return "quick" if self.share <= 0 else "full" if self.share >= 1 else "sample"


QUICK = Level(0.0)
FULL = Level(1.0)


@dataclass(frozen=True, slots=True)
class Turn:
    """One part: the objects ``[first, last)`` of the inventory, ``bytes`` together as files."""

    part: int
    first: int
    last: int
    bytes: int


class Inventory:
    """Names and sizes of object files, in order of name; 41 bytes each."""

    def __init__(self) -> None:
        self._names = bytearray()
        self._sizes = array("q")
        self._complete = bytearray()
        self.bytes = 0
        """Of all files."""

    @classmethod
    def of(cls, objects: Objects) -> Self:
        """What ``objects`` holds now."""
        made = cls()
        for name in objects.names():
            made.add(name, objects.size(name))
        return made

    def add(self, name: ContentDigest, size: int | None) -> None:
        """Enters the next name in order. ``size``: None where something else than a plain file stands."""
        self._names += name.raw
        self._sizes.append(-1 if size is None else size)
        self._complete.append(False)
        self.bytes += size or 0

    def __len__(self) -> int:
        return len(self._sizes)

    def name(self, at: int) -> ContentDigest:
        return ContentDigest(bytes(self._names[at * SIZE : (at + 1) * SIZE]))

    def size(self, at: int) -> int | None:
        """Bytes of a file; None where something else than a plain file stands."""
        return None if self._sizes[at] < 0 else self._sizes[at]

    def note(self, at: int) -> None:
        """This file has been found to hold all of its object."""
        self._complete[at] = True

    def looked_at(self, at: int, raw_size: int) -> bool:
        """Whether this file was noted, or has ``raw_size`` bytes, those of its object as it is."""
        return bool(self._complete[at]) or self._sizes[at] == raw_size

    def find(self, raw: bytes) -> int | None:
        """Where a name stands; None if it is not here."""
        at = self._from(raw)
        return at if at < len(self) and self._names[at * SIZE : (at + 1) * SIZE] == raw else None

    def _from(self, start: bytes) -> int:
        """The first name that is not below ``start``."""
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self._names[middle * SIZE : (middle + 1) * SIZE] < start:
                low = middle + 1
            else:
                high = middle
        return low

    def turns(self, level: Level, waited: Mapping[int, int] | None) -> list[Turn]:
        """The parts whose turn it is, in order: together at least the level's share of all bytes.

        ``waited``: the run that last checked a part, where one is known. None: nobody keeps that, and chance decides.
        """
        parts = list(self._parts())
        if waited is None:
            random.shuffle(parts)
        else:
            parts.sort(key=lambda turn: (waited.get(turn.part, 0), turn.part))
        chosen: list[Turn] = []
        left = math.ceil(self.bytes * level.share)
        for turn in parts:
            if left <= 0 and level.name != "full":  # empty files count nothing, and a full check reads them too
                break
            chosen.append(turn)
            left -= turn.bytes
        return chosen

    def _parts(self) -> Iterator[Turn]:
        last = 0
        while last < len(self):
            first, part = last, self._names[last * SIZE] << 4 | self._names[last * SIZE + 1] >> 4
            last = len(self) if part == PARTS - 1 else self._from((part + 1 << 4).to_bytes(2, "big"))
            yield Turn(part, first, last, sum(size for size in self._sizes[first:last] if size > 0))
