"""Errors of the disk, told with the place. The calls that read and write below a store are given descriptors: their errors name no file, or only its last part."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from .errors import StoreCorrupt

_ROOM = "Make room on that disk (`kvferry gc --purge` deletes what no name needs), then run it again."
_RIGHTS = "Make that folder writable for you, or give another store with --store, then run it again."
_ADVICE = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EROFS: _RIGHTS,
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EIO: "The disk itself fails: look into the system's log, and copy what can still be read.",
    errno.ENOENT: "If a store was copied without its empty folders, `kvferry pull` or `kvferry prefill` puts them back.",
    errno.EMFILE: "Allow the process more open files (`ulimit -n`), then run it again.",
}


@contextlib.contextmanager
def below(path: Path) -> Iterator[None]:
    """Gives an `OSError` that comes from below the folder ``path``, and does not say so, that path. It stays of its kind.

    But a folder in the place of a file, or a file in that of a folder, is `StoreCorrupt`.
    """
    try:
        yield
    except OSError as error:
        named = error.filename2 or error.filename  # of a rename the place that it was for
        if error.errno is None or (isinstance(named, str) and named.startswith(("/", str(path)))):
            raise
        name = f" ({named})" if isinstance(named, str) else ""
        if error.errno in (errno.EISDIR, errno.ENOTDIR):
            expected, found = ("file", "folder") if error.errno == errno.EISDIR else ("folder", "file")
            raise StoreCorrupt.at(
                str(path),
                f"expected a {expected}, found a {found}{name}",
                todo="`kvferry check` names it: move it away, then run it again.",
                path=str(path),
            ) from error
        raise OSError(error.errno, f"{error.strerror}{name}", str(path)) from error


def advice(error: OSError) -> str:
    """What to do about an error of the disk."""
    return _ADVICE.get(error.errno or 0, "Mend this, then run it again.")
