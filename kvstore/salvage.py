"""What can still be read out of a damaged ref: its label and its snapshot, each only where it proves itself. Pure.

The name of a ref's file is a digest of the label, so that a right guess is known to be right; 32 bytes that are the digest of a manifest
that is here stand in the file by no accident.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from .codec import HEADER
from .digest import SIZE, SnapshotDigest, label_file

_LABEL = HEADER + 7
"""Where the label begins, with the one to three bytes that say how long it is."""
_LONGEST = 800
"""Bytes of a label at most: 200 characters."""
_NEAR = 16
"""Bits in which a digest that is here may differ from what stands in its place in the file: chance never comes so close."""


def read_label(data: bytes, file: str) -> str | None:
    """The label of the ref whose damaged file holds ``data``; None unless the file's name ``file`` proves it."""
    for text in _texts(data):
        try:
            label = text.decode()
        except UnicodeDecodeError:
            continue
        if label_file(label) == file:
            return label
    return None


def _texts(data: bytes) -> Iterator[bytes]:
    """What may be the label: every length at its place; then, as long as it says it is, with any one bit put right."""
    for mark in (1, 2, 3):
        start = _LABEL + mark
        for end in range(start + 1, min(len(data), start + _LONGEST) + 1):
            yield data[start:end]
    end = data.find(b"\xa8snapshot\xc4\x20")
    for mark in (1, 2, 3):
        text = bytearray(data[_LABEL + mark : end]) if end > _LABEL + mark else bytearray()
        for at in range(8 * len(text)):
            text[at // 8] ^= 1 << at % 8
            yield bytes(text)
            text[at // 8] ^= 1 << at % 8


def read_snapshot(data: bytes, here: Set[SnapshotDigest]) -> SnapshotDigest | None:
    """Which of the snapshots ``here`` a damaged ref stood for; None if none, or more than one, can be told."""
    known = {digest.raw: digest for digest in here}
    whole = {found for at in range(len(data)) if (found := known.get(data[at : at + SIZE])) is not None}
    if not whole:
        start = data.find(b"snapshot\xc4\x20") + 10
        place = int.from_bytes(data[start : start + SIZE]) if start >= 10 and len(data) >= start + SIZE else None
        if place is not None:
            whole = {digest for digest in here if (int.from_bytes(digest.raw) ^ place).bit_count() <= _NEAR}
    return whole.pop() if len(whole) == 1 else None
