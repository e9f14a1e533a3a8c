"""Giving objects the other codec: planes for what is cold, raw again for what is in use. Their names and content stay.

Each file is read, verified, encoded, decoded again for comparison, written and synced out of sight, and renamed over the old one, in batches.
The store's lock is held shared for a batch, as a saver holds it: no collector takes an object between its reading and its renaming, nor a
file from ``tmp/``; readers and savers go on, with the old file or the new one. Killed at any point it leaves whole files; the next plan lists
those that are left.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .codec import CODECS, HEADER, PLANES, RAW, Codec, decode_header, encode_object
from .codec import Kind as FrameKind
from .digest import ContentDigest, SnapshotDigest
from .disk import below
from .errors import FormatTooNew, KVError, Missing, ObjectCorrupt, ObjectMissing, StoreCorrupt
from .files import Buffer, Unsettled
from .gauge import Gauge
from .objects import Objects
from .plaintext import counted, size_text
from .planes import decode_planes, fits_planes
from .store import Store

BATCH_BYTES, BATCH_OBJECTS = 8 << 20, 32
"""A batch ends with the object that reaches either, of content."""
PAUSE = 0.025
"""Seconds between batches: a waiting collector looks at the lock every 20 ms."""

Progress = Callable[[int], None]
"""Called after every batch with the bytes of content that it went through."""


@dataclass(frozen=True, slots=True)
class Item:
    """An object to recode: bytes of its content, and of its file as it is."""

    name: ContentDigest
    length: int
    size: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Objects that are in another codec than ``to``. ``there``: how many of the chosen ones are in it, or can't be.

    ``unreadable``: chosen objects whose header is damaged, or of a newer version.
    """

    to: Codec
    items: tuple[Item, ...]
    there: int
    unreadable: tuple[ContentDigest, ...]

    @property
    def content_bytes(self) -> int:
        return sum(item.length for item in self.items)

    def value(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "to": self.to,
            "objects": len(self.items),
            "bytes": sum(item.size for item in self.items),
            "there": self.there,
            "unreadable": [name.hex for name in self.unreadable],
        }

    def __str__(self) -> str:
        size = size_text(sum(item.size for item in self.items))
        return f"{counted(len(self.items), 'object')} to make {self.to}, {size} now; {self.there:,} stay as they are"


@dataclass(frozen=True, slots=True)
class Recoded:
    """What `apply` did. ``bytes_before`` and ``bytes_after``: of the recoded objects' files.

    ``kept``: objects that planes don't make smaller. ``gone``: collected since the plan, or recoded by somebody else. ``damaged``: left as
    they are.
    """

    objects: int
    bytes_before: int
    bytes_after: int
    kept: int
    gone: int
    damaged: tuple[ContentDigest, ...]

    def value(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "objects": self.objects,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "kept": self.kept,
            "gone": self.gone,
            "damaged": [name.hex for name in self.damaged],
        }


def plan(store: Store, to: Codec, names: Sequence[str] | None = None, *, older_seconds: float = 0.0) -> Plan:
    """What of the snapshots called ``names`` (None: of the whole store) is in another codec. Reads headers; changes nothing.

    ``older_seconds``: leaves out what a snapshot needs that was saved or found that recently, as far as the index knows. `SnapshotMissing`;
    `Corrupt` by kind where a chosen snapshot, or one that was used recently, can't be read.
    """
    shelf = store.shelf
    recent: set[ContentDigest] = set()
    if older_seconds > 0:
        used = store.indexed(lambda index: index.used_since(time.time() - older_seconds))
        recent = _contents(store, used)
    chosen = shelf.objects.names() if names is None else sorted(_contents(store, {store.resolve(n) for n in names}))
    items: list[Item] = []
    unreadable: list[ContentDigest] = []
    there = 0
    for name in chosen:
        if name in recent:
            continue
        try:
            header = shelf.objects.header(name)
        except FileNotFoundError:
            continue
        except (ObjectCorrupt, FormatTooNew, StoreCorrupt):
            unreadable.append(name)
            continue
        if header.codec == CODECS[to] or (to == "planes" and not fits_planes(header.content_length)):
            there += 1
        else:
            items.append(Item(name, header.content_length, HEADER + header.stored_length))
    return Plan(to, tuple(items), there, tuple(unreadable))


