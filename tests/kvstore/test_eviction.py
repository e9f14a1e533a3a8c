"""Eviction: the least recently used unnamed snapshots, as few as suffice, whatever the clock says; and how much may go unasked."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from kvmemory import carry, expect_rows, find, save

from kvstore import Saved, Store, prune
from kvstore.digest import SnapshotDigest
from kvstore.errors import WouldDeleteMost
from kvstore.gauge import files_bytes, physical_bytes

STEM = list(range(128))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "s")


def bytes_now(store: Store) -> int:
    """All but the index's."""
    path = store.shelf.path
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file() and not p.name.startswith("index.sqlite"))


def chosen(store: Store, free: int, slack: int = 0) -> list[SnapshotDigest]:
    return [d.digest for d in prune.eviction(store, free, slack).snapshots]


def evict(store: Store, free: int) -> int:
    """Bytes that are free afterwards and weren't before."""
    before = bytes_now(store)
    prune.apply(store, prune.eviction(store, free))
    prune.purge(store)
    return before - bytes_now(store)


def test_the_least_recently_used_goes_first_and_no_more_than_needed(store: Store) -> None:
    saved = [save(store, [n, *STEM]) for n in range(4)]
    find(store, [0, *STEM, 1])
    order = [saved[n].digest for n in (1, 2, 3, 0)]
    assert chosen(store, 1) == order[:1] and chosen(store, 1 << 40) == order
    one = prune.eviction(store, 1).bytes
    assert chosen(store, one) == order[:1] and chosen(store, one + 1) == order[:2]
    assert chosen(store, one, slack=1) == order[:2]
    assert evict(store, one + 1) >= one + 1
    assert find(store, [1, *STEM, 1]) is None and find(store, [2, *STEM, 1]) is None
    expect_rows(store, find(store, [3, *STEM, 1]))
    expect_rows(store, find(store, [0, *STEM, 1]))


def test_what_has_a_name_stays(store: Store) -> None:
    save(store, [1, *STEM], name="a")
    save(store, [2, *STEM])
    assert evict(store, 1 << 40) > 0
    assert evict(store, 1 << 40) == 0
    expect_rows(store, store.match("a"))


def test_shared_objects_count_when_the_last_that_needs_them_goes(store: Store) -> None:
    """Physical bytes: what eviction says to free is what is free afterwards, for every target."""
    chance = random.Random(5)
    for n in range(12):
        cut = chance.choice((64, 128))
        stem = STEM if n % 4 else [7, *STEM]  # what names keep is out of the reckoning
        save(store, [*stem[:cut], 500 + n, *range(chance.randrange(60))], name=None if n % 4 else f"n{n}")
    whole = prune.eviction(store, 1 << 40)
    while whole.snapshots:
        free = chance.randrange(1, 20_000)
        plan = prune.eviction(store, free)
        assert plan.bytes >= min(free, whole.bytes)
        if len(plan.snapshots) > 1:  # as few as suffice
            less = prune.eviction(store, free - 1)
            assert len(less.snapshots) <= len(plan.snapshots)
        assert evict(store, free) == plan.bytes
        whole = prune.eviction(store, 1 << 40)
    for n in range(0, 12, 4):
        expect_rows(store, store.match(f"n{n}"))


def test_sizes_are_those_of_the_files(store: Store) -> None:
    """An object's file may be shorter than its content: nothing is computed from a length."""
    saved = save(store, list(range(200)), codec="planes")
    plan = prune.eviction(store, 1)
    assert [d.digest for d in plan.snapshots] == [saved.digest]
    assert plan.bytes == sum(
        p.stat().st_size
        for folder in ("objects", "snapshots")
        for p in (store.shelf.path / folder).rglob("*")
        if p.is_file()
    )


def test_trash_and_leftovers_go_before_snapshots(store: Store) -> None:
    save(store, [1, *STEM])
    collected = prune.apply(store, prune.plan(store)).bytes
    (store.shelf.path / "tmp" / "1f-00").write_bytes(b"x" * 1000)
    kept = save(store, [2, *STEM])
    assert chosen(store, collected + 1000, slack=1 << 30) == []
    assert chosen(store, collected + 1001) == [kept.digest]
    assert evict(store, collected + 1000) == collected + 1000
    expect_rows(store, find(store, [2, *STEM, 1]))


def test_objects_that_nothing_names_go_before_snapshots(tmp_path: Path) -> None:
    with Store.open(tmp_path / "other") as other, Store.open(tmp_path / "s") as store:
        stray = save(other, [7, *STEM])
        carry(other, store, stray.digest)
        kept = save(store, [2, *STEM])
        for end in ("", ".cov"):
            (tmp_path / "s" / "snapshots" / f"{stray.digest}{end}").unlink()
        assert chosen(store, 10_000) == []
        assert evict(store, 10_000) > 10_000
        assert find(store, [2, *STEM, 1]).digest == kept.digest


