"""What a collector moved to ``trash/``: listed, and brought back. Deleting it for good is `prune.purge`.

A snapshot comes back in the store's publish order: objects, then manifest with coverage, then the name. What is in its place already stays.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .codec import decode_coverage
from .digest import ContentDigest, SnapshotDigest, label_file
from .errors import (
    Corrupt,
    CoverageCorrupt,
    FormatTooNew,
    Missing,
    ObjectMissing,
    RefConflict,
    SignaturesCorrupt,
    SnapshotMissing,
    StoreBusy,
)
from .files import Root
from .objects import Objects
from .pins import by_digits
from .plaintext import counted
from .records import check_label
from .shelf import Shelf
from .snapshot import Coverage, Snapshot
from .store import Store

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)
"""What file systems say that have no hard links, exFAT among them, or not so many."""


@dataclass(frozen=True, slots=True)
class Collected:
    """A snapshot in the trash, or one whose name lies there. ``tokens``: None if its manifest can't be read.

    ``bytes``: of what would come out of the trash with it; what two of them share counts for both. ``lacking``: objects that were promised and
    are neither in the trash nor in the store. ``in_store``: the manifest was not collected, or is here again.
    """

    digest: SnapshotDigest
    names: tuple[str, ...]
    tokens: int | None
    bytes: int
    lacking: int
    in_store: bool

    def value(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "snapshot": self.digest.hex,
            "names": list(self.names),
            "tokens": self.tokens,
            "bytes": self.bytes,
            "lacking": self.lacking,
            "in_store": self.in_store,
        }


@dataclass(frozen=True, slots=True)
class Restored:
    """What `restore` brought back. ``lacking``: promised objects that are lost or damaged, and so are not promised any more."""

    digest: SnapshotDigest
    name: str | None
    tokens: int
    objects: int
    lacking: int


def collected(shelf: Shelf) -> list[Collected]:
    """What `restore` can bring back, removed names first. Changes nothing, reads manifests and no objects."""
    names: dict[SnapshotDigest, list[str]] = {}
    for ref in shelf.records.buried_refs():
        names.setdefault(ref.snapshot, []).append(ref.label)
    there = set(shelf.root.names("trash"))
    digests = {SnapshotDigest.parse(name[:64]) for name in there if _is_manifest(name)}
    found = []
    for digest in digests | names.keys():
        labels = tuple(names.get(digest, ()))
        here = shelf.records.has_snapshot(digest)
        if not here and f"{digest}.snapshot" not in there:
            continue  # a name of what was deleted
        try:
            snapshot, coverage = _read(shelf, digest)
        except (Corrupt, FormatTooNew, Missing):
            found.append(Collected(digest, labels, None, 0, 0, here))
            continue
        promised = _promised(snapshot, coverage)
        buried = [name for name in promised if name.hex in there]
        files = [f"{digest}.snapshot", f"{digest}.cov", f"{digest}.sig", *(name.hex for name in buried)]
        sizes = sum(shelf.root.size(f"trash/{file}") or 0 for file in files)
        lacking = sum(name.hex not in there and not shelf.objects.has(name) for name in promised)
        found.append(Collected(digest, labels, snapshot.tokens, sizes, lacking, here))
    return sorted(found, key=lambda one: (not one.names, one.names, one.digest))


def restore(store: Store, what: str, name: str | None = None) -> Restored:
    """Brings back the snapshot ``what``: a name that was removed, or the first digits of a digest. Durable when it returns.

    It gets ``name``, by default the removed name that it was found by; without either it is unnamed cache again. Every object is verified
    first; a lost or damaged one is no longer promised, and may be restored by doing this again. Holds the store's lock shared, so no collector runs. `SnapshotMissing`,
    `RefConflict` (the name stands for something else now: nothing is changed), `Corrupt` by kind, `OSError`.
    """
    shelf, records = store.shelf, store.shelf.records
    with shelf.shared():
        digest, found = _find(shelf, what)
        label = found if name is None else check_label(name)
        before = None if label is None else records.standing(label)
        if label is not None and before not in (None, digest):
            raise RefConflict(
                f"name {label!r}: it stands for snapshot {before} now. Give the one from the trash another name with --as.",
                label=label,
            )
        snapshot, coverage = _read(shelf, digest)
        places = {
            snapshot.blocks[b][g]: snapshot.object_bytes(b, g)
            for g in range(len(coverage.runs))
            for b in coverage.blocks(g)
        }
        sound = {one for one, length in places.items() if shelf.objects.sound(one, length)}
        moved = _put_back(shelf, sound)
        if places and not moved.here:
            raise ObjectMissing(
                f"snapshot {digest}: expected its {counted(len(places), 'object')} in the trash, found none that is whole. `kvferry pull REMOTE NAME` "
                f"fetches it from a remote that has it.",
                digest=digest.hex,
            )
        lost = {
            (b, g)
            for g in range(len(coverage.runs))
            for b in coverage.blocks(g)
            if snapshot.blocks[b][g] not in moved.here
        }
        store.publish(snapshot, coverage.without(lost))
        with contextlib.suppress(SignaturesCorrupt, FormatTooNew):
            records.add_signatures(digest, records.buried_signatures(digest))
        if label is not None:
            records.move_ref(label, before, digest)
        names = [] if found is None else [f"{label_file(found)}.ref"]
        # What could not be read may be readable the next time: until all of it is back the trash still says what it was.
        known = [] if lost else [f"{digest}.snapshot", f"{digest}.cov", f"{digest}.sig", *names]
        _clear(shelf, [*(one.hex for one in moved.here), *known])
    return Restored(digest, label, snapshot.tokens, moved.count, len(places) - len(moved.here))


def _find(shelf: Shelf, what: str) -> tuple[SnapshotDigest, str | None]:
    """The digest of a snapshot in the trash or the store, and the removed name that it was found by."""
    label = check_label(what)
    buried = {ref.label: ref.snapshot for ref in shelf.records.buried_refs()}
    here = set(shelf.records.snapshots())
    there = {SnapshotDigest.parse(name[:64]) for name in shelf.root.names("trash") if _is_manifest(name)}
    if label not in buried:
        return by_digits(sorted(here | there), what), None
    if buried[label] not in here | there:
        raise SnapshotMissing(
            f"name {label!r}: expected its snapshot {buried[label]} in the trash, found none: it was deleted.",
            label=label,
        )
    return buried[label], label


def _is_manifest(name: str) -> bool:
    digest, _, end = name.partition(".")
    return end == "snapshot" and len(digest) == 64 and not set(digest) - set("0123456789abcdef")


def _read(shelf: Shelf, digest: SnapshotDigest) -> tuple[Snapshot, Coverage]:
    """The manifest, and what was promised of it: here and, as far as it can be read, in the trash."""
    snapshot = shelf.records.snapshot(digest)
    try:
        coverage = shelf.records.coverage(digest, snapshot)
    except CoverageCorrupt:
        coverage = Coverage(digest, ((),) * len(snapshot.layout.groups))
    with contextlib.suppress(FileNotFoundError, Corrupt, FormatTooNew):
        data = shelf.root.read(f"trash/{digest}.cov", 1 << 27)
        buried = decode_coverage(data, digest, len(snapshot.layout.groups), len(snapshot.blocks))
        coverage = coverage.union(buried)
    return snapshot, coverage


def _promised(snapshot: Snapshot, coverage: Coverage) -> set[ContentDigest]:
    return {snapshot.blocks[b][g] for g in range(len(coverage.runs)) for b in coverage.blocks(g)}


@dataclass(frozen=True, slots=True)
class _Back:
    here: set[ContentDigest]
    count: int


def _put_back(shelf: Shelf, names: set[ContentDigest]) -> _Back:
    """Gives objects their places, durably; those that are in the store after it, and how many came from the trash."""
    root, here, count = shelf.root, set(), 0
    for name in sorted(names):
        if shelf.objects.has(name):
            here.add(name)
            continue
        with contextlib.suppress(FileNotFoundError):  # a purge was quicker
            count += _linked(root, f"trash/{name.hex}", Objects.path(name))
            here.add(name)
    # Also of those that were there: whoever put them there may have died before the sync.
    root.sync_all(sorted({Objects.path(name).rpartition("/")[0] for name in here}))
    return _Back(here, count)


def _linked(root: Root, source: str, target: str) -> bool:
    """Gives a file in the trash its place too, unless something is there. Readers may have it open, or be about to look for it in either place."""
    (from_folder, from_name), (to_folder, to_name) = source.split("/"), target.rsplit("/", 1)
    with root.folder(from_folder) as src, root.folder(to_folder) as dst:
        try:
            os.link(from_name, to_name, src_dir_fd=src, dst_dir_fd=dst, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        else:
            return True
    # Not while a reader looks first there, then here.
    with root.lock("trash", exclusive=True):
        return root.set_aside(source, target)


def _clear(shelf: Shelf, names: Iterable[str]) -> None:
    """Deletes what came back from the trash, when no reader loads; what a reader keeps there longer `prune.purge` deletes."""
    with contextlib.suppress(StoreBusy), shelf.root.lock("trash", exclusive=True, seconds=1.0):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                shelf.root.discard(f"trash/{name}")
