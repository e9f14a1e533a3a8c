"""Who holds a lock, as far as the system tells: Linux lists all locks in ``/proc/locks``. For people only; nothing is decided by it."""

from __future__ import annotations

import os
import re
from pathlib import Path


def parse_locks(text: str, device: int, inode: int, *, writers: bool = False) -> list[int]:
    """The processes that hold a lock on a file, by ``/proc/locks``; those that wait for one (``->``) are passed over. ``writers``: only those
    that hold it alone."""
    place = f"{os.major(device):02x}:{os.minor(device):02x}:{inode}"
    lines = (line.split() for line in text.splitlines())
    held = (words for words in lines if len(words) >= 6 and words[5] == place and words[1] != "->")
    found = {int(words[4]) for words in held if words[3] == "WRITE" or not writers}
    return sorted(pid for pid in found if pid > 0)  # 0 and -1: of another container or machine


def lock_holders(file: os.stat_result, *, writers: bool = False) -> list[str]:
    """What holds a lock on a file, as ``process 123 (its command, stopped)``; empty where nobody can tell. The file isn't opened: closing it
    would give up a lock of SQLite's."""
    try:
        text = Path("/proc/locks").read_text()
    except OSError:
        return []
    return [
        _process(pid)
        for pid in parse_locks(text, file.st_dev, file.st_ino, writers=writers)
        if pid != os.getpid() or not writers
    ]


def _process(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        state = re.search(r"^State:\s+(\S)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return f"process {pid}"
    command = b" ".join(word for word in words if word).decode(errors="replace")
    shown = "".join(c for c in command if c.isprintable())[:60]
    stopped = ", stopped" if state is not None and state[1] in "Tt" else ""
    return f"process {pid} ({shown}{stopped})"


def waiting_advice(who: list[str]) -> str:
    """What to do about them. A sentence without its full stop."""
    if any(one.endswith(", stopped)") for one in who):
        return "A stopped process keeps its locks: let it go on (`kill -CONT`) or end it, then try again"
    return "Try again when it is done"
