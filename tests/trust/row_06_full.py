"""A disk that is full, or nearly: operations fail clearly or succeed, nothing is lost, and removing and collecting work with no byte free."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import traced
import world
from battery import Missing, Size, Tally, need
from world import Operation, State

from kvstore import Store, prune
from kvstore.errors import KVError

TITLE = "disk full: fill levels on a small tmpfs; then gc with nothing free"
REQUIRED = 50
DISK_BYTES = 6 << 20
PAGE = 4096
OPERATIONS = ("save", "save as planes", "pull", "pull into a new store", "push", "recode to raw")
REMOVED = "small"


def run(size: Size, tally: Tally, scratch: Path) -> None:
    made = scratch / "made"
    world.make(made)
    levels = size.pick(3, 60, 600)
    tally.facts.update(levels=levels, refused=0, done=0)
    with _disk(scratch / "disk") as disk:
        most = {name: _pages(disk, made, world.OPERATIONS[name]) for name in OPERATIONS}
        for level in range(levels):
            name = OPERATIONS[level % len(OPERATIONS)]
            free = most[name] * level // levels
            with tally.attempt(f"{name} with {free} pages free"):
                done = _attempt(disk, made, world.OPERATIONS[name], free)
                tally.facts["done" if done else "refused"] += 1
    if size.name != "smoke" and not (tally.facts["done"] and tally.facts["refused"]):
        raise AssertionError(f"the levels are wrong: {tally.facts}")


@contextmanager
def _disk(at: Path) -> Iterator[Path]:
    """A small file system of our own; a folder in it."""
    mount = need("mount")
    at.mkdir()
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "kvferry-trust", str(at)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Missing(f"a tmpfs can't be mounted here, which needs root: {done.stderr.strip()}")
    try:
        yield at / "world"
    finally:
        subprocess.run(["umount", str(at)], check=True)


def _free(at: Path) -> int:
    """Pages."""
    found = os.statvfs(at)
    return found.f_bavail * found.f_frsize // PAGE


def _pages(disk: Path, made: Path, operation: Operation) -> int:
    """What the operation takes, and some more."""
    at = world.copied(made, disk)
    before = _free(disk.parent)
    operation.run(at)
    return 2 * (before - _free(disk.parent)) + 24


def _fill(disk: Path, free: int) -> Path:
    """Leaves that many pages."""
    ballast = disk.parent / "ballast"
    with ballast.open("ab", buffering=0) as file:
        count = _free(disk.parent) - free
        assert count >= 0, "the disk is too small for this test"
        try:
            for _ in range(count):
                file.write(bytes(PAGE))
            while not free:
                file.write(bytes(PAGE))
        except OSError as error:
            assert error.errno == errno.ENOSPC and not free
    return ballast


def _attempt(disk: Path, made: Path, operation: Operation, free: int) -> bool:
    """Whether there was room for the operation."""
    (disk.parent / "ballast").unlink(missing_ok=True)
    at = world.copied(made, disk)
    ballast = _fill(disk, free)
    done = True
    try:
        operation.run(at)
    except Exception as error:
        _require_full(error)
        done = False
    _fill(disk, 0)
    before = _free(disk.parent)
    with Store.open(at / "store") as store:
        store.shelf.records.remove([REMOVED])
        prune.PAUSE = 0.0
        prune.apply(store, prune.plan(store))
        assert prune.purge(store) > 0
    assert before == 0 < _free(disk.parent), "a collection on a full disk made no room"
    ballast.unlink()
    less = Operation(operation.name, operation.run, _without(operation.after))
    world.judge(at, less, returned=done, before=_without(world.BEFORE))
    world.finish(at, less, before=_without(world.BEFORE))
    shutil.rmtree(at)
    return done


def _require_full(error: Exception) -> None:
    """It says that there is no room, and where."""
    assert traced.is_clear(error), f"no clear error: {error!r}"
    said = error.message if isinstance(error, KVError) else str(error)
    words = (os.strerror(errno.ENOSPC), "free", "full")
    assert any(word in said for word in words), f"expected to hear of a full disk, found {error!r}"


def _without(state: State) -> State:
    return {
        folder: {name: items for name, items in names.items() if folder != "store" or name != REMOVED}
        for folder, names in state.items()
    }