def apply(store: Store, plan: Plan, progress: Progress | None = None) -> Recoded:
    """Recodes what ``plan`` lists, a batch at a time. What is damaged is left alone and named. `StoreBusy`, `OSError` (a full disk), and where a
    quota is set `StoreFull`: earlier batches stay."""
    if plan.to == "planes" and plan.items:
        store.shelf.require("planes")
    total = _Tally()
    for number, batch in enumerate(_batches(plan.items)):
        if number:
            time.sleep(PAUSE)
        total.add(store.quota.within(partial(_recode, store, plan.to, batch)))
        if progress is not None:
            progress(sum(item.length for item in batch))
    return Recoded(total.objects, total.before, total.after, total.kept, total.gone, tuple(total.damaged))


@dataclass(slots=True)
class _Tally:
    objects: int = 0
    before: int = 0
    after: int = 0
    kept: int = 0
    gone: int = 0
    damaged: list[ContentDigest] = field(default_factory=list)

    def add(self, other: _Tally) -> None:
        self.objects += other.objects
        self.before += other.before
        self.after += other.after
        self.kept += other.kept
        self.gone += other.gone
        self.damaged += other.damaged


def _recode(store: Store, to: Codec, batch: Sequence[Item], gauge: Gauge | None) -> _Tally:
    """One batch, all of it or, on an error (`NoRoom`), none of it unless a rename or a folder's sync failed."""
    root, tally = store.shelf.root, _Tally()
    moves: list[tuple[str, str]] = []
    with below(store.shelf.path), store.shelf.shared():
        try:
            with Unsettled() as unsettled:
                for item in batch:
                    parts = _encoded(store, to, item, tally)
                    if parts is None:
                        continue
                    size = sum(len(part) for part in parts)
                    if gauge is not None:
                        gauge.require(size, more=tally.after)
                    tally.before, tally.after = tally.before + item.size, tally.after + size
                    path = f"tmp/{os.getpid():x}-{secrets.token_hex(8)}"
                    unsettled.add(root.create(path, parts))
                    moves.append((path, Objects.path(item.name)))
            root.move(moves)
        except BaseException:
            for path, _ in moves:  # those that were renamed already aren't there any more
                with contextlib.suppress(OSError):
                    root.discard(path)
            if gauge is not None:
                gauge.release(tally.after)
            raise
    if gauge is not None:
        gauge.release(tally.before)
    tally.objects = len(moves)
    return tally


def _encoded(store: Store, to: Codec, item: Item, tally: _Tally) -> list[Buffer] | None:
    """The file in the other codec, proven to hold the content; None where the object stays as it is."""
    objects = store.shelf.objects
    try:
        if not objects.has(item.name) or objects.header(item.name).codec == CODECS[to]:
            tally.gone += 1
            return None
        content = objects.read(item.name, item.length)
    except (FileNotFoundError, ObjectMissing):
        tally.gone += 1
        return None
    except (ObjectCorrupt, FormatTooNew, StoreCorrupt):
        tally.damaged.append(item.name)
        return None
    parts = encode_object(item.name, [content], CODECS[to])
    if to == "raw":
        return parts
    header = decode_header(memoryview(parts[0]), FrameKind.OBJECT, f"object {item.name}")
    if header.codec == RAW:
        tally.kept += 1
        return None
    if header.codec != PLANES or decode_planes(item.name, memoryview(parts[1]), item.length) != content:
        raise KVError(
            f"object {item.name}: expected planes that hold its content, found that they don't. Nothing was replaced; this is a fault of "
            f"kvferry or of its zstandard package: please report it.",
            name=item.name.hex,
        )
    return parts


def _batches(items: Sequence[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += item.length
        if size >= BATCH_BYTES or len(batch) >= BATCH_OBJECTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _contents(store: Store, digests: set[SnapshotDigest]) -> set[ContentDigest]:
    """Every object that these manifests name. One that a collector took meanwhile needs none."""
    found: set[ContentDigest] = set()
    for digest in sorted(digests):
        with contextlib.suppress(Missing):
            found.update(content for block in store.shelf.records.snapshot(digest).blocks for content in block)
    return found
