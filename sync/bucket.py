"""A bucket as a remote: the files of a store without an index, under the same names, in an object store. `docs/fleet.md` describes it.

What is written is whole or not there, so nothing needs a quarantine: an object is verified in memory, then put under its name. Two files are
added to a store's: ``prefixes/<key>`` (see `prefixes`) and ``names/<hex>``, which keeps names apart that differ by case only.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Self, TypeVar

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
from kvstore.digest import ContentDigest, PrefixKey, SnapshotDigest, label_file
from kvstore.errors import (
    Corrupt,
    FormatTooNew,
    ObjectMissing,
    RefConflict,
    RefCorrupt,
    SignaturesCorrupt,
    SnapshotMissing,
    StoreCorrupt,
    StoreMissing,
    Unreachable,
)
from kvstore.items import Item
from kvstore.layout import Layout
from kvstore.objects import Objects
from kvstore.records import check_label, folded
from kvstore.shelf import FEATURES, FORMAT
from kvstore.signatures import Signature, joined
from kvstore.snapshot import Coverage, Ref, Snapshot

from . import prefixes
from .blobs import Blobs, Entry, Version
from .frames import Buffer, check_frame
from .plan import Lengths, objects
from .reach import blaming_remote
from .remote import MAX_ASKED, Frame
from .vouching import checked

_T = TypeVar("_T")
_K = TypeVar("_K")
AT_ONCE = 16
PROBES = 64
"""Prefix keys that are asked for at once; above that `DEEPER` at a time."""
DEEPER = 8
TRIES = 8
"""Of a conditional write that somebody else keeps overtaking."""
GRACE = timedelta(days=1)
"""What is younger is never collected; what is older than half of it counts as absent when something is pushed, and is put again."""


class Bucket:
    """Implements `Source` and `Target`. Use `Bucket.open`; close it, or use it in a `with`."""

    def __init__(self, blobs: Blobs, *, grace: timedelta = GRACE) -> None:
        self.blobs = blobs
        self.grace = grace
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kvferry-bucket")
        self._put: dict[ContentDigest, float] = {}
        """When each object was put through this handle, by `time.monotonic`."""

    @classmethod
    def open(cls, blobs: Blobs, *, create: bool = False, grace: timedelta = GRACE) -> Self:
        """``create``: makes it a remote where nothing says that it is one. `StoreMissing`, `StoreCorrupt`, `FormatTooNew`, `Unreachable`, `Refused`."""
        bucket = cls(blobs, grace=grace)
        try:
            bucket._check_format(create)
        except BaseException:
            bucket.close()
            raise
        return bucket

    def _check_format(self, create: bool) -> None:
        where = f"{self.where}/format.json"
        found = self.blobs.read("format.json", 1 << 16)
        if found is None and create:
            line = json.dumps({"format": FORMAT, "features": list(FEATURES)}).encode() + b"\n"
            self.blobs.create("format.json", line)  # another may have been first: then it is theirs that counts
            found = self.blobs.read("format.json", 1 << 16)
        if found is None:
            raise StoreMissing(
                f"{where}: expected a remote, found nothing. See that the bucket and prefix are right; `kvferry push` makes a remote.",
                where=self.where,
            )
        try:
            value = json.loads(found[0])
            version, features = value["format"], value["features"]
            if type(version) is not int or not isinstance(features, list):
                raise ValueError("format and features")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreCorrupt.at(
                where,
                f"expected a format and features, found something else ({error})",
                todo="Give the prefix of a remote.",
            ) from error
        unknown = [feature for feature in features if feature not in FEATURES]
        if version != FORMAT or unknown:
            raise FormatTooNew(
                f"{where}: this kvferry reads format {FORMAT} with {list(FEATURES)}, found format {version} with {features}. Upgrade kvferry to open it.",
                supported=FORMAT,
                found=version,
            )

    @property
    def where(self) -> str:
        return self.blobs.where

    def now(self) -> datetime:
        """The time by the bucket's own clock, which says how old its files are."""
        self.blobs.write("clock", b"")
        entry = self.blobs.entry("clock")
        if entry is None:
            raise Unreachable(
                f"{self.where}: expected the file clock, which was just written, found none.", where=self.where
            )
        return entry.modified

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def each(self, work: Callable[[_K], _T], many: Iterable[_K]) -> list[_T]:
        """``work`` of each, `AT_ONCE` at a time. The first error of one is raised."""
        return list(self._pool.map(work, many))

    # what both sides ask

    def refs(self) -> Iterator[Ref]:
        paths = [entry.path for entry in self.blobs.entries("refs")]
        found = [ref for ref in self.each(self._ref, paths) if ref is not None]
        yield from sorted(found, key=lambda ref: ref.label)

    def ref(self, label: str) -> Ref | None:
        return self._ref(f"refs/{label_file(check_label(label))}")

    def _ref(self, path: str) -> Ref | None:
        found = self.blobs.read(path, MAX_RECORD)
        if found is None:
            return None
        with blaming_remote(self.where):
            return decode_ref(found[0], f"ref file {path}")

    def _standing(self, label: str) -> tuple[SnapshotDigest | None, Version | None]:
        """Where a name stands, and the version that says so. A damaged one stands for nothing, and is replaced."""
        path = f"refs/{label_file(label)}"
        found = self.blobs.read(path, MAX_RECORD)
        if found is None:
            return None, None
        try:
            return decode_ref(found[0], path).snapshot, found[1]
        except RefCorrupt:
            return None, found[1]

    def snapshot(self, digest: SnapshotDigest) -> Snapshot:
        found = self.blobs.read(f"snapshots/{digest}", MAX_RECORD + HEADER)
        if found is None:
            raise SnapshotMissing(
                f"{self.where}: snapshot {digest}: expected its manifest, found none.", digest=digest.hex
            )
        with blaming_remote(self.where):
            return decode_snapshot(found[0], digest)

    def signatures(self, digest: SnapshotDigest) -> Sequence[Signature]:
        return self._signatures(digest)[0]

    def _signatures(self, digest: SnapshotDigest) -> tuple[tuple[Signature, ...], Version | None]:
        found = self.blobs.read(f"snapshots/{digest}.sig", MAX_RECORD)
        if found is None:
            return (), None
        with blaming_remote(self.where):
            return decode_signatures(found[0], digest), found[1]

    def have(self, objects: Lengths) -> set[ContentDigest]:
        return self._there(objects, self._is_there)

    def sound(self, objects: Lengths) -> set[ContentDigest]:
        return self._there(objects, self._is_sound)

    def _there(self, objects: Lengths, test: Callable[[ContentDigest, int], bool]) -> set[ContentDigest]:
        assert len(objects) <= MAX_ASKED
        found = self.each(lambda one: test(*one), objects.items())
        return {name for name, there in zip(objects, found, strict=True) if there}

    def _is_there(self, name: ContentDigest, length: int) -> bool:
        entry = self.blobs.entry(Objects.path(name))
        if entry is None:
            return False
        if entry.size == HEADER + length:
            return True
        head = self.blobs.start(Objects.path(name), HEADER) if entry.size > HEADER else None
        try:
            header = None if head is None else decode_header(head, Kind.OBJECT, f"object {name}")
        except (Corrupt, FormatTooNew):
            return False
        return header is not None and (header.name, header.content_length, header.stored_length) == (
            name.raw, length, entry.size - HEADER,
        )  # fmt: skip

    def _is_sound(self, name: ContentDigest, length: int) -> bool:
        try:
            for _ in check_frame(name, length, self._frame(name)):
                pass
        except (Corrupt, FormatTooNew, ObjectMissing):
            return False
        return True

    # Source

    def coverage(self, digest: SnapshotDigest, snapshot: Snapshot) -> Coverage:
        return self._coverage(digest, snapshot)[0]

    def _coverage(self, digest: SnapshotDigest, snapshot: Snapshot) -> tuple[Coverage, Version | None]:
        groups, blocks = len(snapshot.layout.groups), len(snapshot.blocks)
        found = self.blobs.read(f"snapshots/{digest}.cov", MAX_RECORD)
        if found is None:
            return Coverage(digest, ((),) * groups), None
        with blaming_remote(self.where):
            return decode_coverage(found[0], digest, groups, blocks), found[1]

    def fetch(self, names: Sequence[ContentDigest]) -> Iterator[Frame]:
        for name in names:
            yield name, self._frame(name)

    def _frame(self, name: ContentDigest) -> Iterator[Buffer]:
        pieces = self.blobs.stream(Objects.path(name))
        if pieces is None:
            raise ObjectMissing(f"{self.where}: object {name}: expected its file, found none.", name=name.hex)
        yield from pieces

    def find(
        self, layout: Layout, root: PrefixKey, namespace: str, items: Sequence[Item], head: str | None
    ) -> SnapshotDigest | None:
        """A snapshot that has as many full blocks of ``items`` as the records say any has; None where none has one. A hint: a lower bound, to be
        verified by its manifest."""
        asked = list(prefixes.keys(root, items))
        deepest: prefixes.Record | None = None
        at, step = 0, PROBES
        while at < len(asked):
            found = self.each(self._record, asked[at : at + step])
            hits = [record for record in found if record is not None]
            if not hits:
                break
            deepest = hits[-1]
            at, step = at + step, DEEPER
        return None if deepest is None else deepest.snapshot

    def _record(self, key: PrefixKey) -> prefixes.Record | None:
        found = self.blobs.read(prefixes.path(key), prefixes.LIMIT)
        return None if found is None else prefixes.decode(found[0])

    # Target

    def resume(self, objects: Lengths) -> set[ContentDigest]:
        return set()  # what was put has its name already

    def put(self, frames: Iterator[Frame], lengths: Lengths) -> None:
        for name, chunks in frames:
            data = b"".join(check_frame(name, lengths[name], chunks))
            self.blobs.write(Objects.path(name), data)
            self._put[name] = time.monotonic()

    def publish(self, snapshot: Snapshot, coverage: Coverage, label: str, expect: SnapshotDigest | None) -> Coverage:
        digest, manifest = encode_snapshot(snapshot)
        nfc = check_label(label)
        needed = objects(snapshot, coverage)
        self._claim(nfc, expect, digest)
        renewed = self._protect(label, digest, manifest, needed)
        held = self._join(snapshot, coverage)
        for part in _waves(list(prefixes.records(digest, snapshot)), AT_ONCE):
            self.each(lambda one: self.blobs.write(prefixes.path(one[0]), prefixes.encode(one[1])), part)
        self._move(nfc, expect, digest)
        # A collector that had looked before all this may just have deleted what it saw as old: it sees the name from now on.
        if self.blobs.entry(f"snapshots/{digest}") is None:
            self.blobs.write(f"snapshots/{digest}", manifest)
        if self.blobs.entry(f"snapshots/{digest}.cov") is None:
            held = self._join(snapshot, coverage)
        self._require(label, renewed)
        return held

    def _protect(self, label: str, digest: SnapshotDigest, manifest: bytes, needed: Lengths) -> Lengths:
        """Writes the manifest while all that it needs is young, so that no collector takes any of it from then on. Returns what was old, and put again."""
        renewed: dict[ContentDigest, int] = {}
        half = self.grace.total_seconds() / 2
        for _ in range(TRIES):
            began = time.monotonic()
            renewed.update(self._renewed(label, needed))
            self.blobs.write(f"snapshots/{digest}", manifest)  # anew each time: so it is young
            self._require(label, renewed)
            if not half or time.monotonic() - began <= half:
                return renewed
        raise Unreachable(
            f"{self.where}: expected to look at {len(needed)} objects of {label!r} and write their manifest within {half:g} s, half the grace, found that it "
            f"took longer {TRIES} times. What was carried is kept. Push again, or have everybody use a longer --grace.",
            where=self.where,
        )

    def _renewed(self, label: str, needed: Lengths) -> Lengths:
        """`ObjectMissing` unless all are there. Those that are older than half the grace are put again, and returned."""
        recent = time.monotonic() - self.grace.total_seconds() / 4
        looked = {name: length for name, length in needed.items() if self._put.get(name, -math.inf) < recent}
        entries = self._require(label, looked)
        now = self.now() if entries else None
        old = {
            name: looked[name] for name, entry in entries.items()
            if now is not None and now - entry.modified > self.grace / 2
        }  # fmt: skip
        self.each(lambda name: self._again(name, old[name]), old)
        return old

    def _require(self, label: str, needed: Lengths) -> dict[ContentDigest, Entry]:
        """`ObjectMissing` unless all are there."""
        entries = self.each(lambda name: self.blobs.entry(Objects.path(name)), needed)
        there = {name: entry for name, entry in zip(needed, entries, strict=True) if entry is not None}
        if absent := [name for name in needed if name not in there]:
            for name in absent:
                self._put.pop(name, None)
            raise ObjectMissing(
                f"{self.where}: {len(absent)} objects of {label!r} are not there, the first is {absent[0]}. Push again to send them.",
                name=absent[0].hex,
            )
        return there

    def _again(self, name: ContentDigest, length: int) -> None:
        data = b"".join(check_frame(name, length, self._frame(name)))
        self.blobs.write(Objects.path(name), data)

    def _join(self, snapshot: Snapshot, coverage: Coverage) -> Coverage:
        path = f"snapshots/{coverage.snapshot}.cov"
        for _ in range(TRIES):
            try:
                before, version = self._coverage(coverage.snapshot, snapshot)
            except Corrupt:  # healed by what was just pushed
                self.blobs.write(path, encode_coverage(coverage))
                return coverage
            held = before.union(coverage)
            if version is None:
                done = self.blobs.create(path, encode_coverage(held))
            else:
                done = held == before or self.blobs.replace(path, encode_coverage(held), version)
            if done:
                return held
        raise _overtaken(self.where, path)

    def add_signatures(self, digest: SnapshotDigest, signatures: Sequence[Signature]) -> None:
        path, new = f"snapshots/{digest}.sig", checked(signatures, digest)
        if self.blobs.entry(f"snapshots/{digest}") is None:
            raise SnapshotMissing(
                f"{self.where}: snapshot {digest}: expected its manifest, found none.", digest=digest.hex
            )
        for _ in range(TRIES):
            try:
                before, version = self._signatures(digest)
            except SignaturesCorrupt:  # healed by what was just brought
                self.blobs.write(path, encode_signatures(digest, joined((), new)))
                return
            held = joined(before, new)
            data = encode_signatures(digest, held)
            if held == before or (
                self.blobs.create(path, data) if version is None else self.blobs.replace(path, data, version)
            ):
                return
        raise _overtaken(self.where, path)

    def _claim(self, label: str, expect: SnapshotDigest | None, target: SnapshotDigest) -> None:
        """`RefConflict` where the name stands elsewhere already, or another one that differs by case only is in use."""
        now, _ = self._standing(label)
        if now != expect and now != target:
            raise _moved(label, expect, now)
        path = f"names/{label_file(folded(label))}"
        for _ in range(TRIES):
            if self.blobs.create(path, label.encode()):
                return
            there = self.blobs.read(path, 1 << 12)
            if there is None:
                continue
            other = there[0].decode(errors="replace")
            if other == label:
                return
            if self.blobs.entry(f"refs/{label_file(other)}") is not None:
                raise RefConflict(f"name {label!r}: {other!r} is there already. Choose another name.", label=label)
            if self.blobs.replace(path, label.encode(), there[1]):
                return
        raise _overtaken(self.where, path)

    def _move(self, label: str, expect: SnapshotDigest | None, target: SnapshotDigest) -> None:
        path = f"refs/{label_file(label)}"
        data = encode_ref(Ref(label, target, int(time.time())))
        for _ in range(TRIES):
            now, version = self._standing(label)
            if now == target:  # it was there, or the answer to our own write was lost
                return
            if now != expect:
                raise _moved(label, expect, now)
            if self.blobs.create(path, data) if version is None else self.blobs.replace(path, data, version):
                return
        raise _overtaken(self.where, path)


def _waves(many: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for at in range(0, len(many), size):
        yield many[at : at + size]


def _moved(label: str, expect: SnapshotDigest | None, now: SnapshotDigest | None) -> RefConflict:
    return RefConflict(
        f"name {label!r}: expected {expect or 'no snapshot'}, found {now or 'none'}: it was moved by somebody else in the meantime. Push again.",
        label=label,
    )


def _overtaken(where: str, path: str) -> RefConflict:
    return RefConflict(f"{where}/{path}: others wrote to it {TRIES} times while this tried to. Push again.", path=path)
