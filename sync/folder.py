"""A folder as a remote: a disk, a stick, a network share. A kvferry store without an index; any store will do.

Where something else copies the folder about (a cloud drive), let one machine write each name: a lock doesn't travel.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

from kvstore.digest import ContentDigest, PrefixKey, SnapshotDigest
from kvstore.errors import (
    Corrupt,
    FormatTooNew,
    InputInvalid,
    Missing,
    ObjectMissing,
    Refused,
    StoreCorrupt,
    StoreMissing,
    Unreachable,
)
from kvstore.items import Item
from kvstore.layout import Layout
from kvstore.match import match_items
from kvstore.shelf import Shelf
from kvstore.signatures import Signature
from kvstore.snapshot import Coverage, Ref, Snapshot

from .frames import Buffer
from .incoming import Incoming, absent, move_name, promised, unsound
from .plan import Lengths, objects
from .reach import blaming, blaming_remote, reaching
from .remote import MAX_ASKED, Frame
from .vouching import checked


def folder_path(address: str) -> Path:
    """The folder that a remote's address names: a path, or a ``file://`` URL. `InputInvalid`."""
    if "://" not in address:
        return Path(address).expanduser()
    url = urlsplit(address)
    if url.scheme != "file" or url.netloc not in ("", "localhost") or not url.path:
        raise InputInvalid(
            f"remote {address!r}: expected a folder, as a path or as file:///path; this kvferry carries to folders only"
        )
    return Path(unquote(url.path))


