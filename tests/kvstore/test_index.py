"""The index is a cache: damaged, absent, foreign, behind or ahead, it is made anew from the files and `find` works."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvmemory import IDENTITY, LAYOUT, carry, expect_rows, files, find, save

from kvstore import Store
from kvstore.check import check
from kvstore.digest import root_key
from kvstore.errors import StoreBusy
from kvstore.index import VERSION, Index, refusal
from kvstore.inventory import QUICK

CHAINS = [[i, *range(100, 170 + i)] for i in range(12)]


def fill(path: Path) -> None:
    with Store.open(path) as store:
        for i, items in enumerate(CHAINS):
            save(store, items, name=f"n{i}")


def index_files(path: Path) -> list[Path]:
    return [path / f"index.sqlite{end}" for end in ("", "-wal", "-shm")]


def everything_is_found(path: Path) -> None:
    with Store.open(path) as store:
        for items in CHAINS:
            match = find(store, [*items, 5000])
            assert match is not None and match.n == len(items)
        expect_rows(store, match)
        saved = save(store, [*CHAINS[0], 1, 2])
        assert saved.dropped_from is None and find(store, [*CHAINS[0], 1, 2, 3]).n == len(CHAINS[0]) + 2
        digests = set(store.shelf.records.snapshots())
        assert store.indexed(lambda index: index.sound() and set(index.contents()) == digests)


def foreign(path: Path) -> None:
    with sqlite3.connect(path / "index.sqlite") as db:
        db.execute("CREATE TABLE letters(id INTEGER PRIMARY KEY, text TEXT)")
        db.execute("INSERT INTO letters(text) VALUES ('dear')")
    db.close()


def foreign_of_our_version(path: Path) -> None:
    foreign(path)
    with sqlite3.connect(path / "index.sqlite") as db:
        db.execute(f"PRAGMA user_version = {VERSION}")
    db.close()


def foreign_with_our_names(path: Path) -> None:
    with sqlite3.connect(path / "index.sqlite") as db:
        db.execute("CREATE TABLE snapshot(x)")
    db.close()


def of_version(version: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        shutil.copy(path.parent / "kept.sqlite", path / "index.sqlite")
        with sqlite3.connect(path / "index.sqlite") as db:
            db.execute(f"PRAGMA user_version = {version}")
        db.close()

    return change


def cut(length: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        shutil.copy(path.parent / "kept.sqlite", path / "index.sqlite")
        os.truncate(path / "index.sqlite", length)

    return change


DAMAGE: dict[str, Callable[[Path], None]] = {
    "deleted": lambda path: None,
    "empty": lambda path: (path / "index.sqlite").write_bytes(b"") and None,
    "garbage": lambda path: (path / "index.sqlite").write_bytes(random.Random(1).randbytes(20000)) and None,
    "a little garbage": lambda path: (path / "index.sqlite").write_bytes(b"hello") and None,
    "cut in the header": cut(50),
    "cut after a page": cut(4096),
    "cut in a page": cut(9000),
    "a valid database of something else": foreign,
    "something else of our version": foreign_of_our_version,
    "something else with a table of our names": foreign_with_our_names,
    "an older version": of_version(VERSION - 1 or 17),
    "a newer version": of_version(VERSION + 1),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_index_is_made_anew(tmp_path: Path, how: str) -> None:
    path = tmp_path / "s"
    fill(path)
    shutil.copy(path / "index.sqlite", tmp_path / "kept.sqlite")
    before = files(path)
    for file in index_files(path):
        file.unlink(missing_ok=True)
    DAMAGE[how](path)
    everything_is_found(path)
    after = files(path)
    assert before.items() <= after.items()


def test_flipped_pages(tmp_path: Path) -> None:
    """SQLite has no checksums. Whatever a flipped bit makes it say, a match is what the files say, or the file is made anew."""
    path = tmp_path / "s"
    fill(path)
    good = (path / "index.sqlite").read_bytes()
    chance = random.Random(7)
    for _ in range(80):
        data = bytearray(good)
        for _ in range(chance.choice([1, 3, 40])):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        for file in index_files(path):
            file.unlink(missing_ok=True)
        (path / "index.sqlite").write_bytes(data)
        with Store.open(path) as store:
            for items in CHAINS[::4]:
                match = find(store, [*items, 5000])
                if match is not None:
                    assert match.snapshot.items[: match.n] == tuple(items[: match.n])
                    assert match.digest in {ref.snapshot for ref in store.shelf.records.refs()}
            # A check notices what SQLite alone can't, and makes it anew.
            assert check(store, QUICK).ok
            for items in CHAINS[::4]:
                assert find(store, [*items, 5000]).n == len(items)
    everything_is_found(path)


def test_it_becomes_damaged_while_open(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    with Store.open(path) as store:
        assert find(store, [*CHAINS[3], 1]).n == len(CHAINS[3])
        with sqlite3.connect(path / "index.sqlite") as db:
            db.execute("DROP TABLE holds")
        db.close()
        assert find(store, [*CHAINS[3], 1]).n == len(CHAINS[3])
        assert save(store, [7, 8, 9]).written_objects == 2
        assert find(store, [7, 8, 9, 1]).n == 3


def test_files_change_behind_it(tmp_path: Path) -> None:
    path, other = tmp_path / "s", tmp_path / "other"
    fill(path)
    with Store.open(other) as store:
        added = save(store, [900, *range(80)], "gpu")
    # Another program copies a snapshot in, and deletes one.
    for name, data in files(other).items():
        if name.startswith(("objects/", "snapshots/")):
            (path / name).write_bytes(data)
    with Store.open(path) as store:
        gone = store.resolve("n3")
    for end in ("", ".cov"):
        (path / "snapshots" / f"{gone}{end}").unlink()
    with Store.open(path) as store:
        match = find(store, [900, *range(80), 1])
        assert match.digest == added.digest
        expect_rows(store, match, "gpu")
        assert find(store, [*CHAINS[3], 1]) is None


def test_a_store_that_stays_open_notices_a_snapshot_that_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with Store.open(path) as store:
        save(store, [1, 2, 3])
        long = save(store, [1, 2, 3, 4, 5])
        assert find(store, [1, 2, 3, 4, 5, 6]).n == 5
        mtime = (path / "snapshots").stat()
        for end in ("", ".cov"):
            (path / "snapshots" / f"{long.digest}{end}").unlink()
        os.utime(
            path / "snapshots", ns=(mtime.st_atime_ns, mtime.st_mtime_ns)
        )  # even if the folder's time tells nothing
        assert find(store, [1, 2, 3, 4, 5, 6]).n == 3


def test_coverage_comes_from_the_files(tmp_path: Path) -> None:
    items = list(range(400))
    with Store.open(tmp_path / "whole") as whole, Store.open(tmp_path / "s") as store:
        carry(whole, store, save(whole, items).digest)
        short = save(store, items[:100])
        assert find(store, [*items[:200], 999]).digest == short.digest
        store.indexed(lambda index: index._db.execute("UPDATE run SET first = 0, last = 7"))  # as if all were whole
        match = find(store, [*items[:200], 999])
        assert (match.digest, match.n) == (short.digest, 100)
        expect_rows(store, match)
        expect_rows(store, find(store, [*items, 999]))


def test_two_processes_see_each_others_saves(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as one, Store.open(tmp_path / "s") as two:
        assert find(two, [1, 2, 3]) is None
        save(one, [1, 2, 3])
        assert find(two, [1, 2, 3, 4]).n == 3
        save(two, [1, 2, 3, 4, 5])
        assert find(one, [1, 2, 3, 4, 5, 6]).n == 5


def test_a_busy_index_is_not_waited_for_in_find_and_is_named_in_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kvstore.index

    path = tmp_path / "s"
    fill(path)
    monkeypatch.setattr(kvstore.index, "BUSY_SECONDS", 0.05)
    with Store.open(path) as store, Store.open(path) as other:
        find(store, CHAINS[0])
        other.indexed(lambda index: index._db.execute("BEGIN IMMEDIATE"))
        assert find(store, [*CHAINS[1], 5]).n == len(CHAINS[1])
        with pytest.raises(StoreBusy, match="another process wrote to the index"):
            save(store, [5, 5])
        other.indexed(lambda index: index._db.execute("ROLLBACK"))
        assert save(store, [5, 5]).snapshot is not None


def test_rebuild_and_remove(tmp_path: Path) -> None:
    path = tmp_path / "s"
    fill(path)
    with Store.open(path) as store:
        before = store.indexed(Index.contents)
        store.indexed(Index.rebuild)
        assert store.indexed(Index.contents) == before
        digest = store.resolve("n0")

        def forget(index: Index) -> int:
            with index.writing():
                for other in before:
                    index.remove(other)
                index.remove(digest)
            return int(index._db.execute("SELECT count(*) FROM block WHERE parent != 0").fetchone()[0])

        assert store.indexed(forget) == 0
        assert store.indexed(Index.contents) == {}
        store.indexed(Index.catch_up)
        assert store.indexed(Index.contents) == before
        assert isinstance(find(store, [*CHAINS[0], 1]).snapshot.items[0], int)


@pytest.mark.parametrize(
    ("code", "free", "opening", "number"),
    [
        (sqlite3.SQLITE_FULL, 10**9, None, errno.ENOSPC),
        (sqlite3.SQLITE_IOERR, 0, None, errno.ENOSPC),  # what a full disk gives for the file beside the database
        (sqlite3.SQLITE_IOERR, 10**9, None, errno.EIO),
        (sqlite3.SQLITE_READONLY, 10**9, None, errno.EROFS),
        (sqlite3.SQLITE_CANTOPEN, 10**9, errno.EACCES, errno.EACCES),
        (sqlite3.SQLITE_CANTOPEN, 10**9, errno.EROFS, errno.EROFS),
    ],
)
def test_an_index_that_cannot_be_written_is_told_with_its_path_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, free: int, opening: int | None, number: int
) -> None:
    (tmp_path / "index.sqlite").touch()
    error = sqlite3.OperationalError("unable to open database file")
    error.sqlite_errorcode = code
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, free))
    if opening is not None:
        why = OSError(opening, os.strerror(opening))
        monkeypatch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(why))
    told = refusal(error, tmp_path)
    assert isinstance(told, OSError)
    assert (told.errno, told.filename) == (number, str(tmp_path / "index.sqlite"))
    assert os.strerror(number) in str(told) and "unable to open database file" in str(told)


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[None]:
    """The folder of a store that can't be written to; root, whom nothing stops, is another user meanwhile."""
    root = os.geteuid() == 0
    everything = [path, *path.rglob("*")]
    for one in everything:
        if root:
            os.chown(one, 65534, 65534)
        one.chmod(0o500 if one.is_dir() else 0o600)
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        for one in everything:
            one.chmod(0o700 if one.is_dir() else 0o600)


