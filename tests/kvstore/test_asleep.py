"""A process that sleeps in the middle of its work, for as long as it likes: others say who is in the way, and nothing is wrong afterwards.

No lock has a lease and no file an age, so that an hour is like a moment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvmemory import expect_rows, find, save

from kvstore import Store, index, prune, repair
from kvstore.check import check
from kvstore.errors import StoreBusy
from kvstore.files import Root
from kvstore.inventory import QUICK
from kvstore.shelf import Shelf

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)])}

ITEMS = [(3 * i) % 90 for i in range(200)]
GROWN = [*ITEMS[:130], 7, 8, 9]

WORKER = """
import os, signal, sys
from pathlib import Path
from kvmemory import expect_rows, load, save
from kvstore import Store, prune
ITEMS = [(3 * i) % 90 for i in range(200)]
what, call, number = sys.argv[2], sys.argv[3], int(sys.argv[4])
store = Store.open(Path(sys.argv[1]))
store.indexed(lambda index: None)
match = store.match("a") if what == "load" else None
seen, real = 0, getattr(os, call)
def stopping(*args, **kwargs):
    global seen
    seen += 1
    if seen == number:
        os.write(1, b"asleep\\n")
        os.kill(os.getpid(), signal.SIGSTOP)
    return real(*args, **kwargs)
setattr(os, call, stopping)
if what == "save":
    save(store, [*ITEMS[:130], 7, 8, 9], name="late")
elif what == "unnamed":
    save(store, [*ITEMS[:130], 7, 8, 9])
elif what == "collect":
    prune.apply(store, prune.plan(store))
else:
    expect_rows(store, match)
setattr(os, call, real)
os.write(1, b"done %d\\n" % seen)
"""


@contextmanager
def asleep(path: Path, what: str, call: str, number: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that works on the store and stops itself at its ``number``-th ``os.<call>``. It is woken when the block ends."""
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(path), what, call, str(number)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT,
    )  # fmt: skip
    try:
        assert worker.stdout is not None and worker.stdout.readline() == b"asleep\n", worker.communicate()
        os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)
        yield worker
    finally:
        worker.send_signal(signal.SIGCONT)
    out, err = worker.communicate(timeout=60)
    assert (worker.returncode, err) == (0, b"") and out.startswith(b"done"), err


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    real = Root.lock

    def impatient(self: Root, path: str, *, exclusive: bool, seconds: float = 30.0) -> object:
        return real(self, path, exclusive=exclusive, seconds=min(seconds, 0.05))

    monkeypatch.setattr(Root, "lock", impatient)
    monkeypatch.setattr(index, "BUSY_SECONDS", 0.05)
    waiting = Shelf.exclusive
    monkeypatch.setattr(Shelf, "exclusive", lambda self, seconds=30.0: waiting(self, min(seconds, 0.05)))
    with Store.open(tmp_path / "s") as store:
        save(store, ITEMS, name="a")
        save(store, list(range(1000, 1100)))
    return tmp_path / "s"


@pytest.mark.parametrize(
    ("what", "call", "number"),
    [
        ("save", "writev", 1),  # nothing is written
        ("save", "fsync", 1),  # objects are written in tmp/
        ("save", "rename", 1),  # and synced
        ("save", "rename", 2),  # one object is visible
        ("save", "rename", 3),  # all are, the manifest is not
        ("save", "rename", 4),  # coverage is, the manifest is not
        ("save", "rename", 5),  # the manifest is, the name is not
        ("unnamed", "rename", 3),
    ],
)
def test_a_saver(path: Path, what: str, call: str, number: int) -> None:
    with Store.open(path) as store, asleep(path, what, call, number) as sleeper:
        # A collector says who is in the way, and takes nothing; savers, readers and checks go on, or say who holds the lock they need.
        with pytest.raises(StoreBusy) as caught:
            prune.apply(store, prune.plan(store))
        assert (
            f"process {sleeper.pid}" in str(caught.value)
            and "stopped" in str(caught.value)
            and "kill -CONT" in str(caught.value)
        )
        expect_rows(store, store.match("a"))
        for _ in range(2):
            report = check(store)
            assert report.ok, report
        try:
            save(store, [4, 5, 6], name="meanwhile")
        except StoreBusy as error:  # it sleeps while it makes its manifest or its name visible
            assert (
                f"process {sleeper.pid}" in str(error)
                and "kill -CONT" in str(error)
                and call == "rename"
                and number >= 3
            )
        with pytest.raises(StoreBusy):
            prune.apply(store, prune.plan(store))
        assert find(store, [*ITEMS, 1]).n == 200
    with Store.open(path) as store:
        assert check(store).ok
        expect_rows(store, store.match("a"))
        if what == "save":
            expect_rows(store, store.match("late"))
            assert store.match("late").snapshot.items == tuple(GROWN)
        assert find(store, [*GROWN, 1]).n == 133
        prune.apply(store, prune.plan(store))
        prune.purge(store)
        report = check(store)
        assert report.ok and report.notes == (), report
        assert all(named.whole for named in report.names)


def test_a_reader(path: Path) -> None:
    """What it reads may be collected while it sleeps, and is not deleted before it has woken."""
    with Store.open(path) as store:
        with asleep(path, "load", "preadv", 2) as sleeper:
            store.shelf.records.remove(["a"])
            prune.apply(store, prune.plan(store))
            with pytest.raises(StoreBusy, match=f"process {sleeper.pid}"):
                prune.purge(store)
            assert find(store, [*ITEMS, 1]) is None
            assert check(store).ok
        prune.purge(store)
        assert check(store).ok and not list((path / "trash").iterdir())


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_a_collector(path: Path, number: int) -> None:
    """Between any two of its renames: what a check and a reader then find is whole."""
    with Store.open(path) as store:
        with asleep(path, "collect", "rename", number):
            assert check(store).ok
            expect_rows(store, store.match("a"))
            with pytest.raises(StoreBusy):
                save(store, [4, 5, 6])
        save(store, list(range(1000, 1100)), name="again")
        expect_rows(store, store.match("again"))
        assert check(store).ok


def test_a_repair_waits_for_a_sleeping_saver_and_changes_nothing(path: Path) -> None:
    with Store.open(path) as store:
        name = store.match("a").snapshot.blocks[1][0]
        place = path / "objects" / name.hex[:1] / name.hex[1:]
        data = place.read_bytes()
        with asleep(path, "unnamed", "rename", 1):
            place.write_bytes(data[:-1] + b"?")
            with pytest.raises(StoreBusy):
                repair.apply(store, check(store))
            assert place.exists() and not check(store, QUICK).problems
            place.write_bytes(data)
        assert not repair.apply(store, check(store)).lost
        expect_rows(store, store.match("a"))