class Folder:
    """Implements `Source` and `Target` on the store in a folder. Use `Folder.open`; close it, or use it in a `with`."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._incoming: Incoming | None = None
        self._opening = threading.Lock()

    @classmethod
    def open(cls, path: Path, *, create: bool = False) -> Self:
        """Opens the remote in ``path``; with ``create`` makes it where nothing or an empty folder is.

        The folder above must be there, or a disk that isn't mounted would be taken for an empty one. `Unreachable`;
        `StoreMissing`, or `Refused` with ``create``, when the folder holds something else; `StoreCorrupt`; `FormatTooNew`.
        """
        where = str(path)
        with reaching(where), blaming(where):
            if not (path / "format.json").exists():
                _require_place(path, create)
            try:
                return cls(Shelf.open(path, create=create))
            except StoreCorrupt as error:
                if "foreign" not in error.details:
                    raise
                raise (Refused if create else StoreMissing)(_foreign(path), where=where) from error

    @property
    def where(self) -> str:
        return str(self._shelf.path)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Around what is read. What is not found is missing only if the folder is still there."""
        with reaching(self.where), blaming_remote(self.where):
            try:
                yield
            except Missing:
                self._require_there()
                raise

    def _require_there(self) -> None:
        if self._shelf.root.size("format.json") is None:
            raise Unreachable(
                f"{self.where}: it was there a moment ago and is gone. What was carried so far is kept: see that the disk is "
                f"there, then run it again.",
                where=self.where,
            )

    # what both sides ask

    def refs(self) -> Iterator[Ref]:
        with self._asking():
            found = list(self._shelf.records.refs())
            self._require_there()
        yield from found

    def ref(self, label: str) -> Ref | None:
        with self._asking():
            found = self._shelf.records.ref(label)
            if found is None:
                self._require_there()
            return found

    def snapshot(self, digest: SnapshotDigest) -> Snapshot:
        with self._asking():
            return self._shelf.records.snapshot(digest)

    def signatures(self, digest: SnapshotDigest) -> Sequence[Signature]:
        with self._asking():
            return self._shelf.records.signatures(digest)

    def have(self, objects: Lengths) -> set[ContentDigest]:
        assert len(objects) <= MAX_ASKED
        with self._asking():
            lacking = absent(self._shelf, objects) if self._incoming is None else self._incoming.lacking(objects)
            if lacking:
                self._require_there()
            return objects.keys() - lacking.keys()

    def sound(self, objects: Lengths) -> set[ContentDigest]:
        assert len(objects) <= MAX_ASKED
        with self._asking():
            wanted = objects if self._incoming is None else self._incoming.unlanded(objects)
            lacking = unsound(self._shelf, wanted)
            if lacking:
                self._require_there()
            return objects.keys() - lacking.keys()

    # Source

    def coverage(self, digest: SnapshotDigest, snapshot: Snapshot) -> Coverage:
        with self._asking():
            found = self._shelf.records.coverage(digest, snapshot)
            self._require_there()
            return found

    def fetch(self, names: Sequence[ContentDigest]) -> Iterator[Frame]:
        for name in names:
            yield name, self._frame(name)

    def _frame(self, name: ContentDigest) -> Iterator[Buffer]:
        with self._asking():
            yield from self._shelf.objects.frame(name)

    def find(
        self, layout: Layout, root: PrefixKey, namespace: str, items: Sequence[Item], head: str | None
    ) -> SnapshotDigest | None:
        """Reads every manifest: a folder has no index."""
        with self._asking():
            best: tuple[int, SnapshotDigest] | None = None
            for digest in self._shelf.records.snapshots():
                with contextlib.suppress(Corrupt, FormatTooNew, Missing):
                    snapshot = self._shelf.records.snapshot(digest)
                    if snapshot.root != root:
                        continue
                    match = match_items(digest, snapshot, self._shelf.records.coverage(digest, snapshot), items, head)
                    best = max(best or (0, digest), (match.n, digest), key=lambda one: one[0])
            return best[1] if best is not None and best[0] else None

    # Target

    def resume(self, objects: Lengths) -> set[ContentDigest]:
        assert len(objects) <= MAX_ASKED
        with reaching(self.where):
            return self._landing().adopt(objects)

    def put(self, frames: Iterator[Frame], lengths: Lengths) -> None:
        for name, chunks in frames:
            with reaching(self.where):
                self._landing().land(name, lengths[name], chunks)

    def _landing(self) -> Incoming:
        with self._opening:
            if self._incoming is None:
                self._incoming = Incoming(self._shelf)
            return self._incoming

    def publish(self, snapshot: Snapshot, coverage: Coverage, label: str, expect: SnapshotDigest | None) -> Coverage:
        needed = objects(snapshot, coverage)
        records = self._shelf.records
        with self._asking(), self._shelf.shared():
            incoming = self._landing()
            lacking = incoming.lacking(needed)
            if lacking:
                first = next(iter(lacking))
                raise ObjectMissing(
                    f"{self.where}: {len(lacking)} objects of {label!r} are not there, the first is {first}. "
                    f"Push again to send them.",
                    name=first.hex,
                )
            incoming.publish(needed, promised(self._shelf, coverage.snapshot, snapshot, expect))
            with records.locked_snapshots():
                now = records.put_snapshot(snapshot, coverage)
            move_name(records, label, expect, coverage.snapshot)
        return now

    def add_signatures(self, digest: SnapshotDigest, signatures: Sequence[Signature]) -> None:
        with self._asking():
            self._shelf.records.add_signatures(digest, checked(signatures, digest))

    def close(self) -> None:
        if self._incoming is not None:
            self._incoming.close()
            self._incoming = None
        self._shelf.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _require_place(path: Path, create: bool) -> None:
    """Raises unless a store without ``format.json`` may be at ``path``: unfinished, or to be made."""
    if path.exists() and not path.is_dir():
        kind = Refused if create else StoreMissing
        raise kind(f"{path}: expected a folder, found a file. Give the folder of a remote.", where=str(path))
    if create and not path.is_dir() and not path.parent.is_dir():
        raise Unreachable(
            f"{path}: there is no folder {path.parent}. If it is on a disk, see that the disk is mounted; else make that "
            f"folder first.",
            where=str(path),
        )
    if not create and (not path.is_dir() or not any(path.iterdir())):
        found = "an empty folder" if path.is_dir() else "nothing"
        raise Unreachable(
            f"{path}: expected a remote, found {found}. See that the disk is mounted and the path is right; `kvferry push` "
            f"makes a remote.",
            where=str(path),
        )


def _foreign(path: Path) -> str:
    found = sorted(entry.name for entry in path.iterdir())[:5]
    return (
        f"{path}: expected a kvferry remote, found a folder that holds {found} and no format.json. Nothing was changed; give "
        f"the remote's own folder, such as {path / 'kvferry'}."
    )
