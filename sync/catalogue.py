"""Which objects exist for whom: those that a snapshot of one's namespaces promises. Read from manifests and coverage, kept up to date.

Not those that a manifest merely names: anybody who may push can name what lies in another namespace."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable

from kvstore.digest import SnapshotDigest
from kvstore.errors import Corrupt, FormatTooNew, SnapshotMissing
from kvstore.shelf import Shelf
from kvstore.snapshot import Snapshot

from .plan import objects
from .tokens import UNSURE, Grant


class Catalogue:
    """One for a server, asked from many threads. 32 bytes an object and namespace, and only once somebody with few namespaces asks."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._lock = threading.Lock()
        self._mtime: int | None = None
        self._namespaces: dict[SnapshotDigest, str] = {}
        self._promises: dict[SnapshotDigest, tuple[int, int]] = {}
        """Which file the coverage is that `_objects` knows, and when it was written."""
        self._objects: dict[str, set[bytes]] = {}

    def snapshot(self, grant: Grant, digest: SnapshotDigest) -> Snapshot:
        """The manifest, if it exists for ``grant``. `SnapshotMissing`, `SnapshotCorrupt`, `FormatTooNew`."""
        snapshot = self._shelf.records.snapshot(digest)
        if not grant.sees(snapshot.namespace):
            raise SnapshotMissing(f"snapshot {digest}: expected its manifest, found none.", digest=digest.hex)
        return snapshot

    def sees(self, grant: Grant, digest: SnapshotDigest) -> bool:
        """Whether a snapshot exists for ``grant``. One that can't be read exists for those who see everything."""
        if grant.namespaces is None:
            return True
        with self._lock:
            self._refresh()
            namespace = self._namespaces.get(digest)
        return namespace is not None and grant.sees(namespace)

    def seen(self, grant: Grant, names: Iterable[bytes]) -> set[bytes]:
        """Those objects that exist for ``grant``, whether or not they are here."""
        if grant.namespaces is None:
            return set(names)
        with self._lock:
            self._refresh()
            there = [self._objects.get(namespace, set()) for namespace in grant.namespaces]
        return {name for name in names if any(name in some for some in there)}

    def _refresh(self) -> None:
        mtime = self._shelf.root.mtime_ns("snapshots")
        if mtime == self._mtime:
            return
        here = set(self._shelf.records.snapshots())
        if self._namespaces.keys() - here:  # collected: what they alone promised exists no more
            self._namespaces, self._promises, self._objects = {}, {}, {}
        written = self._written()
        for digest in here:
            promise = written.get(f"{digest}.cov")
            if digest in self._namespaces and promise == self._promises.get(digest):
                continue
            try:
                snapshot = self._shelf.records.snapshot(digest)
            except (Corrupt, FormatTooNew, SnapshotMissing):
                continue
            self._namespaces[digest] = snapshot.namespace
            try:
                covered = objects(snapshot, self._shelf.records.coverage(digest, snapshot))
            except (Corrupt, FormatTooNew):
                continue
            if promise is not None:
                self._promises[digest] = promise
            # A new set: others are reading the old one.
            more = {content.raw for content in covered}
            self._objects[snapshot.namespace] = self._objects.get(snapshot.namespace, set()) | more
        self._mtime = mtime if time.time_ns() - mtime > UNSURE else None

    def _written(self) -> dict[str, tuple[int, int]]:
        """Of each coverage file its inode and time."""
        found = {}
        with self._shelf.root.folder("snapshots") as fd, os.scandir(fd) as entries:
            for entry in entries:
                if entry.name.endswith(".cov"):
                    with contextlib.suppress(FileNotFoundError):
                        stat = entry.stat(follow_symlinks=False)
                        found[entry.name] = (stat.st_ino, stat.st_mtime_ns)
        return found
