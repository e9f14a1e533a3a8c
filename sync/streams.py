"""A body of object frames, one after the other, cut into its frames while it arrives. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvstore.codec import HEADER, Header, Kind, decode_header
from kvstore.errors import InputInvalid

from .frames import Buffer


class Cut:
    """Takes pieces of a stream and gives them out again in other sizes, without copying what is large."""

    def __init__(self, chunks: Iterable[Buffer]) -> None:
        self._chunks = iter(chunks)
        self._left = memoryview(b"")

    def take(self, count: int) -> Iterator[memoryview]:
        """The next ``count`` bytes in pieces, each valid until the next is asked for; fewer at the stream's end."""
        while count:
            if not len(self._left):
                chunk = next(self._chunks, None)
                if chunk is None:
                    return
                self._left = memoryview(chunk).cast("B")
                continue
            piece, self._left = self._left[:count], self._left[count:]
            count -= len(piece)
            yield piece

    def exactly(self, count: int) -> bytes:
        """The next ``count`` bytes; fewer at the stream's end."""
        return b"".join(self.take(count))


def frames(chunks: Iterable[Buffer], limit: int) -> Iterator[tuple[Header, Iterator[Buffer]]]:
    """The frames of a body, at most ``limit``: each one's header, and the whole frame in pieces as `frames.check_frame` takes it.

    A frame that was not read to its end when the next is asked for is passed over. Nothing but the header is checked here. `Corrupt` on a header
    that is none, `FormatTooNew`, `InputInvalid` (too many; cut within a header). A payload that is cut is for the frame's reader to see.
    """
    cut = Cut(chunks)
    for number in range(limit + 1):
        head = cut.exactly(HEADER)
        if not head:
            return
        if number == limit:
            raise InputInvalid(f"frames: expected at most {limit} in one body, found more")
        if len(head) < HEADER:
            raise InputInvalid(f"frames: expected a header of {HEADER} bytes, found {len(head)} at the end of the body")
        header = decode_header(head, Kind.OBJECT, f"frame {number} of a body")
        payload = cut.take(header.stored_length)
        yield header, _framed(head, payload)
        for _ in payload:
            pass


def _framed(head: bytes, payload: Iterator[memoryview]) -> Iterator[Buffer]:
    yield head
    yield from payload
