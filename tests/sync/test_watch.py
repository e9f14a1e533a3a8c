"""Watching: what is saved is pushed, what arrives is taken in; whole, once, and again after trouble."""

from __future__ import annotations

import os
import shutil
import threading
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ferries import assert_restores, save
from test_onefile import exported

from kvstore import Store
from kvstore.errors import Unreachable
from sync import Folder, push
from sync.watch import LONGEST, RESCAN, STABLE, Inbox, Pushing, run
from sync.watch_command import _taker


class Told:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, kind: str, what: dict[str, Any]) -> None:
        self.lines.append((kind, what))

    def kinds(self) -> list[str]:
        found = [kind for kind, _ in self.lines]
        self.lines.clear()
        return found


def pushing(tmp_path: Path, told: Told, patterns: tuple[str, ...] = ("*",)) -> Pushing:
    def send(label: str) -> None:
        with Store.open(tmp_path / "a") as store, Folder.open(tmp_path / "disk" / "remote", create=True) as remote:
            push(store, remote, [label])

    return Pushing(tmp_path / "a", "disk", patterns, send, told)


def test_each_new_or_moved_name_is_pushed_once(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    told = Told()
    with Store.open(tmp_path / "a") as a:
        watcher = pushing(tmp_path, told, ("book*",))
        assert watcher.scan(0) == RESCAN and told.kinds() == []
        save(a, "book", 100)
        save(a, "private", 100, "p")
        watcher.scan(1)
        watcher.scan(2)
        assert told.kinds() == ["pushed"]
        save(a, "book", 300)
        watcher.scan(3)
        assert told.kinds() == ["pushed"]
        a.shelf.records.rename_ref("book", "book2")
        watcher.scan(4)
        assert told.kinds() == ["pushed"]
    with Folder.open(tmp_path / "disk" / "remote") as remote:
        assert [ref.label for ref in remote.refs()] == ["book", "book2"]


def test_a_remote_that_is_away(tmp_path: Path) -> None:
    """Longer and longer pauses, then success; other names don't wait for it."""
    told = Told()
    with Store.open(tmp_path / "a") as a:
        save(a, "book", 100)
        watcher = pushing(tmp_path, told)
        now, pauses = 0.0, []
        for _ in range(12):
            wait = watcher.scan(now)
            assert wait > 0
            pauses.append(wait)
            assert watcher.scan(now + wait / 2) > 0
            now += wait
        assert told.kinds() == ["failed"] * 12
        assert pauses[:4] == [1, 2, 4, 8] and max(pauses) == pauses[-1] == LONGEST
        (tmp_path / "disk").mkdir()
        assert watcher.scan(now) == RESCAN and told.kinds() == ["pushed"]


def test_a_name_that_the_remote_has_otherwise_waits_until_it_moves(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    told = Told()
    with Store.open(tmp_path / "a") as a, Store.open(tmp_path / "b") as b:
        save(b, "book", 100, "other")
        with Folder.open(tmp_path / "disk" / "remote", create=True) as remote:
            push(b, remote, ["book"])
        save(a, "book", 200)
        watcher = pushing(tmp_path, told)
        for now in range(5):
            watcher.scan(now)
        assert told.kinds() == ["refused"]
        a.shelf.records.rename_ref("book", "mine")
        watcher.scan(9)
        assert told.kinds() == ["pushed"]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    with Store.open(tmp_path / "a") as a:
        save(a, "book", 100)
        short = exported(a, "book", tmp_path / "short.kvferry")
        save(a, "book", 300)
        return {"short": short, "long": exported(a, "book", tmp_path / "long.kvferry")}


def inbox(tmp_path: Path, told: Told) -> Inbox:
    (tmp_path / "in").mkdir(exist_ok=True)
    return Inbox(tmp_path / "in", _taker(tmp_path / "c", None, None), told)


def test_a_file_that_grows_is_left_until_it_is_still(tmp_path: Path, files: dict[str, bytes]) -> None:
    told, at = Told(), tmp_path / "in" / "x.kvferry"
    watcher = inbox(tmp_path, told)
    for now in range(5):
        at.write_bytes(files["short"][: len(files["short"]) * now // 5])
        os.utime(at, ns=(now, now))
        watcher.scan(float(now))
    assert told.kinds() == []
    watcher.scan(4 + STABLE)
    assert told.kinds() == ["incomplete"], "still, and cut: a copy that was broken off"
    watcher.scan(500.0)
    assert told.kinds() == [], "not again, until it changes"
    at.write_bytes(files["short"])
    watcher.scan(501.0)
    watcher.scan(501 + STABLE)
    assert told.kinds() == ["imported"]
    with Store.open(tmp_path / "c") as c:
        assert_restores(c, "book", 100)
    watcher.scan(600.0)
    assert told.kinds() == []


def test_names_of_files_say_nothing(tmp_path: Path, files: dict[str, bytes]) -> None:
    """Conflict copies, other cases, NFD, renamed, twice: the snapshot has its own name, and it never goes back."""
    told = Told()
    watcher = inbox(tmp_path, told)
    folder = tmp_path / "in"
    names = ["book.kvferry", "BOOK.kvferry", "book.sync-conflict-20261130-120000-ABC.kvferry", unicodedata.normalize("NFD", "bücher.kvferry"),
             unicodedata.normalize("NFC", "bücher.kvferry"), "book (conflicted copy).kvferry"]  # fmt: skip
    for name in names:
        (folder / name).write_bytes(files["long"])
    (folder / "older.kvferry").write_bytes(files["short"])
    (folder / ".book.kvferry.part").write_bytes(files["long"][:50])
    (folder / "notes.txt").write_text("hello")
    (folder / "link.kvferry").symlink_to("/etc/passwd")
    (folder / "folder").mkdir()
    watcher.scan(0.0)
    watcher.scan(STABLE)
    kinds = told.kinds()
    assert kinds.count("imported") in (len(names), len(names) + 1) and set(kinds) <= {"imported", "refused"}
    (folder / "book.kvferry").rename(folder / "renamed.kvferry")
    watcher.scan(10.0)
    watcher.scan(10 + STABLE)
    assert told.kinds() == ["imported"]
    with Store.open(tmp_path / "c") as c:
        assert [ref.label for ref in c.shelf.records.refs()] == ["book"]
        assert_restores(c, "book", 300)


def test_memory_is_a_line_a_file(tmp_path: Path, files: dict[str, bytes]) -> None:
    told = Told()
    watcher = inbox(tmp_path, told)
    for number in range(50):
        at = tmp_path / "in" / f"{number}.kvferry"
        at.write_bytes(files["short"][:100])
        watcher.scan(float(number))
        at.unlink()
    watcher.scan(99.0)
    assert watcher._seen == {}


def test_the_inbox_goes_and_comes_back(tmp_path: Path, files: dict[str, bytes]) -> None:
    told = Told()
    watcher = inbox(tmp_path, told)
    shutil.rmtree(tmp_path / "in")
    assert watcher.scan(0.0) == RESCAN
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.kvferry").write_bytes(files["short"])
    watcher.scan(1.0)
    watcher.scan(1 + STABLE)
    assert told.kinds() == ["imported"]


def until(test: Callable[[], bool]) -> None:
    for _ in range(200):
        if test():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come to that in 10 s")


def test_it_runs_and_stops_and_outlives_errors(
    tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Woken by the file system, with scans that fail now and then."""
    monkeypatch.setattr("sync.watch.STABLE", 0.2)
    monkeypatch.setattr("sync.watch.SETTLE", 0.05)
    told, stop, count = Told(), threading.Event(), 0
    watcher = inbox(tmp_path, told)

    def trouble(now: float) -> float:
        nonlocal count
        count += 1
        if count % 2:
            raise Unreachable("away")
        return RESCAN

    thread = threading.Thread(
        target=run, args=([trouble, watcher.scan], [tmp_path / "in", tmp_path / "absent"], stop, told)
    )
    thread.start()
    until(lambda: count > 0)
    (tmp_path / "in" / "x.kvferry").write_bytes(files["short"])
    until(lambda: "imported" in [kind for kind, _ in told.lines])
    assert "failed" in [kind for kind, _ in told.lines]
    stop.set()
    thread.join(5)
    assert not thread.is_alive()
