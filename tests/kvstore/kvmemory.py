"""Host memory without an array library, filled with KV that is causal like a model's; and short ways to save and carry it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvstore import Group, Identity, Layout, Lineage, Saved, SoftToken, Store
from kvstore.digest import ContentDigest, SnapshotDigest
from kvstore.items import encode_items
from kvstore.layout import Run, blocks_of
from kvstore.snapshot import Coverage, trimmed
from kvstore.staging import Rows as Staged
from kvstore.staging import Staging

LAYOUT = Layout((Group("full", None, (1, 4), 1, 4), Group("sliding", 128, (0, 2, 3), 2, 2)))
IDENTITY = Identity.of({"weights": "w0", "tokenizer": "t0", "sidecars": [["embed", "e0"]], "window": 128, "scale": 0.5})
HEAD = "h" * 64


class Memory:
    """Rows of ``tokens`` tokens, zero at first; implements `kvstore.Rows`."""

    def __init__(self, layout: Layout, tokens: int) -> None:
        self.layout = layout
        self.tokens = tokens
        self._step = [2 * g.row_elements for g in layout.groups]
        self._arrays = [[bytearray(tokens * s) for _ in range(2 * len(g.layers))] for g, s in self._groups()]

    def _groups(self) -> Iterator[tuple[Group, int]]:
        return zip(self.layout.groups, self._step, strict=True)

    def spans(self, group: int, start: int, stop: int) -> Sequence[memoryview]:
        assert 0 <= start < stop <= self.tokens
        step = self._step[group]
        return [memoryview(a)[start * step : stop * step] for a in self._arrays[group]]

    def rows(self, group: int, start: int, stop: int) -> list[bytes]:
        return [bytes(span) for span in self.spans(group, start, stop)] if start < stop else []

    @classmethod
    def causal(cls, items: Sequence[int | SoftToken], engine: str = "cpu", layout: Layout = LAYOUT) -> Memory:
        """A row is a function of all items up to its own, and of the engine that computed it. (No row byte is zero.)"""
        memory = cls(layout, len(items))
        hasher = blake3(engine.encode())
        for at, item in enumerate(items):
            hasher.update(encode_items([item]))
            content = hasher.digest(length=layout.bytes_per_token).replace(b"\0", b"\1")
            for group, step in enumerate(memory._step):
                for array in memory._arrays[group]:
                    array[at * step : (at + 1) * step] = content[:step]
                    content = content[step:]
        return memory


def lineage(engine: str = "cpu") -> Lineage:
    return Lineage.of({"engine": engine, "os": "test"})


def save(store: Store, items: Sequence[int | SoftToken], engine: str = "cpu", **other: Any) -> Saved:
    """Saves causal rows; ``other`` goes to `Store.save`."""
    layout = other.pop("layout", LAYOUT)
    rows = other.pop("rows", None) or Memory.causal(items, engine, layout)
    other.setdefault("lineage", [lineage(engine)] * blocks_of(len(items)))
    return store.save(layout, other.pop("identity", IDENTITY), items, rows, **{"namespace": "default", **other})


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
