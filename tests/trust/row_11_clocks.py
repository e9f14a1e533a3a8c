"""Row 11: clocks that lie: fast or slow by half an hour and by a day, backwards, stopped, before 1970, beyond the year 9999.

A store is made while the clock is right and used while it lies, and the other way round; another time the files' own times lie too, as on a disk that
comes from another machine. Nothing of what has a name may be lost, no bytes differ, nothing becomes unreadable, and what was used last is
evicted last. Every file that reads a clock is in `TRIED`, or in `tests/kvstore/test_clocks.py` as one that reads it for people; else the row fails.

Measured: 25 s of computing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from battery import Lost, Size, Tally
from clocks import CLOCKS, Clock, readers, showing
from harmed import rows_of, same
from kvmemory import HEAD, find, load, save
from test_clocks import READERS

from kvstore import Store, prune, recode
from kvstore.check import check
from kvstore.report import describe, listing
from sync import Folder, pull, push

TITLE = "clocks: 31 minutes, a day, backwards, stopped, out of range"
REQUIRED = "every clock in every place that reads one"

TRIED = {
    "kvstore/gauge.py": "quota",
    "kvstore/index.py": "search",
    "kvstore/prune.py": "collect",
    "kvstore/recode.py": "planes",
    "kvstore/records.py": "names",
    "kvstore/repair.py": "repair",
    "kvstore/stats.py": "statistics",
    "sync/tokens.py": "tokens",
    "sync/pairing.py": "pairing",
    "sync/certificate.py": "certificate",
    "runtime/bundle/digests.py": "digests",
}
"""Per file that reads a clock the step of `STEPS` in which it does. The others do so for people (`test_clocks.READERS` says why each)."""


class World:
    """A store, and what has to be in it: names and their tokens."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.path = scratch, scratch / "store"
        self.store = Store.open(self.path)
        self.names: dict[str, list[int]] = {}
        self.made = 0

    def close(self) -> None:
        self.store.close()

    def items(self) -> list[int]:
        self.made += 1
        return [*range(80), 5000 + self.made, *range(self.made, self.made + 60)]

    def give(self, name: str) -> None:
        items = self.items()
        save(self.store, items, name=name, rows=rows_of(items), pending=3, head=HEAD)
        self.names[name] = items

    def cache(self) -> list[int]:
        items = self.items()
        save(self.store, items, rows=rows_of(items))
        return items

    def whole(self) -> None:
        """Every name restores, and nothing of the store is damaged."""
        for name, items in self.names.items():
            match = self.store.match(name, head=HEAD)
            if match.n != len(items):
                raise Lost(name)
            same(load(self.store, match), match, items)
        report = check(self.store)
        if not report.ok:
            raise Lost(str(report))
        if {ref.label for ref in self.store.shelf.records.refs()} != set(self.names):
            raise Lost("names")


def names(world: World) -> None:
    records = world.store.shelf.records
    world.give("moved")
    world.give("moved")
    label = f"renamed {world.made}"
    world.give(label)
    records.rename_ref(label, f"{label} again")
    world.names[f"{label} again"] = world.names.pop(label)
    world.give("removed")
    records.remove(["removed"])
    del world.names["removed"]
    rows, damage = listing(world.store.shelf)
    assert not damage and {row["name"] for row in rows} == set(world.names), damage
    assert all(len(row["updated"]) >= 19 for row in rows)
    json.dumps([describe(world.store, name, {}) for name in world.names])


def search(world: World) -> None:
    for items in (*world.names.values(), world.cache()):
        match = find(world.store, [*items, 7])
        assert match is not None and match.n == len(items)
        same(load(world.store, match), match, items)


def collect(world: World) -> None:
    """What was used under this clock within the hour stays; what has a name stays under any."""
    recent = world.cache()
    prune.apply(world.store, prune.plan(world.store, keep_seconds=3600))
    prune.purge(world.store)
    match = find(world.store, [*recent, 7])
    assert match is not None and match.n == len(recent), "used within the hour, and collected"


def evict(world: World) -> None:
    """The least recently used goes first, whatever the clock showed when it was used."""
    prune.apply(world.store, prune.plan(world.store))
    prune.purge(world.store)
    first, second = world.cache(), world.cache()
    assert find(world.store, [*first, 7]) is not None
    (doomed,) = prune.eviction(world.store, 1).snapshots
    assert list(world.store.shelf.records.snapshot(doomed.digest).items) == second


def quota(world: World) -> None:
    from kvstore.gauge import physical_bytes
    from kvstore.quota import LEAST, set_quota

    root = world.store.shelf.root
    set_quota(root, max(LEAST, physical_bytes(root) + (96 << 10)))
    try:
        for _ in range(20):
            world.cache()
        world.give("within the quota")
    finally:
        set_quota(root, None)


