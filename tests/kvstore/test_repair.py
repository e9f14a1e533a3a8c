"""`repair` sets aside what is damaged and promises what is here: nothing is deleted, nothing sound is lost, whenever it is killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from independent import MANIFEST, OBJECT, frame
from kvmemory import HEAD, carry, expect_rows, files, find, load, object_file, save

from kvstore import Store, prune, repair
from kvstore.check import check
from kvstore.codec import HEADER
from kvstore.digest import label_file
from kvstore.errors import NotCovered, SnapshotCorrupt, SnapshotMissing, StoreBusy, StoreCorrupt
from kvstore.files import Root
from kvstore.inventory import QUICK

ITEMS = [(3 * i) % 90 for i in range(400)]
OTHER = list(range(1000, 1100))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.open(tmp_path / "s")
    save(store, ITEMS, name="a", pending=1, head=HEAD)
    save(store, OTHER, name="b")
    return store


def flip(path: Path, at: int = -1, bit: int = 2) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def mended(store: Store) -> repair.Repaired:
    """Repairs; afterwards nothing is damaged, and a second repair finds nothing to do."""
    done = repair.apply(store, check(store))
    report = check(store)
    assert report.ok, report
    before = files(store.shelf.path)
    again = repair.apply(store, report)
    assert (again.folder, again.actions, again.lost) == (None, (), False)
    assert files(store.shelf.path) == before
    return done


def kept(store: Store) -> dict[str, bytes]:
    """The files that repairs set aside, by their last name, without the notes."""
    found = files(store.shelf.path / "damaged")
    return {name.rpartition("/")[2]: data for name, data in found.items() if not name.endswith(repair.NOTE)}


def test_a_sound_store_is_left_alone(store: Store) -> None:
    before = files(store.shelf.path)
    done = repair.apply(store, check(store))
    assert (done.folder, done.actions, done.names) == (None, (), ())
    assert files(store.shelf.path) == before and not (store.shelf.path / "damaged").exists()


@pytest.mark.parametrize(
    ("block", "group", "left"),
    [(6, 0, 384), (1, 0, 64), (0, 0, 0), (6, 1, 384), (0, 1, 400), (3, 1, 400), (4, 1, 256), (5, 1, 320)],
)
@pytest.mark.parametrize("how", ["flipped", "absent", "cut", "a link", "a folder"])
def test_an_object(store: Store, tmp_path: Path, block: int, group: int, left: int, how: str) -> None:
    digest = store.resolve("a")
    name = store.match("a").snapshot.blocks[block][group]
    place = object_file(store.shelf.path, name)
    was = place.read_bytes()
    if how == "flipped":
        flip(place)
    elif how == "cut":
        place.write_bytes(was[:-1])
    else:
        place.rename(tmp_path / "away")
        if how == "a link":
            place.symlink_to(tmp_path / "away")
        elif how == "a folder":
            place.mkdir()
            (place / "letter").write_bytes(b"dear")
    harmed = place.read_bytes() if place.is_file() else b""
    coverage = store.shelf.path / "snapshots" / f"{digest}.cov"
    promised = coverage.read_bytes()
    seen = check(store)
    assert [action.path for action in repair.plan(seen)] == [str(place.relative_to(store.shelf.path))]
    done = mended(store)

    # What is set aside is all there, with a note; the promise is exactly what is here.
    assert done.folder is not None
    folder = store.shelf.path / done.folder
    assert not os.path.lexists(place)
    assert (folder / f"{digest}.cov").read_bytes() == promised
    if how in ("flipped", "cut"):
        assert (folder / name.hex).read_bytes() == harmed
    elif how == "a link":
        assert (folder / name.hex).is_symlink() and (tmp_path / "away").read_bytes() == was
    elif how == "a folder":
        assert (folder / name.hex / "letter").read_bytes() == b"dear"
    note = json.loads((folder / repair.NOTE).read_bytes())
    assert [(p["path"], p["names"]) for p in note["problems"]] == [(str(place.relative_to(store.shelf.path)), ["a"])]
    snapshot = store.shelf.records.snapshot(digest)
    now = store.shelf.records.coverage(digest, snapshot)
    assert {(b, g) for g in (0, 1) for b in range(7) if not now.has(b, g)} == {(block, group)}

    # What the name lost, what of it is left, and the command.
    (lost,) = done.names
    assert (lost.label, lost.tokens, lost.usable, lost.objects) == ("a", 400, left, 1)
    assert lost.pull == "kvferry pull REMOTE a" and f"name 'a': {left} of 400 tokens can be continued" in str(done)
    match = find(store, [*ITEMS, 1])
    if left == 0:
        assert match is None or match.n == 0
    else:
        assert match.n == left
        expect_rows(store, match)
    if left < 400:
        with pytest.raises(NotCovered):
            store.match("a")
        (named,) = [named for named in check(store).names if named.label == "a"]
        assert (named.usable, named.pull) == (left, "kvferry pull REMOTE a")
    expect_rows(store, store.match("b"))

    # Saving the same again heals it.
    save(store, ITEMS, name="a", pending=1, head=HEAD)
    expect_rows(store, store.match("a"))


def test_a_trimmed_snapshot_is_fetched_again_trimmed(store: Store, tmp_path: Path) -> None:
    with Store.open(tmp_path / "phone") as phone:
        digest = store.resolve("a")
        carry(store, phone, digest)
        phone.shelf.records.move_ref("a name", None, digest)
        object_file(phone.shelf.path, phone.shelf.records.snapshot(digest).blocks[5][1]).unlink()
        report = check(phone)
        assert [n.pull for n in report.names] == ["kvferry pull --verify --trimmed REMOTE 'a name'"]
        done = mended(phone)
        assert [n.pull for n in done.names] == ["kvferry pull --trimmed REMOTE 'a name'"]


@pytest.mark.parametrize("source", ["trash", "quarantine"])
@pytest.mark.parametrize("how", ["absent", "flipped"])
def test_a_sound_copy_is_put_back(store: Store, source: str, how: str) -> None:
    name = store.match("a").snapshot.blocks[1][0]
    place = object_file(store.shelf.path, name)
    was = place.read_bytes()
    copy = store.shelf.path / source / ("dead" if source == "quarantine" else "") / name.hex
    copy.parent.mkdir(exist_ok=True)
    copy.write_bytes(was)
    place.unlink() if how == "absent" else flip(place)
    done = mended(store)
    assert not done.lost and done.names == () and place.read_bytes() == was and not copy.exists()
    assert len(kept(store)) == (how == "flipped")
    expect_rows(store, store.match("a"))


def test_a_damaged_copy_and_one_that_a_transfer_holds_are_not(store: Store) -> None:
    name = store.match("a").snapshot.blocks[1][0]
    place = object_file(store.shelf.path, name)
    held = store.shelf.path / "quarantine" / "alive"
    held.mkdir()
    (held / name.hex).write_bytes(place.read_bytes())
    (store.shelf.path / "trash" / name.hex).write_bytes(place.read_bytes()[:-1] + b"?")
    place.unlink()
    root = Root(store.shelf.path)
    with root.lock("quarantine/alive", exclusive=True):
        done = repair.apply(store, check(store))
    root.close()
    assert done.lost and (held / name.hex).exists() and check(store).ok


@pytest.mark.parametrize("how", ["flipped", "emptied", "absent", "a folder"])
def test_a_coverage_is_made_anew_of_what_is_here_and_sound(store: Store, how: str) -> None:
    digest = store.resolve("a")
    snapshot = store.match("a").snapshot
    object_file(store.shelf.path, snapshot.blocks[2][0]).unlink()
    flip(object_file(store.shelf.path, snapshot.blocks[3][1]))
    place = store.shelf.path / "snapshots" / f"{digest}.cov"
    if how == "flipped":
        flip(place)
    elif how == "emptied":
        place.write_bytes(b"")
    else:
        place.unlink()
        if how == "a folder":
            place.mkdir()
    done = mended(store)
    assert store.shelf.records.coverage(digest, snapshot).runs == (((0, 2), (3, 7)), ((0, 3), (4, 7)))
    (lost,) = done.names
    assert (lost.label, lost.usable) == ("a", 128)
    assert find(store, [*ITEMS, 1]).n == 128


def test_a_coverage_alone_costs_nothing(store: Store) -> None:
    (store.shelf.path / "snapshots" / f"{store.resolve('a')}.cov").unlink()
    done = mended(store)
    assert not done.lost
    expect_rows(store, store.match("a"))


def test_a_coverage_of_nothing_is_a_promise_that_can_be_kept(store: Store) -> None:
    for path in (store.shelf.path / "objects").glob("?/*"):
        path.unlink()
    done = mended(store)
    assert [(n.label, n.usable) for n in done.names] == [("a", 0), ("b", 0)]


@pytest.mark.parametrize("how", ["flipped", "absent"])
def test_a_manifest_goes_with_the_names_that_stand_for_it(store: Store, how: str) -> None:
    digest, path = store.resolve("a"), store.shelf.path
    manifest = path / "snapshots" / digest.hex
    flip(manifest) if how == "flipped" else manifest.unlink()
    with pytest.raises(SnapshotCorrupt if how == "flipped" else SnapshotMissing):
        prune.plan(store)
    done = mended(store)
    (lost,) = done.names
    assert (lost.label, lost.snapshot, lost.usable, lost.pull) == ("a", digest, None, "kvferry pull REMOTE a")
    with pytest.raises(SnapshotMissing):
        store.resolve("a")
    aside = kept(store)
    assert f"ref-{label_file('a')}" in aside and f"{digest}.cov" in aside
    assert (f"{digest}.snapshot" in aside) is (how == "flipped")
    expect_rows(store, store.match("b"))
    prune.apply(store, prune.plan(store))  # collecting works again
    assert check(store).ok


def test_a_manifest_that_lies_in_the_trash_comes_back(store: Store) -> None:
    digest, path = store.resolve("a"), store.shelf.path
    data = (path / "snapshots" / digest.hex).read_bytes()
    (path / "snapshots" / digest.hex).rename(path / "trash" / f"{digest}.snapshot")
    report = check(store)
    assert [p.kind for p in report.problems] == ["manifest"]
    done = mended(store)
    assert not done.lost and (path / "snapshots" / digest.hex).read_bytes() == data
    prune.purge(store)
    expect_rows(store, store.match("a"))


# refs


def test_a_ref_with_any_one_bit_flipped_is_read_again(store: Store) -> None:
    """Whatever bit it is: label and snapshot prove themselves, by the file's name and by the manifest that is here."""
    digest = store.resolve("a")
    store.shelf.records.rename_ref("a", "Café 1")
    place = store.shelf.path / "refs" / label_file("Café 1")
    whole = place.read_bytes()
    for at in range(0, len(whole), 3):
        flip(place, at, at % 8)
        report = check(store, QUICK)
        assert [p.kind for p in report.problems] == ["ref"], at
        done = repair.apply(store, report)
        assert not done.lost, (at, done)
        assert store.resolve("Café 1") == digest
        place.write_bytes(whole)
    assert {ref.label for ref in store.shelf.records.refs()} == {"Café 1", "b"}
    assert len(kept(store)) == 1 and len(list((store.shelf.path / "damaged").iterdir())) == -(-len(whole) // 3)


@pytest.mark.parametrize("how", ["emptied", "a folder", "another snapshot's"])
def test_what_a_lost_ref_may_have_stood_for_is_not_collected(store: Store, how: str) -> None:
    digest = store.resolve("a")
    cache = save(store, [7] * 70)
    place = store.shelf.path / "refs" / label_file("a")
    if how == "emptied":
        place.write_bytes(b"")
    elif how == "a folder":
        place.unlink()
        place.mkdir()
    else:
        data = bytearray(place.read_bytes())
        at = data.index(digest.raw, HEADER)
        data[at : at + 32] = bytes(32)
        place.write_bytes(data)
    done = mended(store)
    (lost,) = done.names
    assert lost.label == ("a" if how.startswith("another") else None) and done.lost
    prune.apply(store, prune.plan(store))
    prune.purge(store)
    assert {ref.label: ref.snapshot for ref in store.shelf.records.refs() if ref.label != "b"} == {
        f"recovered-{one.hex[:12]}": one for one in (digest, cache.digest)
    }
    expect_rows(store, store.match(f"recovered-{digest.hex[:12]}"))


def test_a_ref_whose_label_alone_is_lost(store: Store) -> None:
    digest = store.resolve("a")
    save(store, [7] * 70)
    place = store.shelf.path / "refs" / label_file("a")
    data = place.read_bytes()
    place.rename(place.with_name(label_file("another")))
    place.with_name(label_file("another")).write_bytes(data.replace(b"label\xa1a", b"label\xa1?"))
    done = mended(store)
    assert [n.label for n in done.names] == [None]
    assert {ref.label: ref.snapshot for ref in store.shelf.records.refs() if ref.label != "b"} == {
        f"recovered-{digest.hex[:12]}": digest
    }


# what nobody here can judge


def test_what_is_newer_is_left_alone(store: Store) -> None:
    path = store.shelf.path
    place = object_file(path, store.match("b").snapshot.blocks[0][0])
    place.write_bytes(frame(OBJECT, place.read_bytes()[HEADER:], version=2))
    manifest = path / "snapshots" / store.resolve("a").hex
    manifest.write_bytes(frame(MANIFEST, manifest.read_bytes()[HEADER:], version=2))
    before = files(path)
    done = repair.apply(store, check(store))
    assert files(path) == before and done.actions == ()
    assert {p.kind for p in check(store).problems} == {"newer"}


@pytest.mark.parametrize("folder", ["objects", "snapshots", "refs", "tmp", "quarantine"])
def test_a_folder_that_is_a_link_is_not_judged(store: Store, tmp_path: Path, folder: str) -> None:
    """A whole folder that was moved to another disk is no damage to be tidied away."""
    (store.shelf.path / folder).rename(tmp_path / "away")
    (store.shelf.path / folder).symlink_to(tmp_path / "away")
    before = files(tmp_path)
    with pytest.raises(StoreCorrupt, match=f"s/{folder}: expected a plain folder"):
        repair.apply(store, check(store))
    assert files(tmp_path) == before


def test_a_fan_out_folder(store: Store, tmp_path: Path) -> None:
    name = store.match("b").snapshot.blocks[0][0]
    folder = object_file(store.shelf.path, name).parent
    folder.rename(tmp_path / "away")
    folder.symlink_to(tmp_path / "away")
    done = mended(store)
    assert folder.is_dir() and not folder.is_symlink() and done.folder is not None
    assert (store.shelf.path / done.folder / f"objects-{folder.name}").is_symlink()
    assert (tmp_path / "away" / name.hex[1:]).exists()


def test_empty_folders_are_put_back(store: Store) -> None:
    for name in ("tmp", "quarantine", "trash"):
        (store.shelf.path / name).rmdir()
    (store.shelf.path / "lock").unlink()
    report = check(store)
    assert report.ok and report.notes == (
        "tmp, quarantine, trash, lock: not here; `kvferry check --repair` puts what was empty back.",
    )
    done = repair.apply(store, report)
    assert not done.lost and check(store).notes == ()
    save(store, [1, 2, 3])


def test_the_index_is_made_anew(store: Store) -> None:
    object_file(store.shelf.path, store.match("a").snapshot.blocks[3][0]).unlink()
    (store.shelf.path / "index.sqlite").write_bytes(b"hello")
    mended(store)
    assert check(store).notes[0].startswith("damaged: 1 repair set aside")
    assert find(store, [*ITEMS, 1]).n == 192


def test_what_repair_set_aside_is_nobodys(store: Store) -> None:
    flip(object_file(store.shelf.path, store.match("a").snapshot.blocks[3][0]))
    mended(store)
    before = files(store.shelf.path / "damaged")
    prune.apply(store, prune.plan(store))
    prune.purge(store)
    save(store, ITEMS, name="a")
    assert files(store.shelf.path / "damaged") == before != {}


def test_many_objects_at_once(store: Store) -> None:
    """More than are looked at under one hold of the lock, shared by several snapshots."""
    for end in (130, 260, 390):
        save(store, ITEMS[:end], name=f"part {end}")
    names = [c for block in store.match("a").snapshot.blocks for c in block]
    for name in names[::2] + names[1:4:2]:
        flip(object_file(store.shelf.path, name))
    whole = {n.label: n.usable for n in check(store).names}
    done = mended(store)
    assert {n.label: n.usable for n in done.names} == {k: v for k, v in whole.items() if k != "b"}
    expect_rows(store, store.match("b"))


# at any moment


def harm(path: Path) -> None:
    """One of everything."""
    with Store.open(path) as store:
        save(store, ITEMS, name="a")
        save(store, ITEMS[:200], name="short")
        save(store, OTHER, name="b")
        save(store, [7] * 70, name="c")
        save(store, [8] * 70, name="d")
        save(store, [9] * 70)
        blocks = store.match("a").snapshot.blocks
        flip(object_file(path, blocks[1][0]))
        object_file(path, blocks[4][0]).unlink()
        trash = object_file(path, blocks[5][0])
        trash.rename(path / "trash" / blocks[5][0].hex)
        (path / "snapshots" / f"{store.resolve('b')}.cov").write_bytes(b"")
        flip(path / "snapshots" / store.resolve("c").hex)
    (path / "refs" / label_file("d")).write_bytes(b"")


def outcome(path: Path) -> tuple[dict[str, int | None], dict[str, bytes]]:
    with Store.open(path) as store:
        report = check(store)
        assert report.ok, report
        for named in report.names:
            match = find(store, [*store.shelf.records.snapshot(named.snapshot).items, 1])
            expect_rows(store, match)
        return {n.label: n.usable for n in report.names}, kept(store)


CALLS = ("rename", "unlink", "rmdir", "mkdir", "fsync")


def in_child(path: Path, at: int) -> int:
    """Repairs in a process that is killed before its ``at``-th change (0: never). Returns how many there were, or -1 if it was killed."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        count = 0

        def counting(call: Callable[..., object]) -> Callable[..., object]:
            def run(*args: object, **kwargs: object) -> object:
                nonlocal count
                count += 1
                if count == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return run

        try:
            for name in CALLS:
                setattr(os, name, counting(getattr(os, name)))
            with Store.open(path) as store:
                repair.apply(store, check(store))
            os.write(write, str(count).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        told = answer.read()
    os.waitpid(pid, 0)
    return int(told) if told else -1


def test_killed_before_every_change(tmp_path: Path) -> None:
    """Wherever it stops the next repair ends at the same names and prefixes, and what was damaged is all there."""
    made = tmp_path / "made"
    harm(made)
    whole = tmp_path / "whole"
    shutil.copytree(made, whole)
    with Store.open(made) as store:
        absent = {p.path for p in check(store, QUICK).problems if p.kind == "object"}
    calls = in_child(whole, 0)
    names, aside = outcome(whole)
    assert calls > 30
    assert {k: v for k, v in names.items() if not k.startswith("recovered")} == {"a": 64, "short": 64, "b": 100}
    assert sum(k.startswith("recovered") for k in names) == 2  # d's snapshot, and the cache it may have stood for
    for at in range(1, calls + 1, calls // 16):
        path = tmp_path / "killed"
        shutil.copytree(made, path)
        assert in_child(path, at) == -1
        with Store.open(path) as store:  # what is promised is here, or told as damage; nothing sound is lost on the way
            for label in ("a", "short"):
                digest = store.resolve(label)
                assert store.shelf.records.has_snapshot(digest)
            report = check(store, QUICK)
            assert {p.path for p in report.problems if p.kind == "object"} <= absent, "the promise goes before the file"
            repair.apply(store, check(store))
        again, kept_now = outcome(path)
        assert again == names, at
        assert {k: v for k, v in aside.items() if not k.endswith(".cov")}.items() <= kept_now.items(), at
        assert aside.keys() <= kept_now.keys(), at
        shutil.rmtree(path)


def test_with_savers_readers_and_a_collector_at_work(tmp_path: Path) -> None:
    """Threads of one process: the locks are the same. Nobody sees an error that is not about what was damaged; at the end all is sound."""
    path = tmp_path / "s"
    with Store.open(path) as store:
        save(store, ITEMS, name="a")
        save(store, OTHER, name="b")
    over, errors = threading.Event(), []

    def at_work(act: Callable[[Store, int], object]) -> None:
        try:
            with Store.open(path) as mine:
                for number in range(10**6):
                    if over.is_set():
                        return
                    act(mine, number)
        except BaseException as error:
            errors.append(error)

    def saver(mine: Store, number: int) -> None:
        save(mine, [*ITEMS[:130], number % 7], name=f"n{number % 3}")

    def reader(mine: Store, number: int) -> None:
        expect_rows(mine, mine.match("b"))

    def collector(mine: Store, number: int) -> None:
        prune.apply(mine, prune.plan(mine))

    threads = [threading.Thread(target=at_work, args=(act,)) for act in (saver, reader, collector)]
    for thread in threads:
        thread.start()
    chance = random.Random(3)
    try:
        with Store.open(path) as store:
            for _ in range(6):
                place = object_file(
                    path, store.shelf.records.snapshot(store.resolve("a")).blocks[chance.randrange(2, 6)][0]
                )
                if place.exists():
                    flip(place)
                repair.apply(store, check(store))
                save(store, ITEMS, name="a")
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert errors == []
    with Store.open(path) as store:
        report = check(store)
        assert report.ok and all(n.whole for n in report.names), report
        expect_rows(store, store.match("a"))
        assert load(store, store.match("n0"))


def test_one_repair_at_a_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(object_file(store.shelf.path, store.match("a").snapshot.blocks[3][0]))
    report = check(store)
    (store.shelf.path / "damaged").mkdir()
    root = Root(store.shelf.path)
    real = Root.lock
    monkeypatch.setattr(
        Root,
        "lock",
        lambda self, path, *, exclusive, seconds=30.0: real(
            self, path, exclusive=exclusive, seconds=min(seconds, 0.05)
        ),
    )
    with root.lock("damaged", exclusive=True), pytest.raises(StoreBusy) as caught:
        repair.apply(store, report)
    assert f"process {os.getpid()}" in str(caught.value)
    root.close()
    assert repair.apply(store, report).lost
