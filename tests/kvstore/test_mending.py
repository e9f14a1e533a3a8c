"""Damage is never a silent miss, and there is always a way on: saving what was computed again heals, names can be given anew."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from independent import OBJECT, frame
from kvmemory import HEAD, carry, expect_rows, files, find, load, object_file, save
from sentences import assert_told

from kvstore import Saved, Store, prune
from kvstore.check import check
from kvstore.codec import HEADER
from kvstore.digest import label_file
from kvstore.errors import (
    FormatTooNew,
    NotCovered,
    ObjectCorrupt,
    ObjectMissing,
    RefConflict,
    RefCorrupt,
    SnapshotMissing,
)
from kvstore.files import Root
from kvstore.objects import Objects

ITEMS = [(3 * i) % 90 for i in range(400)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "s") as made:
        yield made


def flip(path: Path, at: int = -1) -> bytes:
    good = path.read_bytes()
    data = bytearray(good)
    data[at] ^= 4
    path.write_bytes(data)
    return good


def place(store: Store, saved: Saved, block: int, group: int) -> Path:
    assert saved.snapshot is not None
    return object_file(store.shelf.path, saved.snapshot.blocks[block][group])


# objects


@pytest.mark.parametrize("at", [0, 70, 100, HEADER, -1])
@pytest.mark.parametrize("name", [None, "a", "again"])
def test_saving_what_was_computed_again_heals_a_damaged_object(store: Store, at: int, name: str | None) -> None:
    saved = save(store, ITEMS, name="a", pending=1, head=HEAD)
    damaged = place(store, saved, 2, 1)
    good = flip(damaged, at)
    size = len(good)
    with pytest.raises(ObjectCorrupt):
        expect_rows(store, store.match("a"))
    again = save(store, ITEMS, name=name, pending=1, head=HEAD)
    assert (again.written_objects, again.written_bytes) == (1, size) and again.digest == saved.digest
    assert damaged.read_bytes() == good
    expect_rows(store, store.match("a"))
    assert check(store).ok
    assert save(store, ITEMS, name=name, pending=1, head=HEAD).written_objects == 0


def test_a_longer_text_heals_what_it_shares(store: Store) -> None:
    saved = save(store, ITEMS[:130], name="a")
    goods = {p: flip(p) for p in (place(store, saved, 0, 0), place(store, saved, 1, 1))}
    save(store, ITEMS, name="b")
    assert {p: p.read_bytes() for p in goods} == goods


def test_a_file_that_the_disk_cannot_read_is_written_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save(store, ITEMS, name="a")
    bad = place(store, saved, 1, 0)
    inode, real = bad.stat().st_ino, Objects.read

    def failing(self: Objects, name: Any, length: int) -> memoryview:
        if name.hex.endswith(bad.name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, name, length)

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "read", failing)
        assert save(store, ITEMS, name="a").written_objects == 1
    assert bad.stat().st_ino != inode
    with monkeypatch.context() as patch:
        patch.setattr(Objects, "read", lambda *_: (_ for _ in ()).throw(OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(OSError, match="Too many open files") as caught:
            save(store, ITEMS, name="a")
    assert caught.value.filename == str(store.shelf.path)


def test_what_the_caller_knows_is_not_read_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that goes on saves its new blocks only: what it loaded was verified then."""
    saved = save(store, ITEMS[:320])
    read: list[str] = []
    real = Objects.read
    monkeypatch.setattr(Objects, "read", lambda self, name, n: (read.append(name.hex), real(self, name, n))[1])
    assert saved.snapshot is not None
    save(store, ITEMS, known=saved.snapshot.blocks)
    assert read == []
    save(store, ITEMS)
    assert len(read) == 2 * 7


def test_an_object_of_a_newer_version_is_not_replaced(store: Store) -> None:
    saved = save(store, ITEMS, name="a")
    newer = place(store, saved, 1, 0)
    newer.write_bytes(frame(OBJECT, newer.read_bytes()[HEADER:], version=2))
    before = files(store.shelf.path)
    with pytest.raises(FormatTooNew):
        save(store, ITEMS, name="a")
    assert files(store.shelf.path) == before


