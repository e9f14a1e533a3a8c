"""Every damaged byte is found, by an error that names the file's kind; nothing else is disturbed, and nothing is made of it."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from independent import COVERAGE, MANIFEST, OBJECT, REF, frame, plain
from kvmemory import HEAD, LAYOUT, Change, Memory, expect_rows, files, find, object_file, save
from sentences import assert_told

from kvstore import Store
from kvstore.digest import label_file
from kvstore.errors import (
    CoverageCorrupt,
    FormatTooNew,
    FormatTooOld,
    KVError,
    NotCovered,
    ObjectCorrupt,
    ObjectMissing,
    RefCorrupt,
    SnapshotCorrupt,
    SnapshotMissing,
    StoreCorrupt,
)
from kvstore.layout import blocks_of

ITEMS = [(3 * i) % 90 for i in range(150)]
OTHER = [*range(200, 280)]


@dataclass
class Scene:
    """A store with two snapshots; the files of one get damaged."""

    store: Store
    object: Path
    manifest: Path
    coverage: Path
    ref: Path

    def read(self) -> Memory:
        match = self.store.match("a", head=HEAD)
        memory = Memory(LAYOUT, match.n)
        self.store.load(match, memory)
        return memory

    def undisturbed(self) -> None:
        expect_rows(self.store, self.store.match("b"))
        expect_rows(self.store, find(self.store, [*OTHER, 1]))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    path = tmp_path / "s"
    with Store.open(path) as store:
        saved = save(store, ITEMS, name="a", pending=1, head=HEAD)
        save(store, OTHER, name="b")
        manifest = path / "snapshots" / saved.digest.hex
        yield Scene(
            store,
            object_file(path, saved.snapshot.blocks[2][1]),
            manifest,
            manifest.with_suffix(".cov"),
            path / "refs" / label_file("a"),
        )


KINDS: dict[str, tuple[int, type[KVError]]] = {
    "object": (OBJECT, ObjectCorrupt),
    "manifest": (MANIFEST, SnapshotCorrupt),
    "coverage": (COVERAGE, CoverageCorrupt),
    "ref": (REF, RefCorrupt),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def expect(scene: Scene, kind: str) -> KVError:
    with pytest.raises(KVError) as caught:
        scene.read()
    assert type(caught.value) is KINDS[kind][1], caught.value
    assert_told(caught.value)
    return caught.value


@kinds
def test_every_flipped_byte(scene: Scene, kind: str) -> None:
    change = Change(getattr(scene, kind))
    chance = random.Random(1)
    positions = range(len(change.before))
    if len(change.before) > 1500:
        positions = [*range(200), *chance.sample(range(200, len(change.before)), 300)]
    for at in positions:
        data = bytearray(change.before)
        data[at] ^= 1 << chance.randrange(8)
        with change.to(bytes(data)):
            expect(scene, kind)
            if at % 50 == 0:
                scene.undisturbed()
    scene.read()


@kinds
def test_cut_emptied_extended_zeroed(scene: Scene, kind: str) -> None:
    change = Change(getattr(scene, kind))
    size = len(change.before)
    for length in {0, 1, 7, 8, 95, 96, 127, 128, 129, size // 2, size - 32, size - 1}:
        with change.to(change.before[:length]):
            expect(scene, kind)
    for more in (b"\0", b"x" * 100, change.before):
        with change.to(change.before + more):
            expect(scene, kind)
    for data in (
        bytes(size),
        change.before[:128] + bytes(size - 128),
        bytes(128) + change.before[128:],
        os.urandom(size),
    ):
        with change.to(data):
            expect(scene, kind)
    scene.undisturbed()
    scene.read()


def test_swapped_valid_files(scene: Scene) -> None:
    path = scene.store.shelf.path
    blocks = scene.store.match("a").snapshot.blocks
    with Change(scene.object).to(object_file(path, blocks[1][1]).read_bytes()):
        expect(scene, "object")
    first, second = (object_file(path, block[0]) for block in blocks[:2])
    with Change(first).to(second.read_bytes()):  # the same length
        assert "name" in str(expect(scene, "object"))
    other = path / "snapshots" / scene.store.match("b").digest.hex
    with Change(scene.manifest).to(other.read_bytes()):
        expect(scene, "manifest")
    with Change(scene.coverage).to(other.with_suffix(".cov").read_bytes()):
        expect(scene, "coverage")
    with Change(scene.ref).to((path / "refs" / label_file("b")).read_bytes()):
        expect(scene, "ref")
    for kind in KINDS:
        for wrong in KINDS:
            if wrong != kind:
                with Change(getattr(scene, kind)).to(getattr(scene, wrong).read_bytes()):
                    expect(scene, kind)
    scene.read()


@kinds
def test_a_newer_frame_is_told_from_a_damaged_one(scene: Scene, kind: str) -> None:
    change = Change(getattr(scene, kind))
    payload, number = change.before[128:], KINDS[kind][0]
    assert frame(number, payload) == change.before
    for other in ({"version": 2}, {"version": 65535}, {"codec": 2}, {"cipher": 1}):
        with change.to(frame(number, payload, **other)):
            with pytest.raises(FormatTooNew, match="Upgrade kvferry") as caught:
                scene.read()
            assert_told(caught.value)
            (found,) = other.values()
            assert found in caught.value.details.values()
            scene.undisturbed()
    for other in (
        {"magic": b"KVFERRY\1"},
        {"version": 0},
        {"kind": 5},
        {"reserved": b"\0\0\1"},
        {"content": 2**40, "stored": 2**40},
        {"content": 0, "stored": 0},
        {"content": len(payload) + 1},
        {"name": bytes(32)},
    ):
        with change.to(frame(number, payload, **other)), pytest.raises((KINDS[kind][1], FormatTooNew)) as caught:
            scene.read()
    scene.read()


def test_a_failed_load_names_the_damaged_object(scene: Scene) -> None:
    match = scene.store.match("a", head=HEAD)
    data = bytearray(scene.object.read_bytes())
    data[-1] ^= 1
    scene.object.write_bytes(data)
    memory = Memory(LAYOUT, match.n)
    with pytest.raises(ObjectCorrupt) as caught:
        scene.store.load(match, memory)
    assert caught.value.details["name"] == match.snapshot.blocks[2][1].hex in str(caught.value)


def test_what_is_absent_is_missing_and_not_corrupt(scene: Scene) -> None:
    change = Change(scene.object)
    scene.object.unlink()
    with pytest.raises(ObjectMissing, match="pull"):
        scene.read()
    assert save(scene.store, ITEMS, name="again").written_objects == 1  # saving the same puts it back
    assert scene.object.read_bytes() == change.before
    for kind, error in (("coverage", NotCovered), ("manifest", SnapshotMissing), ("ref", SnapshotMissing)):
        getattr(scene, kind).rename(getattr(scene, kind).with_name("away"))
        with pytest.raises(error):
            scene.read()
        getattr(scene, kind).with_name("away").rename(getattr(scene, kind))
    scene.read()


def test_a_cut_object_is_written_again(scene: Scene) -> None:
    change = Change(scene.object)
    scene.object.write_bytes(change.before[:-1])
    assert save(scene.store, ITEMS, name="again").written_objects == 1
    assert scene.object.read_bytes() == change.before


@pytest.mark.parametrize("kind", ["manifest", "coverage"])
def test_saving_the_same_heals_a_record(scene: Scene, kind: str) -> None:
    change = Change(getattr(scene, kind))
    getattr(scene, kind).write_bytes(change.before[:-1] + b"\0")
    save(scene.store, ITEMS, pending=1, head=HEAD)
    assert getattr(scene, kind).read_bytes() == change.before


def test_find_passes_over_a_damaged_snapshot_and_says_so(scene: Scene) -> None:
    save(scene.store, ITEMS[:100], name="shorter")
    asked = [*ITEMS, 7]
    assert find(scene.store, asked).n == 150
    for kind in ("manifest", "coverage"):
        change = Change(getattr(scene, kind))
        with change.to(change.before[:-1] + b"\0"):
            match = find(scene.store, asked)
            assert match.n == 100 and "up to 150 tokens may lie in what can't be read" in match.reason
            assert scene.manifest.name in match.reason
            assert find(scene.store, [*ITEMS[:100], 7]).reason == f"the snapshot ends at {100} tokens"
            expect_rows(scene.store, match)
    assert find(scene.store, asked).n == 150


def test_find_raises_where_only_a_damaged_snapshot_could_serve(scene: Scene) -> None:
    change = Change(scene.manifest)
    with change.to(change.before[:-1] + b"\0"), pytest.raises(SnapshotCorrupt):
        find(scene.store, [*ITEMS, 7])
    with change.to(frame(MANIFEST, change.before[128:], version=9)), pytest.raises(FormatTooNew):
        find(scene.store, [*ITEMS, 7])
    assert find(scene.store, [*ITEMS, 7]).n == 150


def test_one_damaged_name_keeps_no_other_from_being_given(scene: Scene) -> None:
    scene.ref.write_bytes(b"")
    save(scene.store, [1, 2, 3], name="c")
    scene.store.shelf.records.rename_ref("c", "d")
    assert scene.store.match("d").n == 2
    with pytest.raises(RefCorrupt):
        list(scene.store.shelf.records.refs())
    assert sorted(ref.label for ref in scene.store.shelf.records.readable_refs()) == ["b", "d"]


def test_a_ref_must_be_at_the_place_of_its_label(scene: Scene) -> None:
    import msgpack

    payload = dict(msgpack.unpackb(scene.ref.read_bytes()[128:]))
    for change in ({"label": "b"}, {"updated": -1}, {"updated": 2**40}, {"snapshot": b"x"}, {"label": "e\u0301"}):
        data = frame(REF, msgpack.packb({**payload, **change}))
        with Change(scene.ref).to(data):
            expect(scene, "ref")
    decomposed = "e\u0301"
    place = scene.ref.with_name(plain(decomposed.encode()).hex())
    place.write_bytes(frame(REF, msgpack.packb({**payload, "label": decomposed})))
    with pytest.raises(RefCorrupt, match="label"):
        scene.store.shelf.records.read_ref(place.name)


# format.json


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", StoreCorrupt),
        ("{", StoreCorrupt),
        ("[]", StoreCorrupt),
        ("[" * 100000, StoreCorrupt),
        ('{"format": 2}', StoreCorrupt),
        ('{"format": true, "features": []}', StoreCorrupt),
        ('{"format": 2.0, "features": []}', StoreCorrupt),
        ('{"format": -1, "features": []}', StoreCorrupt),
        ('{"format": null, "features": []}', StoreCorrupt),
        ('{"features": []}', StoreCorrupt),
        ('{"format": 3}', FormatTooNew),
        ('{"format": 3, "features": {"any": "thing"}}', FormatTooNew),
        ('{"format": "2", "features": []}', StoreCorrupt),
        ('{"format": 0, "features": []}', StoreCorrupt),
        ('{"format": 2, "features": [1]}', StoreCorrupt),
        ('{"format": 2, "features": {}}', StoreCorrupt),
        ('{"format": 3, "features": []}', FormatTooNew),
        ('{"format": 99, "features": ["x"], "more": 1}', FormatTooNew),
        ('{"format": 2, "features": ["encrypted"]}', FormatTooNew),
        ('{"format": 1, "features": []}', FormatTooOld),
        ("\xff\xfe", StoreCorrupt),
    ],
)
def test_another_format_is_refused_untouched(scene: Scene, text: str, error: type[KVError]) -> None:
    path = scene.store.shelf.path
    (path / "format.json").write_bytes(text.encode("latin-1"))
    before = {name: (data, (path / name).stat().st_mtime_ns) for name, data in files(path).items()}
    listing = sorted(path.iterdir())
    for create in (True, False):
        with pytest.raises(error) as caught:
            Store.open(path, create=create)
        assert_told(caught.value, str(path))
    if "encrypted" in text:
        assert "encrypted" in str(caught.value)
    if error is FormatTooNew and 'features": []' in text:
        assert (caught.value.details["supported"], caught.value.details["found"]) == (2, 3)
    assert before == {name: (data, (path / name).stat().st_mtime_ns) for name, data in files(path).items()}
    assert sorted(path.iterdir()) == listing


def test_every_flipped_bit_of_format_json(scene: Scene) -> None:
    path = scene.store.shelf.path
    change = Change(path / "format.json")
    same = json.loads(change.before)
    outcomes = set()
    for at in range(len(change.before)):
        for bit in range(8):
            data = bytearray(change.before)
            data[at] ^= 1 << bit
            with change.to(bytes(data)):
                try:
                    Store.open(path).close()
                except (StoreCorrupt, FormatTooNew) as error:
                    outcomes.add(type(error).__name__)
                else:
                    assert json.loads(bytes(data)) == same  # another white space
    assert outcomes == {"StoreCorrupt", "FormatTooNew"}


def test_what_is_no_store_is_left_alone(tmp_path: Path) -> None:
    from kvstore.errors import StoreMissing

    with pytest.raises(StoreMissing, match="no store at"):
        Store.open(tmp_path / "none", create=False)
    (tmp_path / "mine").mkdir()
    with pytest.raises(StoreMissing, match="found an empty folder"):
        Store.open(tmp_path / "mine", create=False)
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for create in (True, False):
        for place, found in (("mine", "letter.txt"), ("mine/letter.txt", "expected a folder"), ("link", "a folder")):
            with pytest.raises(StoreCorrupt) as caught:
                Store.open(tmp_path / place, create=create)
            assert_told(caught.value, str(tmp_path / place), found)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["letter.txt"]
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
    # A store whose making was interrupted is completed.
    (tmp_path / "half" / "objects" / "00").mkdir(parents=True)
    (tmp_path / "half" / "tmp").mkdir()
    (tmp_path / "half" / "tmp" / "1f-00").write_text("{")
    with pytest.raises(StoreMissing):
        Store.open(tmp_path / "half", create=False)
    with Store.open(tmp_path / "half") as store:
        assert save(store, [1, 2]).written_objects == 2 * blocks_of(2)


@pytest.mark.parametrize("used", ["snapshots", "refs", "objects", "trash"])
def test_a_store_that_lost_its_format_is_not_given_another(scene: Scene, used: str) -> None:
    """Nobody knows which format it was: an empty store of this format must not be made around somebody's data."""
    path = scene.store.shelf.path
    (path / "format.json").rename(path.parent / "format.json")
    for folder in {"snapshots", "refs", "objects", "trash"} - {used}:
        for file in [p for p in (path / folder).rglob("*") if p.is_file()]:
            file.unlink()
    if used == "trash":
        (path / "trash" / ("0" * 64)).write_bytes(b"x")
    before = files(path)
    for create in (True, False):
        with pytest.raises(StoreCorrupt) as caught:
            Store.open(path, create=create)
        assert_told(caught.value, str(path), used, '{"format": 2, "features": []}')
    assert files(path) == before
    (path / "format.json").write_text('{"format": 2, "features": []}')  # what the message says
    Store.open(path, create=False).close()
