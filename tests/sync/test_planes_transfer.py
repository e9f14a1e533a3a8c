"""Planes on their way: they are carried as they are stored, so fewer bytes move; whoever gets them lists the feature first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from ferries import IDENTITY as MODEL
from ferries import LAYOUT, LINEAGE, MASTER, Ram, object_files, tokens_of

from kvstore import Store
from kvstore.__main__ import app
from kvstore.codec import HEADER, PLANES, RAW, Codec, Header, Kind, decode_header
from kvstore.digest import ContentDigest, content_digest
from kvstore.errors import FormatTooNew, ObjectCorrupt
from kvstore.layout import blocks_of
from sync import Folder, Moved, pull, push
from sync.frames import check_frame
from sync.incoming import Incoming

FEW = bytes(0x38 | byte & 7 for byte in range(256))
TOKENS = 300
CONTENT = TOKENS * LAYOUT.bytes_per_token


class NarrowRam(Ram):
    """Rows with eight different high bytes."""

    def __init__(self, tokens: int, seed: str = "a") -> None:
        super().__init__(tokens, seed)
        for array in self.data.values():
            array[1::2] = array[1::2].translate(FEW)


def save(store: Store, name: str, codec: Codec) -> None:
    store.save(LAYOUT, MODEL, tokens_of(TOKENS), NarrowRam(TOKENS), namespace="default", name=name,
               lineage=[LINEAGE] * blocks_of(TOKENS), pending=7, head=MASTER, codec=codec)  # fmt: skip


def expect(path: Path, name: str) -> None:
    with Store.open(path) as store:
        match = store.match(name, head=MASTER)
        rows, want = Ram(TOKENS, fill=False), NarrowRam(TOKENS)
        store.load(match, rows)
        for g, (a, b) in enumerate(match.runs):
            assert [bytes(s) for s in rows.spans(g, a, b)] == [bytes(s) for s in want.spans(g, a, b)]


def codecs(path: Path) -> set[int]:
    return {decode_header(p.read_bytes()[:HEADER], Kind.OBJECT, p.name).codec for p in object_files(path)}


def features(path: Path) -> list[str]:
    found: list[str] = json.loads((path / "format.json").read_text())["features"]
    return found


def size(path: Path) -> int:
    return sum(p.stat().st_size for p in object_files(path))


def sent(store: Store, stick: Path, codec: Codec | None = None) -> Moved:
    with Folder.open(stick, create=True) as remote:
        return push(store, remote, ["a"], codec=codec)


@pytest.mark.parametrize("codec", [RAW, PLANES])
def test_what_is_stored_is_what_travels(tmp_path: Path, codec: int) -> None:
    there: Codec = "planes" if codec else "raw"
    with Store.open(tmp_path / "home") as home:
        save(home, "a", there)
        pushed = sent(home, tmp_path / "stick")
    with Folder.open(tmp_path / "stick") as remote, Store.open(tmp_path / "away") as away:
        pulled = pull(away, remote, ["a"])
    for path, moved in (("stick", pushed), ("away", pulled)):
        assert codecs(tmp_path / path) == {codec} and features(tmp_path / path) == (["planes"] if codec else [])
        assert (moved.objects, moved.payload_bytes, moved.frame_bytes) == (10, CONTENT, size(tmp_path / "home"))
    assert (pulled.frame_bytes < 0.85 * CONTENT) is (codec == PLANES)
    expect(tmp_path / "away", "a")


@pytest.mark.parametrize("here", ["raw", "planes"])
@pytest.mark.parametrize("asked", ["raw", "planes"])
def test_a_push_in_another_codec(tmp_path: Path, here: Codec, asked: Codec) -> None:
    with Store.open(tmp_path / "home") as home:
        save(home, "a", here)
        before = size(tmp_path / "home")
        moved = sent(home, tmp_path / "stick", asked)
        assert size(tmp_path / "home") == before
    assert codecs(tmp_path / "stick") == {PLANES if asked == "planes" else RAW}
    assert features(tmp_path / "stick") == (["planes"] if asked == "planes" else [])
    assert moved.frame_bytes == size(tmp_path / "stick") and moved.payload_bytes == CONTENT
    expect(tmp_path / "stick", "a")


def test_what_the_other_side_has_in_another_codec_is_not_carried(tmp_path: Path) -> None:
    with Store.open(tmp_path / "home") as home:
        save(home, "a", "planes")
        sent(home, tmp_path / "stick", "raw")
        again = sent(home, tmp_path / "stick")
    assert (again.objects, again.frame_bytes, again.skipped) == (0, 0, 10)
    with Store.open(tmp_path / "away") as away, Folder.open(tmp_path / "stick") as remote:
        save(away, "b", "planes")
        pulled = pull(away, remote, ["a"], verify=True)
    assert (pulled.objects, pulled.skipped) == (0, 10) and codecs(tmp_path / "away") == {PLANES}


def test_damaged_planes_are_not_sent_on_and_not_taken_for_sound(tmp_path: Path) -> None:
    with Store.open(tmp_path / "home") as home:
        save(home, "a", "planes")
        sent(home, tmp_path / "stick")
        for path in object_files(tmp_path / "stick")[:3]:
            path.write_bytes(path.read_bytes()[:-1] + b"x")
        with Folder.open(tmp_path / "stick") as remote:
            assert push(home, remote, ["a"]).objects == 0
            mended = push(home, remote, ["a"], verify=True)
        assert mended.objects == 3
        expect(tmp_path / "stick", "a")
        place = object_files(tmp_path / "home")[0]
        place.write_bytes(place.read_bytes()[:-1] + b"x")
        for codec in (None, "planes", "raw"):
            with pytest.raises(ObjectCorrupt, match="was not sent"):
                sent(home, tmp_path / f"stick {codec}", codec)
            assert not list((tmp_path / f"stick {codec}").glob("refs/*"))


def test_planes_that_a_dead_pull_left_are_taken_over(tmp_path: Path) -> None:
    with Store.open(tmp_path / "home") as home, Store.open(tmp_path / "away") as away:
        save(home, "a", "planes")
        names = list(home.shelf.objects.names())
        lengths = {n: c for s in [home.match("a").snapshot] for b, block in enumerate(s.blocks)
                   for g, n in enumerate(block) for c in [s.object_bytes(b, g)]}  # fmt: skip
        with Incoming(away.shelf) as dead:
            for name in names[:4]:
                dead.land(name, lengths[name], home.shelf.objects.frame(name))
        assert features(tmp_path / "away") == [], "nothing of it is visible yet"
        sent(home, tmp_path / "stick")
        with Folder.open(tmp_path / "stick") as remote:
            moved = pull(away, remote, ["a"])
    assert (moved.objects, moved.resumed) == (6, 4)
    assert moved.frame_bytes == sum(size(p) for p in [tmp_path / "away"]) - sum(
        (tmp_path / "away" / "objects" / n.hex[0] / n.hex[1:]).stat().st_size for n in names[:4]
    )
    assert features(tmp_path / "away") == ["planes"]
    expect(tmp_path / "away", "a")


def test_the_feature_is_there_before_the_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(tmp_path / "home") as home:
        save(home, "a", "planes")
        with Folder.open(tmp_path / "stick", create=True) as remote:
            root = type(home.shelf.root)
            move, seen = root.move, []

            def watched(self: object, moves: list[tuple[str, str]]) -> None:
                if any(target.startswith("objects/") for _, target in moves):
                    seen.append(features(tmp_path / "stick"))
                move(self, moves)  # type: ignore[arg-type]

            monkeypatch.setattr(root, "move", watched)
            push(home, remote, ["a"])
    assert seen == [["planes"]]


def test_a_remote_with_a_feature_of_the_future_is_refused(tmp_path: Path) -> None:
    with Store.open(tmp_path / "home") as home:
        save(home, "a", "planes")
        sent(home, tmp_path / "stick")
        place = tmp_path / "stick" / "format.json"
        place.write_text('{"format": 2, "features": ["planes", "encrypted"]}')
        with pytest.raises(FormatTooNew, match="encrypted"):
            sent(home, tmp_path / "stick")


# the frame on its way

CUTS: dict[str, Callable[[bytes], list[bytes]]] = {
    "whole": lambda d: [d],
    "byte by byte": lambda d: [d[i : i + 1] for i in range(len(d))],
    "in the header": lambda d: [d[:50], d[50:]],
    "after the header": lambda d: [d[:HEADER], b"", d[HEADER:]],
}


@pytest.fixture(scope="module")
def planes(tmp_path_factory: pytest.TempPathFactory) -> tuple[ContentDigest, bytes, int]:
    from kvstore.codec import encode_object

    content = bytes(NarrowRam(64).data[0, 0, "k"])
    name = content_digest([content])
    return name, b"".join(encode_object(name, [content], PLANES)), len(content)


@pytest.mark.parametrize("cut", CUTS)
def test_a_frame_is_checked_however_it_is_cut(planes: tuple[ContentDigest, bytes, int], cut: str) -> None:
    name, data, length = planes
    assert data[11] == PLANES and len(data) < HEADER + length
    told: list[Header] = []
    assert b"".join(bytes(p) for p in check_frame(name, length, CUTS[cut](data), told.append)) == data
    assert [header.codec for header in told] == [PLANES]
    for at in (*range(0, HEADER, 9), HEADER, HEADER + length // 2 + 3, len(data) - 1):
        bad = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises((ObjectCorrupt, FormatTooNew)):
            list(check_frame(name, length, CUTS[cut](bad)))
    for cut_off in (data[:-1], data + b"\0", data[: HEADER - 1], data[:HEADER], b"", data + data):
        with pytest.raises(ObjectCorrupt, match="length"):
            list(check_frame(name, length, CUTS[cut](cut_off)))
    for wrong in (length - 2, length + 2, 2**30):
        with pytest.raises(ObjectCorrupt, match="content length"):
            list(check_frame(name, wrong, CUTS[cut](data)))


# the commands


def test_the_commands_say_what_moved(tmp_path: Path) -> None:
    with Store.open(tmp_path / "home") as home:
        save(home, "a", "raw")

    def kvferry(*words: object) -> str:
        done = CliRunner().invoke(app, ["--store", str(tmp_path / "home"), *map(str, words)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    assert "as planes" not in kvferry("push", tmp_path / "raw", "a")
    assert "as planes" in kvferry("push", "--codec", "planes", tmp_path / "one", "a")
    told = json.loads(kvferry("--json", "push", "--codec", "planes", tmp_path / "two", "a"))
    assert told["frame_bytes"] == size(tmp_path / "two") < told["payload_bytes"] == CONTENT
    assert kvferry("recode", "a", "--to", "planes", "--dry-run").startswith("10 objects to make planes, ")
    assert codecs(tmp_path / "home") == {RAW}
    told = json.loads(kvferry("--json", "recode", "--all", "--to", "planes"))
    assert told["recoded"]["bytes_after"] == size(tmp_path / "home") and told["recoded"]["objects"] == 10
    assert kvferry("recode", "--older-than", "1", "--to", "raw").startswith("recoded 0 objects to raw")
    assert kvferry("recode", "--older-than", "0", "--to", "raw").startswith("recoded 10 objects to raw: ")
    expect(tmp_path / "home", "a")


@pytest.mark.parametrize("words", [["--to", "planes"], ["a", "--all", "--to", "planes"], ["a"], ["a", "--to", "zip"]])
def test_recode_wants_to_know_what_and_to_what(tmp_path: Path, words: list[str]) -> None:
    with Store.open(tmp_path / "home") as home:
        save(home, "a", "raw")
    done = CliRunner().invoke(app, ["--store", str(tmp_path / "home"), "recode", *words])
    assert done.exit_code == 2 and codecs(tmp_path / "home") == {RAW}


def test_recode_says_that_something_is_damaged(tmp_path: Path) -> None:
    with Store.open(tmp_path / "home") as home:
        save(home, "a", "raw")
    place = object_files(tmp_path / "home")[0]
    place.write_bytes(place.read_bytes()[:-1] + b"x")
    done = CliRunner().invoke(app, ["--store", str(tmp_path / "home"), "recode", "a", "--to", "planes"])
    assert done.exit_code == 4 and "1 object damaged, left alone" in done.output