@pytest.mark.parametrize("state", ["fresh", "absent", "garbage", "behind", "a file that is read-only too"])
def test_a_store_that_can_only_be_read_is_searched(state: str) -> None:
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o711)
        path = Path(made) / "s"
        fill(path)
        if state == "absent":
            (path / "index.sqlite").unlink()
        elif state == "garbage":
            (path / "index.sqlite").write_bytes(b"hello")
        elif state == "behind":
            shutil.copy(path / "index.sqlite", Path(made) / "kept")
            with Store.open(path) as store:
                save(store, [77] * 70, name="new")
            shutil.copy(Path(made) / "kept", path / "index.sqlite")
        with read_only(path), contextlib.ExitStack() as stack:
            if state.startswith("a file"):
                (path / "index.sqlite").chmod(0o400)
            before = files(path)
            store = stack.enter_context(Store.open(path))
            for items in CHAINS * 2:
                match = find(store, [*items, 5000])
                assert match is not None and match.n == len(items)
            expect_rows(store, match)
            if state == "behind":
                assert find(store, [*[77] * 70, 1]).n == 70
            assert find(store, [9999]) is None
            with pytest.raises(OSError) as caught:
                save(store, [1, 2, 3])
            assert caught.value.errno in (errno.EACCES, errno.EROFS)
            with pytest.raises(OSError) as caught:
                store.indexed(Index.rebuild)
            assert caught.value.errno in (errno.EACCES, errno.EROFS), "the disk itself does not fail"
            assert files(path) == before


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
@pytest.mark.parametrize("thing", ["fifo", "folder", "link"])
def test_whatever_stands_in_the_place_of_the_index_makes_room_for_it(tmp_path: Path, thing: str, suffix: str) -> None:
    path = tmp_path / "s"
    fill(path)
    place = path / f"index.sqlite{suffix}"
    place.unlink(missing_ok=True)
    if thing == "fifo":
        os.mkfifo(place)
    elif thing == "link":
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.mkdir()
        (place / "letter").write_bytes(b"dear")
    everything_is_found(path)
    assert not (tmp_path / "elsewhere").exists()
    kept = [folder / "letter" for folder in (path / "trash").iterdir()]
    assert [letter.read_bytes() for letter in kept] == ([b"dear"] if thing == "folder" else [])


def test_candidates_come_longest_first(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        for cut in (3, 60, 64, 70, 100, 130, 190, 200):
            save(store, [*range(cut), 5000 + cut])
        root = root_key(IDENTITY.digest, LAYOUT.digest, "default")
        asked = [*range(195), 9999]
        found = [common for common, _ in store.indexed(lambda index: list(index.candidates(root, asked)))]
        assert found == sorted(found, reverse=True)
        assert sorted(set(found)) == [3, 60, 64, 70, 100, 128, 130, 190, 192, 195]
