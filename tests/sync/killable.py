"""Runs transfers in processes that are killed at their Nth system call. Commands on standard input, one JSON line each:

``[way, store, remote, n]`` forks, counts the calls below and dies by SIGKILL at the Nth, before (even N) or after (odd N) it is
made. Answers with a JSON line: how many calls were made if it lived, else null. Forking spares the imports each time.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore import Store
from sync import Folder, pull, push

CALLS = ("open", "mkdir", "writev", "fsync", "rename", "unlink", "rmdir", "preadv", "close")


def arm(n: int) -> Callable[[], int]:
    """Counts from here on; returns what tells the count."""
    numbers = itertools.count(1)
    last = [0]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            last[0] = number = next(numbers)
            if number == n and n % 2 == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **kwargs)
            if number == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return run

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    return lambda: last[0]


def transfer(way: str, store: str, remote: str, n: int) -> int:
    made = arm(n)
    with Store.open(Path(store)) as here, Folder.open(Path(remote), create=way == "push") as there:
        if way == "push":
            push(here, there, ["book"])
        else:
            pull(here, there, ["book"])
    return made()


def main() -> None:
    for line in sys.stdin:
        way, store, remote, n = json.loads(line)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(write, str(transfer(way, store, remote, n)).encode())
            finally:
                os._exit(0)
        os.close(write)
        told = os.read(read, 100)
        os.close(read)
        os.waitpid(child, 0)
        print(json.dumps(int(told) if told else None), flush=True)


if __name__ == "__main__":
    main()
