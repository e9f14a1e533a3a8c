"""Objects as byte planes: what goes in comes out; hostile payloads are refused before they cost anything; a store may hold both codecs."""

from __future__ import annotations

import itertools
import json
import random
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from independent import Reader
from kvmemory import Change, object_file
from narrow import Narrow, codecs, expect, save

from kvstore import Store
from kvstore.check import check
from kvstore.codec import (
    HEADER,
    PLANES,
    RAW,
    Header,
    Kind,
    check_object,
    decode_header,
    decode_object,
    encode_header,
    encode_object,
)
from kvstore.digest import ContentDigest, content_digest
from kvstore.errors import FormatTooNew, ObjectCorrupt
from kvstore.planes import MAX_PLANES, decode_planes, encode_planes, fits_planes

ITEMS = [(7 * i) % 90 for i in range(330)]
N = 20_000
CONTENT = np.random.default_rng(1).standard_normal(N).astype("<f2").tobytes()
NAME = content_digest([CONTENT])
LOW, HIGH = CONTENT[0::2], CONTENT[1::2]


def zstd(data: bytes, *, write_checksum: bool = False) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_checksum=write_checksum).compress(data)


def by_hand(size: int, blocks: list[tuple[int, int, bytes]], descriptor: int = 0xA0, window: bytes = b"") -> bytes:
    """A Zstandard frame as RFC 8878 has it. ``blocks``: type (0 raw, 1 run), size, data."""
    frame = b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + window + size.to_bytes(4, "little")
    for number, (kind, length, data) in enumerate(blocks, 1):
        frame += (length << 3 | kind << 1 | (number == len(blocks))).to_bytes(3, "little") + data
    return frame


