"""The objects of a save: hashed, and the new ones written and synced out of sight, several at once; then made visible together.

One pass a block and group hashes the rows, asks whether the store has that content, and if not writes it in ``tmp/``; other threads
sync meanwhile. `publish` renames.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from .codec import HEADER, object_header
from .digest import ContentDigest, content_digest
from .errors import InputInvalid
from .files import Root, settle
from .objects import Objects

SYNCERS = 8
"""Threads that wait for the disk; it takes several flushes together."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one object, live memory that is only read. ``name``: its digest where that is known already."""

    parts: Sequence[memoryview]
    name: ContentDigest | None = None


class Staging:
    """A context manager; what was not published when it ends is deleted. Its user holds `Shelf.shared`."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._objects = Objects(root)
        self._files: dict[ContentDigest, tuple[str, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for path, _size in self._files.values():
            with contextlib.suppress(OSError):
                self._root.discard(path)

    def add(self, batch: Sequence[Rows]) -> list[ContentDigest]:
        """Stages those objects that the store does not have, synced when this returns; the names of all, in order.

        A file of another length is not the object (somebody cut it): it is written again. `InputInvalid` where rows are not what
        their known name says.
        """
        from concurrent.futures import Future, ThreadPoolExecutor

        syncs: list[Future[None]] = []
        with ThreadPoolExecutor(SYNCERS) as syncing:

            def stage(rows: Rows) -> ContentDigest:
                name, fd = self._write(rows)
                if fd is not None:
                    syncs.append(syncing.submit(settle, fd))
                return name

            names = [stage(rows) for rows in batch]
            for sync in syncs:
                sync.result()
        return names

    def _write(self, rows: Rows) -> tuple[ContentDigest, int | None]:
        """The name, and a descriptor to be settled if the object was new."""
        content = b"".join(
            rows.parts
        )  # one call to hash, one to write: many small ones would fight for the interpreter
        name = content_digest([content])
        if rows.name not in (None, name):
            raise InputInvalid(
                f"known: expected the content digest of the rows, {name}, found {rows.name}. Pass only digests of blocks "
                f"that are unchanged since they were loaded or saved.",
                name=str(rows.name),
            )
        length = len(content)
        path = f"tmp/{os.getpid():x}-{secrets.token_hex(8)}"
        if (
            self._objects.size(name) == HEADER + length
            or self._files.setdefault(name, (path, HEADER + length))[0] != path
        ):
            return name, None  # here already, or the same content in another block
        try:
            return name, self._root.create(path, [object_header(name, length), content])
        except BaseException:
            del self._files[name]
            raise

    def has(self, name: ContentDigest) -> bool:
        """Whether the object was new and waits to be published."""
        return name in self._files

    def publish(self, names: set[ContentDigest]) -> tuple[int, int]:
        """Makes the staged ones among ``names`` visible, durably. Returns how many, and their bytes with headers."""
        chosen = sorted(name for name in names if name in self._files)
        self._root.move([(self._files[name][0], Objects.path(name)) for name in chosen])
        return len(chosen), sum(self._files.pop(name)[1] for name in chosen)
