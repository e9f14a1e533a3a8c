"""Parsers of a store's own files, and what reads them again: repair, and the app's checkpoint folder."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import battery
from mutations import as_json, as_msgpack, some_bytes
from parsing import Case, Parser, files_in, in_folder

GOLDEN = battery.HERE.parent / "kvstore" / "golden" / "format-2"


def objects(folder: Path) -> Case:
    """Raw ones and planes; from the disk as a store reads them, and in pieces from another store. Both accept the same files."""
    from blake3 import blake3
    from harmed import CODEC, PLANES, fill
    from independent import OBJECT, derive, frame

    from kvstore.digest import ContentDigest, content_digest
    from kvstore.errors import KVError
    from kvstore.shelf import Shelf
    from sync.frames import check_frame

    store = folder / "store"
    fill(store)
    shelf = Shelf.open(store)
    chance = random.Random(1)
    seeds = [(f"{path.parent.name}{path.name}", path.read_bytes()) for path in sorted(store.glob("objects/*/*"))]
    planes = [seed for seed in seeds if seed[1][CODEC] == PLANES]
    assert 0 < len(planes) < len(seeds)
    lengths = {name: int.from_bytes(data[16:24], "little") for name, data in seeds}

    def read(file: str, data: bytes) -> None:
        name, place = ContentDigest.parse(file), store / "objects" / file[0] / file[1:]
        good = place.read_bytes()
        place.write_bytes(data)
        refused: KVError | None = None
        try:
            content = shelf.objects.read(name, lengths[file])
        except KVError as error:
            refused = error
        finally:
            place.write_bytes(good)
        cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.choice([0, 1, 5])))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        try:
            for _ in check_frame(name, lengths[file], pieces):
                pass
        except KVError:
            assert refused is not None, "refused on its way, accepted on the disk"
        else:
            assert refused is None, f"accepted on its way, refused on the disk: {refused}"
        if refused is not None:
            raise refused
        assert content_digest([content]) == name, "accepted other bytes"
        assert data == good or data[CODEC] == PLANES, "accepted another raw file"

    def seal(file: str, data: bytes) -> bytes:
        payload = data[128:] or b"\0"
        fields: dict[str, Any] = {"name": bytes.fromhex(file)} if chance.random() < 0.8 else {}
        if file in dict(planes) and chance.random() < 0.9:
            fields |= {"codec": PLANES, "content": lengths[file], "hash": blake3(payload).digest()}
        else:
            fields["hash"] = derive("object", payload)
        for key, values in HEADERS.items():
            if chance.random() < 0.05:
                fields[key] = chance.choice(values)
        return frame(OBJECT, payload, **fields)

    return Case(seeds + 3 * planes, read, seal=seal)


def object_again(data: bytes) -> bytes:
    """An object's file, decoded and encoded again. Which bytes a compressor makes is its own affair: of planes the content counts."""
    from kvstore.codec import HEADER, Kind, check_object, decode_header, encode_object
    from kvstore.digest import ContentDigest

    header = decode_header(data, Kind.OBJECT, "object")
    name = ContentDigest(header.name)
    check_object(header, [memoryview(data)[HEADER:]], name)
    return data if header.codec else b"".join(encode_object(name, [data[HEADER:]]))


HEADERS: dict[str, list[Any]] = {
    "version": [0, 1, 2, 65535],
    "kind": [0, 1, 2, 3, 4, 255],
    "codec": [0, 1, 2, 255],
    "cipher": [0, 1],
    "reserved": [b"\0\0\1"],
    "content": [0, 1, 2**20, 2**30, 2**30 + 1, 2**63, 2**64 - 1],
    "stored": [0, 1, 2**20, 2**30, 2**63, 2**64 - 1],
}
"""What a header may say; with it goes a right header hash."""


def _record(kind: int, what: str, find: str, read: Callable[[bytes], bytes]) -> Callable[[Path], Case]:
    """A parser of one kind of record: ``read`` returns what the value that it accepted is written as."""

    def prepare(_: Path) -> Case:
        from independent import derive, frame

        chance = random.Random(2)

        def seal(_: str, payload: bytes) -> bytes:
            header = {key: chance.choice(values) for key, values in HEADERS.items() if chance.random() < 0.01}
            return frame(kind, payload, **{"name": derive(what, payload), **header})

        def again(_: str, data: bytes) -> None:
            assert read(data) == data, "written again it is another file"

        def way(data: bytes, chance: random.Random) -> bytes:
            """``data`` is a whole frame: its payload is changed, and sealed again by `seal` or not."""
            payload = as_msgpack(data[128:], chance)
            return seal("", payload) if chance.random() < 0.9 else some_bytes(data, chance)

        seeds = [(what, path.read_bytes()) for path in sorted(GOLDEN.glob(find))]
        return Case([s for s in seeds if s[1][10] == kind], again, {"": way})

    return prepare


def _manifest(data: bytes) -> bytes:
    from independent import derive

    from kvstore.codec import decode_snapshot, encode_snapshot
    from kvstore.digest import SnapshotDigest

    digest = SnapshotDigest(derive("snapshot", data[128:]))
    snapshot = decode_snapshot(data, digest)
    list(snapshot.chain())
    made, written = encode_snapshot(snapshot)
    assert made == digest
    return written