SKIPPABLE = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"abcd"
RUN = [(1, N, b"a")]
HOSTILE: dict[str, tuple[bytes, str]] = {
    "a bomb": (by_hand(2000 << 17, [(1, 1 << 17, b"a")] * 2000), "found .262144000,"),
    "no size": (
        (lambda c: c.compress(HIGH) + c.flush())(zstandard.ZstdCompressor(level=3).compressobj()),
        "content size",
    ),
    "one byte less": (zstd(HIGH[:-1]), "found .19999,"),
    "one byte more": (zstd(HIGH + b"\0"), "found .20001,"),
    "a size of 2**32 - 1": (by_hand(2**32 - 1, RUN), "found .4294967295,"),
    "more than it says": (by_hand(N, [(1, 100_000, b"a")] * 2), "one frame of 20000"),
    "less than it says": (by_hand(N, [(1, N - 1, b"a")]), "one frame of 20000"),
    "a trailing byte": (zstd(HIGH) + b"\0", "1 bytes of unused"),
    "two frames": (zstd(HIGH[: N // 2]) + zstd(HIGH[N // 2 :]), "found .10000,"),
    "the same twice": (by_hand(N, RUN) * 2, "bytes of unused"),
    "an empty second frame": (zstd(HIGH) + zstd(b""), "9 bytes of unused"),
    "a skippable frame before": (SKIPPABLE + zstd(HIGH), "magic number"),
    "a skippable frame behind": (zstd(HIGH) + SKIPPABLE, "12 bytes of unused"),
    "a skippable frame alone": (SKIPPABLE, "magic number"),
    "a checksum": (zstd(HIGH, write_checksum=True), "0, True"),
    "a dictionary": (by_hand(N, RUN).replace(b"\xfd\xa0", b"\xfd\xa1\x07"), "20000, 7, False"),
    "a window of 64 MiB": (by_hand(N, RUN, 0x80, bytes([(26 - 10) << 3])), "at most 33554432"),
    "a window of 3.75 TiB": (by_hand(N, RUN, 0x80, b"\xff"), "too much memory"),
    "a cut frame": (zstd(HIGH)[:-1], "did not decompress"),
    "a cut header": (zstd(HIGH)[:6], "frame parameters"),
    "no frame": (b"GGUF" + bytes(1000), "magic number"),
    "another plane": (zstd(HIGH[::-1]), "content digest"),
}


def file(frame: bytes, **other: object) -> bytes:
    """An object's file with that frame; its header is right, but for ``other``."""
    from blake3 import blake3

    payload = LOW + frame
    fields = {"content_length": 2 * N, "stored_length": len(payload), "name": NAME.raw, "stored": blake3(payload).digest(),
              "codec": PLANES, **other}  # fmt: skip
    return encode_header(Header(Kind.OBJECT, **fields)) + payload  # type: ignore[arg-type]


def read(data: bytes) -> None:
    check_object(decode_header(data, Kind.OBJECT, "it"), [data[HEADER:]], NAME)


@pytest.mark.parametrize("cuts", [[], [2], [1, 2, 20_000], [20_000, 39_999]])
def test_what_goes_in_comes_out(cuts: list[int]) -> None:
    edges = [0, *cuts, 2 * N]
    parts = [memoryview(CONTENT)[a:b] for a, b in itertools.pairwise(edges)]
    payload = encode_planes(parts)
    assert payload is not None and payload[:N] == LOW and N < len(payload) < 0.9 * len(CONTENT)
    assert zstandard.ZstdDecompressor().decompress(payload[N:]) == HIGH
    assert decode_planes(NAME, memoryview(payload), len(CONTENT)) == CONTENT
    into = [memoryview(bytearray(len(part))) for part in parts]
    header, stored = encode_object(NAME, parts, PLANES)
    decode_object(decode_header(header, Kind.OBJECT, "it"), memoryview(stored), NAME, into)
    assert b"".join(into) == CONTENT


def test_every_pair_of_bytes_comes_back() -> None:
    content = b"".join(bytes([low, high]) for high in range(256) for low in range(256)) + bytes(200_000)
    payload = encode_planes([content])
    assert payload is not None
    assert decode_planes(content_digest([content]), memoryview(payload), len(content)) == content


@pytest.mark.parametrize(
    "content", [bytes(1001), b"\0", random.Random(1).randbytes(5000), b"ab", bytes(MAX_PLANES + 2)]
)
def test_what_planes_do_not_serve_stays_raw(content: bytes) -> None:
    name = content_digest([content])
    header, *rest = encode_object(name, [content], PLANES)
    assert decode_header(header, Kind.OBJECT, "it").codec == RAW and rest == [content]


def test_a_good_file_is_accepted_whoever_compressed_it() -> None:
    read(b"".join(encode_object(NAME, [CONTENT], PLANES)))
    for frame in (
        *(zstandard.ZstdCompressor(level=level, write_checksum=False).compress(HIGH) for level in (-5, 1, 19)),
        by_hand(N, [(0, 15_000, HIGH[:15_000]), (0, 5_000, HIGH[15_000:])]),
        by_hand(N, [(0, N, HIGH)], 0x80, bytes([(25 - 10) << 3])),
    ):
        if fits_planes(2 * N, N + len(frame)):
            read(file(frame))
        else:
            with pytest.raises(ObjectCorrupt, match="less than all"):
                read(file(frame))
    read(file(zstd(HIGH)))


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_frame_is_refused(what: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    frame, words = HOSTILE[what]
    with pytest.raises(ObjectCorrupt, match=f"{NAME}: .*{words}"):
        read(file(frame))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 16 << (20 if sys.platform == "darwin" else 10), "memory as the frame asks for it"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"content_length": 2 * N + 1}, "even number"),
        ({"content_length": MAX_PLANES + 2}, "up to 67108864"),
        ({"content_length": 2**60}, "1 to 1073741824"),
        ({"stored_length": N}, "more than half"),
        ({"stored_length": 2 * N}, "less than all"),
        ({"stored_length": 2**60}, "less than all"),
        ({"content_length": 0}, "content length"),
        ({"content_length": 2 * N - 2}, "Zstandard"),
        ({"content_length": 2 * N + 2}, "Zstandard"),
        ({"stored": NAME.raw}, "stored hash"),
        ({"name": bytes(32)}, "name in the header"),
    ],
)
def test_a_header_that_cannot_be_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ObjectCorrupt, match=words):
        read(file(zstd(HIGH), **fields))


def test_planes_are_for_objects_and_other_codecs_are_newer() -> None:
    for kind in Kind:
        for codec in (PLANES, 2, 255):
            data = encode_header(Header(kind, 2 * N, N + 100, NAME.raw, bytes(32), codec))
            if (kind, codec) == (Kind.OBJECT, PLANES):
                assert decode_header(data, kind, "it").codec == PLANES
            else:
                with pytest.raises(FormatTooNew, match=f"found codec {codec}"):
                    decode_header(data, kind, "it")


