"""A kvferry server as a remote: `Source` and `Target` over HTTP. `docs/protocol.md` is the description."""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
import time
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
from kvstore.errors import FormatTooNew, InputInvalid, LabelInvalid, SnapshotMissing, StoreBusy, Unreachable
from kvstore.items import Item, encode_items
from kvstore.layout import MAX_OBJECT, Layout
from kvstore.records import check_label
from kvstore.signatures import Signature, joined
from kvstore.shelf import FEATURES, FORMAT
from kvstore.snapshot import Coverage, Ref, Snapshot

from .bodies import Signature as SignatureShape
from .bodies import (
    FRAMES_TYPE,
    MAP_TYPE,
    MAX_MAP,
    MAX_REFS,
    PROTOCOL,
    Fetch,
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
from .connection import PIECE, Connection, NotUnderstood, Peer, unreachable
from .frames import Buffer, check_frame
from .plan import Lengths, parts
from .reach import blaming_remote
from .remote import MAX_ASKED, Frame
from .streams import Cut

_S = TypeVar("_S", bound=Shape)
_T = TypeVar("_T")
ATTEMPTS = 4
"""Tries for one object, or one question, before a server counts as gone."""
ENOUGH = 256 << 10
"""Bytes that are read before they are handed on, where so many are expected."""
MAX_NAMES = 1_000_000
"""Names that a server may have; a page counts for a hundred at least."""
PAUSE = 0.2
"""Seconds before the second try; each later one waits twice as long."""
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)


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

        return _tried(once)

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

        return _tried(once)

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
            stream = _Stream(connection, list(names), self.info.limits.frames)
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
        return _tried(once)

    def add_signatures(self, digest: SnapshotDigest, signatures: Sequence[Signature]) -> None:
        body = encode(Signatures(tuple(SignatureShape(one.key, one.raw) for one in signatures)))

        def once() -> None:
            path = f"/v1/snapshots/{digest}/signatures"
            with self._asking("PUT", path, body, {"Content-Type": MAP_TYPE}) as (connection, answer):
                self._decoded(connection, answer, Signatures)

        return _tried(once)

    def _nonsense(self, found: str) -> Unreachable:
        return Connection(self._peer).nonsense(found)


class _Stream:
    """Objects as one body of frames; when the connection breaks, the rest of the object under way, then of the others, from a new one."""

    def __init__(self, connection: Connection, names: list[ContentDigest], limit: int) -> None:
        self._connection = connection
        self._left, self._limit = names, limit
        self._coming = 0
        """Objects of the body under way that have not begun."""
        self._scope = contextlib.ExitStack()
        self._answer: http.client.HTTPResponse | None = None
        self._piece = memoryview(bytearray(PIECE))
        self._alone = False

    def close(self) -> None:
        self._scope.close()
        self._answer = None

    def frame(self, name: ContentDigest) -> Iterator[Buffer]:
        """The frame of the next object. What its reader leaves of it is given up with the connection."""
        done = False
        try:
            yield from self._frame(name)
            done = True
        finally:
            self._left.pop(0)
            if not done:
                self._drop()

    def _frame(self, name: ContentDigest) -> Iterator[Buffer]:
        head, sent, total = b"", 0, HEADER
        tries = fresh = 0
        while sent < total:
            try:
                if self._answer is not None and not head and not self._coming:
                    self._scope.close()  # read to its end: more is asked for on the same connection
                    self._answer = None
                if self._answer is None:
                    self._ask(name, head, sent)
                if not head:
                    head = self._exactly(HEADER)
                    self._coming -= 1
                    header = decode_header(head, Kind.OBJECT, f"object {name}")
                    total = HEADER + header.stored_length
                    sent = HEADER
                    yield head
                    continue
                count = self._read(self._piece[: min(PIECE, total - sent)])
            except Unreachable as error:
                self._drop()
                # A server that gives a little each time would be asked for ever.
                tries, fresh = 1 if fresh >= ENOUGH else tries + 1, 0
                if tries >= ATTEMPTS or isinstance(error, NotUnderstood):
                    raise
                time.sleep(PAUSE * 2 ** (tries - 1))
                continue
            fresh += count
            sent += count
            yield self._piece[:count]
        if self._alone:
            self._drop()

    def _ask(self, name: ContentDigest, head: bytes, sent: int) -> None:
        """All objects that are left; or, in the middle of one, its rest."""
        self._alone = bool(sent)
        if not sent:
            asked = self._left[: self._limit]
            self._coming = len(asked)
            body = encode(Fetch(tuple(n.raw for n in asked)))
            self._answer = self._scope.enter_context(
                self._connection.asking("POST", "/v1/fetch", body, {"Content-Type": MAP_TYPE})
            )
            kind = self._answer.headers.get_content_type()
            if kind != FRAMES_TYPE:
                raise self._connection.nonsense(f"expected {FRAMES_TYPE}, found {kind:.60}")
            return
        header = decode_header(head, Kind.OBJECT, f"object {name}")
        etag = f'"{header.stored.hex()}"'
        headers = {"Range": f"bytes={sent}-", "If-Range": etag}
        self._answer = self._scope.enter_context(self._connection.asking("GET", f"/v1/objects/{name}", None, headers))
        total = HEADER + header.stored_length
        whole = self._answer.status != 206
        if self._answer.length != (total if whole else total - sent):
            raise self._connection.nonsense(
                f"expected {total} bytes, or those from {sent}, found {self._answer.length}"
            )
        if not whole:
            found = self._answer.headers.get("Content-Range", "")
            match = _CONTENT_RANGE.fullmatch(found)
            if match is None or tuple(map(int, match.groups())) != (sent, total - 1, total):
                raise self._connection.nonsense(f"expected bytes {sent}-{total - 1}/{total}, found {found!r:.80}")
            return
        if self._answer.headers.get("ETag") != etag:
            raise self._connection.nonsense(
                f"expected the same object after the break, with ETag {etag}, found another"
            )
        # Ranges are not for this server: what is here already passes by.
        left = sent
        while left:
            left -= self._read(self._piece[: min(PIECE, left)])

    def _read(self, into: memoryview) -> int:
        assert self._answer is not None
        where = self._connection.peer.where
        try:
            count = filled = self._answer.readinto(into)
            # Small pieces cost more on their way to the disk than it takes to wait for more of them.
            while count and filled < min(len(into), ENOUGH):
                count = self._answer.readinto(into[filled:])
                filled += count
        except (OSError, http.client.HTTPException) as error:
            raise unreachable(where, error) from error
        if not filled:
            raise unreachable(where, ConnectionResetError("the connection ended before the answer did"))
        return filled

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        at = 0
        while at < count:
            at += self._read(memoryview(data)[at:])
        return bytes(data)

    def _drop(self) -> None:
        self._scope.close()
        self._connection.close()
        self._answer = None


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


def _tried(once: Callable[[], _T]) -> _T:
    """``once()``, again after a pause where the connection broke or the server was too busy."""
    for attempt in range(ATTEMPTS - 1):
        try:
            return once()
        except NotUnderstood:
            raise
        except (Unreachable, StoreBusy):
            time.sleep(PAUSE * 2**attempt)
    return once()
