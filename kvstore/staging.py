"""The objects of a save: hashed, and the new ones written and synced out of sight; then made visible together.

One pass a block and group hashes the rows, asks whether the store has that content, and if not writes it in ``tmp/``, where the disk
begins with it; at the end all are synced. `publish` renames.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Self

from .codec import CODECS, Codec, encode_object
from .digest import ContentDigest, content_digest
from .errors import InputInvalid
from .files import Root, Unsettled
from .gauge import Gauge, NoRoom
from .objects import Objects


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one object, live memory that is only read. ``name``: its digest where that is known already."""

    parts: Sequence[memoryview]
    name: ContentDigest | None = None


class Staging:
    """A context manager; what was not published when it ends is deleted. Its user holds `Shelf.shared`, and for planes has called `Shelf.require`.

    With a ``gauge`` every file is counted before it is written, and taken back from the count when it is deleted.
    """

    def __init__(self, root: Root, codec: Codec = "raw", gauge: Gauge | None = None) -> None:
        self._root = root
        self._gauge = gauge
        self._codec = CODECS[codec]
        self._objects = Objects(root)
        self._files: dict[ContentDigest, tuple[str, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for path, size in self._files.values():
            with contextlib.suppress(OSError):
                self._root.discard(path)
                if self._gauge is not None:
                    self._gauge.release(size)

    @property
    def bytes(self) -> int:
        """Of the files that wait to be published."""
        return sum(size for _, size in self._files.values())

    def add(self, batch: Sequence[Rows]) -> list[ContentDigest]:
        """Stages those objects that the store does not have, synced when this returns; the names of all, in order.

        A file that is not complete is not the object (somebody cut it): it is written again. `InputInvalid` where rows are not what
        their known name says. `NoRoom`, with the bytes of all of them, when some don't fit: the rest is hashed then, and not written.
        """
        names: list[ContentDigest] = []
        unfit: dict[ContentDigest, int] = {}
        with Unsettled() as unsettled, contextlib.closing(_hashed_ahead(batch)) as hashed:
            for rows, name in zip(batch, hashed, strict=True):
                names.append(name)
                length = sum(part.nbytes for part in rows.parts)
                if name not in self._files and not self._objects.complete(name, length):
                    path = f"tmp/{os.getpid():x}-{secrets.token_hex(8)}"
                    parts = encode_object(name, rows.parts, self._codec)
                    size = sum(len(part) for part in parts)
                    if self._gauge is not None and (unfit or not self._gauge.charge(size)):
                        unfit[name] = size
                        continue
                    unsettled.add(self._root.create(path, parts))
                    self._files[name] = (path, size)
        if unfit:
            raise NoRoom(self.bytes + sum(unfit.values()))
        return names

    def has(self, name: ContentDigest) -> bool:
        """Whether the object was new and waits to be published."""
        return name in self._files

    def publish(self, names: set[ContentDigest]) -> tuple[int, int]:
        """Makes the staged ones among ``names`` visible, durably. Returns how many, and their bytes with headers."""
        chosen = sorted(name for name in names if name in self._files)
        self._root.move([(self._files[name][0], Objects.path(name)) for name in chosen])
        return len(chosen), sum(self._files.pop(name)[1] for name in chosen)


def _hashed_ahead(batch: Sequence[Rows]) -> Generator[ContentDigest, None, None]:
    """The name of each, in order. A thread hashes the next ones while the caller writes: neither needs the interpreter meanwhile."""
    found: SimpleQueue[ContentDigest | BaseException] = SimpleQueue()
    unwanted = threading.Event()

    def run() -> None:
        try:
            for rows in batch:
                if unwanted.is_set():
                    return
                found.put(_verified(rows))
        except BaseException as error:
            found.put(error)

    thread = threading.Thread(target=run, name="kvferry-hash")
    thread.start()
    try:
        for _ in batch:
            got = found.get()
            if isinstance(got, BaseException):
                raise got
            yield got
    finally:
        unwanted.set()
        thread.join()


def _verified(rows: Rows) -> ContentDigest:
    name = content_digest(rows.parts)
    if rows.name not in (None, name):
        raise InputInvalid(
            f"known: expected the content digest of the rows, {name}, found {rows.name}. Pass only digests of blocks "
            f"that are unchanged since they were loaded or saved.",
            name=str(rows.name),
        )
    return name
