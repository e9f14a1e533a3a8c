"""A server that lies about objects, about what it found or took in, or about who it is."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from ferries import IDENTITY, LAYOUT, assert_restores, object_files, save, tokens_of, verify
from liar import Answer, Liar, Lie
from live import serving
from proxy import Fault, Proxy
from refusals import FETCH, OBJECT, TOKENS, cut, error_of, flipped, of, refused, rest, visible

from kvstore import Store
from kvstore.codec import HEADER, PLANES, Header, Kind, decode_header, encode_header
from kvstore.digest import content_digest
from kvstore.errors import (
    CoverageCorrupt,
    InputInvalid,
    KVError,
    ObjectCorrupt,
    ObjectMissing,
    RefConflict,
    StoreFull,
    Unreachable,
)
from sync import pull, push
from sync.bodies import MAP_TYPE, Pair, Paired, decode, encode
from sync.certificate import Certificate
from sync.client import Client
from sync.connection import Connection, FingerprintMismatch, NotUnderstood, Peer
from sync.pairing import check_paired
from sync.reuse import bring, look
from sync.server import Settings
from sync.tokens import TokenRefused


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sync.connection.PAUSE", 0.0)


def framed(content: int, payload: bytes, name: bytes, codec: int = PLANES) -> bytes:
    import blake3

    stored = name if codec != PLANES else blake3.blake3(payload).digest()
    return encode_header(Header(Kind.OBJECT, content, len(payload), name, stored, codec)) + payload


def first_object(body: bytes) -> Header:
    return decode_header(body[:HEADER], Kind.OBJECT, "first")


def reframed(change: Callable[[Header], bytes]) -> Lie:
    """The first frame of a body of frames becomes another."""

    def lie(said: Answer) -> Answer:
        header = first_object(said.body)
        return said.but(body=change(header) + said.body[HEADER + header.stored_length :])

    return lie


def bomb(size: int, states: bool, header: Header) -> bytes:
    """Planes whose high plane unpacks to ``size`` bytes, whatever the frame says of itself."""
    import zstandard

    half = header.content_length // 2
    packed = zstandard.ZstdCompressor(level=3, write_content_size=states, write_checksum=False).compress(bytes(size))
    if states:  # a magic number, a descriptor, and for sizes from 256 to 65,791 or above four bytes of size
        at = packed.index(struct.pack("<I", size))
        packed = packed[:at] + struct.pack("<I", half) + packed[at + 4 :]
    return framed(header.content_length, bytes(half) + packed, header.name)


FRAMES: dict[str, tuple[Lie, type[KVError]]] = {
    "a bit of the header": (flipped(30), ObjectCorrupt),
    "a bit of the payload": (flipped(HEADER + 77), ObjectCorrupt),
    "a bit of the last byte": (flipped(-1), ObjectCorrupt),
    "no frames at all": (lambda said: said.but(body=b""), Unreachable),
    "zeros": (lambda said: said.but(body=bytes(len(said.body))), ObjectCorrupt),
    "another type": (lambda said: said.but(Content_Type="application/octet-stream"), NotUnderstood),
    "another object, which is sound": (
        reframed(lambda h: framed(4, b"four", content_digest([b"four"]).raw, codec=0)),
        ObjectCorrupt,
    ),
    "the right name, other bytes": (
        reframed(lambda h: framed(h.content_length, bytes(h.content_length), h.name, codec=0)),
        ObjectCorrupt,
    ),
    "a gigabyte": (
        reframed(lambda h: encode_header(Header(Kind.OBJECT, 1 << 30, 1 << 30, h.name, h.name))),
        ObjectCorrupt,
    ),
    "a shorter one": (reframed(lambda h: framed(2, b"22", h.name, codec=0)), ObjectCorrupt),
    "planes that are none": (
        reframed(lambda h: framed(h.content_length, bytes(h.content_length - 1), h.name)),
        ObjectCorrupt,
    ),
    "planes of 100 MB": (reframed(lambda h: bomb(100 << 20, True, h)), ObjectCorrupt),
    "planes of 100 MB that do not say so": (reframed(lambda h: bomb(100 << 20, False, h)), ObjectCorrupt),
}


@pytest.mark.parametrize("how", FRAMES)
def test_frames(good: tuple[Peer, Path], tmp_path: Path, how: str) -> None:
    lie, kind = FRAMES[how]
    refused(good[0], tmp_path, {FETCH: lie}, kind)


def test_the_last_frames_first(good: tuple[Peer, Path], tmp_path: Path) -> None:
    def swapped(said: Answer) -> Answer:
        first = HEADER + first_object(said.body).stored_length
        return said.but(body=said.body[first:] + said.body[:first])

    refused(good[0], tmp_path, {FETCH: swapped}, ObjectCorrupt)


def test_more_than_was_asked_for_is_left(good: tuple[Peer, Path], tmp_path: Path) -> None:
    with (
        Store.open(tmp_path / "phone") as phone,
        Liar(good[0], {FETCH: lambda said: said.but(body=said.body + said.body)}) as liar,
        Client.open(liar.peer) as remote,
    ):
        assert pull(phone, remote, ["book"]).objects == 8
    assert len(object_files(tmp_path / "phone")) == 8


RANGES: dict[str, tuple[Callable[[Answer], Answer], type[KVError]]] = {
    "no Content-Range": (lambda said: said.but(Content_Range=None), NotUnderstood),
    "another Content-Range": (lambda said: said.but(Content_Range="bytes 0-5/6"), NotUnderstood),
    "a Content-Range of words": (lambda said: said.but(Content_Range="bytes some-more/all"), NotUnderstood),
    "fewer bytes": (lambda said: said.but(body=said.body[:-1]), NotUnderstood),
    "more bytes": (lambda said: said.but(body=said.body + b"\0"), NotUnderstood),
    "other bytes": (flipped(-1), ObjectCorrupt),  # type: ignore[dict-item]
    "the whole as another object": (lambda said: said.but(status=200, ETag='"00"'), NotUnderstood),
    "the rest as the whole": (lambda said: said.but(status=200), NotUnderstood),
    "416": (lambda said: error_of(416, {"error": "InputInvalid", "message": "no", "details": {}})(said), InputInvalid),  # type: ignore[dict-item,return-value]
}


@pytest.mark.parametrize("how", RANGES)
def test_the_rest_of_an_object(good: tuple[Peer, Path], tmp_path: Path, how: str) -> None:
    change, kind = RANGES[how]
    refused(good[0], tmp_path, rest(change), kind)


def test_an_object_in_crumbs_is_given_up(good: tuple[Peer, Path], tmp_path: Path) -> None:
    """A byte more each time is no progress."""
    lies: dict[str, Lie] = {FETCH: cut, OBJECT: lambda said: said.head + said.body[:1]}
    refused(good[0], tmp_path, lies, Unreachable, before=60)


FOUND: dict[str, tuple[object, type[KVError] | None]] = {
    "a short digest": (b"short", NotUnderstood),
    "a snapshot that is not there": (bytes(32), None),
    "nothing": (None, None),
}


@pytest.mark.parametrize("how", FOUND)
def test_what_a_server_finds(good: tuple[Peer, Path], tmp_path: Path, how: str) -> None:
    snapshot, kind = FOUND[how]
    lie: Lie = lambda said: said.but(body=msgpack.packb({"snapshot": snapshot, "tokens": 99}))  # noqa: E731
    with Store.open(tmp_path / "phone") as phone, Liar(good[0], {"/v1/find": lie}) as liar:
        with Client.open(liar.peer) as remote:
            if kind is None:
                assert bring(phone, remote, LAYOUT, IDENTITY, tokens_of(TOKENS), namespace="default") is None
            else:
                with pytest.raises(kind):
                    bring(phone, remote, LAYOUT, IDENTITY, tokens_of(TOKENS), namespace="default")
        assert visible(tmp_path / "phone") == {**visible(tmp_path / "phone")} and not object_files(tmp_path / "phone")
        with Client.open(good[0]) as remote:
            assert bring(phone, remote, LAYOUT, IDENTITY, tokens_of(TOKENS), namespace="default") is not None


def test_a_snapshot_of_other_tokens_is_not_continued(good: tuple[Peer, Path]) -> None:
    """The server says that this one serves best: how much of it can be used is computed here."""
    other, _, _ = of(good[1], "other")
    lie: Lie = lambda said: said.but(body=msgpack.packb({"snapshot": other.raw, "tokens": TOKENS}))  # noqa: E731
    with Liar(good[0], {"/v1/find": lie}) as liar, Client.open(liar.peer) as remote:
        assert look(remote, LAYOUT, IDENTITY, tokens_of(TOKENS), namespace="default") is None


def test_another_certificate_in_the_middle(good: tuple[Peer, Path], tmp_path: Path) -> None:
    """Once bytes have come over a right connection, a wrong one is told nothing."""
    right, wrong = Certificate(tmp_path / "right"), Certificate(tmp_path / "wrong")
    asked: list[dict[str, object]] = []
    with (
        serving(good[1], Settings(), right.context()) as first,
        serving(good[1], Settings(log=asked.append), wrong.context()) as second,
        Proxy((first.host, first.port), Fault()) as proxy,
        Store.open(tmp_path / "phone") as phone,
    ):
        peer = Peer("127.0.0.1", proxy.port, right.fingerprint, None)
        with Client.open(peer) as remote:
            list(remote.refs())
            proxy._target = (second.host, second.port)
            with pytest.raises(FingerprintMismatch, match="Nothing was sent"):
                pull(phone, remote, ["book"])
            assert asked == []
            proxy._target = (first.host, first.port)
            pull(phone, remote, ["book"])
        assert_restores(phone, "book", TOKENS)


PAIRED: dict[str, dict[str, object]] = {
    "a token that goes on in the next header": {"token": "kvf1.0\r\nX: y"},
    "a token of other letters": {"token": "kvf1.0123456789abcdef." + "ä" * 43},
    "a name that moves the cursor": {"name": "\x1b[2J"},
    "a long name": {"name": "n" * 10_000},
    "scopes of control characters": {"scopes": ["read\n"]},
    "namespaces of nothing": {"namespaces": [""]},
    "another type": {"scopes": "read"},
}


@pytest.mark.parametrize("how", PAIRED)
def test_pairing(how: str) -> None:
    sound = {"token": "kvf1.0123456789abcdef." + "A" * 43, "scopes": ["read"], "namespaces": None, "name": "mac"}

    def answered(changed: dict[str, object]) -> Paired:
        lie: Lie = lambda said: said.but(body=msgpack.packb({**sound, **changed}), Content_Type=MAP_TYPE)  # noqa: E731
        with Liar(None, {"/v1/pair": lie}) as liar:
            connection = Connection(liar.peer)
            asked = {"Content-Type": MAP_TYPE}
            with connection.asking("POST", "/v1/pair", encode(Pair("AW340Y65", "phone")), asked) as answer:
                return check_paired(decode(connection.map(answer, 1 << 20), Paired, "the answer"))

    assert answered({}).name == "mac"
    with pytest.raises((InputInvalid, TokenRefused)):
        answered(PAIRED[how])


@pytest.mark.parametrize("token", ["", "x\r\nX-Injected: y", "ä" * 60, "kvf1.0123456789abcdef." + "A" * 44])
def test_what_is_no_token_is_not_sent(good: tuple[Peer, Path], token: str) -> None:
    with Liar(good[0], {}) as liar, pytest.raises(TokenRefused):
        Client.open(replace(liar.peer, token=token))
    assert liar.asked == []


PUSHES: dict[str, tuple[dict[str, Lie], type[KVError]]] = {
    "two objects landed": (
        {"PUT /v1/objects": lambda said: said.but(body=msgpack.packb({"landed": 2}))},
        NotUnderstood,
    ),
    "no object landed": ({"PUT /v1/objects": lambda said: said.but(body=msgpack.packb({"landed": 0}))}, NotUnderstood),
    "coverage that is none": (
        {"PUT /v1/refs": lambda said: said.but(body=msgpack.packb({"coverage": b"all of it"}))},
        CoverageCorrupt,
    ),
    "a redirect": ({"PUT /v1/refs": lambda said: said.but(status=307, Location="/v1/refs/other")}, NotUnderstood),
    "full": (
        {"PUT /v1/objects": error_of(507, {"error": "StoreFull", "message": "full", "details": {"quota": 9}})},
        StoreFull,
    ),
    "taken": (
        {"PUT /v1/refs": error_of(412, {"error": "RefConflict", "message": "taken", "details": {}})},
        RefConflict,
    ),
    "gone again and again": (
        {"PUT /v1/refs": error_of(409, {"error": "ObjectMissing", "message": "gone", "details": {}})},
        ObjectMissing,
    ),
    "no answer": ({"PUT /v1/objects": lambda said: b""}, Unreachable),
}


@pytest.mark.parametrize("how", PUSHES)
def test_pushes(tmp_path: Path, how: str) -> None:
    lies, kind = PUSHES[how]
    with (
        Store.open(tmp_path / "mac") as mac,
        serving(tmp_path / "served", Settings(frozenset({"read", "push"}))) as peer,
    ):
        save(mac, "book", TOKENS)
        before = visible(tmp_path / "mac")
        with Liar(peer, lies) as liar, pytest.raises(kind) as caught, Client.open(liar.peer) as remote:
            push(mac, remote, ["book"])
        assert type(caught.value) is kind and liar.peer.where in str(caught.value)
        assert visible(tmp_path / "mac") == before
        with Client.open(peer) as remote:
            push(mac, remote, ["book"])
    verify(tmp_path / "served")
    with Store.open(tmp_path / "served") as served:
        assert_restores(served, "book", TOKENS)
