"""A file of lines that several processes append to at once.

Each line is one write at the end of the file, under the file's lock, which the kernel frees when a process dies. It is not synced: a line
survives this process, not a power cut. No measurement waits for a disk.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class LogFile:
    """Open for appending; made, for its user alone, if it is not there. Raises OSError with the path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def append(self, line: bytes) -> None:
        """``line`` ends with a newline. Where a writer died inside its own line, this one still begins a new one."""
        assert line.endswith(b"\n") and line.count(b"\n") == 1
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            whole = line if self._at_a_start() else b"\n" + line
            written = os.write(self._fd, whole)
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        if written < len(whole):
            raise OSError(
                0, f"expected to append {len(whole)} bytes, could append {written}: the line is cut off", str(self.path)
            )

    def close(self) -> None:
        os.close(self._fd)

    def _at_a_start(self) -> bool:
        try:
            end = os.fstat(self._fd).st_size
            return end == 0 or os.pread(self._fd, 1, end - 1) == b"\n"
        except OSError:  # a pipe or a device has no bytes to look at
            return True
