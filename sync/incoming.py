"""Objects that have arrived and are not visible yet: ``quarantine/<id>/<name>`` in a store or a folder remote.

Whoever fills such a folder holds a lock on it, which the kernel frees when the process dies: an unlocked folder is a dead
one. The next transfer takes over what it needs of it, verified once more, so that nothing is carried twice.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterable, Set
from typing import Self

from kvstore.codec import PLANES, Header
from kvstore.digest import ContentDigest, SnapshotDigest
from kvstore.errors import Corrupt, FormatTooNew, Missing, ObjectCorrupt, StoreBusy, StoreCorrupt
from kvstore.files import UNSETTLED, Unsettled
from kvstore.objects import Objects
from kvstore.quota import Quota
from kvstore.records import Records
from kvstore.shelf import Shelf
from kvstore.snapshot import Snapshot

from .frames import Buffer, check_frame
from .plan import Lengths, objects

_PART = "-"
"""Between an object's name and what tells its unfinished files apart."""


class Incoming:
    """One transfer's objects. A context manager; `land` may be called from several threads at once.

    ``quota``: the store's, which evicts where bytes that land need room; a folder's own by default, which can only delete its trash.
    """

    def __init__(self, shelf: Shelf, quota: Quota | None = None) -> None:
        self._shelf = shelf
        self._quota = Quota(shelf) if quota is None else quota
        self._gauge = self._quota.gauge()
        self._root = shelf.root
        self._lock = contextlib.ExitStack()
        self._folder = self._claim()
        self._landed: set[ContentDigest] = set()
        self._unsettled = Unsettled()
        self._waiting: list[ContentDigest] = []
        self._settling = threading.Lock()
        self._planes = False

    def _claim(self) -> str:
        while True:
            folder = f"quarantine/{secrets.token_hex(8)}"
            self._root.make_folder(folder)
            try:
                self._lock.enter_context(self._root.lock(folder, exclusive=True, seconds=0))
                with self._root.folder(folder):
                    return folder
            except (StoreBusy, FileNotFoundError):
                # Before it was locked, somebody took it for a dead one.
                self._lock.close()

    def land(self, name: ContentDigest, length: int, chunks: Iterable[Buffer]) -> None:
        """Writes and verifies one object, out of sight. On an error (`ObjectCorrupt`, `OSError`, `StoreFull`) nothing of it is left.

        The disk begins with it, and `settle` or `publish` waits for the disk. If that fails, what was not settled yet is deleted and counts as not landed.
        The same object may arrive twice at once (over a connection that died, and nobody knows it yet): each has a file of its own until it is whole.
        """
        path = f"{self._folder}/{name}{_PART}{secrets.token_hex(4)}"
        checked = check_frame(name, length, chunks, self._note)
        if self._gauge is None:
            fd = self._root.create(path, checked)
        else:
            with contextlib.closing(self._quota.counted(self._gauge, checked)) as counted:
                fd = self._root.create(path, counted)
        with self._settling:
            self._unsettled.add(fd)
            self._root.set_aside(path, f"{self._folder}/{name}")
            self._waiting.append(name)
            self._landed.add(name)
            if len(self._waiting) >= UNSETTLED // 2:
                self._settle()

    def settle(self) -> None:
        """Waits until all that landed is on the disk."""
        with self._settling:
            self._settle()

    def _settle(self) -> None:
        try:
            self._unsettled.settle()
        except OSError:
            for name in self._waiting:
                with contextlib.suppress(OSError):
                    self._root.discard(f"{self._folder}/{name}")
                self._landed.discard(name)
            raise
        finally:
            self._waiting.clear()

    def _note(self, header: Header) -> None:
        if header.codec == PLANES:
            self._planes = True

    def adopt(self, wanted: Lengths) -> set[ContentDigest]:
        """Takes over those of ``wanted`` that dead transfers left complete. What nobody asked for stays where it is."""
        before = set(self._landed)
        for entry in self._root.names("quarantine"):
            folder = f"quarantine/{entry}"
            if folder == self._folder:
                continue
            # Locked: alive. Gone: somebody else took it over. Not a folder: not ours, `kvferry check` lists it.
            with (
                contextlib.suppress(StoreBusy, FileNotFoundError, StoreCorrupt),
                self._root.lock(folder, exclusive=True, seconds=0),
            ):
                self._adopt(folder, {n: length for n, length in wanted.items() if n not in self._landed})
        return self._landed - before

    def _adopt(self, folder: str, wanted: Lengths) -> None:
        by_file = {name.hex: name for name in wanted}
        there = self._root.names(folder)
        sound = {}
        for file in there:
            name = by_file.get(file)
            if _PART in file:
                self._root.discard(f"{folder}/{file}")  # its writer died
            if name is None:
                continue
            try:
                self._verify(f"{folder}/{file}", name, wanted[name])
            except (ObjectCorrupt, FormatTooNew):
                self._root.remove(f"{folder}/{file}")  # cut off while it was written
            else:
                sound[file] = name
        self._root.move([(f"{folder}/{file}", f"{self._folder}/{file}") for file in sound])
        self._landed.update(sound.values())
        if not self._root.names(folder):
            self._root.remove_folder(folder)

    def _verify(self, path: str, name: ContentDigest, length: int) -> None:
        for _ in check_frame(name, length, self._root.chunks(path), self._note):
            pass
        self._root.sync_file(path)  # its writer may have died before it did

    def lacking(self, wanted: Lengths) -> dict[ContentDigest, int]:
        """Those of ``wanted`` that neither landed nor are in the store."""
        return absent(self._shelf, self.unlanded(wanted))

    def unlanded(self, wanted: Lengths) -> dict[ContentDigest, int]:
        """Those of ``wanted`` that did not land since the last `publish`, whatever the store has."""
        return {name: length for name, length in wanted.items() if name not in self._landed}

    def publish(self, needed: Lengths, promised: Set[ContentDigest]) -> None:
        """Makes all that landed visible, and all of ``needed`` durable. The caller holds `Shelf.shared` from its last
        `lacking` to the ref.

        ``promised``: objects that a published coverage names, so that they are durable. Of the others somebody may have been
        killed between renaming them and syncing the folder. Where planes came along, the store is one with planes from now on.
        """
        with self._settling:  # what lands meanwhile is for the next time
            self._settle()
            if self._planes:
                self._shelf.require("planes")
            self._root.move([(f"{self._folder}/{name}", Objects.path(name)) for name in sorted(self._landed)])
            unsure = needed.keys() - self._landed - promised
            self._root.sync_all(sorted({Objects.path(name).rpartition("/")[0] for name in unsure}))
            self._landed.clear()

    def discard(self) -> None:
        """Ends the transfer, and deletes what landed and was not published."""
        for name in self._root.names(self._folder):
            with contextlib.suppress(OSError):
                self._root.discard(f"{self._folder}/{name}")
        self.close()

    def close(self) -> None:
        """Ends the transfer. What landed and was not published stays, for the next one to take over."""
        self._unsettled.close()
        with contextlib.suppress(OSError):
            self._root.remove_folder(self._folder)
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def absent(shelf: Shelf, wanted: Lengths) -> dict[ContentDigest, int]:
    """Those of ``wanted`` that are not visible in a store in full."""
    return {name: length for name, length in wanted.items() if not shelf.objects.complete(name, length)}


