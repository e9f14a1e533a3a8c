"""A remote whose files are not what they say: refused by name, nothing becomes visible, nothing here is disturbed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest
from ferries import IDENTITY, LAYOUT, LINEAGE, assert_restores, object_files, save, tokens_of, tree, verify
from sentences import assert_told

from kvstore import Group, Layout, Snapshot, Store
from kvstore.codec import HEADER, Header, Kind, encode_coverage, encode_header, encode_ref, encode_snapshot
from kvstore.digest import ContentDigest, SnapshotDigest, label_file, record_digest, snapshot_digest
from kvstore.errors import (
    Corrupt,
    CoverageCorrupt,
    FormatTooNew,
    KVError,
    NotCovered,
    ObjectCorrupt,
    ObjectMissing,
    RefCorrupt,
    SnapshotCorrupt,
    SnapshotMissing,
    StoreCorrupt,
)
from kvstore.shelf import Shelf
from kvstore.snapshot import Coverage, Ref, whole
from sync import Folder, pull, push


class Stick:
    """A remote with one good snapshot, ``book`` of 640 tokens, to be spoiled."""

    def __init__(self, path: Path, digest: SnapshotDigest, snapshot: Snapshot) -> None:
        self.path, self.digest, self.snapshot = path, digest, snapshot
        self.manifest = path / "snapshots" / digest.hex
        self.cov = path / "snapshots" / f"{digest}.cov"
        self.ref = path / "refs" / label_file("book")

    def file(self, name: ContentDigest) -> Path:
        return self.path / "objects" / name.hex[:1] / name.hex[1:]

    @property
    def victim(self) -> Path:
        return self.file(self.snapshot.blocks[4][1])

    def publish(self, snapshot: Snapshot, coverage: Coverage | None = None) -> SnapshotDigest:
        """Points ``book`` at another manifest."""
        digest, data = encode_snapshot(snapshot)
        self.write(digest, data, coverage or whole(digest, snapshot))
        return digest

    def write(self, digest: SnapshotDigest, manifest: bytes, coverage: Coverage) -> None:
        (self.path / "snapshots" / digest.hex).write_bytes(manifest)
        (self.path / "snapshots" / f"{digest}.cov").write_bytes(encode_coverage(Coverage(digest, coverage.runs)))
        self.ref.write_bytes(encode_ref(Ref("book", digest, 0)))


@pytest.fixture
def stick(tmp_path: Path) -> Stick:
    with Store.open(tmp_path / "mac") as mac, Folder.open(tmp_path / "stick", create=True) as remote:
        saved = save(mac, "book", 640)
        push(mac, remote, ["book"])
    assert saved.digest and saved.snapshot
    return Stick(tmp_path / "stick", saved.digest, saved.snapshot)


def refused(tmp_path: Path, *kinds: type[KVError], match: str | None = None) -> KVError:
    """Pulls ``book`` into a store that has another snapshot: it must be refused, and leave no trace a reader could see."""
    with Store.open(tmp_path / "phone") as phone:
        if phone.shelf.records.ref("mine") is None:
            save(phone, "mine", 200, "mine")
        watched = {k: v for k, v in tree(phone.shelf.path).items() if k.startswith(("objects/", "refs/", "snapshots/"))}
        outside = tree(tmp_path / "outside") if (tmp_path / "outside").exists() else {}
        with pytest.raises(kinds, match=match) as error, Folder.open(tmp_path / "stick") as remote:
            pull(phone, remote, ["book"])
        after = {k: v for k, v in tree(phone.shelf.path).items() if k.startswith(("objects/", "refs/", "snapshots/"))}
        assert after == watched, "something became visible or was disturbed"
        assert_restores(phone, "mine", 200, "mine")
        assert (tree(tmp_path / "outside") if outside else {}) == outside
        assert isinstance(error.value, kinds)
        assert str(tmp_path / "stick") in str(error.value), "it doesn't say which side"
        assert_told(error.value)
        return error.value


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def test_flipped_bits_in_an_object(stick: Stick, tmp_path: Path) -> None:
    good = stick.victim.read_bytes()
    for at in (0, 8, 10, 11, 12, 13, 16, 24, 40, 72, 100, HEADER, HEADER + 4000, -1):
        flipped(stick.victim, at)
        error = refused(tmp_path, ObjectCorrupt)
        assert stick.victim.parent.name + stick.victim.name in str(error)
        stick.victim.write_bytes(good)


@pytest.mark.parametrize(
    ("which", "kind"), [("manifest", SnapshotCorrupt), ("cov", CoverageCorrupt), ("ref", RefCorrupt)]
)
def test_flipped_bits_in_a_record(stick: Stick, tmp_path: Path, which: str, kind: type[KVError]) -> None:
    path: Path = getattr(stick, which)
    good = path.read_bytes()
    for at in (0, 8, 10, 11, 12, 13, 16, 24, 40, 72, 100, *range(HEADER, len(good), len(good) // 8), -1):
        flipped(path, at)
        error = refused(tmp_path, kind)
        assert (label_file("book") if which == "ref" else stick.digest.hex) in str(error)
        path.write_bytes(good)


SPOILED: dict[str, tuple[Callable[[Stick], object], type[KVError]]] = {
    "object cut": (lambda s: os.truncate(s.victim, 5000), ObjectCorrupt),
    "object empty": (lambda s: os.truncate(s.victim, 0), ObjectCorrupt),
    "object with a byte more": (lambda s: s.victim.write_bytes(s.victim.read_bytes() + b"\0"), ObjectCorrupt),
    "object of a terabyte": (lambda s: os.truncate(s.victim, 1 << 40), ObjectCorrupt),
    "another valid object in its place": (
        lambda s: s.victim.write_bytes(s.file(s.snapshot.blocks[5][1]).read_bytes()),
        ObjectCorrupt,
    ),
    "object of another length under its name": (
        lambda s: s.victim.write_bytes(
            encode_header(Header(Kind.OBJECT, 4, 4, s.snapshot.blocks[4][1].raw, s.snapshot.blocks[4][1].raw)) + b"four"
        ),
        ObjectCorrupt,
    ),
    "object gone": (lambda s: s.victim.unlink(), ObjectMissing),
    "object is a folder": (lambda s: (s.victim.unlink(), s.victim.mkdir()), ObjectCorrupt),
    "object is a pipe": (lambda s: (s.victim.unlink(), os.mkfifo(s.victim)), ObjectCorrupt),
    "object is a link out": (lambda s: _link(s, s.victim), ObjectCorrupt),
    "object folder is a link out": (lambda s: _link(s, s.victim.parent), Corrupt),
    "manifest is a link out": (lambda s: _link(s, s.manifest), SnapshotCorrupt),
    "coverage is a link out": (lambda s: _link(s, s.cov), CoverageCorrupt),
    "ref is a link out": (lambda s: _link(s, s.ref), RefCorrupt),
    "refs is a link out": (lambda s: _link(s, s.path / "refs"), Corrupt),
    "manifest gone": (lambda s: s.manifest.unlink(), SnapshotMissing),
    "coverage gone": (lambda s: (s.cov.unlink(), [p.unlink() for p in object_files(s.path)]), NotCovered),
    "manifest empty": (lambda s: os.truncate(s.manifest, 0), SnapshotCorrupt),
    "manifest of 100 GB": (lambda s: os.truncate(s.manifest, 100 << 30), SnapshotCorrupt),
    "ref of 100 GB": (lambda s: os.truncate(s.ref, 100 << 30), RefCorrupt),
    "ref of another name": (lambda s: s.ref.write_bytes(encode_ref(Ref("other", s.digest, 0))), RefCorrupt),
    "coverage of another snapshot": (
        lambda s: s.cov.write_bytes(encode_coverage(Coverage(SnapshotDigest(bytes(32)), ((), ())))),
        CoverageCorrupt,
    ),
    "coverage beyond the end": (
        lambda s: s.cov.write_bytes(encode_coverage(Coverage(s.digest, (((0, 11),), ((0, 10),))))),
        CoverageCorrupt,
    ),
    "coverage of other groups": (
        lambda s: s.cov.write_bytes(encode_coverage(Coverage(s.digest, (((0, 10),),)))),
        CoverageCorrupt,
    ),
    "format.json of tomorrow": (
        lambda s: (s.path / "format.json").write_text('{"format": 3, "features": []}'),
        FormatTooNew,
    ),
    "format.json unreadable": (lambda s: (s.path / "format.json").write_text("{"), StoreCorrupt),
    "format.json nested": (lambda s: (s.path / "format.json").write_text("[" * 60000), StoreCorrupt),
}


def _link(stick: Stick, path: Path) -> None:
    """Moves ``path`` out of the remote and leaves a link to it."""
    outside = stick.path.parent / "outside"
    outside.mkdir(exist_ok=True)
    path.rename(outside / path.name)
    path.symlink_to(outside / path.name)


@pytest.mark.parametrize("how", SPOILED)
def test_spoiled(stick: Stick, tmp_path: Path, how: str) -> None:
    spoil, kind = SPOILED[how]
    spoil(stick)
    started = time.monotonic()
    error = refused(tmp_path, kind)
    assert time.monotonic() - started < 5
    if how.startswith("object ") and "folder is a link" not in how:
        assert stick.snapshot.blocks[4][1].hex in str(error), "it doesn't name the object"


def test_a_manifest_that_asks_for_one_object_in_two_lengths(stick: Stick, tmp_path: Path) -> None:
    old = stick.snapshot
    blocks = (*old.blocks, old.blocks[0])
    stick.publish(Snapshot(IDENTITY, LAYOUT, "default", tuple(tokens_of(650)), blocks, (LINEAGE,), (0,) * 11))
    refused(tmp_path, SnapshotCorrupt, match=old.blocks[0][0].hex)


def test_a_manifest_that_names_a_local_object_with_another_length(stick: Stick, tmp_path: Path) -> None:
    """The object here stays as it is: a store's good bytes are never replaced on a manifest's word."""
    with Store.open(tmp_path / "phone") as phone:
        mine = save(phone, "mine", 200, "mine")
    assert mine.snapshot
    blocks = (*stick.snapshot.blocks, mine.snapshot.blocks[0])
    stick.publish(Snapshot(IDENTITY, LAYOUT, "default", tuple(tokens_of(650)), blocks, (LINEAGE,), (0,) * 11))
    error = refused(tmp_path, ObjectMissing)
    assert error.details["name"] in {name.hex for name in mine.snapshot.blocks[0]}


def test_a_manifest_that_is_no_manifest(stick: Stick, tmp_path: Path) -> None:
    def framed(payload: bytes) -> tuple[SnapshotDigest, bytes]:
        digest = snapshot_digest(payload)
        return digest, encode_header(
            Header(Kind.SNAPSHOT, len(payload), len(payload), digest.raw, digest.raw)
        ) + payload  # fmt: skip

    value = msgpack.unpackb(stick.manifest.read_bytes()[HEADER:], strict_map_key=False)
    bad = {
        "nested": b"\x91" * 100_000 + b"\x90",
        "array of a billion": b"\xdd\x3f\xff\xff\xff",
        "an extra field": msgpack.packb({**value, "extra": 1}),
        "a field less": msgpack.packb({k: v for k, v in value.items() if k != "model"}),
        "a path for a digest": msgpack.packb({**value, "blocks": b"../" * 214}),
        "a namespace that is a path with a line break": msgpack.packb({**value, "namespace": "../\n"}),
        "trailing": msgpack.packb(value) + b"\0",
        "more tokens than blocks": msgpack.packb({**value, "items": value["items"] * 3}),
        "no identity": msgpack.packb({**value, "identity": {}}),
        "huge rows": msgpack.packb({**value, "layout": ["float16", [["full", None, [0], 1024, 65536]]]}),
    }
    for payload in bad.values():
        digest, data = framed(payload)
        stick.write(digest, data, Coverage(digest, ((), ())))
        refused(tmp_path, SnapshotCorrupt, match=digest.hex)


def test_names_in_a_manifest_never_become_paths(stick: Stick, tmp_path: Path) -> None:
    """Labels, namespaces, model and identity texts are data: a snapshot full of them is pulled like any other."""
    old = stick.snapshot
    evil = Snapshot(
        IDENTITY, LAYOUT, "../../namespace", old.items, old.blocks, old.lineages, old.lineage, model="/etc/passwd"
    )
    stick.publish(evil)
    with Store.open(tmp_path / "phone") as phone, Folder.open(stick.path) as remote:
        assert pull(phone, remote, ["book"], rename="../../../escape").objects == 20
        assert [ref.label for ref in phone.shelf.records.refs()] == ["../../../escape"]
    verify(tmp_path / "phone")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mac", "phone", "stick"]


def test_another_models_snapshot_is_carried_like_any_other(stick: Stick, tmp_path: Path) -> None:
    layout = Layout((Group("full", None, (0,), 1, 64),))
    with Store.open(tmp_path / "mac") as mac, Folder.open(stick.path, create=True) as remote:
        save(mac, "other model", 300, layout=layout)
        push(mac, remote, ["other model"])
    with Store.open(tmp_path / "phone") as phone, Folder.open(stick.path) as remote:
        pull(phone, remote, ["book", "other model"])
        assert_restores(phone, "other model", 300, layout=layout)
        assert_restores(phone, "book", 640)


def test_after_a_refusal_the_mended_remote_is_pulled_and_nothing_is_carried_twice(stick: Stick, tmp_path: Path) -> None:
    good = stick.victim.read_bytes()
    flipped(stick.victim, -1)
    refused(tmp_path, ObjectCorrupt)
    stick.victim.write_bytes(good)
    with Store.open(tmp_path / "phone") as phone, Folder.open(stick.path) as remote:
        moved = pull(phone, remote, ["book"])
        assert moved.objects + moved.resumed == 20 and moved.resumed > 0
        assert_restores(phone, "book", 640)
    verify(tmp_path / "phone")


def test_a_push_does_not_follow_links_in_the_remote_either(stick: Stick, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    with Store.open(tmp_path / "mac") as mac:
        save(mac, "new", 300, "b")
        for folder in ("quarantine", "refs", "snapshots"):
            (stick.path / folder).rename(tmp_path / "aside")
            (stick.path / folder).symlink_to(outside)
            with pytest.raises(Corrupt, match=folder), Folder.open(stick.path, create=True) as remote:
                push(mac, remote, ["new"])
            assert list(outside.iterdir()) == []
            (stick.path / folder).unlink()
            (tmp_path / "aside").rename(stick.path / folder)
        with Folder.open(stick.path, create=True) as remote:
            push(mac, remote, ["new"])
    verify(stick.path)


def test_a_damaged_object_at_the_remote_is_replaced_by_a_push_that_notices(stick: Stick, tmp_path: Path) -> None:
    """A cut object or a link is not the object: pushing again puts it there."""
    os.truncate(stick.victim, 5000)
    other = stick.file(stick.snapshot.blocks[0][0])
    other.unlink()
    other.symlink_to(tmp_path)
    with Store.open(tmp_path / "mac") as mac, Folder.open(stick.path, create=True) as remote:
        assert push(mac, remote, ["book"]).objects == 2
    verify(stick.path)


def test_the_record_digest_is_what_names_a_ref(stick: Stick, tmp_path: Path) -> None:
    """A ref whose frame is sound but whose payload is not a ref."""
    payload = msgpack.packb({"label": "book", "snapshot": b"../../../../etc/passwd", "updated": 0})
    stick.ref.write_bytes(
        encode_header(
            Header(Kind.REF, len(payload), len(payload), record_digest("ref", payload), record_digest("ref", payload))
        )
        + payload
    )
    refused(tmp_path, RefCorrupt)


def test_a_remote_whose_other_names_are_damaged_still_serves_the_good_ones(stick: Stick, tmp_path: Path) -> None:
    (stick.path / "refs" / ("0" * 64)).write_bytes(b"rubbish")
    with Store.open(tmp_path / "phone") as phone, Folder.open(stick.path) as remote:
        assert pull(phone, remote, ["book"]).objects == 20
    with Shelf.open(stick.path, create=False) as shelf, pytest.raises(RefCorrupt):
        list(shelf.records.refs())
