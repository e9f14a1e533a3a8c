"""The disk is told of objects before they are read: never of too many, and what is read is the same whatever the system makes of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvmemory import IDENTITY, Memory

from kvstore import Group, Layout, Lineage, Store, objects
from kvstore.layout import BLOCK
from kvstore.waiting import LARGE

LARGE_LAYOUT = Layout((Group("large", None, (0,), 4, 1024),))
"""1 MiB an object."""
SMALL_LAYOUT = Layout((Group("small", None, (0,), 1, 2),))
BLOCKS = 40
ITEMS = list(range(BLOCKS * BLOCK))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as store:
        yield store


def save(store: Store, layout: Layout) -> Memory:
    memory, lineage = Memory.causal(ITEMS, layout=layout), [Lineage.of({"engine": "none"})] * BLOCKS
    store.save(layout, IDENTITY, ITEMS, memory, namespace="default", name="a", lineage=lineage)
    return memory


def cool(folder: Path) -> None:
    if hasattr(os, "posix_fadvise"):
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("hints", ["taken", "refused"])
def test_cold_objects_come_back_as_they_were(store: Store, hints: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save(store, LARGE_LAYOUT)
    path = next(path for path in (store.shelf.path / "objects").rglob("*") if path.is_file())
    assert path.stat().st_size >= LARGE, "the objects of this test are to be large ones"
    into = Memory(LARGE_LAYOUT, len(ITEMS))
    cool(store.shelf.path / "objects")
    if hints == "refused":
        real = os.preadv

        def refuse(*_: object) -> None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

        def preadv(fd: int, parts: list[memoryview], start: int, flags: int = 0) -> int:
            return refuse() or 0 if flags else real(fd, parts, start)

        monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
        monkeypatch.setattr(os, "preadv", preadv)
    store.load(store.match("a"), into)
    assert into.rows(0, 0, len(ITEMS) - 1) == saved.rows(0, 0, len(ITEMS) - 1)


@pytest.mark.parametrize("layout", [LARGE_LAYOUT, SMALL_LAYOUT])
def test_of_each_once_in_order_and_never_of_too_many(
    store: Store, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, layout)
    match = store.match("a")
    names = [match.snapshot.blocks[block][group] for block, group in match.objects()]
    told: list[int] = []
    monkeypatch.setattr(objects, "read_ahead", lambda fd, size: told.append(os.fstat(fd).st_ino))
    depths = []
    with objects.Objects(store.shelf.root).opened(names) as files:
        for i, fd in enumerate(files):
            assert told[i] == os.fstat(fd).st_ino
            depths.append(len(told) - i)
    inodes = [(store.shelf.path / objects.Objects.path(name)).stat().st_ino for name in names]
    assert told == inodes
    most = objects.AHEAD // (1 << 20) if layout is LARGE_LAYOUT else objects.AHEAD_FILES
    assert depths == [min(most, len(names) - i) for i in range(len(names))]