def planes(world: World) -> None:
    world.give("cold")
    recode.apply(world.store, recode.plan(world.store, "planes", older_seconds=3600))
    recode.apply(world.store, recode.plan(world.store, "planes"))


def repair(world: World) -> None:
    from kvstore import repair

    world.give("hurt")
    (file,) = [one for one in world.store.shelf.records.ref_files() if _label(world, one) == "hurt"]
    place = world.path / "refs" / file
    data = bytearray(place.read_bytes())
    data[9] ^= 1  # in the header: the content still proves what it stood for
    place.write_bytes(data)
    repair.apply(world.store, check(world.store))


def _label(world: World, file: str) -> str | None:
    ref = world.store.shelf.records.read_ref(file)
    return None if ref is None else ref.label


def statistics(world: World) -> None:
    from kvstore.stats import store_stats

    world.cache()
    find(world.store, [1, 2, 3])
    assert json.dumps(store_stats(world.store).value())


def tokens(world: World) -> None:
    from sync.tokens import TokenBook

    book = TokenBook(world.scratch / "book")
    text, token = book.issue("phone", ("read",), None)
    book.close()
    book = TokenBook(world.scratch / "book")
    assert book.check(text) == token.grant() and token.id in {one.id for one in book.tokens()}
    book.close()


def pairing(world: World) -> None:
    """An offer that was just made can be taken; or, where the clock runs backwards, it is refused by name."""
    from sync.pairing import Offers
    from sync.tokens import TokenRefused

    offers = Offers(world.scratch / "offers")
    secret = offers.open(("read",), None)
    before = time.time()
    try:
        assert offers.take(secret)[0] == ("read",)
    except TokenRefused:
        assert time.time() < before
    finally:
        offers.close()


def certificate(world: World) -> None:
    from sync.certificate import Certificate

    Certificate(world.scratch / "tls").context()


def digests(world: World) -> None:
    from runtime.bundle.digests import DigestCache, hash_file

    file, cache = world.scratch / "weights.bin", world.scratch / "digests.json"
    for content in (b"a" * 100, b"b" * 100, b"c" * 100):
        file.write_bytes(content)
        for _ in range(2):
            opened = DigestCache.open(cache)
            assert opened.digest(file) == hash_file(file), "a digest of what was there before"
            opened.save()


def ferry(world: World) -> None:
    with Folder.open(world.scratch / "remote", create=True) as remote:
        push(world.store, remote, sorted(world.names), force=True)
        with Store.open(world.scratch / "other") as other:
            pull(other, remote, sorted(world.names), verify=True, force=True)
            for name, items in world.names.items():
                match = other.match(name, head=HEAD)
                same(load(other, match), match, items)


STEPS: dict[str, Callable[[World], None]] = {
    "names": names,
    "search": search,
    "collect": collect,
    "evict": evict,
    "quota": quota,
    "planes": planes,
    "repair": repair,
    "statistics": statistics,
    "tokens": tokens,
    "pairing": pairing,
    "certificate": certificate,
    "digests": digests,
    "ferry": ferry,
}


def right(now: float) -> float:
    return now


def harmless(why: str) -> bool:
    """Whether a clock is read for people only, or only to see whether a time is still the same."""
    return "for people" in why or "by equality" in why


def run(size: Size, tally: Tally, scratch: Path) -> None:
    for module, line, call in readers():
        with tally.attempt(f"{module}, line {line}: {call}"):
            file = f"{module.replace('.', '/')}.py"
            assert file in READERS, "a clock that nobody knows"
            assert TRIED.get(file) in STEPS or harmless(READERS[file]), "a clock that no step tries"
    for turn in range(size.pick(1, 1, 5)):
        for name, make in CLOCKS.items():
            orders: list[tuple[str, Clock, Clock, bool]] = [
                ("then", right, make(), False),
                ("before", make(), right, False),
                ("then, and the files' times", right, make(), True),
            ]
            for when, first, second, times in orders[: size.pick(1, 3)]:
                world = World(scratch / f"{turn} {name} {when}")
                _used(world, tally, f"{when}: {name}", first, second, times=times)
                world.close()


def _used(world: World, tally: Tally, what: str, first: Clock, second: Clock, *, times: bool) -> None:
    for half, clock in (("made", first), ("used", second)):
        if half == "used" and times:
            _shift_times(world.path, clock)
        for name, step in STEPS.items():
            with showing(clock):
                with tally.attempt(f"{what}: {half}: {name}"):
                    step(world)
                with tally.attempt(f"{what}: {half}: after {name}"):
                    world.whole()
        with tally.attempt(f"{what}: {half}: read under the right clock"):
            world.whole()


def _shift_times(path: Path, clock: Clock) -> None:
    for place in [path, *path.rglob("*")]:
        found = place.stat()
        try:
            os.utime(place, (clock(found.st_atime), clock(found.st_mtime)))
        except (OSError, OverflowError):  # a time that this file system can't hold
            continue
