"""Files below a store's root: the durable write, reads that follow no symlink, and the locks.

Every path is relative, made by us from digests (``objects/a/bcde…``), never from a peer's text. Folders on the way
are opened one by one without following symlinks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from .disk import placed
from .errors import StoreBusy, StoreCorrupt
from .holders import lock_holders, waiting_advice
from .waiting import start_writing, sync

UNSETTLED = 64
"""Files that are written and not yet synced, at most: each holds a descriptor."""

CHUNK = 1 << 20
"""Bytes of a file that is read or written as a stream, at a time."""

_IOV = 512
Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Pending:
    """A file to be published: its final relative path and its content in parts, read before `Root.publish` returns."""

    path: str
    parts: Sequence[Buffer]


class Root:
    """One store folder. Holds a descriptor of it, so that a renamed store stays the same store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        if self._fd >= 0:
            close(self._fd)
            self._fd = -1

    @contextlib.contextmanager
    def folder(self, path: str) -> Iterator[int]:
        """A descriptor of the folder ``path`` ("" is the root); `StoreCorrupt` where a symlink or a file stands."""
        with placed(self.path):
            fd = self._enter(path)
            try:
                yield fd
            finally:
                close(fd)

    def _enter(self, path: str) -> int:
        """As `folder`; the caller closes it."""
        if not path:
            return os.dup(self._fd)
        fd = self._fd
        for part in path.split("/"):
            try:
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise self._foreign(path, "a plain folder") from error
                raise
            finally:
                if fd != self._fd:
                    close(fd)
            fd = inner
        return fd

    def make_folder(self, path: str) -> None:
        """Creates one folder with mode 0700 unless it is there."""
        parent, name = _split(path)
        with self.folder(parent) as fd, contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=fd)

    def descriptor(self, path: str) -> int:
        """A read descriptor of a regular file, to be closed by the caller; otherwise as `open`."""
        parent, name = _split(path)
        with self.folder(parent) as folder:
            try:
                # O_NONBLOCK: opening a pipe that somebody put there must not wait for its writer.
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO):  # a symlink, a socket
                    raise self._foreign(path, "a plain file") from error
                raise
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise self._foreign(path, "a plain file")
            except BaseException:
                close(fd)
                raise
        return fd

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[int]:
        """A read descriptor of a regular file; `FileNotFoundError` where there is none, `StoreCorrupt` on anything else."""
        with placed(self.path):
            fd = self.descriptor(path)
            try:
                yield fd
            finally:
                close(fd)

    def _foreign(self, path: str, expected: str) -> StoreCorrupt:
        where = self.path / path
        return StoreCorrupt(
            f"{where}: expected {expected}, found a link or something else, which was not followed. "
            f"Look at it with `ls -l`, then move it away.",
            path=str(where),
        )

    def read(self, path: str, limit: int) -> bytes:
        """The whole of a small file, at most ``limit`` bytes; one byte more tells the caller that it is longer."""
        with self.open(path) as fd:
            data = bytearray()
            while len(data) <= limit and (more := os.read(fd, min(1 << 20, limit + 1 - len(data)))):
                data += more
        return bytes(data)

    def chunks(self, path: str) -> Iterator[memoryview]:
        """A file's bytes, at most `CHUNK` at a time; each view is valid until the next is asked for. As `open` raises."""
        with self.open(path) as fd:
            view = memoryview(bytearray(CHUNK))
            at = 0
            while count := os.preadv(fd, [view], at):
                at += count
                yield view[:count]

    def size(self, path: str) -> int | None:
        """Bytes of the file, None where there is none (or a link, or no regular file)."""
        try:
            os.stat(path, dir_fd=self._fd, follow_symlinks=False)  # one call tells most of what is absent
            parent, name = _split(path)
            with self.folder(parent) as fd:
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                return found.st_size if stat.S_ISREG(found.st_mode) else None
        except (FileNotFoundError, NotADirectoryError, StoreCorrupt):
            return None

    def mtime_ns(self, path: str) -> int:
        with self.folder(path) as fd:
            return os.fstat(fd).st_mtime_ns

    def names(self, path: str) -> list[str]:
        """The entries of a folder, sorted; empty where it is absent."""
        try:
            with self.folder(path) as fd:
                return sorted(os.listdir(fd))  # noqa: PTH208 - pathlib can't list a descriptor
        except FileNotFoundError:
            return []

    def publish(self, batch: Sequence[Pending]) -> None:
        """Makes all of ``batch`` visible, durably, in its order; none is visible before all of it is synced.

        All files are written in ``tmp/``, then synced, then renamed over their final paths, then each distinct
        folder is synced once. On an error nothing of it was renamed and the temporary files are gone, unless a rename or a
        folder sync itself failed: then some may be visible, complete, and the caller must not go on to the next stage.
        """
        names = [f"{os.getpid():x}-{os.urandom(8).hex()}" for _ in batch]
        with self.folder("tmp") as tmp:
            try:
                with Unsettled() as unsettled:
                    for name, pending in zip(names, batch, strict=True):
                        unsettled.add(_create(tmp, name, pending.parts))
                folders: dict[str, None] = {}
                for name, pending in zip(names, batch, strict=True):
                    parent, final = _split(pending.path)
                    with self.folder(parent) as fd:
                        os.rename(name, final, src_dir_fd=tmp, dst_dir_fd=fd)
                    folders[parent] = None
            except BaseException:
                for name in names:
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=tmp)
                raise
        self.sync_all(folders)

    def create(self, path: str, parts: Iterable[Buffer]) -> int:
        """Writes one new file and does not sync it: a descriptor for `Unsettled.add`. On an error, also one that ``parts`` raises, the file is gone."""
        parent, name = _split(path)
        with self.folder(parent) as folder:
            try:
                return _create(folder, name, parts)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
                raise

    def write(self, path: str, chunks: Iterable[Buffer]) -> None:
        """Writes and syncs one new file, chunk by chunk as they come; its folder is not synced.

        ``path`` is the caller's alone. On any error, also one that ``chunks`` raises, the file is gone. Each chunk is written
        before the next is asked for.
        """
        parent, name = _split(path)
        with self.folder(parent) as folder:
            try:
                _write(folder, name, chunks)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
                raise

    def move(self, moves: Sequence[tuple[str, str]]) -> None:
        """Renames synced files over their final paths, then makes each distinct target folder durable, once."""
        folders: dict[str, None] = {}
        for source, target in moves:
            (from_folder, from_name), (to_folder, to_name) = _split(source), _split(target)
            with self.folder(from_folder) as src, self.folder(to_folder) as dst:
                os.rename(from_name, to_name, src_dir_fd=src, dst_dir_fd=dst)
            folders[to_folder] = None
        self.sync_all(folders)

    def discard(self, path: str) -> None:
        """Deletes a file, not durably: one that nobody was promised."""
        parent, name = _split(path)
        with self.folder(parent) as fd:
            os.unlink(name, dir_fd=fd)

    def set_aside(self, source: str, target: str) -> bool:
        """Renames a file or folder, not durably; False where there is no ``source``."""
        (from_folder, from_name), (to_folder, to_name) = _split(source), _split(target)
        with self.folder(to_folder) as dst:
            try:
                with self.folder(from_folder) as src:
                    os.rename(from_name, to_name, src_dir_fd=src, dst_dir_fd=dst)
            except FileNotFoundError:
                return False
        return True

    def remove_tree(self, path: str) -> None:
        """Deletes a file, a link, or a folder with all in it, not durably and following no link; `FileNotFoundError`."""
        parent, name = _split(path)
        with self.folder(parent) as fd:
            if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=fd)
                return
        for inner in self.names(path):
            self.remove_tree(f"{path}/{inner}")
        self.remove_folder(path)

    def remove_folder(self, path: str) -> None:
        """Deletes an empty folder, not durably; `OSError` where it is not empty."""
        parent, name = _split(path)
        with self.folder(parent) as fd:
            os.rmdir(name, dir_fd=fd)

    def sync_all(self, paths: Iterable[str]) -> None:
        """Makes the entries of distinct folders durable."""
        with contextlib.ExitStack() as stack:
            folders = [stack.enter_context(self.folder(path)) for path in paths]
            sync(folders)
            if folders and sys.platform == "darwin":
                self._full_sync()

    def sync_file(self, path: str) -> None:
        """Makes the content of a file durable that another process wrote."""
        with self.open(path) as fd:
            os.fsync(fd)

    def sync(self, path: str) -> None:
        """Makes the entries of a folder durable."""
        with self.folder(path) as fd:
            os.fsync(fd)

    def _full_sync(self) -> None:  # pragma: no cover - macOS
        """macOS: fsync stops at the drive's cache; one F_FULLFSYNC a stage flushes everything before it."""
        fcntl.fcntl(self._fd, 51)  # F_FULLFSYNC

    def rename(self, source: str, target: str) -> None:
        """Renames durably within the root."""
        (from_folder, from_name), (to_folder, to_name) = _split(source), _split(target)
        with self.folder(from_folder) as src, self.folder(to_folder) as dst:
            os.rename(from_name, to_name, src_dir_fd=src, dst_dir_fd=dst)
            os.fsync(dst)
            os.fsync(src)

    def remove(self, path: str) -> None:
        """Deletes a file durably; `FileNotFoundError` where there is none."""
        parent, name = _split(path)
        with self.folder(parent) as fd:
            os.unlink(name, dir_fd=fd)
            os.fsync(fd)

    @contextlib.contextmanager
    def lock(self, path: str, *, exclusive: bool, seconds: float = 30.0) -> Iterator[None]:
        """`flock` on a file or folder of the root until the block ends; the kernel frees it when a process dies.

        Not re-entrant: every call has a descriptor of its own. Raises `StoreBusy` after ``seconds``.
        """
        parent, name = _split(path)
        with self.folder(parent) as folder:
            try:
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO):
                    raise self._foreign(path, "a plain file or folder") from error
                raise
        try:
            mode = (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB
            deadline = time.monotonic() + seconds
            pause = 0.0005
            while True:
                try:
                    fcntl.flock(fd, mode)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise self._busy(path, fd, seconds) from None
                    time.sleep(pause)
                    pause = min(pause * 2, 0.02)
                except OSError as error:
                    if error.errno != errno.EBADF:
                        raise
                    fd = self._writable(path, fd)
            yield
        finally:
            close(fd)

    def _writable(self, path: str, fd: int) -> int:
        """The file behind ``fd`` opened for writing, instead of it: an exclusive lock on NFS needs that (Linux, flock(2))."""
        parent, name = _split(path)
        with self.folder(parent) as folder:
            writable = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        close(fd)
        return writable

    def _busy(self, path: str, fd: int, seconds: float) -> StoreBusy:
        where, who = str(self.path / path), lock_holders(os.fstat(fd))
        todo = waiting_advice(who) if who else f"See who with `lsof {where}`, or try again"
        held = f"by {', '.join(who)}" if who else "by another process"
        return StoreBusy(f"{where}: this lock was held for over {seconds:g} s {held}. {todo}.", path=where, holders=who)


class Unsettled:
    """Files that are written and not yet synced. A context manager: when it ends without an error, all of them are synced.

    The disk begins with a file as soon as it is added, and goes on while the next ones are hashed and written; the syncs at the end
    find most of the work done. Measured with 64 files of 0.6 MB: a third of the time of syncing each as it comes.
    """

    def __init__(self) -> None:
        self._fds: list[int] = []

    def add(self, fd: int) -> None:
        """Takes over a descriptor that was written to. Syncs those before it where there are many."""
        self._fds.append(fd)
        start_writing(fd)
        if len(self._fds) >= UNSETTLED:
            self.settle()

    def settle(self) -> None:
        """Syncs and closes all. After an fsync error the files are to be discarded, never synced again."""
        try:
            sync(self._fds)
        finally:
            self.close()

    def __enter__(self) -> Self:
        return self

    def close(self) -> None:
        """Closes what is not synced, and leaves it so."""
        while self._fds:
            close(self._fds.pop())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.settle()
        finally:
            self.close()


def close(fd: int) -> None:
    """Closes a descriptor. What that may complain of is nobody's loss: what was written and is needed was synced before, which tells its own
    errors. And an error here would leave other descriptors open, with their locks."""
    with contextlib.suppress(OSError):
        os.close(fd)


def _split(path: str) -> tuple[str, str]:
    parent, _, name = path.rpartition("/")
    return parent, name


def _write(folder: int, name: str, parts: Iterable[Buffer]) -> None:
    """Writes and syncs one new file."""
    with Unsettled() as unsettled:
        unsettled.add(_create(folder, name, parts))


def _create(folder: int, name: str, parts: Iterable[Buffer]) -> int:
    """A descriptor of a new file, written and not synced."""
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        # Parts that are there already go out many at a time; a stream is written as it comes.
        groups = [parts] if isinstance(parts, Sequence) else ([part] for part in parts)
        for group in groups:
            _write_parts(fd, list(map(_bytes, group)))
    except BaseException:
        close(fd)
        raise
    return fd


def _bytes(part: Buffer) -> memoryview:
    """As a view whose length is its bytes."""
    view = part if isinstance(part, memoryview) else memoryview(part)
    return view if len(view) == view.nbytes else view.cast("B")


def _write_parts(fd: int, left: list[memoryview]) -> None:
    while left:
        left = _after(left, os.writev(fd, left[:_IOV]))


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of ``parts`` behind their first ``count`` bytes. One call of the system mostly moves all."""
    if count == sum(map(len, parts)):
        return []
    at = 0
    while at < len(parts) and count >= len(parts[at]):
        count -= len(parts[at])
        at += 1
    return [parts[at][count:], *parts[at + 1 :]] if count else parts[at:]


def read_at(fd: int, size: int, start: int) -> bytes:
    """``size`` bytes of the file from ``start``, fewer at its end. Cheaper than filling a buffer, which has to be made of zeros first."""
    data = os.pread(fd, size, start)
    while len(data) < size and (more := os.pread(fd, size - len(data), start + len(data))):
        data += more
    return data


def read_parts(fd: int, parts: Sequence[memoryview]) -> int:
    """Fills writable byte views, one after the other, from the file's start. The bytes read: fewer than they hold at its end."""
    left, total = list(filter(len, parts)), 0
    while left and (count := os.preadv(fd, left[:_IOV], total)):
        total += count
        left = _after(left, count)
    return total
