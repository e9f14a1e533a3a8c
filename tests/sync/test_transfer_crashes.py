"""Transfers that are killed, starved, raced or cut off: no part of a snapshot shows, and the next run carries only the rest."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ferries import assert_restores, object_files, quarantined, save, verify
from remote_contract import Both

from kvstore import Snapshot, Store, prune
from kvstore.codec import HEADER
from kvstore.digest import ContentDigest, SnapshotDigest, content_digest
from kvstore.errors import Unreachable
from kvstore.snapshot import Coverage
from sync import Folder, Moved, pull, push
from sync.remote import Frame

ROUNDS = 25


class Killable:
    """The process of `killable`."""

    def __init__(self) -> None:
        here = Path(__file__).parent
        env = {**os.environ, "PYTHONPATH": f"{here.parent.parent}"}
        self._process = subprocess.Popen(
            [sys.executable, str(here / "killable.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )

    def run(self, way: str, store: Path, remote: Path, n: int) -> int | None:
        assert self._process.stdin and self._process.stdout
        print(json.dumps([way, str(store), str(remote), n]), file=self._process.stdin, flush=True)
        answer: int | None = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


@pytest.fixture
def killable() -> Iterator[Killable]:
    process = Killable()
    yield process
    process.close()


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """A folder with ``new`` (book of 1000 tokens) and ``old`` (the same book of 300)."""
    for name, tokens in (("new", 1000), ("old", 300)):
        with Store.open(tmp_path / "before" / name) as store:
            save(store, "book", tokens)
            store.indexed(lambda index: None)
    return tmp_path / "before"


BETWEEN = 32 - 8
"""Objects of the new book that the old one lacks: its last block is short, so four full ones of five are shared."""


def complete(store: Path) -> set[str]:
    """The objects that are in a store or its quarantine with all their bytes."""
    found = set()
    for path in (*object_files(store), *quarantined(store)):
        data = path.read_bytes()
        name = path.name if path.parent.parent.name == "quarantine" else path.parent.name + path.name
        if len(data) > HEADER and content_digest([data[HEADER:]]).hex == name:
            found.add(name)
    return found


@pytest.mark.parametrize("way", ["pull", "push"])
def test_killed_at_any_moment_and_run_again(way: str, before: Path, tmp_path: Path, killable: Killable) -> None:
    """Carries the new book to where the old one is."""
    source, target = before / "new", tmp_path / "target"

    def attempt(n: int) -> int | None:
        return killable.run("pull", target, source, n) if way == "pull" else killable.run("push", source, target, n)

    with Store.open(source) as store:
        wanted = {name.hex for name in store.shelf.objects.names()}
    shutil.copytree(before / "old", target)
    calls = attempt(0)
    assert calls is not None and calls > 150
    chosen = random.Random(way)
    left = []
    for n in sorted(chosen.sample(range(1, calls + 1), ROUNDS)):
        shutil.rmtree(target)
        shutil.copytree(before / "old", target)
        attempt(n)
        done = complete(target) & wanted
        verify(target)
        with Store.open(target) as store:
            at = store.match("book").n
            assert at in (299, 300, 999, 1000)
            assert_restores(store, "book", 300 if at < 301 else 1000)
        if way == "pull":
            with Store.open(target) as store, Folder.open(source) as remote:
                moved = pull(store, remote, ["book"])
        else:
            with Store.open(source) as store, Folder.open(target, create=True) as remote:
                moved = push(store, remote, ["book"])
        left.append(moved.objects)
        assert moved.objects == len(wanted - done), f"killed at {n} of {calls}: carried twice"
        verify(target)
        with Store.open(target) as store:
            assert_restores(store, "book", 1000)
        assert not quarantined(target), n
    assert min(left) == 0 and max(left) == BETWEEN and len(set(left)) > 5, f"killed too early or too late: {left}"


def test_killed_again_and_again_it_still_arrives(before: Path, tmp_path: Path, killable: Killable) -> None:
    carried: list[int] = []
    for n in (40, 90, 91, 120, 150):
        killable.run("pull", tmp_path / "target", before / "new", 560 + n)  # making the store takes 520 calls
        if (tmp_path / "target").exists():
            carried.append(len(complete(tmp_path / "target")))
    assert carried == sorted(carried), "something that had arrived was lost"
    with Store.open(tmp_path / "target") as store, Folder.open(before / "new") as remote:
        moved = pull(store, remote, ["book"])
        assert moved.objects + (carried or [0])[-1] == 32
        assert_restores(store, "book", 1000)
    verify(tmp_path / "target")


@pytest.mark.parametrize("way", ["pull", "push"])
@pytest.mark.parametrize("call", ["writev", "fsync", "rename", "mkdir"])
def test_every_failing_write(
    way: str, call: str, before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Nth call fails, for every N: the error is told as what it is, nothing shows, and running again finishes."""
    source, target = before / "new", tmp_path / "target"
    code = errno.ENOSPC if call != "fsync" else errno.EIO
    real: Callable[..., Any] = getattr(os, call)
    count = [0]

    def failing(at: int) -> Callable[..., Any]:
        count[0] = 0

        def run(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == at:
                if call == "writev":
                    real(args[0], [memoryview(args[1][0])[: len(args[1][0]) // 2]])
                raise OSError(code, os.strerror(code))
            return real(*args, **kwargs)

        return run

    def attempt() -> Moved:
        if way == "pull":
            with Store.open(target) as store, Folder.open(source) as remote:
                return pull(store, remote, ["book"])
        with Store.open(source) as store, Folder.open(target, create=True) as remote:
            return push(store, remote, ["book"])

    step = {"writev": 7, "fsync": 5, "rename": 3, "mkdir": 1}[call]
    at = 1
    while True:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(before / "old", target)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(at))
            try:
                attempt()
            except (OSError, Unreachable) as error:
                assert isinstance(error, OSError if way == "pull" else Unreachable), repr(error)
                told = error.errno if isinstance(error, OSError) else error.details["errno"]
                assert told == code
            else:
                assert count[0] < at, f"{call} number {at} failed and nobody said so"
                break
        verify(target)
        with Store.open(target) as store:
            assert store.match("book").n >= 299
        done = complete(target)
        moved = attempt()
        assert moved.objects == len(complete(source) - done)
        verify(target)
        at += step
    assert at > 1


def test_a_remote_that_cannot_be_read_is_unreachable(
    before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int, buffers: Sequence[Any], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Store.open(tmp_path / "phone") as phone, Folder.open(before / "new") as remote:
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", broken)
            with pytest.raises(Unreachable, match="Input/output error"):
                pull(phone, remote, ["book"])
        assert pull(phone, remote, ["book"]).objects == 32


class Wrapped:
    """A folder remote at which something happens once, before the ``at``-th fetch of an object or before `publish`."""

    def __init__(self, folder: Folder, happen: Callable[[], object], at: int = 0) -> None:
        self._folder, self._happen, self._at = folder, happen, at
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._folder, name)

    def _now(self) -> None:
        with self._lock:
            self._at -= 1
            if self._at == 0:
                self._happen()

    def fetch(self, names: Sequence[ContentDigest]) -> Iterator[Frame]:
        for found in self._folder.fetch(names):
            self._now()
            yield found

    def publish(self, snapshot: Snapshot, coverage: Coverage, label: str, expect: SnapshotDigest | None) -> Coverage:
        self._now()
        return self._folder.publish(snapshot, coverage, label, expect)


def wrapped(folder: Folder, happen: Callable[[], object], at: int) -> Both:
    remote: Any = Wrapped(folder, happen, at)
    both: Both = remote
    return both


def collect(path: Path) -> int:
    """What `kvferry gc` does; returns the objects it took."""
    with Store.open(path) as store:
        pruned = prune.apply(store, prune.plan(store))
        prune.purge(store)
        return pruned.objects


def test_a_remote_that_goes_away_midway(before: Path, tmp_path: Path) -> None:
    stick, away = tmp_path / "stick", tmp_path / "away"
    shutil.copytree(before / "new", stick)

    def vanish() -> None:
        away.mkdir()
        for entry in list(stick.iterdir()):
            entry.rename(away / entry.name)

    with Store.open(tmp_path / "phone") as phone:
        with pytest.raises(Unreachable, match="gone"), Folder.open(stick) as remote:
            pull(phone, wrapped(remote, vanish, 17), ["book"])
        assert list(phone.shelf.records.refs()) == [] and object_files(phone.shelf.path) == []
        there = len(complete(phone.shelf.path))
        assert 0 < there < 32
        for entry in list(away.iterdir()):
            entry.rename(stick / entry.name)
        with Folder.open(stick) as remote:
            moved = pull(phone, remote, ["book"])
        assert (moved.objects, moved.resumed) == (32 - there, there)
        assert_restores(phone, "book", 1000)
    verify(tmp_path / "phone")


def test_a_collector_here_takes_what_a_pull_relied_on(before: Path, tmp_path: Path) -> None:
    """The first 300 tokens are here as unnamed cache when the pull plans, and collected while it fetches the rest."""
    with Store.open(tmp_path / "phone") as phone:
        save(phone, None, 300)
        taken: list[int] = []
        with Folder.open(before / "new") as remote:
            moved = pull(phone, wrapped(remote, lambda: taken.append(collect(phone.shelf.path)), 3), ["book"])
        assert taken == [10] and moved.objects == 32 and moved.skipped == 8
        assert_restores(phone, "book", 1000)
    verify(tmp_path / "phone")


def test_a_collector_there_takes_the_snapshot_that_is_being_pulled(before: Path, tmp_path: Path) -> None:
    """The name moved on at the remote: the pull asks again and brings what the name stands for now."""
    stick = tmp_path / "stick"
    shutil.copytree(before / "new", stick)

    def replace() -> None:
        with Store.open(stick) as store:
            save(store, "book", 640, "other")
        assert collect(stick) == 32

    with Store.open(tmp_path / "phone") as phone, Folder.open(stick) as remote:
        moved = pull(phone, wrapped(remote, replace, 5), ["book"])
        assert moved.snapshots[0].snapshot.tokens == 640
        assert_restores(phone, "book", 640, "other")
    verify(tmp_path / "phone")


def test_a_collector_there_takes_what_a_push_relied_on(before: Path, tmp_path: Path) -> None:
    stick = tmp_path / "stick"
    with Store.open(stick) as store:
        save(store, None, 300)
    with Store.open(before / "new") as mac, Folder.open(stick, create=True) as remote:
        moved = push(mac, wrapped(remote, lambda: collect(stick), 1), ["book"])
    assert moved.objects == 32 and moved.skipped == 8
    verify(stick)
    with Store.open(stick) as store:
        assert_restores(store, "book", 1000)


def test_many_pulls_savers_and_a_collector_at_once(before: Path, tmp_path: Path) -> None:
    phone = tmp_path / "phone"
    Store.open(phone).close()
    errors: list[BaseException] = []
    stop = threading.Event()

    def guarded(work: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)
                raise

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def pulling(label: str) -> None:
        with Store.open(phone) as store:
            for _ in range(4):
                with Folder.open(before / "new") as remote:
                    pull(store, remote, ["book"], rename=label)
                assert_restores(store, label, 1000)
                digest = store.resolve(label)
                store.shelf.records.move_ref(label, digest, None)
            with Folder.open(before / "new") as remote:
                pull(store, remote, ["book"], rename=label)

    def collecting() -> None:
        while not stop.is_set():
            collect(phone)

    collector = guarded(collecting)
    workers = [guarded(lambda label=label: pulling(label)) for label in ("one", "two")]  # type: ignore[misc]
    for worker in workers:
        worker.join()
    stop.set()
    collector.join()
    assert not errors, errors
    verify(phone)
    with Store.open(phone) as store:
        for label in ("one", "two"):
            assert_restores(store, label, 1000)
    assert not quarantined(phone)


def test_two_pushes_of_one_name_at_once(tmp_path: Path) -> None:
    """Both carry; the name ends at the longer one or the later push is told, and what the name stands for is whole."""
    outcomes: list[BaseException | Moved] = []
    for label, tokens in (("mac", 640), ("pad", 1000)):
        with Store.open(tmp_path / label) as store:
            save(store, "book", tokens)

    def send(label: str) -> None:
        with Store.open(tmp_path / label) as store, Folder.open(tmp_path / "stick", create=True) as remote:
            try:
                outcomes.append(push(store, remote, ["book"]))
            except Exception as error:
                outcomes.append(error)

    threads = [threading.Thread(target=send, args=(label,)) for label in ("mac", "pad")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert any(isinstance(o, Moved) for o in outcomes), outcomes
    verify(tmp_path / "stick")
    send("pad")
    with Store.open(tmp_path / "stick") as store:
        assert_restores(store, "book", 1000)