@pytest.mark.parametrize("names", [("a",), ("a b", "a"), ()])
def test_a_damaged_object_is_told_with_what_it_belongs_to(store: Store, names: tuple[str, ...]) -> None:
    saved = save(store, ITEMS)
    for name in names:
        store.shelf.records.move_ref(name, None, saved.digest)
    flip(place(store, saved, 3, 0))
    match = find(store, [*ITEMS, 1])
    with pytest.raises(ObjectCorrupt) as caught:
        load(store, match)
    label = {0: "NAME", 1: "a", 2: "a"}[len(names)]
    assert_told(
        caught.value,
        f"(block 3 of group full of snapshot {saved.digest}, {', '.join(map(repr, sorted(names))) or 'without a name'})",
        f"`kvferry pull --verify REMOTE {label}`",
        f"`kvferry prefill --no-reuse --name {label}`",
    )
    assert saved.snapshot is not None and saved.digest is not None
    details = caught.value.details
    assert (details["name"], details["snapshot"]) == (saved.snapshot.blocks[3][0].hex, saved.digest.hex)
    assert details["names"] == sorted(names)
    place(store, saved, 3, 0).unlink()
    with pytest.raises(ObjectMissing) as missing:
        load(store, match)
    assert_told(missing.value, saved.digest.hex, f"`kvferry pull REMOTE {label}`")


# what is gone


@pytest.mark.parametrize(
    ("block", "group", "left"),
    [(6, 0, 384), (1, 0, 64), (0, 0, None), (6, 1, 384), (0, 1, 400), (3, 1, 400), (4, 1, 256), (5, 1, 320)],
)
def test_find_promises_what_is_there(store: Store, block: int, group: int, left: int | None) -> None:
    """Group 0 sees everything, group 1 the last 128 tokens: after block 3 (tokens 192 to 255) it needs 383 at least."""
    saved = save(store, ITEMS, name="a")
    place(store, saved, block, group).unlink()
    match = find(store, [*ITEMS, 1])
    assert (None if match is None else match.n) == left
    if match is not None:
        expect_rows(store, match)
        assert "`kvferry check` lists them" in match.reason
    assert [p.path for p in check(store).problems] == [
        str(place(store, saved, block, group).relative_to(store.shelf.path))
    ]


def test_find_takes_another_snapshot_where_more_is_there(store: Store) -> None:
    long = save(store, ITEMS, name="long")
    save(store, ITEMS[:300], name="short")
    place(store, long, 6, 0).unlink()
    assert find(store, [*ITEMS, 1]).n == 384
    place(store, long, 5, 0).unlink()
    assert find(store, [*ITEMS, 1]).n == 320
    place(store, long, 4, 0).unlink()  # shared up to token 256; "short" has its own end
    assert find(store, [*ITEMS, 1]).n == 300
    expect_rows(store, find(store, [*ITEMS, 1]))


