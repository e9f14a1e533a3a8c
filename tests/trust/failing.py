"""Makes one call into the operating system fail, or do only half of what was asked, and watches what the program does about it."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

PRODUCT = str(Path(__file__).resolve().parents[2])
OURS = ("kvstore", "sync")
SHORT = 0
"""Instead of an error number: only half of the bytes are read or written."""

CALLS = {
    os: (
        "open", "dup", "close", "read", "pread", "preadv", "write", "writev", "pwrite", "ftruncate", "fsync", "rename", "replace", "link",
        "unlink", "mkdir", "rmdir", "listdir", "scandir", "stat", "lstat", "fstat", "lseek", "statvfs", "utime", "chmod", "fchmod",
        "posix_fadvise", "posix_fallocate", "sendfile",
    ),
    fcntl: ("flock", "fcntl"),
}  # fmt: skip
TRANSFERS = ("read", "pread", "preadv", "write", "writev", "pwrite")

Site = tuple[str, ...]
"""A call, and where in the product it is made: the files and lines of the product's frames, innermost first."""


@dataclass(slots=True)
class Watch:
    """What was called, and what failed."""

    fail: tuple[str, int, int] | None = None
    """The call, the how manieth of it, and the error (or `SHORT`)."""
    counts: dict[str, int] = field(default_factory=dict)
    sites: list[tuple[Site, str, int]] = field(default_factory=list)
    """Every call in order, where it was made, with its number."""
    failed: bool = False
    broken: set[tuple[int, int]] = field(default_factory=set)
    """Files whose fsync failed."""
    sins: list[str] = field(default_factory=list)
    """What was done to such a file that may not be done to it."""


@contextmanager
def watching(fail: tuple[str, int, int] | None = None, *, note: bool = False) -> Iterator[Watch]:
    """Every call of `CALLS` from the product is counted, ``fail`` fails; with ``note`` each one's site is noted."""
    watch = Watch(fail)
    real = {
        (module, name): getattr(module, name)
        for module, names in CALLS.items()
        for name in names
        if hasattr(module, name)
    }
    for (module, name), call in real.items():
        setattr(module, name, _watched(watch, name, call, note))
    try:
        yield watch
    finally:
        for (module, name), call in real.items():
            setattr(module, name, call)


def _watched(watch: Watch, name: str, real: Callable[..., Any], note: bool) -> Callable[..., Any]:
    fstat = os.fstat

    def run(*args: Any, **kwargs: Any) -> Any:
        number = watch.counts[name] = watch.counts.get(name, 0) + 1
        if note:
            watch.sites.append(((name, *_frames(sys._getframe(1))), name, number))
        fails = watch.fail is not None and watch.fail[:2] == (name, number)
        if name == "fsync":
            found = fstat(args[0])
            key = (found.st_dev, found.st_ino)
            if key in watch.broken and not _is_folder(found):
                watch.sins.append("a file was synced again after its fsync had failed")
            if fails:
                watch.broken.add(key)
        if name in ("rename", "replace") and watch.broken:
            found = (
                os.lstat(args[0]) if kwargs.get("src_dir_fd") is None else os.stat(args[0], dir_fd=kwargs["src_dir_fd"])
            )
            if (found.st_dev, found.st_ino) in watch.broken:
                watch.sins.append("a file was renamed into place after its fsync had failed")
        if not fails:
            return real(*args, **kwargs)
        assert watch.fail is not None
        watch.failed = True
        if watch.fail[2] == SHORT:
            return _half(name, real, args)
        if name == "close":  # the descriptor is gone even so
            real(*args)
        error = watch.fail[2]
        place = args[0] if args and isinstance(args[0], str | os.PathLike) else None
        raise OSError(error, os.strerror(error), *([] if place is None else [os.fspath(place)]))

    return run


def _frames(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PRODUCT) and Path(path[len(PRODUCT) + 1 :]).parts[0] in OURS:
            yield f"{path[len(PRODUCT) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back


def _is_folder(found: os.stat_result) -> bool:
    return found.st_mode & 0o170000 == 0o040000


def _half(name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Half of the bytes, at least one where there is one."""
    if name in ("read", "pread"):
        return real(args[0], max(1, args[1] // 2), *args[2:])
    if name in ("write", "pwrite"):
        data = memoryview(args[1]).cast("B")
        return real(args[0], data[: max(1, len(data) // 2)], *args[2:])
    parts = [memoryview(part).cast("B") for part in args[1]]
    left = max(1, sum(map(len, parts)) // 2)
    chosen = []
    for part in parts:
        chosen.append(part[:left])
        left -= len(chosen[-1])
        if not left:
            break
    return real(args[0], chosen, *args[2:])
