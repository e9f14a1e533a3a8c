"""One object's frame on its way between stores: checked while its bytes pass. No I/O.

A frame is carried as it is stored, raw or as planes; both sides have its content under the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvstore.codec import HEADER, RAW, Header, Kind, check_object, decode_header
from kvstore.digest import ContentDigest, content_hasher
from kvstore.errors import ObjectCorrupt

Buffer = bytes | memoryview


def check_frame(
    name: ContentDigest, length: int, chunks: Iterable[Buffer], told: Callable[[Header], None] | None = None
) -> Iterator[Buffer]:
    """Passes on the frame of object ``name`` (``length`` bytes of content) and raises `ObjectCorrupt` if it isn't that.

    ``chunks`` is the frame cut anywhere. Nothing is proven before the iterator has ended: the caller keeps what it got
    out of sight until then. At most one byte past the expected end is looked at, and each piece is valid until the next is
    asked for. Checked: header, name, lengths, content digest, no trailing bytes. ``told`` is given the header as soon as it is accepted.

    Raw content is hashed as it passes. Of planes the payload is kept, which is smaller than ``length``, and decoded at the end.
    """
    what = f"object {name}"
    head = bytearray()
    header: Header | None = None
    content, planes = content_hasher(), bytearray()
    seen = size = 0
    for chunk in chunks:
        view = memoryview(chunk)
        if header is None:
            take = HEADER - len(head)
            head += view[:take]
            view = view[take:]
            if len(head) < HEADER:
                continue
            header = _header(bytes(head), name, length)
            size = header.stored_length
            if told is not None:
                told(header)
            yield bytes(head)
        seen += len(view)
        if seen > size:
            raise _bad(name, "length", f"{size} bytes after the header", f"at least {seen}")
        if len(view):
            if header.codec == RAW:
                content.update(view)
            else:
                planes += view
            yield view
    if header is None:
        decode_header(bytes(head), Kind.OBJECT, what)  # raises: too short
        raise AssertionError("a cut header was accepted")
    if seen != size:
        raise _bad(name, "length", f"{size} bytes after the header", seen)
    if header.codec != RAW:
        check_object(header, [bytes(planes)], name)
    elif content.digest() != name.raw:
        raise _bad(name, "content digest", name, content.hexdigest())


def _header(head: bytes, name: ContentDigest, length: int) -> Header:
    header = decode_header(head, Kind.OBJECT, f"object {name}")
    if header.name != name.raw:
        raise _bad(name, "name in the header", name, header.name.hex())
    if header.content_length != length:
        raise _bad(name, "content length", f"{length} bytes, as the snapshot says", header.content_length)
    return header


def _bad(name: ContentDigest, field: str, expected: object, found: object) -> ObjectCorrupt:
    return ObjectCorrupt.at(
        f"object {name}", f"{field}: expected {expected}, found {found}", name=name.hex, field=field
    )
