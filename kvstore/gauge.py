"""How many bytes all files below a store's folder take: walked, and between walks counted by those who write.

Savers and transfers of every process add to one count, in the file ``quota.count``, before they write an object: so a save needs no
walk, and what nobody has written yet is not given away twice. The count may be too high (something was deleted), which a walk corrects
as soon as it would matter; it is never trusted over a restart of the machine, because it isn't synced.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .errors import StoreBusy, StoreCorrupt
from .files import Root

COUNT = "quota.count"
WAIT = 30.0
"""Seconds that another process may hold the count: it does while it walks."""
RESTART = 30.0
"""Seconds by which wall clock less monotonic clock may change before the machine is taken to have been restarted."""

_INDEX = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm")
_COUNT = struct.Struct("<8sqqd")
_MAGIC = b"KVFCOUNT"


class NoRoom(Exception):
    """What is being written doesn't fit below the quota; ``needed``: bytes of all of it. Not for callers of the store."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


@dataclass(frozen=True, slots=True)
class _Count:
    """``bytes`` of all files but the index's; ``since``: what was added since somebody walked."""

    bytes: int
    since: int


class Gauge:
    """The count of one store under a quota of ``limit`` bytes. May be used by several threads."""

    def __init__(self, root: Root, limit: int) -> None:
        self._root = root
        self.limit = limit

    def charge(self, size: int) -> bool:
        """Counts ``size`` bytes that are about to be written; False, and nothing is counted, if they don't fit.

        Walks if they don't fit by a count that isn't fresh, and each time that half the quota was added. `StoreBusy`, `OSError`.
        """
        with self._locked() as (folder, fd):
            count = self._read(fd)
            index = index_bytes(folder)
            if count is None or count.since > self.limit // 2:
                count = self._walked(fd)
            if count.since and count.bytes + index + size > self.limit:
                count = self._walked(fd)
            if count.bytes + index + size > self.limit:
                return False
            self._write(fd, _Count(count.bytes + size, count.since + size))
            return True

    def add(self, size: int) -> None:
        """Counts bytes that are written whether they fit or not. Where it can't, the next walk does."""
        with contextlib.suppress(OSError, StoreBusy), self._locked() as (_, fd):
            count = self._read(fd)
            if count is not None:
                self._write(fd, _Count(count.bytes + size, count.since + size))

    def require(self, size: int, more: int = 0) -> None:
        """As `charge`; raises `NoRoom` for these and ``more`` bytes if they don't fit."""
        if not self.charge(size):
            raise NoRoom(size + more)

    def release(self, size: int) -> None:
        """Takes back bytes that were charged and are not there (any more). Where it can't, the count stays too high until the next walk."""
        with contextlib.suppress(OSError, StoreBusy), self._locked() as (_, fd):
            count = self._read(fd)
            if count is not None:
                self._write(fd, replace(count, bytes=max(0, count.bytes - size)))

    def recount(self) -> int:
        """Walks, and returns the bytes of all files."""
        with self._locked() as (folder, fd):
            return self._walked(fd).bytes + index_bytes(folder)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[tuple[int, int]]:
        """Descriptors of the store's folder and of the count, which nobody else reads or changes meanwhile."""
        with self._root.folder("") as folder:
            fd = os.open(COUNT, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
            try:
                self._lock(fd)
                yield folder, fd
            finally:
                os.close(fd)

    def _lock(self, fd: int) -> None:
        deadline = time.monotonic() + WAIT
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    where = self._root.path / COUNT
                    raise StoreBusy(
                        f"{where}: another process held this lock for over {WAIT:g} s. See who with `lsof {where}`, or try again.",
                        path=str(where),
                    ) from None
                time.sleep(0.0005)

    def _read(self, fd: int) -> _Count | None:
        """None where it says nothing: made just now, cut, damaged, or of before a restart."""
        data = os.pread(fd, _COUNT.size + 4, 0)
        body, check = data[: _COUNT.size], data[_COUNT.size :]
        if len(check) != 4 or int.from_bytes(check, "little") != zlib.crc32(body):
            return None
        magic, count, since, started = _COUNT.unpack(body)
        if magic != _MAGIC or count < 0 or abs(started - _started()) > RESTART:
            return None
        return _Count(count, since)

    def _write(self, fd: int, count: _Count) -> None:
        body = _COUNT.pack(_MAGIC, count.bytes, count.since, _started())
        os.pwrite(fd, body + zlib.crc32(body).to_bytes(4, "little"), 0)

    def _walked(self, fd: int) -> _Count:
        count = _Count(files_bytes(self._root), 0)
        try:
            self._write(fd, count)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        return count


def _started() -> float:
    """About when the machine was started. Changes when a clock is set or the machine has slept, too: then somebody walks once more."""
    return time.time() - time.monotonic()


def physical_bytes(root: Root) -> int:
    """Bytes of every file below a store's folder, ours or not, as long as the files are."""
    with root.folder("") as folder:
        return files_bytes(root) + index_bytes(folder)


def index_bytes(folder: int) -> int:
    """Bytes of the index's files in the folder with this descriptor: they change without being counted."""
    total = 0
    for name in _INDEX:
        with contextlib.suppress(FileNotFoundError):
            total += os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
    return total


def files_bytes(root: Root) -> int:
    """Bytes of every file but the index's. What is moved from folder to folder meanwhile is counted at least once.

    Files go from tmp and quarantine to their places, and to and from the trash: so these are walked first, and the trash at the end again.
    """
    trash = _entries(root, "trash")
    total = sum(tree_bytes(root, folder) for folder in ("tmp", "quarantine"))
    for name in root.names(""):
        if name not in ("tmp", "quarantine", "trash", *_INDEX):
            total += tree_bytes(root, name)
    return total + sum((trash | _entries(root, "trash")).values())


def _entries(root: Root, path: str) -> dict[str, int]:
    try:
        with root.folder(path) as fd, os.scandir(fd) as entries:
            return {entry.name: _entry_bytes(fd, entry) for entry in entries}
    except (FileNotFoundError, StoreCorrupt):
        return {}


def tree_bytes(root: Root, path: str) -> int:
    """Bytes of a file, or of the files in a folder; links count nothing and are not followed."""
    size = root.size(path)
    return sum(_entries(root, path).values()) if size is None else size


def _entry_bytes(folder: int, entry: os.DirEntry[str]) -> int:
    try:
        if entry.is_file(follow_symlinks=False):
            return os.stat(entry.name, dir_fd=folder, follow_symlinks=False).st_size
        if not entry.is_dir(follow_symlinks=False):
            return 0
        fd = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # gone, or something else stands there by now
            return 0
        raise
    try:
        with os.scandir(fd) as entries:
            return sum(_entry_bytes(fd, inner) for inner in entries)
    finally:
        os.close(fd)