# in a store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "s")


def test_a_store_saved_as_planes(store: Store) -> None:
    path = store.shelf.path
    saved = save(store, ITEMS, name="a", codec="planes")
    assert set(codecs(path).values()) == {PLANES}
    assert saved.written_bytes == sum(p.stat().st_size for p in path.glob("objects/?/*")) < 0.85 * 330 * 80
    assert json.loads((path / "format.json").read_text()) == {"format": 2, "features": ["planes"]}
    expect(store, "a")
    assert check(store).ok
    with Store.open(path) as again:
        expect(again, "a")
    assert Reader(path).rows(saved.digest.raw)  # type: ignore[union-attr]


def test_names_do_not_depend_on_the_codec(store: Store, tmp_path: Path) -> None:
    with Store.open(tmp_path / "raw") as raw:
        assert save(raw, ITEMS).digest == save(store, ITEMS, codec="planes").digest
        assert codecs(raw.shelf.path).keys() == codecs(store.shelf.path).keys()
        assert set(codecs(raw.shelf.path).values()) == {RAW}
        assert json.loads((raw.shelf.path / "format.json").read_text())["features"] == []


def test_raw_and_planes_live_together(store: Store) -> None:
    """What is here counts whichever codec it is in: nothing is written twice."""
    save(store, ITEMS[:128], name="a", codec="planes")
    grown = save(store, ITEMS, name="b")
    assert grown.written_objects == 2 * 4 and sorted(codecs(store.shelf.path).values()) == [RAW] * 8 + [PLANES] * 4
    assert save(store, ITEMS, name="c", codec="planes").written_objects == 0
    for name in "abc":
        expect(store, name)
    known = store.match("b").snapshot.blocks
    assert save(store, [*ITEMS[:320], 1, 2], name="d", known=known[:5]).written_objects == 2
    assert check(store).ok


def test_only_part_of_an_object_is_wanted(store: Store) -> None:
    save(store, ITEMS, name="a", codec="planes")
    for n in (1, 63, 64, 65, 200, 329):
        match = store.match("a", at=n)
        rows, want = Narrow(match.snapshot.layout, n), Narrow.causal(ITEMS)
        store.load(match, rows)
        for group, (first, last) in enumerate(match.runs):
            assert rows.rows(group, first, last) == want.rows(group, first, last)


def test_every_damaged_byte_and_every_cut_of_planes_is_found(store: Store) -> None:
    save(store, ITEMS, name="a", codec="planes")
    snapshot = store.match("a").snapshot
    name, length = snapshot.blocks[1][0], snapshot.object_bytes(1, 0)
    change = Change(object_file(store.shelf.path, name))
    good = change.before

    def refused(data: bytes, *, complete: bool) -> None:
        with change.to(data):
            with pytest.raises((ObjectCorrupt, FormatTooNew), match=name.hex[:12]):
                expect(store, "a")
            assert store.shelf.objects.complete(name, length) is complete
            assert not store.shelf.objects.sound(name, length) or data == good

    for at in (*range(96, 128), *range(128, len(good), 7), len(good) - 1):
        refused(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :], complete=at >= HEADER)
    for bad in (good[:-1], good[:HEADER], good[:60], b"", good + b"\0", good + bytes(HEADER + length - len(good) - 1)):
        refused(bad, complete=False)
    # As long as the raw object would be: that it isn't it is found when it is read.
    refused(good + bytes(HEADER + length - len(good)), complete=True)
    expect(store, "a")
    # A saver that has the rows writes it again, raw.
    change.path.write_bytes(good[:-1])
    assert save(store, ITEMS, name="a").written_objects == 1
    change.path.write_bytes(good[:200] + b"x" + good[201:])
    assert save(store, ITEMS, name="a").written_objects == 1 and check(store).ok


def test_a_good_object_in_anothers_place_is_not_it(store: Store) -> None:
    save(store, ITEMS, name="a", codec="planes")
    blocks = store.match("a").snapshot.blocks
    one, other = (object_file(store.shelf.path, block[0]) for block in blocks[:2])
    with Change(one).to(other.read_bytes()):
        assert not store.shelf.objects.complete(blocks[0][0], 2048)
        with pytest.raises(ObjectCorrupt, match="name in the header"):
            expect(store, "a")
    expect(store, "a")


