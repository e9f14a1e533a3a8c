"""On a disk without a free byte: names are removed, cache is collected, the trash is emptied, the quota is taken away. A real one, of 6 MB."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvmemory import expect_rows, files, find, save
from optional import missing

from kvstore import Store, prune, trash
from kvstore.check import check
from kvstore.pins import unpin
from kvstore.quota import LEAST, read_quota, set_quota

A = [(3 * i) % 90 for i in range(200)]
C = list(range(1000, 1200))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "kvferry-test", str(path)]
    try:
        mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        missing("no small file system can be mounted here: that takes root")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True, timeout=60)


def fill(disk: Path) -> None:
    """Until not one byte more can be written, nor a file be made that has one."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for size in (1 << 16, 4096, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue
    stat = os.statvfs(disk)
    assert stat.f_bavail == 0


@pytest.mark.parametrize("index", ["open", "closed", "absent"])
def test_everything_that_frees_works_on_a_full_disk(disk: Path, index: str) -> None:
    path = disk / "s"
    store = Store.open(path)
    save(store, A, name="a")
    save(store, C, name="c")
    save(store, [5, *A], name="pin/p")
    for n in range(15):
        save(store, [100 + n, *C])
    set_quota(store.shelf.root, LEAST)
    if index != "open":
        store.close()
        if index == "absent":
            (path / "index.sqlite").unlink()
        store = Store.open(path)
    fill(disk)
    before = files(path)
    with pytest.raises(OSError, match="No space left"):
        save(store, [9, *A], name="new")
    assert files(path).items() - {("quota.count", b"")} == before.items()
    store.shelf.records.remove(["c"])
    unpin(store.shelf.records, ["p"])
    pruned = prune.apply(store, prune.plan(store))
    assert (pruned.snapshots, pruned.objects) == (17, 16 + 15 * 8)
    set_quota(store.shelf.root, None)
    assert prune.purge(store) >= pruned.bytes
    assert read_quota(store.shelf.root) is None and not list((path / "trash").iterdir())
    save(store, A[:70], name="new")  # there is room again
    store.close()
    with Store.open(path) as again:
        for name in ("a", "new"):
            expect_rows(again, again.match(name))
        assert find(again, [*C, 1]) is None
        assert not check(again).problems


def test_what_was_collected_on_a_full_disk_comes_back_when_there_is_room(disk: Path) -> None:
    with Store.open(disk / "s") as store:
        save(store, A, name="a")
        fill(disk)
        store.shelf.records.remove(["a"])
        prune.apply(store, prune.plan(store))
        (disk / "filler").unlink()
        found = trash.collected(store.shelf)[0]
        trash.restore(store, found.digest.hex, "a")
        expect_rows(store, store.match("a"))


def test_a_quota_evicts_on_a_full_disk(disk: Path) -> None:
    """The disk is smaller than the quota, and full of cache: eviction by size needs no room either."""
    with Store.open(disk / "s") as store:
        save(store, A, name="a")
        for n in range(20):
            save(store, [n, *C])
        fill(disk)
        prune.apply(store, prune.eviction(store, 100_000))
        assert prune.purge(store) >= 100_000
        assert save(store, [99, *C]).written_objects == 8
        expect_rows(store, store.match("a"))
