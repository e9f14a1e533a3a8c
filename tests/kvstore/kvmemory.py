"""Short ways to find, load, compare and carry the KV of `kvstore.testing`, and to change files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore import SoftToken, Store
from kvstore.digest import ContentDigest, SnapshotDigest
from kvstore.layout import Run
from kvstore.snapshot import Coverage, trimmed
from kvstore.staging import Rows as Staged
from kvstore.staging import Staging
from kvstore.testing import HEAD, IDENTITY, LAYOUT, lineage, save
from kvstore.testing import PlainRows as Memory

__all__ = [
    "HEAD",
    "IDENTITY",
    "LAYOUT",
    "Change",
    "Memory",
    "carry",
    "expect_rows",
    "files",
    "find",
    "lineage",
    "load",
    "object_file",
    "save",
]


def find(store: Store, items: Sequence[int | SoftToken], **other: Any) -> Any:
    layout, identity = other.pop("layout", LAYOUT), other.pop("identity", IDENTITY)
    return store.find(layout, identity, items, **{"namespace": "default", **other})


def load(store: Store, match: Any) -> Memory:
    memory = Memory(match.snapshot.layout, max(match.n, 1))
    store.load(match, memory)
    return memory


def expect_rows(store: Store, match: Any, engine: str = "cpu") -> None:
    """The loaded rows are those of the match's tokens, and every row outside its runs is untouched."""
    found = load(store, match)
    want = Memory.causal(match.snapshot.items, engine, match.snapshot.layout)
    for group, (first, last) in enumerate(match.runs):
        assert last == match.n
        assert found.rows(group, first, last) == want.rows(group, first, last)
        assert not any(map(any, found.rows(group, 0, first)))


def carry(
    source: Store, target: Store, digest: SnapshotDigest, runs: tuple[tuple[Run, ...], ...] | None = None
) -> None:
    """Brings a snapshot into another store as a pull does: objects, then manifest with coverage. ``runs``: trimmed by default."""
    snapshot = source.shelf.records.snapshot(digest)
    coverage = trimmed(digest, snapshot) if runs is None else Coverage(digest, runs)
    objects: dict[ContentDigest, bytes] = {}
    for group in range(len(snapshot.layout.groups)):
        for block in coverage.blocks(group):
            name = snapshot.blocks[block][group]
            content = source.shelf.objects.read(name, snapshot.object_bytes(block, group))
            objects[name] = bytes(content)
    with target.shelf.shared(), Staging(target.shelf.root) as staging:
        staging.publish(set(staging.add([Staged([memoryview(content)], name) for name, content in objects.items()])))
        target.publish(snapshot, coverage)


def files(path: Path) -> dict[str, bytes]:
    """Every file of a store but its index and lock, by relative path."""
    skip = {"index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "lock"}
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name not in skip}


def object_file(path: Path, name: ContentDigest) -> Path:
    return path / "objects" / name.hex[:1] / name.hex[1:]


@dataclass
class Change:
    """A file's bytes, put back when the block ends."""

    path: Path
    before: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.before = self.path.read_bytes()

    @contextmanager
    def to(self, data: bytes) -> Iterator[None]:
        self.path.write_bytes(data)
        try:
            yield
        finally:
            self.path.write_bytes(self.before)
