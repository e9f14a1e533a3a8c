"""A kvferry server as a remote: `Source` and `Target` over HTTP. `docs/protocol.md` is the description."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Self, TypeVar
from urllib.parse import quote

import msgpack

from kvstore.codec import (
    HEADER,
    MAX_RECORD,
    MAX_UPDATED,
    Kind,
    decode_coverage,
    decode_header,
    decode_ref,
    decode_snapshot,
    encode_coverage,
    encode_snapshot,
)
from kvstore.digest import SIZE, ContentDigest, PrefixKey, SnapshotDigest
from kvstore.errors import FormatTooNew, InputInvalid, LabelInvalid, SnapshotMissing, Unreachable
from kvstore.items import Item, encode_items
from kvstore.layout import MAX_OBJECT, Layout
from kvstore.records import check_label
from kvstore.shelf import FEATURES, FORMAT
from kvstore.signatures import Signature, joined
from kvstore.snapshot import Coverage, Ref, Snapshot

from .bodies import (
    FRAMES_TYPE,
    MAP_TYPE,
    MAX_MAP,
    MAX_REFS,
    PROTOCOL,
    Find,
    Found,
    Had,
    Have,
    Info,
    Landed,
    Publish,
    Published,
    Refs,
    Shape,
    Signatures,
    decode,
    encode,
    flags,
)
from .bodies import Signature as SignatureShape
from .connection import Connection, Peer, tried
from .fetching import Stream
from .frames import Buffer, check_frame
from .plan import Lengths, parts
from .reach import blaming_remote
from .remote import MAX_ASKED, Frame
from .streams import Cut

_S = TypeVar("_S", bound=Shape)
_T = TypeVar("_T")
MAX_NAMES = 1_000_000
"""Names that a server may have; a page counts for a hundred at least."""


class Client:
    """A server. Use `Client.open`; close it, or use it in a `with`. Each thread that fetches or puts has a connection of its own."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._idle: list[Connection] = []
        self._lock = threading.Lock()

    @classmethod
    def open(cls, peer: Peer) -> Self:
        """Asks the server who it is. `Unreachable`, `TokenRefused`, `FingerprintMismatch`; `FormatTooNew` for another protocol."""
        client = cls(peer)
        try:
            client.info = info = client._ask_info()
            if info.protocol != PROTOCOL:
                raise FormatTooNew(
                    f"{client.where}: this kvferry speaks protocol {PROTOCOL}, found protocol {info.protocol}. Upgrade the older one of the two.",
                    supported=PROTOCOL,
                    found=info.protocol,
                )
            unknown = sorted(set(info.features) - set(FEATURES))
            if unknown or info.format > FORMAT:
                raise FormatTooNew(
                    f"{client.where}: this kvferry knows format {FORMAT} and the features {list(FEATURES)}, found format {info.format} and {unknown!r:.200}. "
                    f"Upgrade kvferry here.",
                    features=unknown,
                )
            if min(info.limits.asked, info.limits.frames) < 1:
                raise client._nonsense("expected limits of at least 1, found less")
        except BaseException:
            client.close()
            raise
        return client

    def _ask_info(self) -> Info:
        return self._got("/v1/info", lambda connection, answer: self._decoded(connection, answer, Info))

    def _got(self, path: str, read: Callable[[Connection, http.client.HTTPResponse], _T]) -> _T:
        """What ``read`` makes of the answer to a GET."""

        def once() -> _T:
            with self._asking("GET", path) as (connection, answer):
                return read(connection, answer)

        return tried(once)

    info: Info

    @property
    def where(self) -> str:
        return self._peer.where

    def close(self) -> None:
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Connection]:
        with self._lock:
            connection = self._idle.pop() if self._idle else Connection(self._peer)
        try:
            yield connection
        finally:
            with self._lock:
                self._idle.append(connection)

    @contextlib.contextmanager
    def _asking(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> Iterator[tuple[Connection, http.client.HTTPResponse]]:
        with (
            self._connected() as connection,
            blaming_remote(self.where),
            connection.asking(method, path, body, headers) as answer,
        ):
            yield connection, answer

    def _posted(self, path: str, value: Shape, shape: type[_S], limit: int = MAX_MAP) -> _S:
        """Asks with a map. What is asked this way changes nothing."""

        def once() -> _S:
            with self._asking("POST", path, encode(value), {"Content-Type": MAP_TYPE}) as (connection, answer):
                return self._decoded(connection, answer, shape, limit)

        return tried(once)

    def _decoded(
        self, connection: Connection, answer: http.client.HTTPResponse, shape: type[_S], limit: int = MAX_MAP
    ) -> _S:
        data = connection.map(answer, limit)
        try:
            return decode(data, shape, "the answer")
        except InputInvalid as error:
            raise connection.nonsense(str(error).rstrip(".")) from error

    # what both sides ask

    def refs(self) -> Iterator[Ref]:
        after, more, count = "", True, 0
        while more:
            path = f"/v1/refs?after={quote(after, safe='')}&limit={MAX_REFS}"
            page = self._got(path, lambda connection, answer: self._decoded(connection, answer, Refs))
            more, count = page.more, count + max(len(page.refs), MAX_REFS // 10)
            if count > MAX_NAMES or len(page.refs) > MAX_REFS or (more and not page.refs):
                raise self._nonsense(
                    f"expected pages of 1 to {MAX_REFS} names and an end of them, found {len(page.refs)}"
                )
            for one in page.refs:
                if (
                    one.label <= after
                    or len(one.snapshot) != SIZE
                    or not 0 <= one.updated <= MAX_UPDATED
                    or not _is_label(one.label)
                ):
                    raise self._nonsense(f"expected names in order after {after!r:.80}, found {one.label!r:.80}")
                after = one.label
                yield Ref(one.label, SnapshotDigest(one.snapshot), one.updated)

    def ref(self, label: str) -> Ref | None:
        nfc = check_label(label)
        try:
            path = f"/v1/refs/{quote(nfc, safe='')}"
            ref = self._got(path, lambda c, answer: decode_ref(c.body(answer, MAX_MAP), f"name {nfc!r}"))
        except SnapshotMissing:
            return None
        if ref.label != nfc:
            raise self._nonsense(f"expected the name {nfc!r}, found {ref.label!r:.80}")
        return ref

    def snapshot(self, digest: SnapshotDigest) -> Snapshot:
        limit = MAX_RECORD + HEADER
        return self._got(f"/v1/snapshots/{digest}", lambda c, answer: decode_snapshot(c.body(answer, limit), digest))

    def signatures(self, digest: SnapshotDigest) -> Sequence[Signature]:
        path = f"/v1/snapshots/{digest}/signatures"
        try:
            found = self._got(path, lambda c, answer: self._decoded(c, answer, Signatures)).signatures
            return joined((), (Signature(one.key, one.signature) for one in found))
        except SnapshotMissing:
            return ()
        except InputInvalid as error:
            raise self._nonsense(str(error).rstrip(".")) from error

    def have(self, objects: Lengths) -> set[ContentDigest]:
        return self._have(objects, sound=False)

    def sound(self, objects: Lengths) -> set[ContentDigest]:
        return self._have(objects, sound=True)

    def _have(self, objects: Lengths, *, sound: bool) -> set[ContentDigest]:
        assert len(objects) <= MAX_ASKED
        if not objects:
            return set()
        if len(objects) > self.info.limits.asked:
            return set().union(*(self._have(part, sound=sound) for part in parts(objects, self.info.limits.asked)))
        asked = Have(tuple((name.raw, length) for name, length in objects.items()), sound)
        found = self._posted("/v1/have", asked, Had)
        try:
            there = flags(found.have, len(objects), "the answer")
        except InputInvalid as error:
            raise self._nonsense(str(error).rstrip(".")) from error
        return {name for name, here in zip(objects, there, strict=True) if here}

    # Source

    def coverage(self, digest: SnapshotDigest, snapshot: Snapshot) -> Coverage:
        groups, blocks = len(snapshot.layout.groups), len(snapshot.blocks)
        try:
            path = f"/v1/snapshots/{digest}/coverage"
            return self._got(path, lambda c, answer: decode_coverage(c.body(answer, MAX_MAP), digest, groups, blocks))
        except SnapshotMissing:
            return Coverage(digest, ((),) * groups)

    def fetch(self, names: Sequence[ContentDigest]) -> Iterator[Frame]:
        with self._connected() as connection:
            stream = Stream(connection, list(names), self.info.limits.frames)
            try:
                for name in names:
                    yield name, stream.frame(name)
            finally:
                stream.close()

    def find(
        self, layout: Layout, root: PrefixKey, namespace: str, items: Sequence[Item], head: str | None
    ) -> SnapshotDigest | None:
        asked = Find(namespace, root.raw, msgpack.packb(layout.wire()), encode_items(items), head)
        found = self._posted("/v1/find", asked, Found).snapshot
        if found is not None and len(found) != SIZE:
            raise self._nonsense(f"expected a digest of {SIZE} bytes, found {len(found)}")
        return None if found is None else SnapshotDigest(found)

    # Target

    def resume(self, objects: Lengths) -> set[ContentDigest]:
        return set()  # what landed in an earlier push counts in `have`

    def put(self, frames: Iterator[Frame], lengths: Lengths) -> None:
        for name, chunks in frames:
            # One body an object: how long it is stands in its header.
            cut = Cut(chunks)
            head = cut.exactly(HEADER)
            stored = decode_header(head, Kind.OBJECT, f"object {name}").stored_length
            rest = cut.take(MAX_OBJECT + HEADER)
            body = _withheld(check_frame(name, lengths[name], chain([head], rest)), HEADER + stored)
            sent = {"Content-Type": FRAMES_TYPE, "Content-Length": str(HEADER + stored)}
            with self._asking("PUT", "/v1/objects", body, sent) as (connection, answer):
                if self._decoded(connection, answer, Landed).landed != 1:
                    raise connection.nonsense("expected one object taken in, found another number")

    def publish(self, snapshot: Snapshot, coverage: Coverage, label: str, expect: SnapshotDigest | None) -> Coverage:
        digest, manifest = encode_snapshot(snapshot)
        body = encode(Publish(manifest, encode_coverage(coverage)))
        condition = {"If-None-Match": "*"} if expect is None else {"If-Match": f'"{expect}"'}
        headers = {"Content-Type": MAP_TYPE, **condition}
        path = f"/v1/refs/{quote(check_label(label), safe='')}"

        def once() -> Coverage:
            with self._asking("PUT", path, body, headers) as (connection, answer):
                held = self._decoded(connection, answer, Published).coverage
                return decode_coverage(held, digest, len(snapshot.layout.groups), len(snapshot.blocks))

        # It may have been done and the answer lost: the server then finds the name where it should be.
        return tried(once)

    def add_signatures(self, digest: SnapshotDigest, signatures: Sequence[Signature]) -> None:
        body = encode(Signatures(tuple(SignatureShape(one.key, one.raw) for one in signatures)))

        def once() -> None:
            path = f"/v1/snapshots/{digest}/signatures"
            with self._asking("PUT", path, body, {"Content-Type": MAP_TYPE}) as (connection, answer):
                self._decoded(connection, answer, Signatures)

        return tried(once)

    def _nonsense(self, found: str) -> Unreachable:
        return Connection(self._peer).nonsense(found)


def _withheld(pieces: Iterable[Buffer], count: int) -> Iterator[Buffer]:
    """``count`` bytes in pieces, of which the last goes out when the others have ended: so nothing that turns out wrong is ever sent whole."""
    last: bytes | None = None
    for piece in pieces:
        count -= len(piece)
        if count > 0:
            yield piece
        elif len(piece):
            last = bytes(piece)
    if last is not None:
        yield last


def _is_label(text: str) -> bool:
    try:
        return check_label(text) == text
    except LabelInvalid:
        return False
