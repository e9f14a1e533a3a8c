"""Files made to hurt: right hashes around wrong content, links, pipes. Bounded cost, a named error, nothing written elsewhere."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from independent import COVERAGE, MANIFEST, REF, derive, frame
from kvmemory import HEAD, IDENTITY, LAYOUT, expect_rows, files, find, load, object_file, save
from sentences import assert_told

from kvstore import Store
from kvstore.codec import decode_coverage, decode_ref, decode_snapshot, encode_snapshot
from kvstore.digest import SnapshotDigest, label_file
from kvstore.errors import (
    CoverageCorrupt,
    InputInvalid,
    KVError,
    ObjectCorrupt,
    RefCorrupt,
    SnapshotCorrupt,
    StoreCorrupt,
)
from kvstore.items import decode_items
from kvstore.snapshot import Coverage, Lineage, Receipt, Snapshot


def value(**change: Any) -> dict[str, Any]:
    """A right manifest's value, changed."""
    good = {
        "identity": IDENTITY.wire(),
        "layout": LAYOUT.wire(),
        "namespace": "default",
        "items": struct.pack(">70I", *range(70)),
        "blocks": bytes(range(128)),
        "lineages": [{"engine": "cpu", "os": "test"}],
        "lineage": [0, 0],
        "pending": 5,
        "head": HEAD,
        "receipt": [[5, 6], 2, "cap"],
        "model": "m",
    }
    return {**good, **change}


def decode(payload: bytes) -> Snapshot:
    return decode_snapshot(frame(MANIFEST, payload), SnapshotDigest(derive("snapshot", payload)))


def reordered(payload: dict[str, Any]) -> bytes:
    return msgpack.packb(dict(reversed(payload.items())))


def without(key: str) -> bytes:
    return msgpack.packb({k: v for k, v in value().items() if k != key})


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\x90"


def test_the_right_manifest_is_read() -> None:
    snapshot = decode(msgpack.packb(value()))
    assert snapshot.items == tuple(range(70)) and snapshot.receipt == Receipt((5, 6), 2, "cap")
    assert encode_snapshot(snapshot)[1] == frame(MANIFEST, msgpack.packb(value()))


def packed(**change: Any) -> Callable[[], bytes]:
    return lambda: msgpack.packb(value(**change))


