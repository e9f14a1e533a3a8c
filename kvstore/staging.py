"""The objects of a save: hashed, and the new ones written and synced out of sight, several at once; then made visible together.

One pass a block and group: its thread hashes the rows, asks whether the store has that content, and if not writes and syncs it in
``tmp/`` while other threads hash. `publish` renames.
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
from .files import WRITERS, Root, parallel
from .objects import Objects


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
        """Stages those objects that the store does not have; the names of all, in order.

        A file of another length is not the object (somebody cut it): it is written again. `InputInvalid` where rows are not what
        their known name says.
        """
        return parallel(self._stage, batch, WRITERS)

    def _stage(self, rows: Rows) -> ContentDigest:
        name = content_digest(rows.parts)
        if rows.name not in (None, name):
            raise InputInvalid(
                f"known: expected the content digest of the rows, {name}, found {rows.name}. Pass only digests of blocks "
                f"that are unchanged since they were loaded or saved.",
                name=str(rows.name),
            )
        length = sum(len(part) for part in rows.parts)
        if name not in self._files and self._objects.size(name) != HEADER + length:
            path = f"tmp/{os.getpid():x}-{secrets.token_hex(8)}"
            self._root.write(path, [object_header(name, length), *rows.parts])
            if self._files.setdefault(name, (path, HEADER + length))[0] != path:  # the same content in another thread
                self._root.discard(path)
        return name

    def has(self, name: ContentDigest) -> bool:
        """Whether the object was new and waits to be published."""
        return name in self._files

    def publish(self, names: set[ContentDigest]) -> tuple[int, int]:
        """Makes the staged ones among ``names`` visible, durably. Returns how many, and their bytes with headers."""
        chosen = sorted(name for name in names if name in self._files)
        self._root.move([(self._files[name][0], Objects.path(name)) for name in chosen])
        return len(chosen), sum(self._files.pop(name)[1] for name in chosen)
