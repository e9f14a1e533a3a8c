"""Does one thing with a large store, in a process of its own, and says how much memory that took: row 12 starts it.

scaled.py DEED STORE
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

BLOCKS = 2_000
"""Blocks of one snapshot."""


def fill(path: Path, blocks: int) -> None:
    """A store of so many different objects, the smallest that there are: 256 bytes of content each."""
    import random

    from kvstore import ArrayRows, Store
    from kvstore.layout import BLOCK

    chance = random.Random(12)
    with Store.open(path) as store:
        for at in range(0, blocks, BLOCKS):
            tokens = BLOCK * min(BLOCKS, blocks - at)
            rows = ArrayRows(
                layout(), {0: (bytearray(chance.randbytes(2 * tokens)), bytearray(chance.randbytes(2 * tokens)))}
            )
            store.save(
                layout(), identity(), items(at, tokens), rows, namespace="default", name=f"snapshot {at}", lineage=[lineage()] * (tokens // BLOCK)
            )  # fmt: skip


def layout() -> Any:
    from kvstore import Group, Layout

    return Layout((Group("full", None, (0,), 1, 1),))


def identity() -> Any:
    from kvstore import Identity

    return Identity.of({"weights": "w", "tokenizer": "t"})


def lineage() -> Any:
    from kvstore import Lineage

    return Lineage.of({"engine": "scale"})


def items(at: int, tokens: int) -> list[int]:
    return [at + 7, *((at + i) % 1009 for i in range(tokens - 1))]


def _records(store: Any) -> int:
    return sum(1 for _ in store.shelf.records.refs())


def _listing(store: Any) -> int:
    """All objects by name; the first comes before the last is looked for."""
    names: Iterator[object] = store.shelf.objects.names()
    first = sum(1 for _ in islice(names, 10))
    return first + sum(1 for _ in names)


def _restored(store: Any) -> int:
    from kvstore import ArrayRows

    tokens = 64 * 64
    match = store.match("snapshot 0", at=tokens)
    rows = ArrayRows(layout(), {0: (bytearray(2 * tokens), bytearray(2 * tokens))})
    return int(store.load(match, rows))


def _found(store: Any) -> int:
    match = store.find(layout(), identity(), [*items(0, 64 * 50), 5], namespace="default")
    return 0 if match is None else int(match.n)


def _planned(store: Any) -> int:
    from kvstore import prune

    plan = prune.plan(store)
    return len(plan.snapshots) + len(plan.objects)


def _examined(store: Any, full: bool) -> int:
    from kvstore.check import check
    from kvstore.inventory import FULL, QUICK

    report = check(store, FULL if full else QUICK)
    assert report.ok, report
    return report.objects


def _indexed(store: Any) -> int:
    from kvstore.index import Index

    store.indexed(Index.rebuild)
    return _found(store)


def _used(store: Any) -> int:
    from kvstore.usage import usage

    return usage(store).bytes


def _shown(store: Any) -> int:
    from kvstore.report import listing

    rows, damage = listing(store.shelf)
    assert not damage
    return len(rows)


DEEDS: dict[str, Callable[[Any], int]] = {
    "names": _records,
    "ls": _shown,
    "objects": _listing,
    "restore": _restored,
    "find": _found,
    "gc plan": _planned,
    "check quick": lambda store: _examined(store, False),
    "check full": lambda store: _examined(store, True),
    "index rebuild": _indexed,
    "du": _used,
}


def most_memory() -> int:
    """Bytes that were in memory at most, of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def main(deed: str, path: Path) -> None:
    import kvstore.check
    import kvstore.prune
    import kvstore.report
    import kvstore.usage
    from kvstore import Store

    assert kvstore.check and kvstore.prune and kvstore.report and kvstore.usage
    with Store.open(path) as store:
        before, began = most_memory(), time.monotonic()
        found = DEEDS[deed](store)
        print(json.dumps({"found": found, "bytes": most_memory() - before, "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    importlib.import_module("scaled").main(sys.argv[1], Path(sys.argv[2]))
