"""Requests as bytes: whatever a client may send to a server, and what it says to that."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
from ferries import tree

from kvstore import Snapshot, Store
from kvstore.codec import HEADER, Header, Kind, encode_header
from kvstore.digest import SnapshotDigest, content_digest
from sync.bodies import FRAMES_TYPE, MAP_TYPE, Have, encode
from sync.connection import Peer
from sync.pairing import Offers
from sync.served import Served
from sync.server import Settings, application
from sync.tokens import TokenBook

TOKENS = 130


IN_MAP, IN_FRAMES = {"Content-Type": MAP_TYPE}, {"Content-Type": FRAMES_TYPE}


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def error(self) -> str:
        """Its name; every error is told in the form of docs/protocol.md."""
        value = json.loads(self.body)
        assert set(value) == {"error", "message", "details"} and isinstance(value["details"], dict), value
        assert self.headers["Content-Type"].startswith("application/json")
        return str(value["error"])


def ask(
    peer: Peer,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    source: str = "127.0.0.1",
) -> Reply:
    connection = http.client.HTTPConnection(peer.host, peer.port, timeout=30, source_address=(source, 0))
    sent = dict(headers or {})
    if peer.token is not None:
        sent["Authorization"] = f"Bearer {peer.token}"
    try:
        connection.request(method, path, body or None, sent)
        answer = connection.getresponse()
        return Reply(answer.status, dict(answer.headers.items()), answer.read())
    finally:
        connection.close()


def dialled(peer: Peer, sent: bytes = b"") -> socket.socket:
    sock = socket.create_connection((peer.host, peer.port), timeout=30)
    sock.sendall(sent)
    return sock


def all_of(sock: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    data = b""
    with sock, contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            data += piece
    return data


def files(folder: Path) -> dict[str, Any]:
    return {k: v for k, v in tree(folder).items() if k.split("/")[0] in ("objects", "refs", "snapshots")}


def shown(folder: Path, label: str = "book") -> tuple[SnapshotDigest, Snapshot, list[str]]:
    """A snapshot and the names of its objects."""
    with Store.open(folder) as store:
        digest = store.resolve(label)
        snapshot = store.shelf.records.snapshot(digest)
    return digest, snapshot, [name.hex for block in snapshot.blocks for name in block]


NO_HTTP: dict[str, bytes] = {
    "rubbish": b"\x00\xff\xfe rubbish\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "no version": b"GET /v1/info\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/9.9": b"GET /v1/info HTTP/9.9\r\n\r\n",
    "a long path": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    "a long header": b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\nA: " + b"a" * 100_000 + b"\r\n\r\n",
    "a thousand headers": b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 1000 + b"\r\n",
    "a header without a colon": b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\nnothing\r\n\r\n",
    "a space before the colon": b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\nA : b\r\n\r\n",
    "a header with a zero": b"GET /v1/info HTTP/1.1\r\nHost: localhost\r\nA: \0\r\n\r\n",
    "two lengths": b"POST /v1/have HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "length and chunks": (
        b"POST /v1/have HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "a negative length": b"POST /v1/have HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    "a length of words": b"POST /v1/have HTTP/1.1\r\nHost: localhost\r\nContent-Length: ten\r\n\r\n",
    "a length of a thousand digits": b"POST /v1/have HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
    + b"9" * 1000
    + b"\r\n\r\n",
    "chunks of words": (
        b"POST /v1/have HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/msgpack\r\nTransfer-Encoding: chunked\r\n\r\nhello\r\n"
    ),
}


BOMB = b"\xdd" + struct.pack(">I", (1 << 20) - 5) + b"\x80" * ((1 << 20) - 5)


MAPS: dict[str, bytes] = {
    "nothing": b"",
    "no map": b"\x93\1\2\3",
    "an empty map": b"\x80",
    "a million maps": BOMB,
    "a million maps in a key": b"\x82\xa7objects" + BOMB[:-20] + b"\xa5sound\xc2",
    "nested": b"\x91" * 100_000 + b"\x90",
    "nested maps": b"\x81\xa7objects" * 50_000,
    "an array of a billion": b"\x82\xa7objects\xdd\x3f\xff\xff\xff",
    "a text of 4 GB": b"\x81\xdb\xff\xff\xff\xff",
    "a key twice": b"\x83\xa5sound\xc2\xa7objects\x90\xa5sound\xc3",
    "a key too many": msgpack.packb({"objects": [], "sound": False, "more": 1}),
    "a key less": msgpack.packb({"objects": []}),
    "a number for a key": msgpack.packb({1: [], "sound": False}),
    "a text for bytes": msgpack.packb({"objects": [["a" * 32, 5]], "sound": False}),
    "a float": msgpack.packb({"objects": [[b"a" * 32, 5.5]], "sound": False}),
    "a short digest": msgpack.packb({"objects": [[b"a", 5]], "sound": False}),
    "one object twice": msgpack.packb({"objects": [[b"a" * 32, 5]] * 2, "sound": False}),
    "2,000 objects": msgpack.packb(
        {"objects": [[bytes([i % 256, i // 256]) * 16, 5] for i in range(2000)], "sound": False}
    ),
    "a timestamp": b"\xd6\xff\0\0\0\0",
    "a text that is no UTF-8": b"\x82\xa7objects\x90\xa5\xff\xff\xff\xff\xff\xc2",
    "a byte more": encode(Have((), False)) + b"\0",
}


ASKING = ("POST /v1/have", "POST /v1/fetch", "POST /v1/find", "PUT /v1/refs/x")


def frame(payload: bytes, **changed: Any) -> bytes:
    name = content_digest([payload]).raw
    header = replace(Header(Kind.OBJECT, len(payload), len(payload), name, name), **changed)
    return encode_header(header) + payload


ONE = frame(b"one" * 100)


FRAMES: dict[str, bytes] = {
    "zeros": bytes(5000),
    "half a header": ONE[:60],
    "a header alone": ONE[:HEADER],
    "cut": ONE[:-1],
    "a byte between": ONE + b"\0" + ONE,
    "a bit of the payload": ONE[:-1] + bytes([ONE[-1] ^ 1]),
    "a bit of the header": ONE[:20] + bytes([ONE[20] ^ 1]) + ONE[21:],
    "another name": frame(b"one", name=bytes(32), stored=bytes(32)),
    "another stored hash": frame(b"one", stored=bytes(32)),
    "a manifest": frame(b"one", kind=Kind.SNAPSHOT),
    "a cipher": frame(b"one", cipher=7),
    "a codec": frame(b"one", codec=77),
    "a terabyte": frame(b"one", content_length=1 << 40, stored_length=1 << 40),
    "no bytes": frame(b"", content_length=0, stored_length=0),
    "65 frames": b"".join(frame(b"%d" % i) for i in range(65)),
}


def routes(folder: Path) -> list[tuple[str, str]]:
    """(method, path) of everything that a server with pairing answers."""
    with Served(folder) as served:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        book = TokenBook(folder.parent / "routes")
        app = application(served, Settings(book=book, offers=Offers(folder.parent / "routes")))
        found = [
            (route.method, route.resource.canonical) for route in app.router.routes() if route.resource is not None
        ]
        asyncio.set_event_loop(None)
        loop.close()
    return found
