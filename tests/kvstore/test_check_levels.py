"""How much a check reads, in which order, and what it says of the rest."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from kvmemory import object_file, save
from test_index import read_only

from kvstore import Store
from kvstore.check import check
from kvstore.check_report import Report
from kvstore.digest import ContentDigest
from kvstore.index import Index
from kvstore.inventory import FULL, PARTS, QUICK, Inventory, Level

ITEMS = [(3 * i) % 90 for i in range(1000)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.open(tmp_path / "s")
    save(store, ITEMS, name="a")
    return store


def damage(store: Store) -> set[str]:
    """Every object, of unchanged length."""
    for name in store.shelf.objects.names():
        place = object_file(store.shelf.path, name)
        place.write_bytes(place.read_bytes()[:-1] + b"\0")
    return {str(p.relative_to(store.shelf.path)) for p in (store.shelf.path / "objects").glob("?/*")}


def found(report: Report) -> set[str]:
    return {problem.path for problem in report.problems}


def test_samples_go_round(store: Store) -> None:
    """Each reads what no other has read; when all were read, those come again that have waited longest."""
    objects = damage(store)
    level = Level(0.25)
    rounds = []
    for _ in range(8):
        report = check(store, level)
        value = report.value()
        assert (value["level"], value["quick"], value["complete"]) == ("sample", False, True)
        assert 0.25 * report.bytes <= report.read_bytes < 0.4 * report.bytes
        assert len(found(report)) == report.read_objects
        rounds.append(found(report))
    first = rounds[0] | rounds[1] | rounds[2] | rounds[3]
    assert first == objects and sum(map(len, rounds[:3])) == len(rounds[0] | rounds[1] | rounds[2])
    assert rounds[4] >= rounds[0] or rounds[4] & rounds[0], "the oldest come first"
    assert rounds[4] | rounds[5] | rounds[6] | rounds[7] == objects


def test_a_full_check_makes_all_equally_old_and_new_ones_older(store: Store) -> None:
    assert check(store).read_objects == 32
    save(store, [5, 6, 7], name="new")
    damage(store)
    fresh = {str(object_file(Path(), c)) for b in store.match("new").snapshot.blocks for c in b}
    seen = found(check(store, Level(0.02)))
    assert fresh <= seen and len(seen) <= len(fresh) + 1


def test_time_that_is_over_ends_it_and_the_next_goes_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.check._BATCH", 4)
    ticks = iter(range(10**6))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))
    objects = damage(store)
    read: set[str] = set()
    for _ in range(40):
        report = check(store, Level(1.0, seconds=3.0))
        value = report.value()
        again, read = found(report) & read, read | found(report)
        assert not again or read == objects, "nothing is read twice before all have been read"
        if not value["complete"]:
            assert "its time was over: the next check goes on there" in str(report)
            assert report.read_objects < report.objects
        if read == objects:
            break
    assert read == objects
    assert check(store, Level(1.0, seconds=0.0)).read_objects == 0


def test_a_store_that_keeps_no_order_is_sampled_by_chance(tmp_path_factory: pytest.TempPathFactory) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o711)
        with Store.open(Path(made) / "s") as store:
            save(store, ITEMS, name="a")
            damage(store)
            objects = {str(object_file(Path(), name)) for name in store.shelf.objects.names()}
        seen: set[str] = set()
        with read_only(Path(made) / "s"), Store.open(Path(made) / "s", create=False) as store:
            for _ in range(400):
                report = check(store, Level(0.1))
                assert 3 <= report.read_objects <= 6
                seen |= found(report)
                if seen == objects:
                    break
        assert seen == objects


def test_the_order_survives_what_makes_the_index_anew(store: Store) -> None:
    check(store, Level(0.25))
    before = store.indexed(Index.checked)
    assert before and set(before.values()) == {1}
    store.indexed(Index.rebuild)
    assert store.indexed(Index.checked) == before
    (store.shelf.path / "index.sqlite").unlink()
    with Store.open(store.shelf.path) as other, contextlib.suppress(OSError):
        assert other.indexed(Index.checked) == {}, "rebuildable: without it all have waited equally long"


def test_an_inventory_is_cut_into_parts_by_name() -> None:
    names = sorted(
        ContentDigest(bytes([i >> 8, i & 255, i % 7] + [0] * 29)) for i in (0, 1, 15, 16, 17, 4096, 65535, 65520, 40000)
    )
    inventory = Inventory()
    for at, name in enumerate(names):
        inventory.add(name, at)
    turns = inventory.turns(FULL, {})
    assert [turn.part for turn in turns] == sorted({name.raw[0] << 4 | name.raw[1] >> 4 for name in names})
    assert max(turn.part for turn in turns) == PARTS - 1
    assert [at for turn in turns for at in range(turn.first, turn.last)] == list(range(len(names)))
    assert sum(turn.bytes for turn in turns) == inventory.bytes == sum(range(len(names)))
    assert all(inventory.find(name.raw) == at for at, name in enumerate(names))
    assert inventory.find(bytes(32)[:-1] + b"\1") is None and inventory.find(b"\xff" * 32) is None
    assert [t.part for t in inventory.turns(FULL, {turns[0].part: 9, turns[1].part: 4})][-2:] == [
        turns[1].part,
        turns[0].part,
    ]
    assert inventory.turns(QUICK, {}) == []
    assert Inventory().turns(FULL, {}) == []


def test_memory_is_flat_in_the_number_of_objects() -> None:
    """41 bytes an object, however many names there are."""
    import tracemalloc

    sizes = []
    for count in (10_000, 40_000):
        tracemalloc.start()
        inventory = Inventory()
        for at in range(count):
            inventory.add(ContentDigest(at.to_bytes(4, "big") + bytes(28)), 100)
        sizes.append(tracemalloc.get_traced_memory()[0] / count)
        tracemalloc.stop()
        assert len(inventory) == count
    assert max(sizes) < 60
