"""Regular files only: a named pipe as a source would be waited for without end, and a device has none."""

from __future__ import annotations

import stat
from pathlib import Path

from runtime.build.errors import SourceMissing

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def regular_file(path: Path) -> bool:
    """Whether there is a file at ``path``, itself or behind links. Raises SourceMissing for something that isn't a regular file."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    if stat.S_ISREG(mode):
        return True
    raise SourceMissing(
        f"{path}: expected a regular file, found {_KINDS.get(stat.S_IFMT(mode), 'something else')}. Put the file itself there.",
        file=str(path),
    )
