"""The crash file system itself: what is synced always survives, what isn't sometimes doesn't, and nothing that happens goes unnoticed."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from battery import scratch_folder
from recording import Recording

BEFORE, AFTER = b"before" * 300, b"after!" * 300


@pytest.fixture
def at() -> Iterator[Path]:
    with scratch_folder() as folder:
        (folder / "root" / "store").mkdir(parents=True)
        (folder / "root" / "store" / "name").write_bytes(BEFORE)
        yield folder


def written(path: Path, *, sync: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(fd, AFTER[:500])
    os.writev(fd, [AFTER[500:1000], AFTER[1000:]])
    if sync:
        os.fsync(fd)
    os.close(fd)


def synced(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def outcomes(at: Path, run: Callable[[Path], object]) -> Counter[tuple[str, ...]]:
    """What 300 power losses right after ``run`` leave in the folder: each file's name, and whether it is whole, old or torn."""
    root = at / "root"
    with Recording(root) as recording:
        recording.step(lambda: run(root / "store"))
    recording.require_whole(at / "noted")
    found: Counter[tuple[str, ...]] = Counter()
    for seed in range(300):
        lost = at / f"lost-{seed}"
        recording.disk.lose_power(len(recording.disk.log), lost, random.Random(seed))
        kinds = {BEFORE: "old", AFTER: "whole", b"": "empty"}
        files = sorted((lost / "store").iterdir())
        found[tuple(f"{file.name} {kinds.get(file.read_bytes(), 'torn')}" for file in files)] += 1
    return found


def test_the_durable_way_always_survives(at: Path) -> None:
    def run(store: Path) -> None:
        written(store / "new", sync=True)
        os.rename(store / "new", store / "name")  # noqa: PTH104 - what is recorded
        synced(store)

    assert outcomes(at, run).keys() == {("name whole",)}


def test_without_the_folders_sync_the_old_one_may_come_back(at: Path) -> None:
    def run(store: Path) -> None:
        written(store / "new", sync=True)
        os.rename(store / "new", store / "name")  # noqa: PTH104

    found = outcomes(at, run)
    assert found.keys() == {("name whole",), ("name old",), ("name old", "new whole"), ("name whole", "new whole")}


def test_without_its_own_sync_a_file_may_be_empty_or_torn(at: Path) -> None:
    def run(store: Path) -> None:
        written(store / "new", sync=False)
        synced(store)

    found = outcomes(at, run)
    assert found.keys() == {("name old", "new whole"), ("name old", "new empty"), ("name old", "new torn")}


def test_what_is_deleted_may_come_back_until_its_folder_is_synced(at: Path) -> None:
    assert outcomes(at, lambda store: os.unlink(store / "name")).keys() == {(), ("name old",)}  # noqa: PTH108


def test_a_deletion_that_was_synced_is_final(at: Path) -> None:
    def run(store: Path) -> None:
        os.unlink(store / "name")  # noqa: PTH108
        synced(store)

    assert outcomes(at, run).keys() == {()}


def test_a_change_that_is_not_recorded_is_noticed(at: Path) -> None:
    with Recording(at / "root") as recording:
        recording.step(lambda: (at / "root" / "store" / "name").write_bytes(AFTER))
    with pytest.raises(AssertionError, match="name"):
        recording.require_whole(at / "noted")


def test_a_killed_step_does_nothing_more(at: Path) -> None:
    store = at / "root" / "store"

    def run() -> None:
        try:
            written(store / "new", sync=True)
        finally:
            os.unlink(store / "name")  # noqa: PTH108

    with Recording(at / "root") as recording:
        recording.step(run, kill=("fsync", 1))
    assert (store / "name").read_bytes() == BEFORE and (store / "new").read_bytes() == AFTER