def unsound(shelf: Shelf, wanted: Lengths) -> dict[ContentDigest, int]:
    """Those of ``wanted`` that are absent, or whose bytes are not what they should be; reads all of them."""
    return {name: length for name, length in wanted.items() if not _is_sound(shelf, name, length)}


def _is_sound(shelf: Shelf, name: ContentDigest, length: int) -> bool:
    try:
        for _ in check_frame(name, length, shelf.root.chunks(Objects.path(name))):
            pass
    except (FileNotFoundError, Corrupt, FormatTooNew):
        return False
    return True


def promised(
    shelf: Shelf, digest: SnapshotDigest, snapshot: Snapshot, before: SnapshotDigest | None
) -> set[ContentDigest]:
    """The objects that a store's coverage of ``snapshot``, and of the one that its name stood for, names; if readable."""
    names: set[ContentDigest] = set()
    with contextlib.suppress(Corrupt, FormatTooNew):
        names |= objects(snapshot, shelf.records.coverage(digest, snapshot)).keys()
    if before is not None and before != digest:
        with contextlib.suppress(Missing, Corrupt, FormatTooNew):
            older = shelf.records.snapshot(before)
            names |= objects(older, shelf.records.coverage(before, older)).keys()
    return names


def move_name(records: Records, label: str, expect: SnapshotDigest | None, target: SnapshotDigest) -> None:
    """Compare-and-swap, as `Records.move_ref`; a name that stays where it was is not written again."""
    if not records.standing(label) == expect == target:
        records.move_ref(label, expect, target)
