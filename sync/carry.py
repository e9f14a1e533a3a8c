"""Objects under way: several batches at once, bounded in number and bytes; and what a transfer came to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from kvstore.digest import ContentDigest, SnapshotDigest
from kvstore.snapshot import Coverage, Snapshot

from .frames import Buffer
from .plan import Lengths
from .remote import WORKERS

BATCH_OBJECTS = 16
BATCH_BYTES = 8 << 20
"""A batch ends with the object that reaches either."""

ATTEMPTS = 3
"""Plans made for one name, when objects go away at the remote in between."""

Advance = Callable[[float], None]
Meter = Callable[[float], AbstractContextManager[Advance]]
"""Opens a progress display for so many bytes and yields what moves it on. Called from the caller's thread only."""


@contextlib.contextmanager
def unmetered(total: float) -> Iterator[Advance]:
    """Shows nothing."""
    yield lambda amount: None


@dataclass(frozen=True, slots=True)
class Carried:
    """One snapshot as it now is at its destination. ``nowhere``: wanted objects that neither side has."""

    label: str
    digest: SnapshotDigest
    snapshot: Snapshot = field(repr=False)
    coverage: Coverage
    nowhere: int


@dataclass(frozen=True, slots=True)
class Moved:
    """What a transfer did.

    ``objects`` were carried, ``payload_bytes`` of content in ``frame_bytes`` of frames, which is what went over the wire: less than the content
    where frames are planes. ``skipped`` were at the destination; ``resumed`` were left there by an interrupted transfer.
    """

    objects: int
    payload_bytes: int
    frame_bytes: int
    skipped: int
    resumed: int
    seconds: float
    snapshots: tuple[Carried, ...]


class Tally:
    """Counts what is carried while it is."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self.objects = self.payload = self.frames = self.resumed = self.skipped = 0

    def adopted(self, names: Lengths) -> None:
        self.resumed += len(names)
        self._advance(sum(names.values()))

    def carried(self, batch: Lengths, frames: int) -> None:
        """``frames``: bytes of its frames, as they were carried."""
        self.objects += len(batch)
        self.frames += frames
        self.payload += sum(batch.values())
        self._advance(sum(batch.values()))

    def moved(self, seconds: float, snapshots: tuple[Carried, ...]) -> Moved:
        return Moved(self.objects, self.payload, self.frames, self.skipped, self.resumed, seconds, snapshots)


def counting(chunks: Iterable[Buffer], moved: list[int]) -> Iterator[Buffer]:
    """Passes on what is carried, and appends to ``moved`` the bytes of each piece."""
    for chunk in chunks:
        moved.append(len(chunk))
        yield chunk


def carry(lengths: Lengths, work: Callable[[Lengths], int], tally: Tally) -> None:
    """Runs ``work`` on batches, `WORKERS` at once; it returns the bytes of frames that it carried. The first error is raised when the batches
    under way have ended."""
    with ThreadPoolExecutor(WORKERS) as pool:
        running: dict[Future[int], Lengths] = {}
        try:
            for batch in _batches(lengths):
                if len(running) >= 2 * WORKERS:
                    _reap(running, tally)
                running[pool.submit(work, batch)] = batch
            while running:
                _reap(running, tally)
        finally:
            for future in running:
                future.cancel()


def _reap(running: dict[Future[int], Lengths], tally: Tally) -> None:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    for future in done:
        batch = running.pop(future)
        tally.carried(batch, future.result())


def _batches(lengths: Lengths) -> Iterator[Lengths]:
    """At most `BATCH_OBJECTS` and about `BATCH_BYTES` each, and small enough that every worker gets some."""
    limit = min(BATCH_OBJECTS, -(-len(lengths) // WORKERS))
    batch: dict[ContentDigest, int] = {}
    size = 0
    for name, length in lengths.items():
        batch[name] = length
        size += length
        if len(batch) >= limit or size >= BATCH_BYTES:
            yield batch
            batch, size = {}, 0
    if batch:
        yield batch
