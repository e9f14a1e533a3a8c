"""A server whose answers are none, or lie about names and snapshots: refused by name in bounded memory, and a good one is pulled from next."""

from __future__ import annotations

import itertools
import struct
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from liar import Answer, Liar, Lie
from refusals import COVERAGE, FETCH, INFO, MANIFEST, REF, error_of, flipped, of, refused

from kvstore import Store
from kvstore.codec import HEADER, encode_coverage
from kvstore.errors import (
    CoverageCorrupt,
    FormatTooNew,
    InputInvalid,
    KVError,
    LabelInvalid,
    NotCovered,
    ObjectMissing,
    RefCorrupt,
    SnapshotCorrupt,
    SnapshotMissing,
    StoreBusy,
    StoreFull,
    Unreachable,
)
from kvstore.snapshot import Coverage
from sync import pull
from sync.bodies import Info, Refs, RefShape, decode, encode
from sync.client import Client
from sync.connection import ATTEMPTS, NotUnderstood, Peer, TooMany
from sync.plan import objects
from sync.tokens import TokenRefused


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sync.connection.PAUSE", 0.0)


MANY = 3 << 30
"""Bytes that an endless answer gives up after, so that a test ends that has found an error."""


def endless(start: bytes, piece: bytes) -> Lie:
    """``start``, then ``piece`` for ever."""

    def lie(_: Answer) -> Iterator[bytes]:
        yield start
        many = piece * (1 + 65536 // len(piece))
        for _ in range(MANY // len(many)):
            yield many

    return lie


OK = b"HTTP/1.1 200 OK\r\n"


MAP = OK + b"Content-Type: application/msgpack\r\n"


BOMB = b"\xdd" + struct.pack(">I", (1 << 20) - 5) + b"\x80" * ((1 << 20) - 5)
"""A megabyte that unpacks to a million maps."""


HTTP: dict[str, tuple[Lie, type[KVError]]] = {
    "endless headers": (endless(OK, b"X-More: and more\r\n"), Unreachable),
    "an endless header": (endless(OK + b"X-More: ", b"m"), Unreachable),
    "an endless status": (endless(b"HTTP/1.1 200 ", b"O"), Unreachable),
    "100 Continue for ever": (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), Unreachable),
    "101": (lambda said: said.but(status=101), NotUnderstood),
    "204": (lambda said: b"HTTP/1.1 204 No Content\r\n\r\n", NotUnderstood),
    "206 of nothing asked": (lambda said: said.but(status=206, Content_Range="bytes 0-1/2"), NotUnderstood),
    "304": (lambda said: b"HTTP/1.1 304 Not Modified\r\n\r\n", NotUnderstood),
    "no status": (lambda said: b"HTTP/1.1 \r\n\r\n", Unreachable),
    "status of words": (lambda said: b"HTTP/1.1 fine\r\n\r\n", Unreachable),
    "status 99999": (lambda said: b"HTTP/1.1 99999 X\r\n\r\n", Unreachable),
    "HTTP/0.9": (lambda said: said.body, Unreachable),
    "HTTP/2": (lambda said: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Unreachable),
    "nothing": (lambda said: b"", Unreachable),
    "TLS": (lambda said: b"\x15\x03\x01\x00\x02\x02\x46", Unreachable),
    "no length": (lambda said: said.but(Content_Length=None).raw, NotUnderstood),
    "an endless body without a length": (endless(MAP + b"\r\n", b"\x80"), NotUnderstood),
    "endless chunks": (endless(MAP + b"Transfer-Encoding: chunked\r\n\r\n", b"5\r\nhello\r\n"), NotUnderstood),
    "a negative length": (lambda said: said.but(Content_Length="-5").raw, NotUnderstood),
    "a length of words": (lambda said: said.but(Content_Length="many").raw, NotUnderstood),
    "a terabyte": (endless(MAP + b"Content-Length: 1099511627776\r\n\r\n", b"\0"), NotUnderstood),
    "a length of a thousand digits": (lambda said: said.but(Content_Length="9" * 1000).raw, NotUnderstood),
    "a body cut short": (lambda said: said.raw[:-3], Unreachable),
    "gzip": (lambda said: said.but(Content_Encoding="gzip"), NotUnderstood),
    "another type": (lambda said: said.but(Content_Type="text/html"), NotUnderstood),
    "no type": (lambda said: said.but(Content_Type=None), NotUnderstood),
    "a map with a byte more": (lambda said: said.but(body=said.body + b"\0"), NotUnderstood),
    "no map": (lambda said: said.but(body=b"\x93\1\2\3"), NotUnderstood),
    "nested maps": (lambda said: said.but(body=b"\x81\xa1a" * 100_000), NotUnderstood),
    "nested arrays": (lambda said: said.but(body=b"\x91" * 100_000 + b"\x90"), NotUnderstood),
    "an array of a billion": (lambda said: said.but(body=b"\xdd\x3f\xff\xff\xff"), NotUnderstood),
    "a key twice": (lambda said: said.but(body=b"\x87" + said.body[1:] + b"\xa8protocol\x01"), NotUnderstood),
    "a key too many": (lambda said: said.but(body=b"\x87" + said.body[1:] + b"\xa4more\x01"), NotUnderstood),
    "an extension": (lambda said: said.but(body=b"\xc7\x05\x01hello"), NotUnderstood),
    "a million maps": (lambda said: said.but(body=BOMB), NotUnderstood),
    "an error without JSON": (error_of(500, b"<html>"), NotUnderstood),
    "an error of nested JSON": (error_of(500, b"[" * 60_000), NotUnderstood),
    "an error that is a list": (error_of(500, [1]), NotUnderstood),
    "an error of other types": (error_of(500, {"error": 1, "message": [], "details": None}), NotUnderstood),
    "an error of invalid UTF-8": (error_of(500, b'{"error": "\xff"}'), NotUnderstood),
    "an endless error": (endless(b"HTTP/1.1 500 X\r\n\r\n", b" "), NotUnderstood),
    "an endless error in chunks": (
        endless(b"HTTP/1.1 500 X\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"A: b\r\n"),
        NotUnderstood,
    ),
    "an error of a number too long": (error_of(500, b'{"error": ' + b"9" * 60_000 + b"}"), NotUnderstood),
}
"""What may come for any answer; here for the first one."""


@pytest.mark.parametrize("how", HTTP)
def test_what_is_no_answer(good: tuple[Peer, Path], how: str) -> None:
    lie, kind = HTTP[how]
    tracemalloc.start()
    try:
        with Liar(good[0], {INFO: lie}) as liar, pytest.raises(KVError) as caught:
            Client.open(liar.peer)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert type(caught.value) is kind, caught.value
    assert liar.peer.where in str(caught.value) and str(caught.value).isprintable()
    assert len(liar.asked) == (1 if kind is NotUnderstood else ATTEMPTS), "what can't be understood is asked once"
    assert peak < 12 << 20, f"{peak:,} bytes"


@pytest.mark.parametrize("where", [REF, MANIFEST, COVERAGE, FETCH])
@pytest.mark.parametrize(
    "how", ["endless headers", "no length", "endless chunks", "a body cut short", "a terabyte", "gzip", "204"]
)
def test_no_answer_later_on(good: tuple[Peer, Path], tmp_path: Path, where: str, how: str) -> None:
    """A connection that breaks is told as that: not as damage, which somebody would mend."""
    if (where, how) == (FETCH, "a body cut short"):
        pytest.skip("the rest is asked for and comes: tests/trust/row_10_network.py")
    refused(good[0], tmp_path, {where: HTTP[how][0]}, HTTP[how][1])


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(good: tuple[Peer, Path], tmp_path: Path, status: int) -> None:
    with Liar(good[0], {}) as elsewhere:
        for where in (INFO, REF, FETCH):
            to = f"{elsewhere.peer.where}/v1/info"
            lies: dict[str, Lie] = {where: lambda said, to=to: said.but(status=status, Location=to)}  # type: ignore[misc]
            refused(good[0], tmp_path / where.replace("/", ""), lies, NotUnderstood)
    assert elsewhere.asked == []


def test_http_1_0_is_enough(good: tuple[Peer, Path], tmp_path: Path) -> None:
    with (
        Liar(good[0], {"": lambda said: said.raw.replace(b"HTTP/1.1", b"HTTP/1.0", 1)}) as liar,
        Client.open(liar.peer) as remote,
        Store.open(tmp_path / "phone") as phone,
    ):
        assert pull(phone, remote, ["book"]).objects == 8


def test_what_nobody_asked_for_is_not_taken_for_the_next_answer(good: tuple[Peer, Path], tmp_path: Path) -> None:
    forged = b"HTTP/1.1 404 X\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"

    def more(said: Answer) -> Answer:
        return replace(said, body=said.body + forged)

    with Liar(good[0], {INFO: more, REF: more, MANIFEST: more}) as liar, Client.open(liar.peer) as remote:
        time.sleep(0.05)
        with Store.open(tmp_path / "phone") as phone:
            assert pull(phone, remote, ["book"]).objects == 8


def slow(said: Answer) -> Iterator[bytes]:
    for at in range(len(said.raw)):
        yield said.raw[at : at + 1]
        time.sleep(0.01)


@pytest.mark.parametrize("where", [INFO, MANIFEST, FETCH])
def test_an_answer_in_drips(
    good: tuple[Peer, Path], tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time; all of them would take for ever."""
    monkeypatch.setattr("sync.connection.SECONDS", 0.2)
    monkeypatch.setattr("sync.connection.SLOWEST", 1 << 20)
    error = refused(good[0], tmp_path, {where: slow}, Unreachable)
    assert "in time" in str(error)


INFO_LIES: dict[str, tuple[dict[str, object], type[KVError]]] = {
    "another protocol": ({"protocol": 2}, FormatTooNew),
    "a newer format": ({"format": 99}, FormatTooNew),
    "a feature of tomorrow": ({"features": ["planes", "clouds"]}, FormatTooNew),
    "no objects in a question": ({"limits": {"asked": 0, "frames": 64, "map": 1 << 20}}, NotUnderstood),
    "negative limits": ({"limits": {"asked": 1024, "frames": -1, "map": 1 << 20}}, NotUnderstood),
    "limits of words": ({"limits": {"asked": "many", "frames": 64, "map": 1 << 20}}, NotUnderstood),
    "a protocol of a float": ({"protocol": 1.5}, NotUnderstood),
}


@pytest.mark.parametrize("how", INFO_LIES)
def test_who_it_says_it_is(good: tuple[Peer, Path], how: str) -> None:
    changed, kind = INFO_LIES[how]

    def lie(said: Answer) -> Answer:
        return said.but(body=msgpack.packb({**msgpack.unpackb(said.body), **changed}))

    with Liar(good[0], {INFO: lie}) as liar, pytest.raises(kind) as caught:
        Client.open(liar.peer)
    assert liar.peer.where in str(caught.value)


def test_lower_limits_are_kept_to(good: tuple[Peer, Path], tmp_path: Path) -> None:
    def lie(said: Answer) -> Answer:
        info = decode(said.body, Info, "info")
        info.limits.asked, info.limits.frames = 3, 1
        return said.but(body=encode(info))

    with Store.open(tmp_path / "phone") as phone, Liar(good[0], {INFO: lie}) as liar, Client.open(liar.peer) as remote:
        assert pull(phone, remote, ["book"]).objects == 8
        snapshot = phone.shelf.records.snapshot(phone.resolve("book"))
        names = objects(snapshot, phone.shelf.records.coverage(phone.resolve("book"), snapshot))
        assert remote.have(names) == set(names)
        assert sum("/v1/fetch" in asked for asked in liar.asked) == 8
        assert sum("/v1/have" in asked for asked in liar.asked) == 3


def refs_page(*refs: tuple[str, bytes, int], more: bool = False) -> Lie:
    page = Refs(tuple(RefShape(label, snapshot, updated) for label, snapshot, updated in refs), more)
    return lambda said: said.but(body=encode(page))


GOOD = bytes(32)


REFS: dict[str, Lie] = {
    "the other way round": refs_page(("b", GOOD, 0), ("a", GOOD, 0)),
    "one twice": refs_page(("a", GOOD, 0), ("a", GOOD, 0)),
    "the same page again and again": refs_page(("a", GOOD, 0), more=True),
    "empty pages, and more": refs_page(more=True),
    "a short digest": refs_page(("a", GOOD[1:], 0)),
    "a name that moves the cursor": refs_page(("\x1b[2J", GOOD, 0)),
    "an empty name": refs_page(("", GOOD, 0)),
    "a name too long": refs_page(("n" * 201, GOOD, 0)),
    "a name in another normal form": refs_page(("e\u0301", GOOD, 0)),
    "a time before time": refs_page(("a", GOOD, -1)),
    "a time after it": refs_page(("a", GOOD, 1 << 62)),
    "more than a page": refs_page(*((f"{n:05}", GOOD, 0) for n in range(1001))),
}


@pytest.mark.parametrize("how", REFS)
def test_lists_of_names(good: tuple[Peer, Path], how: str) -> None:
    with (
        Liar(good[0], {"/v1/refs": REFS[how]}) as liar,
        Client.open(liar.peer) as remote,
        pytest.raises(NotUnderstood),
    ):
        list(remote.refs())
    assert len(liar.asked) <= 3


def test_names_without_end(good: tuple[Peer, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sync.client.MAX_NAMES", 5000)
    number = itertools.count()

    def one(said: Answer) -> Answer:
        return said.but(body=encode(Refs((RefShape(f"{next(number):09}", GOOD, 0),), True)))

    with Liar(good[0], {"/v1/refs": one}) as liar, Client.open(liar.peer) as remote, pytest.raises(NotUnderstood):
        list(remote.refs())
    assert len(liar.asked) < 60


def test_records_that_are_others(good: tuple[Peer, Path], tmp_path: Path) -> None:
    peer, folder = good
    digest, manifest, coverage = of(folder, "book")
    _, other_manifest, other_coverage = of(folder, "other")
    ref = next(p.read_bytes() for p in sorted((folder / "refs").iterdir()) if b"other" in p.read_bytes())
    beyond = encode_coverage(Coverage(digest, (((0, 9),), ((0, 9),))))
    fewer = encode_coverage(Coverage(digest, (((0, 4),),)))
    cases: list[tuple[str, bytes, type[KVError]]] = [
        (REF, ref, NotUnderstood),
        (REF, manifest, RefCorrupt),
        (REF, b"", RefCorrupt),
        (MANIFEST, other_manifest, SnapshotCorrupt),
        (MANIFEST, coverage, SnapshotCorrupt),
        (MANIFEST, b"", SnapshotCorrupt),
        (MANIFEST, bytes(5 << 20), SnapshotCorrupt),
        (COVERAGE, other_coverage, CoverageCorrupt),
        (COVERAGE, beyond, CoverageCorrupt),
        (COVERAGE, fewer, CoverageCorrupt),
        (COVERAGE, manifest, CoverageCorrupt),
    ]
    for number, (where, body, kind) in enumerate(cases):
        lies: dict[str, Lie] = {where: lambda said, body=body: said.but(body=body)}  # type: ignore[misc]
        refused(peer, tmp_path / str(number), lies, kind)


@pytest.mark.parametrize(
    ("where", "kind"), [(REF, RefCorrupt), (MANIFEST, SnapshotCorrupt), (COVERAGE, CoverageCorrupt)]
)
def test_records_with_a_flipped_bit(good: tuple[Peer, Path], tmp_path: Path, where: str, kind: type[KVError]) -> None:
    for at in (0, 12, 40, 100, HEADER, -1):
        refused(good[0], tmp_path / str(at), {where: flipped(at)}, kind)


def test_a_name_for_a_snapshot_that_is_not_there(good: tuple[Peer, Path], tmp_path: Path) -> None:
    gone = error_of(404, {"error": "SnapshotMissing", "message": "gone", "details": {}})
    refused(good[0], tmp_path, {MANIFEST: gone}, SnapshotMissing)


def test_promises_that_are_not_kept(good: tuple[Peer, Path], tmp_path: Path) -> None:
    gone = error_of(404, {"error": "ObjectMissing", "message": "gone", "details": {"name": "ab" * 32}})
    refused(good[0], tmp_path / "a", {FETCH: gone}, ObjectMissing)
    nothing = error_of(404, {"error": "SnapshotMissing", "message": "no promise", "details": {}})
    none: Lie = lambda said: said.but(body=msgpack.packb({"have": bytes(1)}))  # noqa: E731
    refused(good[0], tmp_path / "b", {COVERAGE: nothing, "/v1/have": none}, NotCovered)
    for number, wrong in enumerate((b"", b"\xff\xff", b"\xff" * 1000)):
        lie: Lie = lambda said, wrong=wrong: said.but(body=msgpack.packb({"have": wrong}))  # type: ignore[misc] # noqa: E731
        refused(good[0], tmp_path / str(number), {COVERAGE: nothing, "/v1/have": lie}, NotUnderstood)


TOLD: dict[str, tuple[dict[str, object], type[KVError]]] = {
    "a name of nowhere": ({"error": "SystemExit", "message": "bye", "details": {}}, KVError),
    "a text that moves the cursor": (
        {"error": "StoreBusy", "message": "\x1b[2J\r\n\u202e now\ud800", "details": {"name": "\x1b[2J" * 999}},
        StoreBusy,
    ),
    "a long text": ({"error": "InputInvalid", "message": "m" * 60_000, "details": {}}, InputInvalid),
    "a name that is none": ({"error": "LabelInvalid", "message": "m", "details": {"label": 5}}, LabelInvalid),
    "full": ({"error": "StoreFull", "message": "m", "details": {"quota": 5, "used": -1, "needed": True}}, StoreFull),
    "too many": ({"error": "TooMany", "message": "m", "details": {"wait": "\n"}}, TooMany),
    "damage": (
        {"error": "SnapshotCorrupt", "message": "m", "details": {"where": "/etc", "what": "x"}},
        SnapshotCorrupt,
    ),
    "no leave": ({"error": "TokenRefused", "message": "m", "details": {}}, TokenRefused),
}


@pytest.mark.parametrize("how", TOLD)
def test_errors_that_a_server_tells(good: tuple[Peer, Path], tmp_path: Path, how: str) -> None:
    value, kind = TOLD[how]
    error = refused(good[0], tmp_path, {REF: error_of(400, value)}, kind)
    details = {k: v for k, v in error.details.items() if isinstance(v, str) and k != "todo"}
    assert all(text.isprintable() and len(text) <= 2100 for text in details.values())
    assert "needed" not in error.details or error.details["needed"] is not True