def test_a_damaged_cache_goes_first(store: Store) -> None:
    save(store, [1, *STEM])
    damaged = save(store, [2, *STEM])
    place = store.shelf.path / "snapshots" / str(damaged.digest)
    place.write_bytes(place.read_bytes()[:-1] + b"\0")
    assert chosen(store, 1) == [damaged.digest]
    assert evict(store, 1) > 10_000
    expect_rows(store, find(store, [1, *STEM, 9]))


# clocks


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_800_000_000.0
        monkeypatch.setattr(time, "time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize("jump", [-86_400.0, -1860.0, -1e9, 1860.0, 86_400.0, 1e9, 0.0])
def test_the_order_of_uses_survives_any_clock(store: Store, clock: Clock, jump: float) -> None:
    saved: list[Saved] = []
    for n in range(3):
        saved.append(save(store, [n, *STEM]))
    clock.now += jump
    saved += [save(store, [n, *STEM]) for n in (3, 4)]
    find(store, [1, *STEM, 9])
    clock.now -= jump
    saved.append(save(store, [5, *STEM]))
    find(store, [0, *STEM, 9])
    assert chosen(store, 1 << 40) == [saved[n].digest for n in (2, 3, 4, 1, 5, 0)]


def test_saving_again_is_a_use(store: Store) -> None:
    saved = [save(store, [n, *STEM]) for n in range(2)]
    save(store, [0, *STEM])
    assert chosen(store, 1) == [saved[1].digest]


def test_what_was_used_in_the_future_is_kept_as_recent(store: Store, clock: Clock) -> None:
    old = save(store, [1, *STEM])
    clock.now += 1e8
    save(store, [2, *STEM])
    clock.now -= 1e8
    assert prune.plan(store, keep_seconds=60).snapshots == ()
    clock.now += 61
    assert [d.digest for d in prune.plan(store, keep_seconds=60).snapshots] == [old.digest]


def test_a_lost_index_is_replaced_by_the_times_of_the_files(store: Store, tmp_path: Path) -> None:
    saved = [save(store, [n, *STEM]) for n in range(3)]
    for age, one in zip((5, 9, 7), saved, strict=True):
        os.utime(tmp_path / "s" / "snapshots" / str(one.digest), (1_700_000_000 - age,) * 2)
    store.close()
    for file in (tmp_path / "s").glob("index.sqlite*"):
        file.unlink()
    with Store.open(tmp_path / "s") as again:
        assert chosen(again, 1 << 40) == [saved[n].digest for n in (1, 2, 0)]


# the share


def test_a_run_that_would_delete_most_is_refused(store: Store) -> None:
    save(store, [1, *STEM], name="a")
    save(store, [2, *STEM])
    total = physical_bytes(store.shelf.root)
    plan = prune.plan(store)
    share = plan.bytes / total
    assert 0.01 < share < 0.5
    prune.require_share(store, plan)
    prune.require_share(store, plan, share + 0.001)
    with pytest.raises(WouldDeleteMost) as caught:
        prune.require_share(store, plan, share - 0.001)
    assert caught.value.details["bytes"] == plan.bytes and caught.value.details["total"] == total
    assert "--yes" in str(caught.value) and caught.value.exit_code == 7
    prune.apply(store, plan)  # what lies in the trash would go too
    with pytest.raises(WouldDeleteMost):
        prune.require_share(store, prune.plan(store), share / 4)


# counting


def test_every_file_below_the_root_counts(store: Store) -> None:
    path = store.shelf.path
    save(store, STEM, name="a")
    save(store, [1, *STEM])
    prune.apply(store, prune.plan(store))
    (path / "letter").write_bytes(b"12345")
    (path / "mine" / "inner").mkdir(parents=True)
    (path / "mine" / "inner" / "x").write_bytes(b"123")
    (path / "quarantine" / "dead").mkdir()
    (path / "quarantine" / "dead" / "y").write_bytes(b"1234567")
    (path / "link").symlink_to("/etc/hostname")
    (path / "mine" / "loop").symlink_to(path)
    (path / "mine" / "link").symlink_to(path / "letter")
    os.mkfifo(path / "pipe")
    expected = sum(p.lstat().st_size for p in path.rglob("*") if p.is_file() and not p.is_symlink())
    assert physical_bytes(store.shelf.root) == expected
    assert files_bytes(store.shelf.root) == expected - sum(p.stat().st_size for p in path.glob("index.sqlite*"))
