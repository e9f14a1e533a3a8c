"""What a transfer does about damage, on either side: what it says, and that following it mends."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from ferries import assert_restores, object_files, pulled, pushed, save, tree, verify
from sentences import assert_told

from kvstore import Store
from kvstore.check import check
from kvstore.digest import label_file
from kvstore.errors import (
    CoverageCorrupt,
    KVError,
    ObjectCorrupt,
    RefConflict,
    RefCorrupt,
    Refused,
    SnapshotCorrupt,
    SnapshotMissing,
    StoreCorrupt,
    StoreMissing,
)
from sync import Folder, Moved, pull, push
from sync.folder import Folder as FolderRemote


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)


# two at once


def test_two_pulls_of_one_snapshot_at_once_both_succeed(mac: Store, stick: Path, tmp_path: Path) -> None:
    """Both have planned when the first one gives the name."""
    save(mac, "book", 300)
    pushed(mac, stick, "book")
    Store.open(tmp_path / "pad").close()
    planned = threading.Barrier(2, timeout=30)
    outcomes: list[object] = []

    class Together(FolderRemote):
        def fetch(self, names):  # type: ignore[no-untyped-def]
            if not self.__dict__.setdefault("waited", False):
                self.__dict__["waited"] = True
                planned.wait()
            return super().fetch(names)

    def run() -> None:
        try:
            with Store.open(tmp_path / "pad") as store, Together.open(stick) as remote:
                outcomes.append(pull(store, remote, ["book"]))
        except BaseException as error:
            outcomes.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(o, Moved) for o in outcomes), outcomes
    verify(tmp_path / "pad")
    with Store.open(tmp_path / "pad") as store:
        assert_restores(store, "book", 300)


@pytest.mark.parametrize("way", ["pull", "push"])
@pytest.mark.parametrize("before", [None, 100])
def test_a_name_that_somebody_else_moved_to_the_same_snapshot_is_no_conflict(
    way: str, before: int | None, mac: Store, phone: Store, stick: Path
) -> None:
    """A name that was absent, or stood at an older snapshot, when this side planned."""
    if before is not None:
        save(mac, "book", before)
        pushed(mac, stick, "book")
        pulled(phone, stick, "book")
    save(mac, "book", 300)
    if way == "pull":
        pushed(mac, stick, "book")
    target = phone.shelf.path if way == "pull" else stick
    lock, started = threading.Lock(), []

    class Overtaken(FolderRemote):
        def _first(self) -> None:
            with lock:
                if not started:
                    started.append(1)
                    with Store.open(target) as other, Folder.open(mac.shelf.path) as source:
                        pull(other, source, ["book"])

        def fetch(self, names):  # type: ignore[no-untyped-def]
            self._first()
            return super().fetch(names)

        def put(self, frames, lengths):  # type: ignore[no-untyped-def]
            self._first()
            return super().put(frames, lengths)

    if way == "pull":
        with Overtaken.open(stick) as remote:
            pull(phone, remote, ["book"])
        assert_restores(phone, "book", 300)
    else:
        with Overtaken.open(stick, create=True) as remote:
            push(mac, remote, ["book"])
    assert started
    verify(target)


# names


def test_a_damaged_name_here_is_given_anew_by_a_pull(mac: Store, phone: Store, stick: Path) -> None:
    save(mac, "book", 300)
    pushed(mac, stick, "book")
    pulled(phone, stick, "book")
    flip(phone.shelf.path / "refs" / label_file("book"))
    assert pulled(phone, stick, "book").objects == 0
    assert_restores(phone, "book", 300)
    assert check(phone).ok
    flip(phone.shelf.path / "refs" / label_file("book"))
    save(phone, "other", 100, "b")
    pushed(phone, stick, "other")
    pulled(phone, stick, "other", rename="book")
    assert_restores(phone, "book", 100, "b")


def test_a_damaged_name_there_needs_force(mac: Store, stick: Path) -> None:
    save(mac, "book", 300)
    pushed(mac, stick, "book")
    flip(stick / "refs" / label_file("book"))
    before = tree(stick)
    with pytest.raises(RefCorrupt) as caught:
        pushed(mac, stick, "book")
    assert_told(caught.value, f"{stick}: name 'book'", f"`kvferry push --force {shlex.quote(str(stick))} NAME`")
    assert tree(stick) == before
    pushed(mac, stick, "book", force=True)
    verify(stick)


@pytest.mark.parametrize("how", ["damaged", "gone"])
@pytest.mark.parametrize("way", ["pull", "push"])
def test_a_name_whose_snapshot_cannot_be_compared_needs_force(
    way: str, how: str, mac: Store, phone: Store, stick: Path
) -> None:
    old = save(mac, "book", 100)
    pushed(mac, stick, "book")
    pulled(phone, stick, "book")
    save(mac, "book", 300)
    if way == "pull":
        pushed(mac, stick, "book")
    manifest = (phone.shelf.path if way == "pull" else stick) / "snapshots" / str(old.digest)
    flip(manifest) if how == "damaged" else manifest.unlink()

    def attempt(force: bool) -> Moved:
        return pulled(phone, stick, "book", force=force) if way == "pull" else pushed(mac, stick, "book", force=force)

    with pytest.raises(SnapshotCorrupt if how == "damaged" else SnapshotMissing) as caught:
        attempt(False)
    assert_told(caught.value, f"`kvferry {way} --force REMOTE book`", str(old.digest))
    attempt(True)
    with Store.open(manifest.parent.parent) as store:
        assert_restores(store, "book", 300)


# what mends what


HARMS: dict[str, tuple[Callable[[Path, str], Path], type[KVError]]] = {
    "object": (lambda path, _: object_files(path)[3], ObjectCorrupt),
    "manifest": (lambda path, digest: path / "snapshots" / digest, SnapshotCorrupt),
    "coverage": (lambda path, digest: path / "snapshots" / f"{digest}.cov", CoverageCorrupt),
    "ref": (lambda path, _: path / "refs" / label_file("book"), RefCorrupt),
}


@pytest.mark.parametrize("what", HARMS)
def test_what_a_damaged_remote_is_told_to_do_mends_it(what: str, mac: Store, phone: Store, stick: Path) -> None:
    digest = str(save(mac, "book", 300).digest)
    pushed(mac, stick, "book")
    find, kind = HARMS[what]
    flip(find(stick, digest))
    with pytest.raises(kind) as caught:
        pulled(phone, stick, "book")
    options = {"object": "--verify ", "ref": "--force "}.get(what, "")
    assert_told(caught.value, f"{stick}: ", f"`kvferry push {options}{shlex.quote(str(stick))} NAME`")
    assert f"{stick}: {stick}" not in str(caught.value)
    with Folder.open(stick, create=True) as remote:
        push(mac, remote, ["book"], verify=what == "object", force=what == "ref")
    verify(stick)
    pulled(phone, stick, "book")
    assert_restores(phone, "book", 300)


@pytest.mark.parametrize("what", HARMS)
def test_what_a_damaged_store_is_told_to_do_mends_it(what: str, mac: Store, phone: Store, stick: Path) -> None:
    digest = str(save(mac, "book", 300).digest)
    pushed(mac, stick, "book")
    pulled(phone, stick, "book")
    find, kind = HARMS[what]
    flip(find(phone.shelf.path, digest))
    with pytest.raises(kind) as caught:
        assert_restores(phone, "book", 300)
    verify_option = "--verify " if what == "object" else ""
    assert_told(caught.value, f"`kvferry pull {verify_option}REMOTE ")
    (problem,) = check(phone).problems
    assert f"`kvferry pull {verify_option}REMOTE book`" in problem.todo or what == "ref"
    with Folder.open(stick) as remote:
        pull(phone, remote, ["book"], verify=what == "object")
    assert check(phone).ok
    assert_restores(phone, "book", 300)


def test_a_damaged_object_is_not_sent_and_told_by_name(mac: Store, stick: Path) -> None:
    save(mac, "book", 300)
    flip(object_files(mac.shelf.path)[0])
    with pytest.raises(ObjectCorrupt) as caught:
        pushed(mac, stick, "book")
    assert_told(
        caught.value, str(mac.shelf.path), "It was not sent.", "`kvferry pull --verify REMOTE book`", "--name book"
    )


# what is no remote


def test_a_remote_that_lost_its_format_is_not_given_another(mac: Store, phone: Store, stick: Path) -> None:
    save(mac, "book", 300)
    pushed(mac, stick, "book")
    (stick / "format.json").unlink()
    before = tree(stick)
    with pytest.raises(StoreCorrupt) as caught:
        pushed(mac, stick, "book")
    assert_told(caught.value, str(stick), '{"format": 2, "features": []}')
    with pytest.raises(StoreCorrupt):
        pulled(phone, stick, "book")
    assert tree(stick) == before
    (stick / "format.json").write_text('{"format": 2, "features": []}')
    assert pushed(mac, stick, "book").skipped == 10


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "an interrupted one", "something else", "a file"])
def test_where_a_push_makes_a_remote(mac: Store, phone: Store, stick: Path, there: str) -> None:
    save(mac, "book", 300)
    if there == "a file":
        stick.write_bytes(b"mine")
    elif there != "nothing":
        stick.mkdir()
    if there == "an interrupted one":
        (stick / "objects" / "00").mkdir(parents=True)
        (stick / "lock").touch()
    if there == "something else":
        (stick / "letter.txt").write_text("dear")
    if there in ("something else", "a file"):
        before = tree(stick.parent)
        with pytest.raises(Refused) as caught:
            pushed(mac, stick, "book")
        assert_told(caught.value, str(stick))
        with pytest.raises(StoreMissing):
            pulled(phone, stick, "book")
        assert {k: v for k, v in tree(stick.parent).items() if k.startswith("stick")} == {
            k: v for k, v in before.items() if k.startswith("stick")
        }
    else:
        assert pushed(mac, stick, "book").objects == 10
        verify(stick)


def test_a_conflict_stays_a_conflict(mac: Store, phone: Store, stick: Path) -> None:
    save(mac, "book", 300)
    pushed(mac, stick, "book")
    save(phone, "book", 300, "b")
    with pytest.raises(RefConflict):
        pulled(phone, stick, "book")
