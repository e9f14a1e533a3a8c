"""Publishing a finished folder: everything on disk first, then one rename."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def sync_tree(root: Path) -> None:
    """fsync every file and folder under ``root``, itself included."""
    for path in [root, *root.rglob("*")]:
        _sync(path)


def publish_folder(staging: Path, target: Path) -> None:
    """Make ``staging`` durable and rename it to ``target`` (absent, or an empty folder), in the same parent folder.

    After a crash at any moment ``target`` is whole or isn't there. Raises OSError (ENOTEMPTY) if somebody filled it meanwhile.
    """
    sync_tree(staging)
    staging.rename(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        # On macOS fsync leaves the drive's own cache unwritten; F_FULLFSYNC doesn't.
        full = getattr(fcntl, "F_FULLFSYNC", None)
        if full is None:
            os.fsync(handle)
        else:
            fcntl.fcntl(handle, full)
    finally:
        os.close(handle)
