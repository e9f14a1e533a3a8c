"""Clocks may lie: who reads one, and that a wrong one changes the order of last use and what people read, never what is safe."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kvmemory import expect_rows, find, object_file, save

from kvstore import Store, prune, recode, repair
from kvstore.check import check
from kvstore.inventory import Level

ROOT = Path(__file__).parents[2]
CLOCK = re.compile(
    r"time\.time\w*\(|\.st_[mc]time\w*|\bmtime_ns\(|datetime\.(?:\w+\.)?(?:now|today)\(|gmtime\(|localtime\("
)

READERS = {
    "kvstore/files.py": "the time of a folder, for those below that only ask whether it changed",
    "kvstore/index.py": "last use, which only sorts, never runs backwards and is no condition of anything; whether `snapshots/` changed, by equality",
    "kvstore/records.py": "when a name was given, for people",
    "kvstore/repair.py": "when a name was given, for people",
    "kvstore/prune.py": "--keep-days, a preference among unnamed snapshots; which manifest is older, where last use is not known",
    "kvstore/recode.py": "which snapshots are cold, a preference: either codec is right at any moment",
    "kvstore/gauge.py": "whether the machine was started again since files were counted: if in doubt they are counted again",
    "kvstore/counts.py": "since when was counted, for people",
    "kvstore/stats.py": "since when was counted, for people",
    "runtime/bundle/digests.py": "whether a file was changed, by equality of its times; one younger than the clock's grain isn't remembered",
    "runtime/metrics/machine.py": "when something was measured, for people",
    "runtime/checkpoint_commands.py": "when a checkpoint was made, for people",
    "runtime/bench_commands.py": "when something was measured, for people",
    "sync/bucket.py": "when a name was given, for people; what is old is told by the bucket's own clock",
    "sync/catalogue.py": "whether `snapshots/` changed, by equality",
    "sync/tokens.py": "when a token was given, for people; whether its file changed, by equality",
    "sync/pairing.py": "how long an offer to pair stands: with a wrong clock it is refused, and made again",
    "sync/certificate.py": "a certificate's first and last day, two days and many years away",
    "sync/watch.py": "whether a file was changed, by equality of its times; how long ago is told by a clock that only goes forward",
    "sync/watch_command.py": "when something was done, for people",
    "runtime/send_command.py": "when a checkpoint was made, for people",
    "sync/serve_command.py": "when a request was answered, for people",
}
"""Every file that reads a clock or a file's times, and what for. Whoever adds one says here why a wrong clock does no harm."""

DAY = 86400.0
NOW = time.time()
LIES = {
    "right": lambda n: 0.0,
    "half an hour ahead": lambda n: 1860.0,
    "half an hour behind": lambda n: -1860.0,
    "a day ahead": lambda n: DAY,
    "a day behind": lambda n: -DAY,
    "running backwards": lambda n: -10.0 * n,
    "jumping": lambda n: DAY if n % 2 else -DAY,
    "not set": lambda n: -NOW - 1000 + n,
}


def test_every_reader_of_a_clock_is_known() -> None:
    found = {
        str(path.relative_to(ROOT))
        for package in ("kvstore", "runtime", "sync")
        for path in (ROOT / package).rglob("*.py")
        if CLOCK.search(path.read_text())
    }
    assert found <= READERS.keys(), "say there why a wrong clock does no harm"


@pytest.fixture(params=LIES)
def lying(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`time.time` and `time.time_ns` are wrong; a file's times are the system's, so that the two disagree."""
    lie: Callable[[int], float] = LIES[request.param]
    real, count = time.time, 0

    def lied() -> float:
        nonlocal count
        count += 1
        return real() + lie(count)

    monkeypatch.setattr(time, "time", lied)
    monkeypatch.setattr(time, "time_ns", lambda: int(lied() * 1e9))


@pytest.mark.usefixtures("lying")
def test_a_wrong_clock_changes_no_more_than_an_order(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        chains = [[n, *range(100, 230)] for n in range(6)]
        for n, items in enumerate(chains):
            save(store, items, name=None if n % 2 else f"n{n}")
        for items in chains:
            match = find(store, [*items, 1])
            assert match.n == len(items)
            expect_rows(store, match)
        for number in range(3):
            save(store, [*chains[0], number], name="n0")
        store.shelf.records.rename_ref("n2", "renamed")
        assert {ref.label for ref in store.shelf.records.refs()} == {"n0", "renamed", "n4"}  # each can be read again
        for ref in store.shelf.records.refs():
            assert ref.updated >= 0

        # What names need stays, however old the clock says it is; what they don't need goes when all is asked for.
        for days in (0.5, 30.0):
            prune.apply(store, prune.plan(store, keep_seconds=days * DAY))
            named(store, chains)
        prune.apply(store, prune.plan(store))
        prune.purge(store)
        named(store, chains)
        assert len(list(store.shelf.records.snapshots())) == 3

        recode.apply(store, recode.plan(store, "planes", older_seconds=DAY))
        named(store, chains)
        assert check(store, Level(0.5)).ok and check(store).ok
        object_file(tmp_path / "s", store.match("n4").snapshot.blocks[1][0]).unlink()
        repair.apply(store, check(store))
        assert check(store).ok


def named(store: Store, chains: list[list[int]]) -> None:
    expect_rows(store, store.match("renamed"))
    expect_rows(store, store.match("n4"))
    assert store.match("n0").snapshot.items == (*chains[0], 2)
    expect_rows(store, store.match("n0"))


@pytest.mark.parametrize("seconds", [-DAY, -1.0, 0.0, 1.0, DAY])
def test_a_folder_whose_time_lies_hides_nothing_for_good(tmp_path: Path, seconds: float) -> None:
    """Behind the index a snapshot is taken away and another put there, and the folder's time is set to what the index saw last."""
    with Store.open(tmp_path / "other") as other, Store.open(tmp_path / "s") as store:
        a, b = list(range(100)), list(range(500, 600))
        digest = save(store, a).digest
        save(other, b, name="b")
        folder = tmp_path / "s" / "snapshots"
        seen = folder.stat()
        (folder / digest.hex).unlink()
        (folder / f"{digest}.cov").unlink()
        for source in (tmp_path / "other").glob("[or]*/**/*"):
            if source.is_file():
                target = tmp_path / "s" / source.relative_to(tmp_path / "other")
                target.write_bytes(source.read_bytes())
        for source in (tmp_path / "other" / "snapshots").iterdir():
            (folder / source.name).write_bytes(source.read_bytes())
        moment = seen.st_mtime_ns + int(seconds * 1e9)
        os.utime(folder, ns=(moment, moment))
        assert find(store, [*a, 1]) is None, "the files decide"
        expect_rows(store, store.match("b"))
        assert check(store).ok  # compares the index with the files
        assert find(store, [*b, 1]).n == 100
        assert len(prune.plan(store).snapshots) == 0
        assert prune.plan(store).objects, "what the snapshot that is gone needed"
