"""A snapshot as one file: its ref, manifest, coverage, signatures where it has some, and objects, each a frame, one after the other.

Written and read as a stream, so that it goes through a pipe too.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.codec import (
    HEADER,
    MAX_RECORD,
    Kind,
    decode_coverage,
    decode_header,
    decode_ref,
    decode_signatures,
    decode_snapshot,
    encode_coverage,
    encode_ref,
    encode_signatures,
    encode_snapshot,
)
from kvstore.digest import ContentDigest, SnapshotDigest
from kvstore.disk import below
from kvstore.errors import Corrupt, InputInvalid, KVError, NotCovered, ObjectCorrupt, Refused
from kvstore.files import Root
from kvstore.records import check_label
from kvstore.signatures import Signature, true_ones
from kvstore.snapshot import Coverage, Ref, Snapshot
from kvstore.snapshot import trimmed as trimmed_coverage
from kvstore.store import Store

from .carry import Advance, Carried
from .frames import Buffer, check_frame
from .incoming import Incoming, absent, move_name, promised
from .plan import objects
from .pulling import standing
from .reach import blaming
from .streams import Cut
from .vouching import Producers, require, take_along

SUFFIX = ".kvferry"
_KIND = 10
"""Where in a header the kind stands."""


class FileCorrupt(Corrupt):
    """A one-file snapshot that is cut, damaged, or no such file."""

    advice = "Nothing was imported. Export it again with `kvferry export NAME FILE.kvferry`, or copy it again."


@dataclass(frozen=True, slots=True)
class Exported:
    """What is written: ``objects``, and ``bytes`` in all, with headers. ``coverage``: what of the snapshot they are."""

    label: str
    updated: int
    digest: SnapshotDigest
    snapshot: Snapshot
    coverage: Coverage
    signatures: tuple[Signature, ...]
    objects: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Imported:
    """What was read: ``objects`` came, of which ``landed`` were not here; ``bytes`` in all, with headers."""

    carried: Carried
    objects: int
    landed: int
    bytes: int


def plan_export(store: Store, name: str, *, trimmed: bool) -> Exported:
    """What `export` would write. `SnapshotMissing`, `NotCovered` where what is here can't be continued from its end."""
    digest = store.resolve(name)
    snapshot = store.shelf.records.snapshot(digest)
    held = store.shelf.records.coverage(digest, snapshot)
    store.match(name)  # NotCovered, with what to do
    if trimmed:
        wanted = trimmed_coverage(digest, snapshot)
        held = Coverage(digest, tuple(_within(a, b) for a, b in zip(held.runs, wanted.runs, strict=True)))
    names = objects(snapshot, held)
    ref = store.shelf.records.ref(name)
    label, updated = (name, 0) if ref is None else (ref.label, ref.updated)
    signatures = true_ones(store.shelf.records.signatures(digest), digest)
    records = sum(map(len, _encoded(Ref(label, digest, updated), snapshot, held, signatures)))
    size = records + sum(store.shelf.objects.size(one) or 0 for one in names)
    return Exported(label, updated, digest, snapshot, held, signatures, len(names), size)


def _encoded(ref: Ref, snapshot: Snapshot, coverage: Coverage, signatures: Sequence[Signature]) -> list[bytes]:
    signed = [encode_signatures(ref.snapshot, signatures)] if signatures else []
    return [encode_ref(ref), encode_snapshot(snapshot)[1], encode_coverage(coverage), *signed]


