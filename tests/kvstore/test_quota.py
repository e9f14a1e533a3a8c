"""A quota is kept while writing, by every process, at the cost of unnamed snapshots only; and where nothing can go that is said in time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvmemory import expect_rows, files, find, save

from kvstore import Group, Layout, Store, gauge, prune, quota
from kvstore.check import check
from kvstore.errors import InputInvalid, StoreCorrupt, StoreFull
from kvstore.gauge import Gauge, physical_bytes
from kvstore.quota import LEAST, overview, read_quota, set_quota
from kvstore.shelf import Shelf
from kvstore.staging import Rows as Staged
from kvstore.staging import Staging

LAYOUT = Layout((Group("full", None, (0,), 8, 64),))
BLOCK_FILE = 64 * LAYOUT.bytes_per_token + 128
INDEX = 1 << 20
"""More than the index grows by in one save."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "s") as store:
        set_quota(store.shelf.root, LEAST)
        yield store


def cache(store: Store, first: int, blocks: int = 4, name: str | None = None) -> bool:
    return save(store, [first, *range(64 * blocks - 1)], layout=LAYOUT, name=name).digest is not None


def there(store: Store, first: int) -> bool:
    return find(store, [first, *range(300)], layout=LAYOUT) is not None


def used(store: Store) -> int:
    return physical_bytes(store.shelf.root)


def count(counter: Gauge) -> int:
    with counter._locked() as (_, fd):
        found = counter._read(fd)
    assert found is not None
    return found.bytes


def sound(store: Store) -> None:
    report = check(store)
    assert not report.problems, report


def test_cache_gives_way_and_the_quota_holds(store: Store) -> None:
    cache(store, 0, name="kept")
    most = 0
    for n in range(1, 40):
        cache(store, n)
        most = max(most, used(store))
    assert LEAST * 3 // 4 < most <= LEAST + INDEX  # no file but the index's is written beyond it
    assert most - (used(store) - gauge.files_bytes(store.shelf.root)) <= LEAST
    gone = [n for n in range(1, 40) if not there(store, n)]
    assert gone == list(range(1, len(gone) + 1)) and 10 < len(gone) < 39  # the oldest
    expect_rows(store, store.match("kept"))
    sound(store)


def test_names_and_pins_never_give_way(store: Store) -> None:
    for n in range(6):
        cache(store, n, name=f"{'pin/' if n % 2 else ''}n{n}")
    before = files(store.shelf.path)
    cache(store, 100)
    with pytest.raises(StoreFull) as caught:
        cache(store, 50, blocks=40)
    error = caught.value
    assert there(store, 100)  # what wouldn't suffice isn't taken
    d = error.details
    assert d["quota"] == LEAST and d["needed"] >= 40 * BLOCK_FILE and d["used"] + d["needed"] > LEAST
    assert d["used"] == pytest.approx(used(store), abs=INDEX) and 4 * BLOCK_FILE < d["evictable"] < 5 * BLOCK_FILE
    assert error.exit_code == 10 and pickle.loads(pickle.dumps(error)).details == d
    for part in ("gc --purge", "kvferry rm ", "kvferry quota ", "8.39 MB", str(store.shelf.path)):
        assert part in str(error)
    for n in range(10, 60):
        cache(store, n)
    for n in range(6):
        expect_rows(store, store.match(f"{'pin/' if n % 2 else ''}n{n}"))
    assert before.items() - {"quota.count"} <= files(store.shelf.path).items() | {
        ("quota.count", before["quota.count"])
    }
    sound(store)


def test_what_it_says_to_do_helps(store: Store) -> None:
    for n in range(7):
        cache(store, n, name=f"n{n}")
    store.shelf.records.move_ref("n6", store.resolve("n6"), None)
    prune.apply(store, prune.plan(store))
    with pytest.raises(StoreFull) as caught:
        cache(store, 50, blocks=50, name="big")
    ways = re.findall(r"`kvferry ([^`]*)`", str(caught.value))
    assert [way.split()[0] for way in ways] == ["trash", "rm", "gc", "du", "quota"]
    set_quota(store.shelf.root, int(ways[-1].split()[1]))
    assert cache(store, 50, blocks=50, name="big")


