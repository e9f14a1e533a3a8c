"""Processes that get killed. Started once; forks a child for every line on stdin, so that a kill costs milliseconds.

    crashing.py STORE

Line ``loop SEED``: the child saves, renames, removes and collects until it is killed; it prints each promise after it was made.
Line ``step ACTION N STORE``: the child does one action and kills itself at its N-th call into the operating system that changes a file.
Prints ``pid P`` for each child, and ``end STATUS`` when it has died.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvmemory import save

from kvstore import Store, pins, prune, recode, trash

CALLS = ("rename", "link", "fsync", "writev", "unlink", "open", "mkdir", "rmdir")
STEM = [(3 * i) % 90 for i in range(130)]


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def loop(path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with Store.open(path) as store:
        say("ready")
        for number in range(10_000):
            items = [*STEM[: chance.randrange(130)], seed, number, *range(chance.randrange(70))]
            name = f"{seed} {number}"
            kind = chance.randrange(10)
            if kind < 5:
                say("promised", save(store, items, name=name).digest, name)
            elif kind < 7:
                save(store, items)
            elif kind == 7:
                say("removing", name)
                save(store, items, name=name)
                store.shelf.records.move_ref(name, store.resolve(name), None)
            elif kind == 8:
                save(store, items, name=name)
                say("promised", store.shelf.records.rename_ref(name, f"{name} renamed").snapshot, f"{name} renamed")
            else:
                prune.apply(store, prune.plan(store))
                prune.purge(store)


def grow(store: Store) -> None:
    save(store, [*STEM, 1, 2, 3], name="a")


def collect(store: Store) -> None:
    prune.apply(store, prune.plan(store))


ACTIONS: dict[str, Callable[[Store], object]] = {
    "grow": grow,
    "unnamed": lambda store: save(store, [*STEM[:100], 7]),
    "rename": lambda store: store.shelf.records.rename_ref("a", "b"),
    "remove": lambda store: store.shelf.records.move_ref("a", store.resolve("a"), None),
    "collect": collect,
    "purge": prune.purge,
    "create": lambda store: Store.open(store.shelf.path.with_name(f"{store.shelf.path.name}-new")).close(),
}

RECODING: dict[str, Callable[[Store], object]] = {
    "planes": lambda store: recode.apply(store, recode.plan(store, "planes")),
    "raw": lambda store: recode.apply(store, recode.plan(store, "raw")),
}

KEEPING: dict[str, Callable[[Store], object]] = {
    "restore": lambda store: trash.restore(store, "gone"),
    "evict": lambda store: prune.apply(store, prune.eviction(store, 1)),
    "pin": lambda store: pins.pin(store.shelf.records, "a"),
}


def step(path: Path, action: str, number: int) -> None:
    """Does an action; dies before its ``number``-th call, or says how many there were."""
    numbers = itertools.count(1)  # counts right for several threads too

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if next(numbers) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapped

    with Store.open(path) as store:
        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        {**ACTIONS, **RECODING, **KEEPING}[action](store)
    say("calls", next(numbers) - 1)


def main() -> None:
    for line in sys.stdin:
        words = line.split()
        pid = os.fork()
        if pid == 0:
            if words[0] == "loop":
                loop(Path(sys.argv[1]), int(words[1]))
            else:
                step(Path(words[3]), words[1], int(words[2]))
            os._exit(0)
        say("pid", pid)
        say("end", os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main()