MANIFESTS: dict[str, Callable[[], bytes]] = {
    "no msgpack": lambda: b"\xc1",
    "cut": lambda: msgpack.packb(value())[:-1],
    "trailing byte": lambda: msgpack.packb(value()) + b"\xc0",
    "an array": lambda: msgpack.packb(list(value().values())),
    "nil": lambda: b"\xc0",
    "a map of 2^32-1 entries": lambda: b"\xdf\xff\xff\xff\xff",
    "a map of 300 entries": lambda: msgpack.packb({f"{i}": i for i in range(300)}),
    "an array of 2^32-1 elements": lambda: b"\x81\xa8identity\xdd\xff\xff\xff\xff",
    "a byte string of 2^32-1 bytes": lambda: b"\x81\xa5items\xc6\xff\xff\xff\xff",
    "a text of 2^32-1 bytes": lambda: b"\x81\xa5model\xdb\xff\xff\xff\xff",
    "deep arrays": lambda: b"\x81\xa8identity" + nested(100_000),
    "deep arrays within msgpack's limit": lambda: b"\x81\xa8identity" + nested(500),
    "a doubled key": lambda: b"\x8c\xa5model\xa1m" + msgpack.packb(value())[1:],
    "a doubled identity field": lambda: msgpack.packb(value()).replace(
        msgpack.packb(IDENTITY.wire()),
        b"\x86\xa1a\x01" + msgpack.packb(IDENTITY.wire())[1:].replace(b"\xa5scale", b"\xa1a"),
    ),
    "an integer key": lambda: b"\x8c\x01\x01" + msgpack.packb(value())[1:],
    "an extension": packed(model=msgpack.ExtType(1, b"x")),
    "a long integer": lambda: msgpack.packb(value()).replace(b"\xa7pending\x05", b"\xa7pending\xcc\x05"),
    "a long text": lambda: msgpack.packb(value()).replace(b"\xa5model\xa1m", b"\xa5model\xd9\x01m"),
    "a float 32": lambda: msgpack.packb(value()).replace(
        b"\xa5scale" + msgpack.packb(0.5), b"\xa5scale\xca" + struct.pack(">f", 0.5)
    ),
    "text that is no UTF-8": lambda: msgpack.packb(value()).replace(b"\xa5model\xa1m", b"\xa5model\xa1\xff"),
    "another order": lambda: reordered(value()),
    "identity in another order": packed(identity=dict(reversed(IDENTITY.wire().items()))),
    "lineage in another order": packed(lineages=[{"os": "test", "engine": "cpu"}]),
    "a key more": packed(more=1),
    **{f"no {key}": (lambda key=key: without(key)) for key in value()},
    "identity without weights": packed(identity={"tokenizer": "t"}),
    "identity of maps": packed(identity={**IDENTITY.wire(), "zmap": {"a": 1}}),
    "identity of 300 fields": packed(
        identity={**{f"a{i:03}": i for i in range(300)}, "tokenizer": "t", "weights": "w"}
    ),
    "items cut": packed(items=b"\0\0\0"),
    "items cut in a soft token": packed(items=struct.pack(">70I", *range(69), 2**31)),
    "no items": packed(items=b"", blocks=b"", lineage=[]),
    "items as text": packed(items="abcd"),
    "too few blocks": packed(blocks=bytes(64)),
    "blocks cut": packed(blocks=bytes(127)),
    "too many blocks": packed(blocks=bytes(192)),
    "lineage out of the table": packed(lineage=[0, 1]),
    "lineage negative": packed(lineage=[0, -1]),
    "lineage too short": packed(lineage=[0]),
    "lineage of floats": packed(lineage=[0, 0.0]),
    "lineage of nils": packed(lineage=[0, None]),
    "a lineage of numbers": packed(lineages=[{"engine": 1}]),
    "pending negative": packed(pending=-1),
    "pending too large": packed(pending=2**31),
    "pending without head": packed(head=None),
    "head without pending": packed(pending=None, receipt=None),
    "receipt without pending": packed(pending=None, head=None),
    "receipt longer than asked": packed(receipt=[[1, 2, 3], 2, "cap"]),
    "receipt asked for 2^40": packed(receipt=[[1], 2**40, "cap"]),
    "receipt of negative tokens": packed(receipt=[[-1], 2, "cap"]),
    "receipt with more": packed(receipt=[[1], 2, "cap", 1]),
    "namespace empty": packed(namespace=""),
    "namespace with an escape": packed(namespace="\x1b[2J"),
    "namespace not normal": packed(namespace="e\u0301"),
    "layout of another dtype": packed(layout=["int1", LAYOUT.wire()[1]]),
    "layout without groups": packed(layout=["float16", []], blocks=b""),
    "layout of huge objects": packed(
        layout=["float16", [["f", None, list(range(1024)), 1024, 65536]]], blocks=bytes(64)
    ),
    "layout of a window of 100": packed(layout=["float16", [["f", 100, [0], 1, 1]]], blocks=bytes(64)),
    "layout of doubled layers": packed(layout=["float16", [["f", None, [0, 0], 1, 1]]], blocks=bytes(64)),
    "layout of a negative layer": packed(layout=["float16", [["f", None, [-1], 1, 1]]], blocks=bytes(64)),
    "layout of nine groups": packed(
        layout=["float16", [[f"{i}", None, [i], 1, 1] for i in range(9)]], blocks=bytes(32 * 18)
    ),
    "layout with true": packed(layout=["float16", [["f", None, [0], True, 1]]], blocks=bytes(64)),
    "a megabyte of structure": packed(lineages=[{"engine": "cpu"}] * 200_000),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_hostile_manifest_is_refused(name: str) -> None:
    payload = MANIFESTS[name]()
    assert payload != msgpack.packb(value())
    with pytest.raises(SnapshotCorrupt) as caught:
        decode(payload)
    assert len(str(caught.value)) < 1000
    assert_told(caught.value, caught.value.details["what"])


COVERAGES: dict[str, Any] = {
    "another snapshot": {"snapshot": bytes(32), "runs": [[], []]},
    "one group": {"snapshot": b"d" * 32, "runs": [[[0, 1]]]},
    "beyond the end": {"snapshot": b"d" * 32, "runs": [[[0, 4]], []]},
    "negative": {"snapshot": b"d" * 32, "runs": [[[-1, 1]], []]},
    "empty run": {"snapshot": b"d" * 32, "runs": [[[1, 1]], []]},
    "backwards": {"snapshot": b"d" * 32, "runs": [[[2, 1]], []]},
    "touching": {"snapshot": b"d" * 32, "runs": [[[0, 1], [1, 2]], []]},
    "overlapping": {"snapshot": b"d" * 32, "runs": [[[0, 2], [1, 3]], []]},
    "a run of three": {"snapshot": b"d" * 32, "runs": [[[0, 1, 2]], []]},
    "floats": {"snapshot": b"d" * 32, "runs": [[[0.0, 1.0]], []]},
    "short digest": {"snapshot": b"d", "runs": [[], []]},
    "more": {"snapshot": b"d" * 32, "runs": [[], []], "more": 1},
}


@pytest.mark.parametrize("name", COVERAGES)
def test_a_hostile_coverage_is_refused(name: str) -> None:
    digest = SnapshotDigest(b"d" * 32)
    good = frame(COVERAGE, msgpack.packb({"snapshot": digest.raw, "runs": [[[0, 1], [2, 3]], []]}))
    assert decode_coverage(good, digest, 2, 3) == Coverage(digest, (((0, 1), (2, 3)), ()))
    with pytest.raises(CoverageCorrupt) as caught:
        decode_coverage(frame(COVERAGE, msgpack.packb(COVERAGES[name])), digest, 2, 3)
    assert_told(caught.value, digest.hex)


@pytest.mark.parametrize(
    "payload",
    [{"label": 1, "snapshot": bytes(32), "updated": 0}, {"label": "a", "snapshot": "x" * 32, "updated": 0}, {}, [], 7],
)
def test_a_hostile_ref_is_refused(payload: Any) -> None:
    with pytest.raises(RefCorrupt) as caught:
        decode_ref(frame(REF, msgpack.packb(payload)), "ref file refs/x")
    assert_told(caught.value, "refs/x")


def test_a_record_in_another_form_is_refused() -> None:
    digest = SnapshotDigest(b"d" * 32)
    runs = msgpack.packb({"snapshot": digest.raw, "runs": [[[0, 1]], []]})
    ref = msgpack.packb({"label": "a", "snapshot": digest.raw, "updated": 5})
    assert decode_ref(frame(REF, ref), "ref").updated == 5
    for payload in (
        reordered({"snapshot": digest.raw, "runs": [[[0, 1]], []]}),
        runs.replace(b"\x92\x00\x01", b"\x92\x00\xcc\x01"),
        runs.replace(b"\xc4\x20", b"\xc5\x00\x20"),
        runs + b"\xc0",
    ):
        assert payload != runs
        with pytest.raises(CoverageCorrupt):
            decode_coverage(frame(COVERAGE, payload), digest, 2, 3)
    for payload in (
        reordered({"label": "a", "snapshot": digest.raw, "updated": 5}),
        ref.replace(b"updated\x05", b"updated\xcc\x05"),
        ref.replace(b"label\xa1a", b"label\xd9\x01a"),
        ref.replace(b"updated\x05", b"updated\x05\xa5label\xa1a").replace(b"\x83", b"\x84", 1),
        ref + b"\xc0",
    ):
        assert payload != ref
        with pytest.raises(RefCorrupt):
            decode_ref(frame(REF, payload), "ref")


BOMB = """
import resource, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import msgpack
from independent import derive, frame
from kvstore.codec import decode_snapshot
from kvstore.digest import SnapshotDigest
from kvstore.errors import SnapshotCorrupt
million = b"\\xdd" + (1_000_000).to_bytes(4, "big") + {"maps": b"\\x80", "arrays": b"\\x90", "floats": b"\\xcb" + bytes(8)}[sys.argv[3]] * 1_000_000
many = b"\\xdc" + (min(60, (60 << 20) // len(million))).to_bytes(2, "big")
payload = b"\\x81\\xa8lineages" + many + million * min(60, (60 << 20) // len(million))
data = frame(2, payload)
digest = SnapshotDigest(derive("snapshot", payload))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    decode_snapshot(data, digest)
except SnapshotCorrupt as error:
    print("refused", "outside of byte strings" in str(error))
"""


@pytest.mark.parametrize("what", ["maps", "arrays", "floats"])
def test_a_small_file_does_not_unfold_into_gigabytes(what: str) -> None:
    here = Path(__file__).parent
    command = [sys.executable, "-c", BOMB, str(here.parents[1]), str(here), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "refused True\n", done.stderr[-500:]


def test_values_that_could_not_be_read_again_are_not_written() -> None:
    snapshot = decode(msgpack.packb(value()))
    many = tuple(Lineage.of({"engine": "x" * 700 + str(i)}) for i in range(2000))
    with pytest.raises(InputInvalid, match="outside of byte strings"):
        encode_snapshot(
            Snapshot(**{**{f: getattr(snapshot, f) for f in snapshot.__dataclass_fields__}, "lineages": many})
        )
    assert decode_items(b"") == ()


def test_a_file_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        saved = save(store, list(range(70)), name="a")
        name = saved.snapshot.blocks[0][0]
        manifest = tmp_path / "s" / "snapshots" / saved.digest.hex
        os.truncate(object_file(tmp_path / "s", name), 1 << 40)
        with pytest.raises(ObjectCorrupt, match="file length"):
            load(store, store.match("a"))
        os.truncate(manifest, 1 << 40)
        with pytest.raises(SnapshotCorrupt, match="length"):
            store.match("a")


# links and other things in the place of files


def test_links_are_not_followed(tmp_path: Path) -> None:
    path, outside = tmp_path / "s", tmp_path / "outside"
    outside.mkdir()
    with Store.open(path) as store:
        saved = save(store, list(range(70)), name="a", pending=1, head=HEAD)
        save(store, list(range(100, 170)), name="b")
        expect_rows(store, store.match("a", head=HEAD))
        places: list[tuple[Path, type[KVError]]] = [
            (object_file(path, saved.snapshot.blocks[0][0]), ObjectCorrupt),
            (path / "snapshots" / saved.digest.hex, SnapshotCorrupt),
            (path / "snapshots" / f"{saved.digest.hex}.cov", CoverageCorrupt),
            (path / "refs" / label_file("a"), RefCorrupt),
            (object_file(path, saved.snapshot.blocks[0][0]).parent, ObjectCorrupt),
        ]
        for place, error in places:
            away = outside / "target"
            place.rename(away)
            place.symlink_to(away)
            with pytest.raises(error, match="not followed") as caught:
                load(store, store.match("a", head=HEAD))
            assert_told(caught.value)
            expect_rows(store, store.match("b"))
            place.unlink()
            os.mkfifo(place)  # opening it for reading would wait for a writer
            with pytest.raises(error):
                load(store, store.match("a", head=HEAD))
            place.unlink()
            if place.name == saved.digest.hex:
                place.mkdir()
                with pytest.raises(error):
                    store.match("a")
                place.rmdir()
            away.rename(place)
        expect_rows(store, store.match("a", head=HEAD))


def test_saving_replaces_a_link_and_leaves_its_target(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with Store.open(path) as store:
        saved = save(store, list(range(70)), name="a")
        place = object_file(path, saved.snapshot.blocks[0][0])
        data = place.read_bytes()
        place.unlink()
        (tmp_path / "target").write_bytes(b"mine")
        place.symlink_to(tmp_path / "target")
        assert save(store, list(range(70)), name="a").written_objects == 1
        assert place.read_bytes() == data and not place.is_symlink()
        assert (tmp_path / "target").read_bytes() == b"mine"


@pytest.mark.parametrize(
    "folder", ["objects", "snapshots", "refs", "tmp", "objects/*", "lock", "format.json", "index.sqlite"]
)
def test_a_linked_folder_is_not_written_through(tmp_path: Path, folder: str) -> None:
    path, outside = tmp_path / "s", tmp_path / "outside"
    items = list(range(70))
    with Store.open(path) as store:
        save(store, items, name="a")
        probe = save(store, [*items, 1], name="probe").snapshot.blocks[1][0]
        store.shelf.records.move_ref("probe", store.resolve("probe"), None)
    if folder == "objects/*":
        folder = f"objects/{probe.hex[:1]}"
        object_file(path, probe).unlink()
    (path / folder).rename(outside)
    (path / folder).symlink_to(outside)
    before = (
        {p: p.read_bytes() for p in outside.rglob("*") if p.is_file()} or {outside: outside.read_bytes()}
        if outside.is_file()
        else {}
    )
    if folder == "index.sqlite":  # a cache: the link goes, its target stays as it is
        with Store.open(path) as store:
            assert find(store, [*items, 1]).n == 70
        assert not (path / folder).is_symlink()
    else:
        with pytest.raises((StoreCorrupt, RefCorrupt), match="not followed") as caught, Store.open(path) as store:
            save(store, [*items, 1], name="new")
        assert_told(caught.value, str(path / folder))
    assert before == {p: p.read_bytes() for p in before}


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_nobody_else_can_read_a_store(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        with Store.open(tmp_path / "s") as store:
            save(store, list(range(200)), name="a")
            find(store, list(range(200)))
            modes = {p: stat.S_IMODE(p.stat().st_mode) for p in [tmp_path / "s", *(tmp_path / "s").rglob("*")]}
    finally:
        os.umask(before)
    assert len(modes) > 35 and (tmp_path / "s" / "index.sqlite-wal") in modes
    assert {p for p, mode in modes.items() if mode != (0o700 if p.is_dir() else 0o600)} == set()
    assert all(not name.startswith("tmp/") for name in files(tmp_path / "s"))