def test_a_save_that_failed_leaves_nothing(store: Store) -> None:
    cache(store, 0, name="a")
    for _ in range(2):
        before = {name: data for name, data in files(store.shelf.path).items() if name != "quota.count"}
        with pytest.raises(StoreFull):
            cache(store, 1, blocks=80, name="a")
        assert {name: data for name, data in files(store.shelf.path).items() if name != "quota.count"} == before
    expect_rows(store, store.match("a"))


def test_the_rest_is_not_written_when_it_does_not_fit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is needed is exact: objects that are here already count nothing."""
    cache(store, 0, blocks=40, name="a")
    asked: list[int] = []
    monkeypatch.setattr(quota.Quota, "_make_room", lambda self, gauge, needed: asked.append(needed))
    with pytest.raises(StoreFull):
        save(store, [0, *range(64 * 40 - 1), *range(64 * 30)], layout=LAYOUT, name="b")
    assert asked == [30 * BLOCK_FILE] * quota.ROUNDS


def test_manifests_count_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that brings no object: its manifest needs room."""
    items = [n % 7 for n in range(64 * 200)]
    known: list[int] = []
    charge = Gauge.charge

    def noted(self: Gauge, size: int) -> bool:
        known.append(size)
        return charge(self, size)

    monkeypatch.setattr(Gauge, "charge", noted)
    first = save(store, items, layout=Layout((Group("full", None, (0,), 1, 1),)), name="a")
    assert first.snapshot is not None and first.digest is not None
    manifest = (store.shelf.path / "snapshots" / first.digest.hex).stat().st_size
    assert known[-1] >= manifest > 50_000
    monkeypatch.setattr(Gauge, "charge", lambda self, size: size < 50_000 and noted(self, size))
    with pytest.raises(StoreFull):
        save(store, [*items, 1], layout=Layout((Group("full", None, (0,), 1, 1),)), name="b")
    assert store.standing("b") is None


def test_setting_it(store: Store, tmp_path: Path) -> None:
    root = store.shelf.root
    assert read_quota(root) == LEAST and json.loads((tmp_path / "s" / "quota.json").read_bytes()) == {"quota": LEAST}
    assert overview(store.shelf) == {"bytes": LEAST, "used": used(store), "left": LEAST - used(store)}
    set_quota(root, None)
    assert read_quota(root) is None and not list((tmp_path / "s").glob("quota*"))
    set_quota(root, None)
    for n in range(20):
        cache(store, n)
    assert used(store) > LEAST
    assert not list((tmp_path / "s").glob("quota*"))  # nothing is counted
    with pytest.raises(InputInvalid, match=r"at least 8\.39 MB"):
        set_quota(root, LEAST - 1)
    set_quota(root, LEAST)
    assert overview(store.shelf)["left"] == 0
    assert all(there(store, n) for n in range(20))  # nothing goes before something is written
    cache(store, 100)
    assert used(store) <= LEAST


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"quota": "1"}', '{"quota": true}', '{"quota": 0}', '{"quota": 1.5}', "[" * 5000]
)
def test_a_damaged_quota_is_an_error_and_can_be_removed(store: Store, text: str) -> None:
    (store.shelf.path / "quota.json").write_text(text)
    with pytest.raises(StoreCorrupt, match="`kvferry quota off`"):
        cache(store, 1)
    set_quota(store.shelf.root, None)
    assert cache(store, 1)


# the count


def test_the_count_follows_what_is_written(store: Store) -> None:
    counter = Gauge(store.shelf.root, LEAST)
    counter.recount()
    walks = []
    counter._walked = lambda fd: walks.append(fd)  # type: ignore[assignment, func-returns-value, method-assign, return-value]
    for n in range(3):
        cache(store, n)
    with counter._locked() as (_, fd):
        count = counter._read(fd)
    assert count is not None and not walks
    exact = gauge.files_bytes(store.shelf.root)
    assert exact <= count.bytes <= exact + 4 * quota.REF_BYTES