def _within(runs: tuple[tuple[int, int], ...], wanted: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    return tuple((max(a, c), min(b, d)) for a, b in runs for c, d in wanted if max(a, c) < min(b, d))


def export(store: Store, plan: Exported, advance: Advance) -> Iterator[Buffer]:
    """The file's bytes, each piece valid until the next is asked for. Every object is verified as it passes; `ObjectMissing`, `ObjectCorrupt`."""
    for record in _encoded(Ref(plan.label, plan.digest, plan.updated), plan.snapshot, plan.coverage, plan.signatures):
        yield record
        advance(len(record))
    for name, length in objects(plan.snapshot, plan.coverage).items():
        for piece in check_frame(name, length, store.shelf.objects.frame(name)):
            yield piece
            advance(len(piece))


def write(path: Path, pieces: Iterable[Buffer], *, force: bool) -> None:
    """Writes a file that appears whole and durably, or not at all. `Refused` where something is there, unless ``force``."""
    if os.path.lexists(path) and not force:
        raise Refused(
            f"{path}: expected no such file, found one. Give another name, or replace it with --force.", path=str(path)
        )
    if not path.parent.is_dir():
        raise InputInvalid(f"{path}: expected the folder {path.parent}, found none. Make it first.", path=str(path))
    part = f".{path.name}.{secrets.token_hex(4)}.part"
    with below(path.parent):
        root = Root(path.parent)
        try:
            root.write(part, pieces)
            try:
                root.rename(part, path.name)
            except BaseException:
                root.discard(part)
                raise
        finally:
            root.close()


def import_(
    store: Store,
    pieces: Iterable[Buffer],
    where: str,
    *,
    name: str | None,
    force: bool,
    advance: Advance,
    required: Producers | None = None,
) -> Imported:
    """Takes a one-file snapshot into the store: verified, and visible only when all of it is here.

    It gets the name that it was exported with, or ``name``; the name moves as with `pull`. With ``required`` one of these producers must have signed it (`Unsigned`, before any object is read). `FileCorrupt`, `ObjectCorrupt`, `FormatTooNew`, `RefConflict`.
    """
    with _reading(where):
        stream = _Counted(pieces, advance)
        cut = Cut(stream)
        ref, digest, snapshot, coverage = _records(cut)
        signatures, head = _signatures(cut, digest)
    require(where, ref.label, digest, signatures, required)
    label = check_label(ref.label if name is None else name)
    expect = standing(store, where, label, digest, snapshot, force)
    needed = objects(snapshot, coverage)
    with below(store.shelf.path), Incoming(store.shelf) as incoming:
        landed = 0
        here = needed.keys() - absent(store.shelf, needed).keys()
        for one, length in needed.items():
            frame = check_frame(one, length, _frame(cut, head, one))
            head = b""
            with blaming(where, ObjectCorrupt, todo=FileCorrupt.advice):
                if one in here:
                    for _ in frame:  # verified all the same: a file that is damaged is not imported
                        pass
                else:
                    incoming.land(one, length, frame)
                    landed += 1
        if cut.exactly(1):
            raise FileCorrupt.at(where, f"end: expected none after {len(needed)} objects, found more bytes")
        with store.shelf.shared():
            lacking = incoming.lacking(needed)
            if lacking:
                raise KVError(
                    f"{where}: {len(lacking)} objects that were here when the import began were collected meanwhile. Import it again."
                )
            incoming.publish(needed, promised(store.shelf, digest, snapshot, expect))
            held = store.publish(snapshot, coverage)
            take_along(store.shelf.records, digest, signatures)
            move_name(store.shelf.records, label, expect, digest)
    return Imported(Carried(label, digest, snapshot, held, 0), len(needed), landed, stream.count)


def _records(cut: Cut) -> tuple[Ref, SnapshotDigest, Snapshot, Coverage]:
    ref = decode_ref(_record(cut, Kind.REF), "its name")
    manifest = _record(cut, Kind.SNAPSHOT)
    snapshot = decode_snapshot(manifest, ref.snapshot)
    coverage = decode_coverage(
        _record(cut, Kind.COVERAGE), ref.snapshot, len(snapshot.layout.groups), len(snapshot.blocks)
    )
    if not any(coverage.runs):
        raise NotCovered("coverage: expected some objects, found none")
    return ref, ref.snapshot, snapshot, coverage


def _signatures(cut: Cut, digest: SnapshotDigest) -> tuple[tuple[Signature, ...], bytes]:
    """The true ones, and where there are none the header of the first object, which was read to know that."""
    head = cut.exactly(HEADER)
    if head[_KIND : _KIND + 1] != bytes([Kind.SIGNATURES]):
        return (), head
    return true_ones(decode_signatures(_record(cut, Kind.SIGNATURES, head), digest), digest), b""


def _record(cut: Cut, kind: Kind, head: bytes = b"") -> bytes:
    head = head or cut.exactly(HEADER)
    length = decode_header(head, kind, f"its {kind.name.lower()}").stored_length
    assert length <= MAX_RECORD
    return head + cut.exactly(length)


def _frame(cut: Cut, head: bytes, name: ContentDigest) -> Iterator[Buffer]:
    """``head``: its header, if that was read already."""
    head = head or cut.exactly(HEADER)
    yield head
    if len(head) == HEADER:
        yield from cut.take(decode_header(head, Kind.OBJECT, f"object {name}").stored_length)


class _Counted:
    """Counts the bytes of a stream as they pass."""

    def __init__(self, pieces: Iterable[Buffer], advance: Advance) -> None:
        self._pieces = iter(pieces)
        self._advance = advance
        self.count = 0

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Buffer:
        piece = next(self._pieces)
        self.count += len(piece)
        self._advance(len(piece))
        return piece


class _reading:
    """Around the records of a file: what is corrupt in them is the file's damage."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, Corrupt):
            what = str(error.details.get("what", "its content"))
            raise FileCorrupt.at(self._where, f"{what}: {error.found.rstrip('.')}") from error
        if isinstance(error, InputInvalid | NotCovered):
            raise FileCorrupt.at(self._where, error.message.rstrip(".")) from error
