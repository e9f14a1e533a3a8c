"""Collecting in a bucket what no name needs. There is no lock, so time keeps writers and collector apart: what is younger than the grace stays.

A writer puts again what is older than half of it (`Bucket.publish`), and must therefore be done within the other half. Ages are told by the bucket's
own clock. Marking reads refs and manifests, twice; if one of those that stay can't be read, or a listing fails, nothing is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvstore.digest import PrefixKey, SnapshotDigest
from kvstore.errors import Corrupt, FormatTooNew, Unreachable
from kvstore.objects import Objects
from kvstore.plaintext import counted, size_text

from . import prefixes
from .blobs import Entry
from .bucket import AT_ONCE, Bucket

_HEX = frozenset("0123456789abcdef")
Advance = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """Snapshots and objects that no name needs, older than the grace. `apply` looks again."""

    snapshots: tuple[SnapshotDigest, ...]
    objects: tuple[Entry, ...]

    @property
    def bytes(self) -> int:
        """Of the objects."""
        return sum(entry.size for entry in self.objects)

    def value(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "snapshots": [digest.hex for digest in self.snapshots],
            "objects": len(self.objects),
            "bytes": self.bytes,
        }

    def __str__(self) -> str:
        return f"{counted(len(self.snapshots), 'snapshot')} and {counted(len(self.objects), 'object')}, {size_text(self.bytes)}"


@dataclass(frozen=True, slots=True)
class Collected:
    """What `apply` deleted."""

    snapshots: int
    objects: int
    bytes: int


def plan(bucket: Bucket) -> Plan:
    """What can be collected now; deletes nothing. `Corrupt` by kind, `FormatTooNew`, `Unreachable` where what is needed can't be known."""
    now = bucket.now()
    named, manifests = _marked(bucket)
    doomed = {digest for digest, entry in manifests.items() if digest not in named and _old(bucket, entry, now)}
    needed = _read(bucket, manifests.keys() - doomed)[1]
    objects = (
        entry for entry in bucket.blobs.entries("objects") if entry.path not in needed and _old(bucket, entry, now)
    )
    return Plan(tuple(sorted(doomed)), tuple(objects))


def apply(bucket: Bucket, planned: Plan, advance: Advance) -> Collected:
    """Deletes what is still not needed: of each snapshot the records that lead to it, its promise, its manifest; then objects."""
    now = bucket.now()
    named, manifests = _marked(bucket)
    doomed = [d for d in planned.snapshots if d in manifests and d not in named and _old(bucket, manifests[d], now)]
    kept = manifests.keys() - set(doomed)
    records, needed = _read(bucket, kept)
    forgotten = bucket.each(lambda digest: _forget(bucket, digest, records, now), doomed)
    # Again: a manifest that came since, or that was not deleted after all, may need some of the objects.
    _, manifests = _marked(bucket)
    needed |= _read(bucket, manifests.keys() - kept)[1]

    def delete(entry: Entry) -> bool:
        current = bucket.blobs.entry(entry.path)
        if entry.path in needed or current is None or not _old(bucket, current, now):
            return False
        bucket.blobs.delete([entry.path])
        return True

    gone: list[int] = []
    for at in range(0, len(planned.objects), AT_ONCE):
        wave = planned.objects[at : at + AT_ONCE]
        gone += [entry.size for entry, done in zip(wave, bucket.each(delete, wave), strict=True) if done]
        advance(sum(entry.size for entry in wave))
    return Collected(sum(forgotten), len(gone), sum(gone))


def _marked(bucket: Bucket) -> tuple[set[SnapshotDigest], dict[SnapshotDigest, Entry]]:
    """The snapshots that names stand for, and all manifests. `RefCorrupt`: nobody knows what a damaged name needs."""
    named = {ref.snapshot for ref in bucket.refs()}
    manifests = {}
    for entry in bucket.blobs.entries("snapshots"):
        name = entry.path.rpartition("/")[2]
        if len(name) == 64 and set(name) <= _HEX:
            manifests[SnapshotDigest.parse(name)] = entry
    if lost := named - manifests.keys():
        raise Unreachable(
            f"{bucket.where}: expected the manifest of snapshot {min(lost)}, which a name stands for, found none in the listing. Nothing was deleted: "
            f"try again, and if it stays so push that name again.",
            where=bucket.where,
        )
    return named, manifests


def _old(bucket: Bucket, entry: Entry, now: datetime) -> bool:
    return now - entry.modified > bucket.grace


def _read(bucket: Bucket, kept: Iterable[SnapshotDigest]) -> tuple[dict[PrefixKey, prefixes.Record], set[str]]:
    """What the prefix records may say once only these manifests are left, and the paths of the objects that they name, promised or not."""
    records: dict[PrefixKey, prefixes.Record] = {}
    paths: set[str] = set()

    def read(digest: SnapshotDigest) -> tuple[list[tuple[PrefixKey, prefixes.Record]], set[str]]:
        snapshot = bucket.snapshot(digest)
        return list(prefixes.records(digest, snapshot)), {
            Objects.path(content) for contents in snapshot.blocks for content in contents
        }

    asked = sorted(kept)
    for at in range(0, len(asked), AT_ONCE):  # not all at once in memory
        for some, names in bucket.each(read, asked[at : at + AT_ONCE]):
            records.update(some)
            paths |= names
    return records, paths


def _forget(bucket: Bucket, digest: SnapshotDigest, kept: dict[PrefixKey, prefixes.Record], now: datetime) -> bool:
    """Deep to shallow, so that at no time a deeper record stands without the shallower ones. False where somebody wrote the manifest again meanwhile."""
    try:
        own = list(prefixes.records(digest, bucket.snapshot(digest)))
    except (Corrupt, FormatTooNew):
        own = []  # dangling records are misses
    for key, _ in reversed(own):
        found = bucket.blobs.read(prefixes.path(key), prefixes.LIMIT)
        record = None if found is None else prefixes.decode(found[0])
        if found is None or (record is not None and record.snapshot != digest):
            continue
        if key in kept:
            bucket.blobs.write(prefixes.path(key), prefixes.encode(kept[key]))
        else:
            bucket.blobs.delete([prefixes.path(key)])
    current = bucket.blobs.entry(f"snapshots/{digest}")
    if current is None or not _old(bucket, current, now):
        return False  # its writer makes the records anew
    bucket.blobs.delete([f"snapshots/{digest}.sig", f"snapshots/{digest}.cov", f"snapshots/{digest}"])
    return True