def test_what_is_not_published_is_taken_back(store: Store) -> None:
    counter = Gauge(store.shelf.root, LEAST)
    counter.recount()
    before = count(counter)
    with store.shelf.shared(), Staging(store.shelf.root, "raw", counter) as staging:
        names = staging.add([Staged([memoryview(bytes([n]) * 1000)]) for n in range(3)])
        assert count(counter) == before + 3 * 1128 == before + staging.bytes
        staging.publish({names[0]})
    assert count(counter) == before + 1128


def test_what_a_transfer_publishes_is_counted(store: Store) -> None:
    saved = save(store, list(range(64)), layout=LAYOUT, name="a")
    assert saved.snapshot is not None and saved.coverage is not None
    counter = Gauge(store.shelf.root, LEAST)
    before = count(counter)
    with store.shelf.shared():
        store.publish(saved.snapshot, saved.coverage)
    assert count(counter) == before + quota.records_bytes(saved.snapshot, saved.coverage)


@pytest.mark.parametrize("harm", ["cut", "flipped", "absent", "negative", "restarted"])
def test_a_count_that_says_nothing_is_made_anew(store: Store, harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = store.shelf.path / "quota.count"
    cache(store, 0, blocks=40, name="a")
    low = Gauge(store.shelf.root, LEAST)
    low.recount()
    low.release(1 << 40)  # as the disk may have it after a power failure: too low
    data = place.read_bytes()
    if harm == "cut":
        place.write_bytes(data[:-1])
    elif harm == "flipped":
        place.write_bytes(data[:9] + bytes([data[9] ^ 1]) + data[10:])
    elif harm == "absent":
        place.unlink()
    elif harm == "negative":
        with low._locked() as (_, fd):
            low._write(fd, gauge._Count(-5, 0))
    else:
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 100)
    with pytest.raises(StoreFull):
        cache(store, 1, blocks=28)  # less than half the quota, after which somebody walks anyway
    assert used(store) <= LEAST


