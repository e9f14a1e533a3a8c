"""In a bucket, which has no index: one small file a prefix key that says which snapshot has that block. Hints, verified by the manifest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgpack
import msgspec

from kvstore.digest import SIZE, BlockId, PrefixKey, SnapshotDigest, child_key
from kvstore.items import Item, encode_items
from kvstore.layout import BLOCK
from kvstore.snapshot import Snapshot

LIMIT = 1024


@dataclass(frozen=True, slots=True)
class Record:
    """A full block: its BlockId, a snapshot that holds it, and its number there."""

    block: BlockId
    snapshot: SnapshotDigest
    number: int


class _Record(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    block: bytes
    snapshot: bytes
    number: int


def path(key: PrefixKey) -> str:
    """Where the record of a prefix key is."""
    return f"prefixes/{key}"


def records(digest: SnapshotDigest, snapshot: Snapshot) -> Iterator[tuple[PrefixKey, Record]]:
    """One for each full block of a snapshot, shallow to deep."""
    for number, link in enumerate(snapshot.chain()):
        if (number + 1) * BLOCK <= snapshot.tokens:
            yield link.key, Record(link.id, digest, number)


def keys(root: PrefixKey, items: Sequence[Item]) -> Iterator[PrefixKey]:
    """The prefix keys of the full blocks of ``items``, shallow to deep."""
    key = root
    for at in range(0, len(items) - BLOCK + 1, BLOCK):
        key = child_key(key, encode_items(items[at : at + BLOCK]))
        yield key


def encode(record: Record) -> bytes:
    packed: bytes = msgpack.packb([record.block.raw, record.snapshot.raw, record.number])
    return packed


def decode(data: bytes) -> Record | None:
    """A record; None for anything else: it is a hint, and a bad one is a miss."""
    try:
        wire = msgspec.convert(msgpack.unpackb(data, use_list=False), _Record)
    except (ValueError, TypeError, msgpack.UnpackException, msgspec.ValidationError, RecursionError):
        return None
    if len(wire.block) != SIZE or len(wire.snapshot) != SIZE or wire.number < 0:
        return None
    return Record(BlockId(wire.block), SnapshotDigest(wire.snapshot), wire.number)