def _coverage(data: bytes) -> bytes:
    import msgpack

    from kvstore.codec import decode_coverage, encode_coverage
    from kvstore.digest import SnapshotDigest

    snapshot = bytes(32)
    for path in GOLDEN.glob("snapshots/*.cov"):  # whose it is: its place says so, where a store reads it
        if msgpack.unpackb(path.read_bytes()[128:])["snapshot"] in data:
            snapshot = bytes.fromhex(path.stem)
    return encode_coverage(decode_coverage(data, SnapshotDigest(snapshot), 2, 6))


def _ref(data: bytes) -> bytes:
    from kvstore.codec import decode_ref, encode_ref

    return encode_ref(decode_ref(data, "ref file refs/x"))


def format_json(folder: Path) -> Case:
    from kvstore.shelf import Shelf

    def read(path: Path) -> None:
        Shelf.open(path, create=False).close()
        assert json.loads((path / "format.json").read_bytes())["format"] == 2

    return Case(files_in(GOLDEN, "format.json"), in_folder(folder, GOLDEN, read), {"json": as_json})


def quota_json(folder: Path) -> Case:
    from kvstore.quota import LEAST, read_quota
    from kvstore.shelf import Shelf

    shutil.copytree(GOLDEN, good := folder / "good")
    (good / "quota.json").write_text(json.dumps({"quota": 2 * LEAST}) + "\n")

    def read(path: Path) -> None:
        with Shelf.open(path) as shelf:
            quota = read_quota(shelf.root)
            assert quota is not None and quota > 0

    return Case(files_in(good, "quota.json"), in_folder(folder, good, read), {"json": as_json})


def repaired(folder: Path) -> Case:
    """Any file of a store: repair ends well, a check finds nothing afterwards but what it says is lost, and no other name is hurt."""
    from harmed import Scene, Seen

    from kvstore import Store, repair
    from kvstore.check import check

    scene = Scene(folder / "store")
    kinds = ("object", "planes", "manifest", "coverage", "ref")

    def read(name: str, data: bytes) -> None:
        with scene.with_files({name: data}):
            with Store.open(scene.path) as store:
                repair.apply(store, check(store))
                left = [problem for problem in check(store).problems if problem.kind != "newer"]
                assert not left, left
            seen = Seen(scene.path, check_again=False)
            hurt = {label for label, needed in scene.needs.items() if name in needed}
            assert seen.refused.keys() <= hurt, seen.refused

    return Case([(name, scene.good(name)) for kind in kinds for name in scene.kinds[kind]], read)


def items(_: Path) -> Case:
    import struct

    from kvstore.items import decode_items, encode_items

    def read(_: str, data: bytes) -> None:
        assert encode_items(decode_items(data)) == data

    soft = struct.pack(">I", 2**31 + 7) + bytes(range(32))
    return Case([("items", struct.pack(">3I", 1, 2, 2**31 - 1)), ("items", b"\0\0\0\1" + soft + b"\0\0\0\2")], read)


def index(folder: Path) -> Case:
    """The index's file: whatever it holds, a search finds what the files say or less, and a check makes it anew."""
    from harmed import SAVED, Scene, same
    from kvmemory import find, load

    from kvstore import Store
    from kvstore.check import check

    scenes = {"settled": Scene(folder / "settled"), "live": Scene(folder / "live", live=True)}
    names = sorted(SAVED)

    def read(file: str, data: bytes) -> None:
        state, _, name = file.partition("/")
        scene = scenes[state]
        with scene.with_files({name: data}), Store.open(scene.path) as store:
            items = SAVED[names[len(data) % len(names)]]
            asked = [*items, 77777]
            match = find(store, asked)
            if match is not None:
                same(load(store, match), match, asked)
            assert check(store).ok
            match = find(store, asked)
            assert match is not None and match.n == len(items), match

    seeds = [(f"{state}/{name}", scene.good(name)) for state, scene in scenes.items() for name in scene.kinds["index"]]
    return Case(seeds, read)


def checkpoint(folder: Path) -> Case:
    import corellm_independent as independent
    from corellm_models import app, some_rows, some_tokens, write_bundle

    from kvstore.formats.corellm_folder import read_folder

    bundle = write_bundle(folder / "bundle", ctx=128, sliding=64)
    independent.write(folder / "good", bundle, some_tokens(70), some_rows(bundle, 70), pending=3)
    geometry = app(bundle).geometry()

    def read(path: Path) -> None:
        made, rows = read_folder(path, geometry, lambda _: None)
        assert 0 < len(made.tokens) <= 128 and rows.tokens == len(made.tokens)

    one = in_folder(folder, folder / "good", read)
    manifest = files_in(folder / "good", "manifest.json")
    return Case([*manifest * 4, *files_in(folder / "good", "*.bin")], one, {"json": as_json})


STORE: tuple[Parser, ...] = (
    Parser("objects", ("kvstore.codec", "kvstore.planes", "sync.frames"), objects),
    Parser(
        "manifest",
        ("kvstore.codec", "kvstore.items", "kvstore.digest"),
        _record(2, "snapshot", "snapshots/*", _manifest),
    ),
    Parser("coverage", ("kvstore.codec",), _record(3, "coverage", "snapshots/*.cov", _coverage)),
    Parser("ref", ("kvstore.codec",), _record(4, "ref", "refs/*", _ref)),
    Parser("format.json", ("kvstore.shelf",), format_json),
    Parser("quota.json", ("kvstore.quota",), quota_json),
    Parser("items", ("kvstore.items",), items),
    Parser("index", ("kvstore.index",), index),
    Parser("repair", ("kvstore.salvage", "kvstore.repair"), repaired),
    Parser("checkpoint folder", ("kvstore.formats.corellm", "kvstore.formats.corellm_folder"), checkpoint),
)