def test_a_count_that_is_too_low_is_found_out(store: Store) -> None:
    """Somebody copies files into the store: after half the quota was written somebody walks."""
    (store.shelf.path / "letter").write_bytes(b"x" * 10)
    cache(store, 0, name="a")
    (store.shelf.path / "letter").write_bytes(b"x" * (LEAST // 4))
    for n in range(1, 20):
        cache(store, n)
        assert used(store) <= LEAST + INDEX


def test_a_count_that_is_too_high_costs_nobody_anything(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    cache(store, 0, blocks=40)
    monkeypatch.setattr(quota.Quota, "_make_room", None)
    counter = Gauge(store.shelf.root, LEAST)
    counter.recount()
    assert counter.charge(LEAST * 3 // 10)
    cache(store, 1, blocks=8)
    assert there(store, 0)


def test_one_counts_at_a_time(store: Store) -> None:
    counter = Gauge(store.shelf.root, LEAST)
    counter.recount()
    before, done = count(counter), threading.Event()
    holder = os.open(store.shelf.path / "quota.count", os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    thread = threading.Thread(target=lambda: counter.charge(5) and done.set())
    thread.start()
    assert not done.wait(0.1)
    os.close(holder)
    thread.join()
    assert done.is_set() and count(counter) == before + 5


# many at once

WRITER = """
import sys
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from kvmemory import save
from kvstore import Store
from kvstore.errors import StoreFull
from test_quota import LAYOUT
number = int(sys.argv[2])
with Store.open(Path(sys.argv[1])) as store:
    print("ready", flush=True)
    sys.stdin.readline()
    for n in range(12):
        name = f"n{number}" if n == 3 else None
        try:
            save(store, [1000 * number + n, *range(64 * 6 - 1)], layout=LAYOUT, name=name)
        except StoreFull as error:
            print(error)
"""


def distinct_bytes(path: Path) -> int:
    """Each file once, also one that is moved meanwhile."""
    seen: dict[int, int] = {}
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found = (Path(folder) / name).lstat()
                if not name.startswith("index.sqlite"):
                    seen[found.st_ino] = found.st_size
    return sum(seen.values())


@pytest.mark.slow
def test_many_writers_keep_to_it_together(store: Store) -> None:
    writers = 4
    words = [sys.executable, "-c", WRITER, str(store.shelf.path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    running = [
        subprocess.Popen(
            [*words, str(number), str(Path(__file__).parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for number in range(writers)
    ]
    for one in running:
        assert one.stdout is not None and one.stdout.readline() == "ready\n"
    for one in running:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    most = 0
    while any(one.poll() is None for one in running):
        most = max(most, distinct_bytes(store.shelf.path))
    told = [one.communicate()[0] for one in running]
    assert [one.returncode for one in running] == [0] * writers
    assert told == [""] * writers
    assert LEAST // 2 < most <= LEAST + writers * BLOCK_FILE
    for number in range(writers):
        expect_rows(store, store.match(f"n{number}"))
    sound(store)


def test_another_evicts_meanwhile(store: Store) -> None:
    """A writer that finds the store full waits for whoever evicts, and then has room without evicting."""
    for n in range(15):
        cache(store, n)
    last = [n for n in range(15) if there(store, n)][-1]
    holder = os.open(store.shelf.path / "quarantine", os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    done = threading.Event()

    def write() -> None:
        with Store.open(store.shelf.path) as other:
            cache(other, 100, blocks=30)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert not done.wait(0.2)
    prune.apply(store, prune.eviction(store, 31 * BLOCK_FILE))
    prune.purge(store)
    kept = {n for n in range(15) if there(store, n)}
    os.close(holder)
    thread.join()
    assert done.is_set() and last in kept and kept == {n for n in range(15) if there(store, n)}


def test_waiting_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "WAIT", 0.05)
    for n in range(15):
        cache(store, n)
    holder = os.open(store.shelf.path / "quarantine", os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(StoreFull, match=r"quarantine: .*held"):
        cache(store, 100, blocks=30)
    os.close(holder)
    assert cache(store, 100, blocks=30)


def test_nothing_is_evicted_when_a_need_is_unknown(store: Store) -> None:
    cache(store, 0, name="a")
    for n in range(1, 15):
        cache(store, n)
    place = store.shelf.path / "snapshots" / str(store.resolve("a"))
    place.write_bytes(place.read_bytes()[:-1] + b"\0")
    with pytest.raises(StoreFull, match="nobody knows what the name 'a' needs"):
        cache(store, 100, blocks=30)


# a folder that is only a shelf


def test_a_folder_without_an_index_only_deletes_its_trash(store: Store) -> None:
    for n in range(8):
        cache(store, n)
    prune.apply(store, prune.plan(store))
    cache(store, 10)
    with Shelf.open(store.shelf.path) as shelf:
        mine = quota.Quota(shelf)
        found = mine.gauge()
        assert found is not None
        mine.make_room(found, LEAST // 2)
        assert not list((store.shelf.path / "trash").iterdir())
        with pytest.raises(StoreFull):
            mine.make_room(found, LEAST)
        assert there(store, 10)


def test_a_stream_is_counted_as_it_comes(store: Store) -> None:
    counter = store.quota.gauge()
    assert counter is not None
    counter.recount()
    before = gauge.files_bytes(store.shelf.root)
    at_first = count(counter)
    stream = store.quota.counted(counter, [b"x" * 1000, b"y" * 500])
    assert next(stream) == b"x" * 1000 and count(counter) == at_first + 1000
    assert next(stream) == b"y" * 500 and count(counter) == at_first + 1500
    with pytest.raises(StopIteration):
        next(stream)
    assert count(counter) == at_first + 1500
    stream = store.quota.counted(counter, [b"x" * 1000, b"y" * 500])
    next(stream)
    stream.close()  # as a writer does whose disk fails it
    assert count(counter) == at_first + 1500
    with pytest.raises(StoreFull):
        list(store.quota.counted(counter, [b"x" * 1000, bytes(LEAST)]))
    assert gauge.files_bytes(store.shelf.root) == before


def test_a_full_disk_is_no_full_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the disk stays what it is, and what was counted for it is found out by the next walk."""
    writev = os.writev

    def full(fd: int, parts: list[memoryview]) -> int:
        if sum(map(len, parts)) > 100_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return writev(fd, parts)

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space left"):
        cache(store, 1)
    monkeypatch.undo()
    assert cache(store, 1)
