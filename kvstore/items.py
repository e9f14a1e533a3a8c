"""Token items: what a prefix is made of, and their one encoding in keys, manifests and the index.

A token is its id as a big-endian u32 below 2^31. A soft token (an image or audio position, whose embedding row does
not come from the vocabulary) is its placeholder id with the top bit set, then the 32-byte digest of the row. So
encodings are prefix-free, and byte order of encoded blocks puts the longest common prefix beside a query.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from .digest import SIZE
from .errors import InputInvalid

MAX_ID = 2**31 - 1
_SOFT = 2**31
_STRIDE = 128
"""Items that are compared at once."""


@dataclass(frozen=True, slots=True, order=True)
class SoftToken:
    """A position whose embedding row is media. ``row``: `digest.soft_row_digest` of the fp16 row."""

    placeholder: int
    row: bytes


Item = int | SoftToken


def encode_items(items: Sequence[Item]) -> bytes:
    """The canonical bytes of ``items``; 4 a token, 36 a soft token."""
    if set(map(type, items)) == {int} and min(items) >= 0:  # type: ignore[operator]
        with suppress(struct.error):  # a signed word holds no more than MAX_ID
            return struct.pack(f">{len(items)}i", *items)  # the usual case, forty times as fast
    try:
        return b"".join(
            struct.pack(">I32s", _SOFT | _id(i.placeholder), _row(i.row))
            if isinstance(i, SoftToken)
            else struct.pack(">I", _id(i))
            for i in items
        )
    except (struct.error, TypeError) as error:
        raise InputInvalid(f"items: expected token ids and SoftTokens, found {error}") from error


def encoded_blocks(items: Sequence[Item], block: int) -> Iterator[bytes]:
    """`encode_items` of every ``block`` items; of many blocks at once, where they are all tokens."""
    for at in range(0, len(items), 16 * block):
        some = items[at : at + 16 * block]
        data = encode_items(some)
        if len(data) == 4 * len(some):
            yield from (data[i : i + 4 * block] for i in range(0, len(data), 4 * block))
        else:
            yield from (encode_items(some[i : i + block]) for i in range(0, len(some), block))


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
    least, start = min(len(a), len(b)), 0
    while start < least and tuple(a[start : start + _STRIDE]) == tuple(b[start : start + _STRIDE]):
        start += _STRIDE  # a hundred times as fast as one after the other
    n = min(start, least)
    for x, y in zip(a[n:least], b[n:least], strict=True):
        if x != y:
            break
        n += 1
    return n