@pytest.mark.parametrize(
    "spoil", [lambda store: shutil.rmtree(store / "objects"), lambda store: None], ids=["gone", "there"]
)
def test_an_error_leaves_no_thread_writing(store: Store, spoil: Callable[[Path], None]) -> None:
    """When `load` has raised, nobody writes to the caller's rows any more."""
    save(store, ITEMS, name="a", codec="planes")
    match = store.match("a")
    place = object_file(store.shelf.path, match.snapshot.blocks[3][1])
    place.write_bytes(place.read_bytes()[:-1] + b"x")
    rows = Narrow(match.snapshot.layout, match.n)
    with pytest.raises(ObjectCorrupt):
        store.load(match, rows)
    spoil(store.shelf.path)
    rows = Narrow(match.snapshot.layout, match.n)
    with pytest.raises((ObjectCorrupt, KeyError)):
        store.load(match, rows)
    import threading

    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvferry-planes")]


# the feature


def test_a_feature_is_listed_once_and_other_keys_stay(store: Store) -> None:
    place = store.shelf.path / "format.json"
    place.write_text('{"more": {"é": [1, 2]}, "format": 2, "features": []}')
    for _ in range(2):
        store.shelf.require("planes")
        assert json.loads(place.read_text()) == {"more": {"é": [1, 2]}, "format": 2, "features": ["planes"]}
    before = place.stat().st_mtime_ns
    save(store, ITEMS, codec="planes")
    assert place.stat().st_mtime_ns == before
    assert place.stat().st_mode & 0o777 == 0o600 and not list((store.shelf.path / "tmp").iterdir())


def test_the_feature_is_there_before_the_object(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every rename into objects/ the store says already what its reader must know."""
    seen = []
    move = type(store.shelf.root).move

    def watched(root: object, moves: list[tuple[str, str]]) -> None:
        seen.append(json.loads((store.shelf.path / "format.json").read_text())["features"])
        move(root, moves)  # type: ignore[arg-type]

    monkeypatch.setattr(type(store.shelf.root), "move", watched)
    save(store, ITEMS, codec="planes")
    assert seen and all(features == ["planes"] for features in seen)


def test_an_older_kvferry_refuses_the_store_by_name(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, ITEMS, name="a", codec="planes")
    monkeypatch.setattr("kvstore.shelf.FEATURES", ())
    with pytest.raises(FormatTooNew, match=r"found \['planes'\]"):
        Store.open(store.shelf.path)


def test_a_store_of_a_newer_version_gets_no_feature(store: Store) -> None:
    place = store.shelf.path / "format.json"
    for text in ('{"format": 3, "features": []}', '{"format": 2, "features": ["encrypted"]}'):
        place.write_text(text)
        with pytest.raises(FormatTooNew):
            save(store, ITEMS, codec="planes")
        assert place.read_text() == text and codecs(store.shelf.path) == {}


def test_complete_costs_no_more_for_what_is_raw(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, ITEMS[:64])
    (raw,) = [ContentDigest.parse(n) for n in codecs(store.shelf.path)][:1]
    length = store.shelf.objects.size(raw)
    assert length is not None
    monkeypatch.setattr("kvstore.files.Root.open", None)  # a raw object's file is not opened
    assert store.shelf.objects.complete(raw, length - HEADER)
    assert not store.shelf.objects.complete(raw, length - HEADER - 2)
    assert not store.shelf.objects.complete(ContentDigest(bytes(32)), 2048)


def test_a_stored_hash_that_is_wrong_is_found_by_whoever_examines(store: Store) -> None:
    """A restore proves the content by its digest. `check` and savers find a payload that isn't the one that its header states, too."""
    save(store, ITEMS, name="a", codec="planes")
    snapshot = store.match("a").snapshot
    name, length = snapshot.blocks[1][0], snapshot.object_bytes(1, 0)
    place = object_file(store.shelf.path, name)
    data = place.read_bytes()
    lie = encode_header(Header(Kind.OBJECT, length, len(data) - HEADER, name.raw, bytes(32), PLANES))
    place.write_bytes(lie + data[HEADER:])
    assert store.shelf.objects.complete(name, length) and not store.shelf.objects.complete(name, length - 2)
    expect(store, "a")
    assert not store.shelf.objects.sound(name, length) and not check(store).ok
    assert save(store, ITEMS, name="a").written_objects == 1 and check(store).ok
