"""A file system with a volatile and a durable layer: what of a recorded run is on the disk when the power goes.

What was synced is there, of everything else any part. Bytes of a file are durable by its own fsync only, an entry by that of its
folder only. Entries of different names reach the disk in any order, one name's in theirs; writes in any order and in part, sector by
sector, and a file's length perhaps before its bytes. A rename may leave both names, never none.

The index is written by SQLite, behind the recorder's back: it comes back as it was at some moment before, or cut short, or not at all.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

SECTOR = 512
INDEX = "index.sqlite"
"""How the names of the index's files begin."""


@dataclass(frozen=True, slots=True)
class Entry:
    """In a folder a name stands for ``node`` from now on, None: for nothing. ``needs``: of a rename's old name, the place in the log of its new one."""

    folder: int
    name: str
    node: int | None
    needs: int | None = None


@dataclass(frozen=True, slots=True)
class Write:
    node: int
    at: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """A file's length was set."""

    node: int
    size: int


@dataclass(frozen=True, slots=True)
class Sync:
    node: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A step of the run ended; ``returned``: it was not killed."""

    returned: bool


Event = Entry | Write | Cut | Sync | Mark


@dataclass(slots=True)
class Disk:
    """What was recorded. Nodes are numbers, the root is 0. All that is there at the start is durable."""

    folders: dict[int, dict[str, int]] = field(default_factory=dict)
    """Of each folder its entries at the start; empty for those made later."""
    contents: dict[int, bytes] = field(default_factory=dict)
    """Of each file its bytes at the start."""
    log: list[Event] = field(default_factory=list)
    times: list[tuple[int, int, int]] = field(default_factory=list)
    """(length of the log, folder, its mtime then, in ns)."""
    indexes: list[tuple[int, str, dict[str, bytes]]] = field(default_factory=list)
    """(length of the log, store, the index's files then)."""

    def now(self, to: Path) -> None:
        """Makes the folder as the run left it, without index."""
        _Loss(self, len(self.log), _All()).make(0, to)

    def lose_power(self, count: int, to: Path, chance: random.Random, *, all_unsynced: bool = False) -> None:
        """Makes a folder as a power loss after ``count`` events may leave it; with ``all_unsynced`` nothing is there that was not synced."""
        kinds: Sequence[_All | _Order | _Any] = (_All(), _Order(0), _Order(chance.randrange(count + 1)), _Any(chance))
        loss = _Loss(self, count, _Order(0) if all_unsynced else chance.choices(kinds, (1, 3, 2, 4))[0])
        loss.make(0, to)
        loss.set_times(to, chance)
        loss.add_indexes(to, chance)


class _All:
    """Everything reached the disk: the power went later."""

    def keeps(self, at: int) -> bool:
        return True

    def tears(self) -> random.Random | None:
        return None


class _Order(_All):
    """What was done up to a moment reached the disk, of the rest only what was synced."""

    def __init__(self, until: int) -> None:
        self._until = until

    def keeps(self, at: int) -> bool:
        return at < self._until


class _Any(_All):
    """Each change for itself."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._share = chance.choice((0.2, 0.5, 0.8))

    def keeps(self, at: int) -> bool:
        return self._chance.random() < self._share

    def tears(self) -> random.Random | None:
        return self._chance


class _Loss:
    """One state of a disk after ``count`` events."""

    def __init__(self, disk: Disk, count: int, kind: _All) -> None:
        self._disk, self._count, self._kind = disk, count, kind
        self._synced = {event.node: at for at, event in enumerate(disk.log[:count]) if isinstance(event, Sync)}
        self._entries = {node: dict(entries) for node, entries in disk.folders.items()}
        self._bytes = {node: bytearray(content) for node, content in disk.contents.items()}
        self._places: dict[int, list[Path]] = {}
        stuck: set[tuple[int, str]] = set()
        kept: set[int] = set()
        for at, event in enumerate(disk.log[:count]):
            if isinstance(event, Entry):
                place = (event.folder, event.name)
                if (
                    place in stuck
                    or not self._keeps(at, event.folder)
                    or (event.needs is not None and event.needs not in kept)
                ):
                    stuck.add(place)  # what happened to this name later is not on the disk either
                else:
                    kept.add(at)
                    self._enter(event)
            elif isinstance(event, Write | Cut):
                self._fill(at, event)

    def _keeps(self, at: int, node: int) -> bool:
        return at < self._synced.get(node, -1) or self._kind.keeps(at)

    def _enter(self, event: Entry) -> None:
        if event.node is None:
            self._entries[event.folder].pop(event.name, None)
        else:
            self._entries[event.folder][event.name] = event.node

    def _fill(self, at: int, event: Write | Cut) -> None:
        data = self._bytes.setdefault(event.node, bytearray())
        keeps = self._keeps(at, event.node)
        if isinstance(event, Cut):
            if keeps:
                _resize(data, event.size)
            return
        chance = None if keeps else self._kind.tears()
        stop = event.at + len(event.data)
        if keeps or (chance is not None and chance.random() < 0.5):
            _resize(data, max(stop, len(data)))  # perhaps nothing but the length
        for first in range(event.at, stop, SECTOR):
            last = min(first + SECTOR, stop)
            if keeps or (chance is not None and chance.random() < 0.3):
                _resize(data, max(last, len(data)))
                data[first:last] = event.data[first - event.at : last - event.at]

    def make(self, node: int, to: Path) -> None:
        to.mkdir(mode=0o700)
        self._places.setdefault(node, []).append(to)
        for name, inner in self._entries[node].items():
            if inner in self._entries:
                self.make(inner, to / name)
            else:
                (to / name).write_bytes(self._bytes.get(inner, b""))

    def set_times(self, to: Path, chance: random.Random) -> None:
        """A folder's time is what it was at its last sync, or at the end."""
        until = chance.choice((self._count, None))
        for at, node, time in self._disk.times:
            if at <= (self._synced.get(node, 0) if until is None else until):
                for place in self._places.get(node, ()):
                    os.utime(place, ns=(time, time))

    def add_indexes(self, to: Path, chance: random.Random) -> None:
        for store in sorted({store for _, store, _ in self._disk.indexes}):
            if not (to / store).is_dir():
                continue
            before = (to / store).stat()
            states = [files for at, where, files in self._disk.indexes if where == store and at <= self._count]
            for name, data in (chance.choice(states) if states and chance.random() < 0.9 else {}).items():
                if name == INDEX or chance.random() < 0.8:
                    length = len(data) if chance.random() < 0.7 else chance.randrange(len(data) + 1)
                    (to / store / name).write_bytes(data[:length])
            os.utime(to / store, ns=(before.st_atime_ns, before.st_mtime_ns))


def _resize(data: bytearray, size: int) -> None:
    del data[size:]
    data.extend(bytes(size - len(data)))