def test_find_does_not_take_damage_for_absence(store: Store, tmp_path: Path) -> None:
    saved = save(store, ITEMS, name="a")
    path = place(store, saved, 1, 0)
    good = path.read_bytes()
    for harm in ("cut", "link", "pipe", "folder", "fan-out folder is a file"):
        aside = None
        if harm == "cut":
            path.write_bytes(good[:-1])
        elif harm == "fan-out folder is a file":
            aside = path.parent.rename(tmp_path / "aside")
            path.parent.write_bytes(b"")
        else:
            path.unlink()
            {"link": lambda: path.symlink_to("nowhere"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[harm]()
        match = find(store, [*ITEMS, 1])
        assert match.n == 400, harm
        with pytest.raises(ObjectCorrupt) as caught:
            load(store, match)
        assert_told(caught.value)
        if aside is not None:
            path.parent.unlink()
            aside.rename(path.parent)
        elif harm == "folder":
            path.rmdir()
        else:
            path.unlink()
        path.write_bytes(good)
    expect_rows(store, find(store, [*ITEMS, 1]))


def test_an_exact_hit_with_a_hole_falls_back_to_what_is_there(store: Store) -> None:
    saved = save(store, ITEMS, name="a", pending=1, head=HEAD)
    assert find(store, ITEMS, head=HEAD).pending == 1
    place(store, saved, 6, 1).unlink()
    match = find(store, ITEMS, head=HEAD)
    assert (match.n, match.pending) == (384, None)
    for file in (store.shelf.path / "objects").rglob("*"):
        if file.is_file():
            file.unlink()
    assert find(store, ITEMS, head=HEAD) is None


@pytest.mark.parametrize("how", ["absent", "empty"])
def test_a_lost_coverage_is_told_and_made_again_by_saving(store: Store, how: str, tmp_path: Path) -> None:
    saved = save(store, ITEMS, name="a")
    cov = store.shelf.path / "snapshots" / f"{saved.digest}.cov"
    good = cov.read_bytes()
    if how == "absent":
        cov.unlink()
    else:
        with Store.open(tmp_path / "other") as other:
            carry(store, other, saved.digest, ((), ()))
            cov.write_bytes((tmp_path / "other" / "snapshots" / cov.name).read_bytes())
    with pytest.raises(NotCovered) as caught:
        store.match("a")
    assert_told(caught.value, cov.name, "`kvferry pull REMOTE a`", "`kvferry prefill --name a`")
    assert find(store, [*ITEMS, 1]) is None
    assert save(store, ITEMS, name="a").written_objects == 0
    assert cov.read_bytes() == good
    expect_rows(store, store.match("a"))


def test_not_covered_says_where_it_can_be_continued(store: Store, tmp_path: Path) -> None:
    saved = save(store, ITEMS, name="a")
    with Store.open(tmp_path / "phone") as phone:
        carry(store, phone, saved.digest)
        phone.shelf.records.move_ref("a", None, saved.digest)
        with pytest.raises(NotCovered) as caught:
            phone.match("a", at=300)
        assert_told(caught.value, "continue from its end")
        phone.match("a")
    with Store.open(tmp_path / "part") as part:
        carry(store, part, saved.digest, (((0, 3),), ((0, 3),)))
        part.shelf.records.move_ref("a", None, saved.digest)
        with pytest.raises(NotCovered) as caught:
            part.match("a")
        assert_told(caught.value, "continue after 193 tokens, of which 192 are here")
        assert part.match("a", at=193).n == 192


# names


@pytest.fixture(params=["flipped", "empty", "of another name", "link", "pipe", "folder"])
def damaged(store: Store, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A store with the names a and b, of which the ref of a is damaged."""
    save(store, ITEMS, name="a")
    save(store, [5, 6, 7], name="b")
    path = store.shelf.path / "refs" / label_file("a")
    if request.param == "flipped":
        flip(path)
    elif request.param in ("empty", "of another name"):
        path.write_bytes(b"" if request.param == "empty" else path.with_name(label_file("b")).read_bytes())
    else:
        path.unlink()
        if request.param == "link":
            (tmp_path / "target").write_bytes(b"mine")
            path.symlink_to(tmp_path / "target")
        elif request.param == "pipe":
            os.mkfifo(path)
        else:
            path.mkdir()
            (path / "letter").write_bytes(b"dear")
    return path


def test_a_damaged_name_is_told_with_what_to_do(store: Store, damaged: Path) -> None:
    records = store.shelf.records
    with pytest.raises(RefCorrupt) as caught:
        store.match("a")
    assert_told(caught.value, "name 'a'", damaged.name, "`kvferry rm a`", "`kvferry pull REMOTE a`")
    with pytest.raises(RefCorrupt) as caught:
        list(records.refs())
    assert_told(caught.value, f"`kvferry rm refs/{damaged.name}`")
    (problem,) = check(store).problems
    assert problem.path == f"refs/{damaged.name}" and f"`kvferry rm refs/{damaged.name}`" in problem.todo
    with pytest.raises(RefCorrupt, match="kvferry rm"):
        prune.plan(store)
    assert records.standing("a") is None and records.damage("a") is not None
    assert records.standing("b") is not None and records.damage("b") is None and records.damage("c") is None


@pytest.mark.parametrize("by", ["name", "file"])
def test_a_damaged_name_can_be_removed(store: Store, damaged: Path, by: str) -> None:
    other = store.resolve("b")
    words = ["b", "a" if by == "name" else f"refs/{damaged.name}"]
    assert store.shelf.records.remove(words) == [("b", other), (words[1], None)]
    assert list((store.shelf.path / "refs").iterdir()) == []
    assert check(store).ok
    assert find(store, [*ITEMS, 1]).n == 400, "what it stood for is cache now"
    assert prune.apply(store, prune.plan(store)).snapshots == 2
    assert (
        not (damaged.parent.parent.parent / "target").exists()
        or (damaged.parent.parent.parent / "target").read_bytes() == b"mine"
    )


def test_removing_is_all_or_nothing_and_takes_no_sound_file(store: Store, damaged: Path) -> None:
    before = sorted(p.name for p in damaged.parent.iterdir())
    sound = f"refs/{label_file('b')}"
    for words in (["a", "nobody"], ["a", sound], ["a", "refs/" + "0" * 64], ["a", "refs/../lock"]):
        with pytest.raises(SnapshotMissing, match="nothing was removed"):
            store.shelf.records.remove(words)
    assert sorted(p.name for p in damaged.parent.iterdir()) == before
    store.shelf.records.rename_ref("b", sound)  # a name may look like that: the name comes first
    assert store.shelf.records.remove([sound])[0][1] is not None


@pytest.mark.parametrize("how", ["save", "move", "rename"])
def test_a_damaged_name_can_be_given_anew(store: Store, damaged: Path, how: str) -> None:
    records = store.shelf.records
    b = store.resolve("b")
    if how == "save":
        save(store, ITEMS[:100], name="a")
        assert store.match("a").n == 99
    elif how == "move":
        with pytest.raises(RefConflict):
            records.move_ref("a", b, b.__class__(bytes(32)))
        records.move_ref("a", None, b)
        assert store.resolve("a") == b
    else:
        records.rename_ref("b", "a")
        assert store.resolve("a") == b
    assert records.damage("a") is None and check(store).ok
    assert damaged.is_file() and not damaged.is_symlink()


def test_a_name_of_a_newer_version_is_left_alone(store: Store) -> None:
    from independent import REF

    save(store, ITEMS, name="a")
    path = store.shelf.path / "refs" / label_file("a")
    path.write_bytes(frame(REF, path.read_bytes()[HEADER:], version=2))
    before = path.read_bytes()
    for act in (
        lambda: save(store, ITEMS[:100], name="a"),
        lambda: store.shelf.records.remove(["a"]),
        lambda: store.shelf.records.remove([f"refs/{path.name}"]),
        lambda: store.shelf.records.move_ref("a", None, None),
    ):
        with pytest.raises(FormatTooNew):
            act()
    assert path.read_bytes() == before


def test_an_unpromised_damaged_object_hurts_nobody(tmp_path: Path) -> None:
    with Store.open(tmp_path / "source") as source, Store.open(tmp_path / "s") as store:
        saved = save(source, ITEMS)
        carry(source, store, saved.digest)
        store.shelf.records.move_ref("t", None, saved.digest)
        save(store, ITEMS[:64])
        flip(place(store, saved, 0, 1))  # the windowed rows of block 0, which "t" names and does not promise
        extra = save(store, [9] * 70)
        flip(place(store, extra, 0, 0))
        todo = {p.path[-63:]: p.todo for p in check(store).problems}
        assert todo[place(store, saved, 0, 1).name].startswith("No name promises it")
        assert todo[place(store, extra, 0, 0).name] == "No name needs it: `kvferry gc` collects it."
        prune.apply(store, prune.plan(store))
        assert [p.path[-63:] for p in check(store).problems] == [place(store, saved, 0, 1).name]


def test_a_collector_goes_no_further_than_what_is_durable(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the manifests' renames may be lost, their objects must stay: else a coverage would promise what is gone."""
    saved = save(store, ITEMS)
    plan = prune.plan(store)

    def failing(self: Root, paths: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(Root, "sync_all", failing)
        with pytest.raises(OSError, match="Input/output error") as caught:
            prune.apply(store, plan)
    assert caught.value.filename == str(store.shelf.path)
    assert all(place(store, saved, b, g).is_file() for b in range(7) for g in range(2))
    assert prune.apply(store, prune.plan(store)).objects == 14
