"""Who waits for the disk, and when: it is told early what will be read and written, and many files are synced at once.

Everything here but `sync` is a hint: without it, or on a system that has no such call, the same bytes come and go, later.
`docs/design/003-one-hash-and-who-waits.md` says what was measured.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Sequence

LARGE = 512 << 10
"""Bytes from which on a file is worth more than one call to have it read ahead."""

SYNCERS = 4
"""Files that are synced at the same time, at most."""


def read_ahead(fd: int, size: int) -> None:
    """Has the disk begin to read a whole file of ``size`` bytes, and returns at once."""
    if size >= LARGE and hasattr(os, "RWF_NOWAIT"):
        # What is read on request (WILLNEED) comes into memory page by page, and each page costs when it is taken, filled, copied and freed. What
        # the kernel reads ahead of a reader of its own accord comes in ever larger pieces. Reads that don't wait make it begin: of the first four
        # pages, then at the two places where it looks whether somebody still follows.
        for count, page in ((4 * mmap.PAGESIZE, 0), (1, 4), (1, 16)):
            with contextlib.suppress(OSError):
                os.preadv(fd, [bytearray(count)], page * mmap.PAGESIZE, os.RWF_NOWAIT)
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)


def start_writing(fd: int) -> None:
    """Has the disk begin to write what a file holds, and returns at once.

    Linux starts writing dirty pages when it is told that they will not be needed, and does not drop them for it. What makes the file
    durable is the `sync` later.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def sync(fds: Sequence[int]) -> None:
    """fsync of each file or folder; of many, a few at a time. When it returns all are durable; one's error is raised when all were tried.

    Every fsync has the disk flush its cache, also where nothing is left to write. Those that wait at the same time share a flush.
    """
    count = min(SYNCERS, max(1, len(fds) // 8))
    errors: list[BaseException] = []

    def run(some: Sequence[int]) -> None:
        for fd in some:
            try:
                os.fsync(fd)
            except BaseException as error:
                errors.append(error)

    threads: list[threading.Thread] = []
    try:
        for i in range(1, count):
            thread = threading.Thread(target=run, args=(fds[i::count],), name="kvferry-sync")
            try:
                thread.start()
            except RuntimeError:  # no more threads are to be had
                run(fds[i::count])
            else:
                threads.append(thread)
        run(fds[::count])
    finally:
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
