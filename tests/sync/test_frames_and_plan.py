"""The pure parts: a frame checked while it passes, and what a side lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from ferries import IDENTITY, LAYOUT, LINEAGE, tokens_of
from remote_contract import frame

from kvstore import Identity, Snapshot
from kvstore.codec import HEADER, Header, Kind, encode_header, encode_snapshot
from kvstore.digest import ContentDigest, content_digest
from kvstore.errors import FormatTooNew, ObjectCorrupt, SnapshotCorrupt
from kvstore.snapshot import Coverage, trimmed, whole
from sync.frames import check_frame
from sync.plan import continues, objects, parting, parts, plan

CUTS: dict[str, Callable[[bytes], list[bytes]]] = {
    "whole": lambda d: [d],
    "byte by byte": lambda d: [d[i : i + 1] for i in range(len(d))],
    "in the header": lambda d: [d[:50], d[50:]],
    "after the header": lambda d: [d[:HEADER], d[HEADER:]],
    "with empty pieces": lambda d: [b"", d[:HEADER], b"", d[HEADER:], b""],
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_good_frame_passes_unchanged_however_it_is_cut(cut: str) -> None:
    name, data = frame(bytes(range(256)) * 3)
    assert b"".join(bytes(p) for p in check_frame(name, 768, CUTS[cut](data))) == data


@pytest.mark.parametrize("cut", CUTS)
def test_a_bad_frame_never_ends_well_however_it_is_cut(cut: str) -> None:
    name, data = frame(bytes(range(256)) * 3)
    for at in (*range(0, HEADER, 5), HEADER, HEADER + 400, len(data) - 1):
        bad = bytearray(data)
        bad[at] ^= 1
        with pytest.raises((ObjectCorrupt, FormatTooNew)):
            list(check_frame(name, 768, CUTS[cut](bytes(bad))))
    for bad_data in (data[:-1], data + b"\0", data[: HEADER - 1], data[:HEADER], b"", data + data):
        with pytest.raises(ObjectCorrupt, match="length"):
            list(check_frame(name, 768, CUTS[cut](bad_data)))


def test_no_more_is_taken_than_the_object_is_long() -> None:
    """A sender that never stops costs one piece beyond the end, and one with a wrong length costs the header."""
    name, data = frame(bytes(1000))
    taken = [0]

    def endless(start: bytes) -> Iterator[bytes]:
        yield start
        while True:
            taken[0] += 1
            yield bytes(1000)

    with pytest.raises(ObjectCorrupt, match="length"):
        list(check_frame(name, 1000, endless(data)))
    assert taken[0] == 1
    with pytest.raises(ObjectCorrupt, match="content length"):
        list(check_frame(name, 999, endless(data)))
    assert taken[0] == 1
    future = bytearray(data[:HEADER])
    future[8:10] = (2).to_bytes(2, "little")
    header = Header(Kind.OBJECT, 1000, 1000, name.raw, bytes(32), codec=2)
    with pytest.raises(FormatTooNew, match="codec 2"):
        list(check_frame(name, 1000, endless(encode_header(header))))
    assert taken[0] == 1


def content(label: str) -> ContentDigest:
    return content_digest([label.encode()])


def snapshot(tokens: int, seed: str = "a", kv: str = "a") -> Snapshot:
    """Contents by (kv, group, block and its length), so that equal blocks of two lengths of text are equal objects."""
    blocks = tuple(
        tuple(content(f"{kv} {g} {b} {min(64, tokens - 64 * b)}") for g in range(2)) for b in range(-(-tokens // 64))
    )
    return Snapshot(IDENTITY, LAYOUT, "default", tuple(tokens_of(tokens, seed)), blocks, (LINEAGE,), (0,) * len(blocks))


def test_what_is_moved_is_what_is_wanted_not_there_and_at_the_source() -> None:
    snap = snapshot(300)
    digest = encode_snapshot(snap)[0]
    want = objects(snap, whole(digest, snap))
    assert list(want) == [name for block in snap.blocks for name in block], "in the order of their blocks"
    assert sum(want.values()) == 300 * LAYOUT.bytes_per_token
    (a, b), (c, d), *_ = snap.blocks
    made = plan("n", None, snap, whole(digest, snap), there={a, content("unrelated")}, source={a, b, c})
    assert made.move == {b: want[b], c: want[c]} and made.payload_bytes == want[b] + want[c]
    assert (made.there, made.nowhere) == (1, 7)
    assert made.coverage == Coverage(digest, (((0, 2),), ((0, 1),))) and d not in made.move
    nothing = plan("n", digest, snap, whole(digest, snap), there=want.keys(), source=set())
    assert (nothing.move, nothing.there, nothing.nowhere) == ({}, 10, 0)
    assert nothing.coverage == whole(digest, snap)
    least = plan("n", None, snap, trimmed(digest, snap), there=set(), source=want.keys())
    # Sliding rows from block (300 - 128) // 64 = 2 on.
    assert len(least.move) == 3 + 5 and least.coverage == Coverage(digest, (((2, 5),), ((0, 5),)))


def test_equal_objects_are_moved_once_and_cover_every_block_that_names_them() -> None:
    snap = snapshot(256)
    snap = replace(snap, blocks=(snap.blocks[0],) * 4)
    digest = encode_snapshot(snap)[0]
    made = plan("n", None, snap, whole(digest, snap), there=set(), source=set(snap.blocks[0]))
    assert len(made.move) == 2 and made.coverage == whole(digest, snap) and made.nowhere == 0


def test_one_object_in_two_lengths_is_refused() -> None:
    snap = snapshot(100)
    snap = replace(snap, blocks=(snap.blocks[0], snap.blocks[0]))
    with pytest.raises(SnapshotCorrupt, match=snap.blocks[0][0].hex):
        objects(snap, whole(encode_snapshot(snap)[0], snap))


@pytest.mark.parametrize(
    ("longer", "shorter", "does"),
    [
        (snapshot(300), snapshot(300), True),
        (snapshot(300), snapshot(128), True),
        (snapshot(300), snapshot(130), True),
        (snapshot(130), snapshot(300), False),
        (snapshot(300), snapshot(128, "b"), False),
        (snapshot(300, kv="b"), snapshot(128), False),
        (snapshot(70, kv="b"), snapshot(50), True),
        (snapshot(50, kv="b"), snapshot(50), False),
        (replace(snapshot(300), namespace="other"), snapshot(128), False),
        (replace(snapshot(300), identity=Identity.of({"weights": "x", "tokenizer": "t"})), snapshot(128), False),
    ],
)
def test_continues(longer: Snapshot, shorter: Snapshot, does: bool) -> None:
    assert continues(longer, shorter) is does
    if not does:
        assert parting(shorter, longer)


def test_parts() -> None:
    assert list(parts({i: i for i in range(5)}, 2)) == [{0: 0, 1: 1}, {2: 2, 3: 3}, {4: 4}]
    assert list(parts({}, 2)) == []
