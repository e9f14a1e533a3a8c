"""Errors of the disk, told with the place. The calls that read and write below a store are given descriptors: their errors name no file, or only its last part."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from .errors import StoreCorrupt

_ROOM = "Make room on that disk (`kvferry gc --purge` deletes what no name needs), then run it again."
_RIGHTS = "Make that folder writable for you, or give another store with --store, then run it again."
_LOCKS = (
    "That file system gives no locks, and nothing is written without them: mount it with locking, or keep the store on a disk of this "
    "machine and carry it with `kvferry push`."
)
_ADVICE = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EROFS: _RIGHTS,
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EIO: "The disk itself fails: look into the system's log, and copy what can still be read.",
    errno.ENOENT: "If a store was copied without its empty folders, `kvferry pull` or `kvferry prefill` puts them back.",
    errno.ENOLCK: _LOCKS,
    errno.EOPNOTSUPP: _LOCKS,
    errno.ENOSYS: _LOCKS,
    errno.EMFILE: "Allow the process more open files (`ulimit -n`), then run it again.",
}
_WRONG_KIND = (errno.EISDIR, errno.ENOTDIR)


@contextlib.contextmanager
def below(path: Path) -> Iterator[None]:
    """Gives an `OSError` that comes from below the folder ``path``, and does not say so, that path. It stays of its kind.

    But a folder in the place of a file, or a file in that of a folder, is `StoreCorrupt`.
    """
    try:
        with placed(path):
            yield
    except OSError as error:
        if error.errno not in _WRONG_KIND or _is_placed(error, path):
            raise
        expected, found = ("file", "folder") if error.errno == errno.EISDIR else ("folder", "file")
        raise StoreCorrupt.at(
            str(path),
            f"expected a {expected}, found a {found}{_name(error)}",
            todo="`kvferry check` names it: move it away, then run it again.",
            path=str(path),
        ) from error


@contextlib.contextmanager
def placed(path: Path) -> Iterator[None]:
    """As `below`, but leaves alone what says that a folder or a file is in the other's place: the caller may know what to do."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.errno in _WRONG_KIND or _is_placed(error, path):
            raise
        raise OSError(error.errno, f"{error.strerror}{_name(error)}", str(path)) from error


def _is_placed(error: OSError, path: Path) -> bool:
    named = _named(error)
    return isinstance(named, str) and named.startswith(("/", str(path)))


def _named(error: OSError) -> object:
    return error.filename2 or error.filename  # of a rename the place that it was for


def _name(error: OSError) -> str:
    return f" ({named})" if isinstance(named := _named(error), str) else ""


def advice(error: OSError) -> str:
    """What to do about an error of the disk."""
    return _ADVICE.get(error.errno or 0, "Mend this, then run it again.")
