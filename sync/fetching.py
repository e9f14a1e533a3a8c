"""Objects from a server as one body of frames, whatever breaks on the way: what is left of an object is asked for again, then the others."""

from __future__ import annotations

import contextlib
import http.client
import re
from collections.abc import Iterator

from kvstore.codec import HEADER, Kind, decode_header
from kvstore.digest import ContentDigest
from kvstore.errors import Unreachable

from .bodies import FRAMES_TYPE, MAP_TYPE, Fetch, encode
from .connection import ATTEMPTS, PIECE, Connection, NotUnderstood, pause, unreachable
from .frames import Buffer

ENOUGH = 256 << 10
"""Bytes that are read before they are handed on, where so many are expected."""
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)


class Stream:
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
                pause(tries)
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
