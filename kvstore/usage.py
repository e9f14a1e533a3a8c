"""What takes the space in a store: by kind of file, and per snapshot what is its own and what it shares."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

from .digest import SnapshotDigest
from .errors import Corrupt, FormatTooNew, SnapshotMissing
from .gauge import tree_bytes
from .shelf import Shelf

_FOLDERS = ("snapshots", "refs")
_HIDDEN = ("tmp", "quarantine", "trash")
_INDEX = tuple(f"index.sqlite{end}" for end in ("", "-wal", "-shm"))


class Shelved(Protocol):
    """A store, of which only the files matter."""

    @property
    def shelf(self) -> Shelf: ...


@dataclass(frozen=True, slots=True)
class SnapshotUsage:
    """One snapshot's bytes as files: ``own`` would go with it (manifest and coverage included), ``shared`` others name too."""

    digest: SnapshotDigest
    names: tuple[str, ...]
    own: int
    shared: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of a store's files by what they are for; per snapshot, named ones first. ``unreadable``: damaged manifests."""

    parts: tuple[tuple[str, int], ...]
    snapshots: tuple[SnapshotUsage, ...]
    unreadable: tuple[SnapshotDigest, ...]

    @property
    def bytes(self) -> int:
        return sum(n for _, n in self.parts)

    def part(self, name: str) -> int:
        return dict(self.parts)[name]

    def value(self) -> dict[str, Any]:
        """Plain values, for JSON. ``name``: None for a snapshot without one."""
        return {
            "total": self.bytes,
            "parts": dict(self.parts),
            "snapshots": [
                {"name": ", ".join(s.names) or None, "snapshot": s.digest.hex, "own": s.own, "shared": s.shared}
                for s in self.snapshots
            ],
            "unreadable": [digest.hex for digest in self.unreadable],
        }


def usage(store: Shelved) -> Usage:
    """What takes the space. Changes nothing; damaged refs and manifests are passed over."""
    root, records = store.shelf.root, store.shelf.records
    sizes = {name.raw: store.shelf.objects.size(name) or 0 for name in store.shelf.objects.names()}
    labels: dict[SnapshotDigest, list[str]] = {}
    for ref in records.readable_refs():
        labels.setdefault(ref.snapshot, []).append(ref.label)
    named: dict[SnapshotDigest, frozenset[bytes]] = {}
    unreadable = []
    for digest in records.snapshots():
        try:
            blocks = records.snapshot(digest).blocks
        except SnapshotMissing:
            continue
        except (Corrupt, FormatTooNew):
            unreadable.append(digest)
            continue
        named[digest] = frozenset(content.raw for contents in blocks for content in contents) & sizes.keys()
    holders = Counter(raw for contents in named.values() for raw in contents)
    snapshots = []
    for digest, contents in named.items():
        own = sum(sizes[raw] for raw in contents if holders[raw] == 1)
        shared = sum(sizes[raw] for raw in contents) - own
        files = sum(root.size(f"snapshots/{digest}{end}") or 0 for end in ("", ".cov", ".sig"))
        snapshots.append(SnapshotUsage(digest, tuple(sorted(labels.get(digest, ()))), own + files, shared))
    snapshots.sort(key=lambda s: (not s.names, s.names, s.digest))
    parts = [(folder, tree_bytes(root, folder)) for folder in ("objects", *_FOLDERS)]
    parts.append(("index", sum(tree_bytes(root, name) for name in _INDEX)))
    parts += [(folder, tree_bytes(root, folder)) for folder in _HIDDEN]
    known = {"objects", *_FOLDERS, *_HIDDEN, *_INDEX}
    parts.append(("other", sum(tree_bytes(root, name) for name in root.names("") if name not in known)))
    return Usage(tuple(parts), tuple(snapshots), tuple(unreadable))
