"""kill -9 at any moment: what was promised is there and whole, what was not leaves nothing a reader could take for a snapshot."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from crashing import ACTIONS, STEM
from kvmemory import expect_rows, find, save

from kvstore import Store, prune
from kvstore.check import check

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)])}


class Forker:
    """The process of `crashing.py`."""

    def __init__(self, path: Path) -> None:
        command = [sys.executable, str(HERE / "crashing.py"), str(path)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
        )

    def ask(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def line(self) -> list[str]:
        assert self._process.stdout
        return self._process.stdout.readline().split(maxsplit=2)

    def until_end(self) -> Iterator[list[str]]:
        while (words := self.line())[:1] != ["end"]:
            assert words, "the forking process has died"
            yield words
        self.status = int(words[1])

    def close(self) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=30)


@pytest.fixture
def forker(tmp_path: Path) -> Iterator[Forker]:
    forker = Forker(tmp_path / "s")
    yield forker
    forker.close()


def clean(store: Store) -> None:
    report = check(store)
    assert report.ok, report
    assert all(named.usable == named.tokens for named in report.names)


def test_killed_at_random_moments(tmp_path: Path, forker: Forker) -> None:
    path = tmp_path / "s"
    Store.open(path).close()
    chance = random.Random(5)
    promised: dict[str, str] = {}
    for kill in range(30):
        forker.ask(f"loop {kill}")
        pid, said, wait_for = None, 0, chance.randrange(1, 6)
        while pid is None or said < wait_for:
            words = forker.line()
            assert words[0] in ("pid", "ready", "promised", "removing")
            if words[0] == "pid":
                pid = int(words[1])
            else:
                said += 1
            if words[0] == "promised":
                promised[words[2].strip()] = words[1]
        time.sleep(chance.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        for words in forker.until_end():
            if words[0] == "promised":
                promised[words[2].strip()] = words[1]
        assert forker.status == signal.SIGKILL
        with Store.open(path) as store:
            clean(store)
            for name, digest in promised.items():
                match = store.match(name)
                assert match.digest.hex == digest
                if f"{kill} " in name:
                    expect_rows(store, match)
            if kill % 6 == 5:
                prune.apply(store, prune.plan(store))
                prune.purge(store)
                clean(store)
                assert check(store).notes == ()  # no leftovers
    assert len(promised) > 15
    with Store.open(path) as store:
        for name in promised:
            expect_rows(store, store.match(name))


@pytest.mark.parametrize("action", ACTIONS)
def test_killed_before_every_step(tmp_path: Path, forker: Forker, action: str) -> None:
    """Before each call that changes a file, one after the other (every few, where an action has many)."""
    made = tmp_path / "made"
    with Store.open(made) as store:
        first = save(store, STEM, name="a")
        save(store, [9, 9, 9], name="other")
        save(store, [5, *STEM])
        if action == "purge":
            prune.apply(store, prune.plan(store))
    forker.ask(f"step {action} 0 {shutil.copytree(made, tmp_path / 'count')}")
    calls = next(int(words[1]) for words in forker.until_end() if words[0] == "calls")
    list(forker.until_end())
    assert calls > 3
    for number in range(1, calls + 1, max(1, calls // 12)):
        path = tmp_path / f"at-{number}"
        shutil.copytree(made, path)
        forker.ask(f"step {action} {number} {path}")
        list(forker.until_end())
        assert forker.status == signal.SIGKILL
        with Store.open(path) as store:
            clean(store)
            expect_rows(store, store.match("other"))
            names = {ref.label for ref in store.shelf.records.refs()}
            assert names - {"a", "b"} == {"other"}
            if action == "rename":
                assert names & {"a", "b"}
            elif action != "remove":
                assert "a" in names
            for name in names & {"a", "b"}:
                match = store.match(name)
                assert match.digest == first.digest or (action == "grow" and match.snapshot.tokens == 133)
                expect_rows(store, match)
            expect_rows(store, find(store, [*STEM, 7]))
            grown = save(store, [*STEM, 1, 2, 3, 4], name="after")
            expect_rows(store, store.match("after"))
            assert grown.snapshot.tokens == 134
            prune.apply(store, prune.plan(store))
            prune.purge(store)
            clean(store)
            assert check(store).notes == ()
        if action == "create":
            with Store.open(tmp_path / f"at-{number}-new") as store:
                expect_rows(store, store.match(str(save(store, STEM).digest)))
                clean(store)
        shutil.rmtree(path)


WORKER = """
import sys
from pathlib import Path
from kvmemory import Memory, expect_rows, find, save
from kvstore import Store, prune
from kvstore.errors import ObjectMissing, SnapshotMissing
prune.SLICE, prune.PAUSE = 0.002, 0.001
kind = sys.argv[2]
stem = [(3 * i) % 90 for i in range(130)]
with Store.open(Path(sys.argv[1])) as store:
    print("ready", flush=True)
    sys.stdin.readline()
    if kind == "collector":
        while not (Path(sys.argv[1]) / "stop").exists():
            try:
                prune.apply(store, prune.plan(store))
            finally:
                prune.purge(store)
    for number in range(25 if kind != "collector" else 0):
        items = [*stem[: 5 * number], int(kind), number]
        save(store, items)
        try:
            match = find(store, [*items, 1])
            if match is not None:
                expect_rows(store, match)
        except (ObjectMissing, SnapshotMissing):
            pass  # unnamed: collected meanwhile
        saved = save(store, items, name=f"{kind} {number % 5}")
        expect_rows(store, store.match(f"{kind} {number % 5}"))
        if number % 7 == 6:
            store.shelf.records.move_ref(f"{kind} {number % 5}", saved.digest, None)
"""


def test_savers_readers_and_a_collector_at_once(tmp_path: Path) -> None:
    path = tmp_path / "s"
    Store.open(path).close()
    workers = {
        kind: subprocess.Popen(
            [sys.executable, "-c", WORKER, str(path), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        for kind in ("1", "2", "collector")
    }
    for worker in workers.values():
        assert worker.stdout and worker.stdin and worker.stdout.readline() == "ready\n"
        worker.stdin.write("go\n")
        worker.stdin.flush()
    outcomes = {kind: workers[kind].communicate(timeout=120)[1] for kind in ("1", "2")}
    (path / "stop").write_text("")
    outcomes["collector"] = workers["collector"].communicate(timeout=120)[1]
    assert outcomes == {"1": "", "2": "", "collector": ""}
    (path / "stop").unlink()
    with Store.open(path) as store:
        prune.apply(store, prune.plan(store))
        prune.purge(store)
        clean(store)
        refs = list(store.shelf.records.refs())
        assert len(refs) == 8
        for ref in refs:
            expect_rows(store, store.match(ref.label))
