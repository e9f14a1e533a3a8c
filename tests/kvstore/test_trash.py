"""What was collected comes back as it was, or it is said what of it is lost; nothing newer is replaced; a kill in the middle harms nothing."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from crashing import STEM
from kvmemory import expect_rows, files, find, load, object_file, save
from test_crash import Forker, clean

from kvstore import Store, prune, trash
from kvstore.check import check
from kvstore.digest import label_file
from kvstore.errors import ObjectMissing, RefConflict, SnapshotMissing
from kvstore.files import Root

A = [(3 * i) % 90 for i in range(200)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "s")


def remove(store: Store, name: str) -> None:
    store.shelf.records.move_ref(name, store.resolve(name), None)


def collect(store: Store) -> None:
    prune.apply(store, prune.plan(store))


def in_trash(store: Store) -> list[str]:
    return sorted(p.name for p in (store.shelf.path / "trash").iterdir())


def sound(store: Store) -> None:
    assert not check(store).problems


def test_a_removed_and_collected_name_comes_back(store: Store) -> None:
    saved = save(store, A, name="a")
    save(store, [*A, 1], name="b")
    before = files(store.shelf.path)
    remove(store, "a")
    collect(store)
    gone = before.keys() - files(store.shelf.path).keys()
    assert len(gone) == 5  # ref, manifest, coverage, the two objects of the last block
    (found,) = trash.collected(store.shelf)
    assert (found.digest, found.names, found.tokens, found.lacking, found.in_store) == (
        saved.digest,
        ("a",),
        200,
        0,
        False,
    )
    assert found.bytes == sum(len(before[name]) for name in gone if not name.startswith("refs/"))
    done = trash.restore(store, "a")
    assert (done.digest, done.name, done.tokens, done.objects, done.lacking) == (saved.digest, "a", 200, 2, 0)
    after = files(store.shelf.path)
    ref = "refs/" + label_file("a")
    assert {**after, ref: b""} == {**before, ref: b""}
    expect_rows(store, store.match("a"))
    assert in_trash(store) == [] == trash.collected(store.shelf)
    sound(store)
    assert find(store, [*A, 5]).digest in (saved.digest, store.resolve("b"))


def test_a_removed_name_comes_back_before_anything_is_collected(store: Store) -> None:
    saved = save(store, A, name="a")
    remove(store, "a")
    (found,) = trash.collected(store.shelf)
    assert found.in_store and found.bytes == 0
    assert trash.restore(store, "a").objects == 0
    assert store.resolve("a") == saved.digest and in_trash(store) == []


def test_an_unnamed_one_comes_back_by_its_digest(store: Store) -> None:
    saved = save(store, A)
    assert saved.digest is not None
    collect(store)
    done = trash.restore(store, saved.digest.hex[:8])
    assert (done.name, done.objects) == (None, 8)
    expect_rows(store, find(store, [*A, 1]))
    collect(store)
    assert trash.restore(store, saved.digest.hex, "kept").name == "kept"
    collect(store)
    expect_rows(store, store.match("kept"))
    sound(store)


def test_two_that_share_come_back_one_after_the_other(store: Store) -> None:
    save(store, A, name="a")
    save(store, [*A, 1], name="b")
    for name in "ab":
        remove(store, name)
    collect(store)
    assert trash.restore(store, "b").objects == 8
    assert trash.restore(store, "a").objects == 2
    for name in "ab":
        expect_rows(store, store.match(name))
    assert in_trash(store) == []


def test_a_name_that_is_taken_is_not_moved(store: Store) -> None:
    saved = save(store, A, name="a")
    remove(store, "a")
    collect(store)
    other = save(store, [7, *A], name="a")
    before = files(store.shelf.path)
    with pytest.raises(RefConflict, match="--as"):
        trash.restore(store, "a")
    assert files(store.shelf.path) == before
    assert trash.restore(store, "a", "older").name == "older"
    assert (store.resolve("a"), store.resolve("older")) == (other.digest, saved.digest)


def test_nothing_newer_is_replaced(store: Store) -> None:
    """An object that was saved again meanwhile stays: the same content, another file."""
    saved = save(store, A, name="a")
    remove(store, "a")
    collect(store)
    save(store, A[:64], name="b", codec="planes")
    assert saved.snapshot is not None
    place = object_file(store.shelf.path, saved.snapshot.blocks[0][0])
    inode = place.stat().st_ino
    trash.restore(store, "a")
    assert place.stat().st_ino == inode
    expect_rows(store, store.match("a"))
    sound(store)


@pytest.mark.parametrize("harm", ["absent", "damaged", "a link"])
def test_what_is_lost_is_not_promised(store: Store, harm: str) -> None:
    saved = save(store, A, name="a")
    assert saved.snapshot is not None
    remove(store, "a")
    collect(store)
    place = store.shelf.path / "trash" / saved.snapshot.blocks[3][0].hex
    data = place.read_bytes()
    place.unlink()
    if harm == "damaged":
        place.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif harm == "a link":
        (store.shelf.path / "letter").write_bytes(data)
        place.symlink_to(store.shelf.path / "letter")
    assert trash.collected(store.shelf)[0].lacking == (harm == "absent")
    done = trash.restore(store, "a")
    assert (done.objects, done.lacking) == (7, 1)
    assert store.shelf.records.coverage(done.digest, saved.snapshot).runs == (((0, 3),), ((0, 4),))
    expect_rows(store, store.match("a", at=192))
    sound(store)


def test_what_is_lost_whole_is_an_error(store: Store) -> None:
    saved = save(store, A, name="a")
    remove(store, "a")
    collect(store)
    assert saved.snapshot is not None and saved.digest is not None
    for block in saved.snapshot.blocks:
        for name in block:
            (store.shelf.path / "trash" / name.hex).unlink()
    with pytest.raises(ObjectMissing, match="kvferry pull"):
        trash.restore(store, "a")
    assert list(store.shelf.records.snapshots()) == [] == list(store.shelf.records.refs())
    prune.purge(store)
    for text in ("a", saved.digest.hex, "0" * 64):
        with pytest.raises(SnapshotMissing):
            trash.restore(store, text)
    assert trash.collected(store.shelf) == []


def test_a_name_of_what_was_deleted_says_so(store: Store) -> None:
    saved = save(store, A, name="a")
    collect(store)
    remove(store, "a")
    (store.shelf.path / "snapshots" / str(saved.digest)).unlink()
    with pytest.raises(SnapshotMissing, match="it was deleted"):
        trash.restore(store, "a")


def test_odd_files_in_the_trash_are_passed_over(store: Store) -> None:
    save(store, A, name="a")
    remove(store, "a")
    collect(store)
    there = store.shelf.path / "trash"
    for name in ("x.ref", "0" * 64 + ".ref", "1" * 64 + ".snapshot", "letter", "z" * 64 + ".snapshot"):
        (there / name).write_bytes(b"?")
    (there / ("2" * 64 + ".ref")).mkdir()
    shutil.copy(there / f"{label_file('a')}.ref", there / f"{label_file('b')}.ref")
    found = trash.collected(store.shelf)
    assert [(one.names, one.tokens) for one in found] == [(("a",), 200), ((), None)]
    assert trash.restore(store, "a").objects == 8


def test_a_reader_at_work_keeps_what_it_reads(store: Store) -> None:
    """While somebody loads, what came back also stays in the trash, where it may be looked for."""
    save(store, A, name="a")
    match = store.match("a")
    remove(store, "a")
    collect(store)
    with Store.open(store.shelf.path) as other, other.shelf.reading():
        trash.restore(store, "a")
        assert len(in_trash(store)) == 11
        load(store, match)
    assert prune.purge(store) > 0
    expect_rows(store, store.match("a"))


def test_readers_find_it_at_every_moment(store: Store) -> None:
    save(store, A, name="a")
    match = store.match("a")
    over, failed = threading.Event(), []

    def read() -> None:
        with Store.open(store.shelf.path) as other:
            while not over.is_set():
                try:
                    load(other, match)
                except ObjectMissing as error:
                    failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(5):
        remove(store, "a")
        collect(store)
        trash.restore(store, "a")
    over.set()
    thread.join()
    assert failed == []


def test_a_file_system_without_links(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no)
    save(store, A, name="a")
    remove(store, "a")
    collect(store)
    assert trash.restore(store, "a").objects == 8
    expect_rows(store, store.match("a"))
    assert in_trash(store) == []
    sound(store)


def test_the_order_is_objects_manifest_name(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, A, name="a")
    remove(store, "a")
    collect(store)
    path, events = store.shelf.path, []
    sync_all = Root.sync_all

    def noted(self: Root, folders: Iterable[str]) -> None:
        names = list(folders)
        sync_all(self, names)
        refs, manifests = len(list((path / "refs").iterdir())), len(list((path / "snapshots").iterdir()))
        events.extend((folder.partition("/")[0], manifests, refs) for folder in names)

    monkeypatch.setattr(Root, "sync_all", noted)
    trash.restore(store, "a")
    stages = [event for i, event in enumerate(events) if i == 0 or events[i - 1] != event]
    assert stages == [("objects", 0, 0), ("snapshots", 2, 0), ("refs", 2, 1)]


def test_removing_a_name_needs_no_trash_and_no_room(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        save(store, [*A, ord(name)], name=name)
    rename = Root.rename

    def full(self: Root, source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Root, "rename", full)
    remove(store, "a")
    monkeypatch.setattr(Root, "rename", rename)
    (store.shelf.path / "trash").rmdir()
    remove(store, "b")
    assert list(store.shelf.records.refs()) == [] == trash.collected(store.shelf)


# killed


@pytest.fixture
def forker(tmp_path: Path) -> Iterator[Forker]:
    forker = Forker(tmp_path / "unused")
    yield forker
    forker.close()


@pytest.mark.parametrize("action", ["restore", "evict", "pin"])
def test_killed_before_every_step(tmp_path: Path, forker: Forker, action: str) -> None:
    made = tmp_path / "made"
    with Store.open(made) as store:
        first = save(store, STEM, name="a")
        gone = save(store, [5, *STEM], name="gone")
        remove(store, "gone")
        if action == "restore":
            collect(store)
    forker.ask(f"step {action} 0 {shutil.copytree(made, tmp_path / 'count')}")
    calls = next(int(words[1]) for words in forker.until_end() if words[0] == "calls")
    list(forker.until_end())
    assert calls > 3
    for number in range(1, calls + 1, max(1, calls // 15)):
        path = tmp_path / f"at-{number}"
        shutil.copytree(made, path)
        forker.ask(f"step {action} {number} {path}")
        list(forker.until_end())
        assert forker.status == signal.SIGKILL
        with Store.open(path) as store:
            clean(store)
            assert store.resolve("a") == first.digest
            expect_rows(store, store.match("a"))
            labels = {ref.label for ref in store.shelf.records.refs()}
            assert {label for label in labels if not label.startswith("pin/")} - {"gone"} == {"a"}
            if action == "restore":
                if "gone" in labels:
                    expect_rows(store, store.match("gone"))
                else:
                    assert trash.restore(store, "gone").lacking == 0
                assert store.resolve("gone") == gone.digest
            collect(store)
            prune.purge(store)
            clean(store)
            for ref in store.shelf.records.refs():
                expect_rows(store, store.match(ref.label))
        shutil.rmtree(path)
