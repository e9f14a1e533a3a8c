"""Token items: what a prefix is made of, and their one encoding in keys, manifests and the index.

A token is its id as a big-endian u32 below 2^31. A soft token (an image or audio position, whose embedding row does
not come from the vocabulary) is its placeholder id with the top bit set, then the 32-byte digest of the row. So
encodings are prefix-free, and byte order of encoded blocks puts the longest common prefix beside a query.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .digest import SIZE
from .errors import InputInvalid

MAX_ID = 2**31 - 1
_SOFT = 2**31


@dataclass(frozen=True, slots=True, order=True)
class SoftToken:
    """A position whose embedding row is media. ``row``: `digest.soft_row_digest` of the fp16 row."""

    placeholder: int
    row: bytes


Item = int | SoftToken


def encode_items(items: Sequence[Item]) -> bytes:
    """The canonical bytes of ``items``; 4 a token, 36 a soft token."""
    if set(map(type, items)) == {int} and min(items) >= 0 and max(items) <= MAX_ID:  # type: ignore[operator]
        return struct.pack(f">{len(items)}I", *items)  # the usual case, forty times as fast
    try:
        return b"".join(
            struct.pack(">I32s", _SOFT | _id(i.placeholder), _row(i.row))
            if isinstance(i, SoftToken)
            else struct.pack(">I", _id(i))
            for i in items
        )
    except (struct.error, TypeError) as error:
        raise InputInvalid(f"items: expected token ids and SoftTokens, found {error}") from error


def _id(token: int) -> int:
    if not 0 <= operator.index(token) <= MAX_ID:
        raise InputInvalid(f"token id: expected 0 to {MAX_ID}, found {token}")
    return operator.index(token)


def _row(row: bytes) -> bytes:
    if len(row) != SIZE:
        raise InputInvalid(f"soft token row digest: expected {SIZE} bytes, found {len(row)}")
    return row


def decode_items(data: bytes) -> tuple[Item, ...]:
    """The items of canonical bytes; `InputInvalid` on a cut item."""
    if data and len(data) % 4 == 0:
        words = struct.unpack(f">{len(data) // 4}I", data)
        if max(words) < _SOFT:  # no soft token: every word is an id
            return words
    return tuple(_decode(data))


def _decode(data: bytes) -> Iterator[Item]:
    at = 0
    while at < len(data):
        if at + 4 > len(data):
            raise InputInvalid(f"items: expected 4 bytes of an item at byte {at}, found {len(data) - at}")
        (word,) = struct.unpack_from(">I", data, at)
        at += 4
        if word < _SOFT:
            yield word
            continue
        if at + SIZE > len(data):
            raise InputInvalid(f"items: expected {SIZE} bytes of a soft token at byte {at}, found {len(data) - at}")
        yield SoftToken(word - _SOFT, data[at : at + SIZE])
        at += SIZE


def common_prefix(a: Sequence[Item], b: Sequence[Item]) -> int:
    """How many leading items are equal."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
