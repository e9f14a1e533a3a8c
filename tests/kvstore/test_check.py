"""`check` finds every damage, says which names it hurts and what of them is still usable, and changes nothing but the index."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from independent import OBJECT, frame
from kvmemory import HEAD, carry, expect_rows, files, find, object_file, save

from kvstore import Store
from kvstore.check import Report, check
from kvstore.codec import HEADER
from kvstore.digest import label_file
from kvstore.errors import ObjectCorrupt
from kvstore.inventory import FULL, QUICK

ITEMS = [(3 * i) % 90 for i in range(400)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.open(tmp_path / "s")
    save(store, ITEMS, name="a", pending=1, head=HEAD)
    save(store, [5, 6, 7], name="b")
    return store


def usable(report: Report) -> dict[str, int | None]:
    return {named.label: named.usable for named in report.names}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)


def test_a_sound_store(store: Store) -> None:
    before = files(store.shelf.path)
    objects = [p for p in (store.shelf.path / "objects").rglob("*") if p.is_file()]
    seen: list[int] = []
    begun: list[int] = []
    for level in (FULL, QUICK):
        report = check(store, level, begin=begun.append, progress=seen.append)
        assert report.ok and report.problems == () and report.notes == ()
        assert (report.snapshots, report.objects) == (2, len(objects) == 16 and 16)
        assert report.bytes == sum(p.stat().st_size for p in objects)
        assert usable(report) == {"a": 400, "b": 3}
        assert "ok: 2 snapshots, 16 objects" in str(report)
        assert json.loads(json.dumps(report.value()))["ok"] is True
    assert sum(seen) == report.bytes and begun == [report.bytes, 0]
    assert files(store.shelf.path) == before


def test_a_trimmed_snapshot_lacks_nothing(store: Store, tmp_path: Path) -> None:
    with Store.open(tmp_path / "phone") as phone:
        carry(store, phone, store.resolve("a"))
        phone.shelf.records.move_ref("a", None, store.resolve("a"))
        report = check(phone)
        assert report.ok and usable(report) == {"a": 400}


@pytest.mark.parametrize(
    ("block", "group", "left"),
    [(6, 0, 384), (1, 0, 64), (0, 0, 0), (6, 1, 384), (0, 1, 400), (3, 1, 400), (4, 1, 256), (5, 1, 320)],
)
def test_what_is_left_of_a_name(store: Store, block: int, group: int, left: int) -> None:
    """Group 0 sees everything, group 1 the last 128 tokens: after block 3 (tokens 192 to 255) it needs 383 at least."""
    name = store.match("a").snapshot.blocks[block][group]
    flip(object_file(store.shelf.path, name))
    before = files(store.shelf.path)
    report = check(store)
    assert not report.ok and usable(report) == {"a": left, "b": 3}
    (problem,) = report.problems
    assert problem.path == f"objects/{name.hex[:1]}/{name.hex[1:]}" and problem.names == ("a",)
    assert problem.found.startswith("content digest: expected") and "`kvferry pull --verify REMOTE a`" in problem.todo
    assert next(n for n in report.names if n.label == "a").lost == ((block, group),)
    assert "1 problem: 2 snapshots" in str(report)
    if left != 400:
        assert f"name 'a': {left} of 400 tokens can be continued" in str(report)
    assert check(store, QUICK).ok  # a flipped bit is found by reading only
    assert files(store.shelf.path) == before


def test_objects_absent_cut_and_of_another_length(store: Store) -> None:
    path, blocks = store.shelf.path, store.match("a").snapshot.blocks
    object_file(path, blocks[0][0]).unlink()
    cut = object_file(path, blocks[1][0])
    cut.write_bytes(cut.read_bytes()[:-1])
    for level in (FULL, QUICK):
        report = check(store, level)
        found = {p.path: p.found for p in report.problems}
        assert len(found) == 2 and usable(report) == {"a": 0, "b": 3}
        assert any(text.endswith("found none.") for text in found.values())
    # Saving the same KV again heals both, as `todo` says.
    save(store, ITEMS, name="a", pending=1, head=HEAD)
    assert check(store).ok


def test_a_header_that_lies_about_the_stored_hash(store: Store) -> None:
    place = object_file(store.shelf.path, store.match("a").snapshot.blocks[0][0])
    place.write_bytes(frame(OBJECT, place.read_bytes()[HEADER:], hash=bytes(32)))
    with pytest.raises(ObjectCorrupt, match="stored hash"):
        expect_rows(store, store.match("a"))
    report = check(store)
    assert not report.ok and "stored hash" in report.problems[0].found


def test_a_newer_object(store: Store) -> None:
    place = object_file(store.shelf.path, store.match("b").snapshot.blocks[0][0])
    place.write_bytes(frame(OBJECT, place.read_bytes()[HEADER:], version=2))
    report = check(store)
    assert "Upgrade kvferry" in report.problems[0].found and usable(report) == {"a": 400, "b": 0}


RECORDS: dict[str, tuple[Callable[[Store], Path], dict[str, int | None]]] = {
    "manifest": (lambda s: s.shelf.path / "snapshots" / s.resolve("a").hex, {"a": None, "b": 3}),
    "coverage": (lambda s: s.shelf.path / "snapshots" / f"{s.resolve('a')}.cov", {"a": 0, "b": 3}),
    "ref": (lambda s: s.shelf.path / "refs" / label_file("a"), {"b": 3}),
}


@pytest.mark.parametrize("how", ["flipped", "emptied", "linked", "absent"])
@pytest.mark.parametrize("what", RECORDS)
def test_damaged_records(store: Store, what: str, how: str, tmp_path: Path) -> None:
    place = RECORDS[what][0](store)
    if how == "flipped":
        flip(place)
    elif how == "emptied":
        place.write_bytes(b"")
    elif how == "linked":
        place.rename(tmp_path / "target")
        place.symlink_to(tmp_path / "target")
    else:
        place.unlink()
    report = check(store)
    assert usable(report) == RECORDS[what][1]
    if (what, how) == ("ref", "absent"):
        assert report.ok
        return
    (problem,) = report.problems
    assert problem.path == str(place.relative_to(store.shelf.path)) and problem.todo
    assert problem.names == (() if what == "ref" else ("a",))


def test_an_unnamed_damaged_manifest(store: Store) -> None:
    saved = save(store, [8, 8, 8])
    flip(store.shelf.path / "snapshots" / saved.digest.hex)
    report = check(store)
    assert [p.todo for p in report.problems] == ["No name needs it: `kvferry gc` collects it."]


def test_what_is_not_ours_is_named_and_left(store: Store) -> None:
    path = store.shelf.path
    for name in ("notes.txt", "objects/zz.txt", "objects/a/short", "snapshots/x", "refs/y", "tmp/1f-00"):
        (path / name).write_text("x")
    (path / "quarantine" / "dead").mkdir()
    (path / "snapshots" / ("0" * 64 + ".cov")).write_text("x")
    before = files(path)
    report = check(store)
    assert report.ok and files(path) == before
    assert sorted(note.split(":")[0] for note in report.notes) == sorted(
        [
            "notes.txt",
            "objects/zz.txt",
            "objects/a/short",
            "snapshots/x",
            "refs/y",
            "tmp/1f-00",
            "quarantine/dead",
            f"snapshots/{'0' * 64}.cov",
        ]
    )


def test_a_linked_fan_out_folder(store: Store, tmp_path: Path) -> None:
    name = store.match("b").snapshot.blocks[0][0]
    folder = object_file(store.shelf.path, name).parent
    folder.rename(tmp_path / "away")
    folder.symlink_to(tmp_path / "away")
    report = check(store)
    assert not report.ok and usable(report)["b"] == 0
    assert {p.path for p in report.problems} >= {f"objects/{name.hex[:1]}"}


@pytest.mark.parametrize(
    "sql", ["DELETE FROM run", "UPDATE run SET last = 1", "DELETE FROM snapshot", "UPDATE snapshot SET tokens = 9"]
)
def test_an_index_that_differs_is_made_anew(store: Store, sql: str) -> None:
    store.indexed(lambda index: index._db.execute(sql))
    report = check(store)
    assert report.ok and report.notes == ("index: differed from the files and was made anew.",)
    assert check(store).notes == ()
    assert find(store, [*ITEMS, 1]).n == 400


def test_a_manifest_without_its_promise(store: Store) -> None:
    """Unnamed it is what a power loss leaves of a save that nobody was told of; under a name something is lost."""
    saved = save(store, tuple(range(90)))
    assert saved.digest is not None
    path = store.shelf.path / "snapshots" / f"{saved.digest}.cov"
    data = path.read_bytes()
    path.unlink()
    report = check(store)
    assert report.ok and any(f"{saved.digest}.cov" in note for note in report.notes)
    path.write_bytes(data)
    store.shelf.records.move_ref("book", None, saved.digest)
    path.unlink()
    report = check(store)
    assert [(problem.path, problem.names) for problem in report.problems] == [
        (f"snapshots/{saved.digest}.cov", ("book",))
    ]
