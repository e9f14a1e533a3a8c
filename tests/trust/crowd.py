"""One of many processes that use a store at once, until its time is over: row 7 starts them with `main`.

Roles: ``writer`` saves (with a name or without), restores, searches, renames and removes; ``ferry`` pulls from a remote, restores and
removes; ``collector`` collects, and empties the trash; ``checker`` checks. Names belong to one process each; the first tokens, and so the
objects, are everybody's. Prints its `Tally` as JSON, and which names it leaves behind with what tokens.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

from battery import Lost, Tally
from harmed import same
from kvmemory import HEAD, find, load, save

from kvstore import Store, prune
from kvstore.check import check
from kvstore.inventory import FULL, QUICK
from sync import Folder, pull

STEM = [(3 * i) % 90 for i in range(200)]
CARRIED = {f"carried {n}": [*STEM[: 40 * n], 9000 + n, *range(n, n + 100)] for n in range(5)}
"""What the remote has."""
KEPT = 12
"""Names that a process leaves standing before it removes old ones."""


def restore(store: Store, name: str, items: list[int]) -> None:
    match = store.match(name, head=HEAD)
    if match.n != len(items):
        raise Lost(f"{name!r}: {match.n} of {len(items)} tokens")
    same(load(store, match), match, items)


class Writer:
    """Knows the names that it gave and their tokens."""

    def __init__(self, path: Path, number: int, chance: random.Random, tally: Tally) -> None:
        self.path, self.number, self.chance, self.tally = path, number, chance, tally
        self.store = Store.open(path)
        self.names: dict[str, list[int]] = {}
        self.given = 0

    def turn(self) -> None:
        one = self.chance.choice([self.give, self.give, self.give, self.cache, self.restore, self.restore, self.search])
        one()
        if len(self.names) > KEPT:
            self.chance.choice([self.remove, self.remove, self.rename])()
        if self.chance.random() < 0.02:
            self.store.close()
            self.store = Store.open(self.path)

    def count(self, what: str) -> None:
        self.tally.facts[what] = self.tally.facts.get(what, 0) + 1

    def some(self) -> list[int]:
        own = [7000 + self.number, self.given] if self.chance.random() < 0.7 else [6000]
        return [*STEM[: self.chance.randrange(1, 200)], *own, *range(self.chance.randrange(100))]

    def give(self) -> None:
        self.given += 1
        name, items = f"{self.number} {self.given}", self.some()
        save(self.store, items, name=name, pending=3, head=HEAD)
        self.names[name] = items
        self.count("saves")

    def cache(self) -> None:
        save(self.store, self.some(), engine=self.chance.choice(["cpu", "gpu"]))
        self.count("saves")

    def restore(self) -> None:
        if self.names:
            name = self.chance.choice(sorted(self.names))
            restore(self.store, name, self.names[name])
            self.count("loads")

    def search(self) -> None:
        items = self.chance.choice(sorted(self.names.values()) or [STEM])
        asked = [*items, 1, 2]
        match = find(self.store, asked)
        if match is None:
            if self.names:
                raise Lost("a search found nothing of what has a name")
        elif all(lineage.fields == (("engine", "cpu"), ("os", "test")) for lineage in match.snapshot.lineages):
            same(load(self.store, match), match, asked)
            self.count("loads")
        self.count("searches")

    def remove(self) -> None:
        name = self.chance.choice(sorted(self.names))
        self.store.shelf.records.remove([name])
        del self.names[name]
        self.count("removals")

    def rename(self) -> None:
        name = self.chance.choice(sorted(self.names))
        self.given += 1
        self.store.shelf.records.rename_ref(name, to := f"{self.number} {self.given}")
        self.names[to] = self.names.pop(name)
        self.count("renames")


class Ferry(Writer):
    """Pulls instead of saving."""

    remote: Folder

    def give(self) -> None:
        self.given += 1
        source, name = self.chance.choice(sorted(CARRIED)), f"{self.number} {self.given}"
        trimmed = self.chance.random() < 0.5
        pull(self.store, self.remote, [source], trimmed=trimmed, rename=name)
        self.names[name] = CARRIED[source]
        self.count("pulls")

    cache = give


def collect(store: Store, chance: random.Random, tally: Tally) -> None:
    prune.apply(store, prune.plan(store, keep_seconds=chance.choice([0, 0, 1])))
    if chance.random() < 0.5:
        prune.purge(store)
    tally.facts["collections"] = tally.facts.get("collections", 0) + 1
    time.sleep(0.05)


def examine(store: Store, chance: random.Random, tally: Tally) -> None:
    report = check(store, chance.choice([QUICK, FULL]))
    if not report.ok:
        raise Lost(str(report))
    tally.facts["checks"] = tally.facts.get("checks", 0) + 1


def main(role: str, number: int, seed: int, seconds: float, path: Path, remote: Path) -> None:
    chance, tally = random.Random(f"crowd {seed} {number}"), Tally()
    turn: Callable[[], None]
    if role in ("writer", "ferry"):
        writer = Writer(path, number, chance, tally) if role == "writer" else Ferry(path, number, chance, tally)
        if isinstance(writer, Ferry):
            writer.remote = Folder.open(remote)
        turn, names = writer.turn, writer.names
    else:
        store, names = Store.open(path), {}
        act = collect if role == "collector" else examine

        def turn() -> None:
            act(store, chance, tally)

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with tally.attempt(f"{role} {number}, turn {tally.tried}"):
            turn()
    print(json.dumps({"tally": tally.plain(), "names": names}))
