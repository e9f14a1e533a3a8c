"""A small model's KV in plain bytes, saved into stores; and what must hold of a store's files, checked file by file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from kvstore import Group, Identity, Layout, Lineage, Saved, Store
from kvstore.codec import HEADER, decode_header
from kvstore.codec import Kind as FrameKind
from kvstore.digest import content_digest
from kvstore.layout import blocks_of
from kvstore.shelf import Shelf
from sync import Folder, Moved, pull, push

LAYOUT = Layout((Group("sliding", 128, (0, 2, 3), 1, 16), Group("full", None, (1, 4), 2, 8)))
"""192 and 128 bytes a token: a full block is 12,288 + 8,192 bytes."""

ROW = {0: 192, 1: 128}
IDENTITY = Identity.of({"weights": "w" * 64, "tokenizer": "t" * 64})
LINEAGE = Lineage.of({"engine": "test"})
MASTER = "m" * 64


class Ram:
    """Rows of ``tokens`` tokens: row bytes depend on ``seed`` and position only, so a longer one starts with a shorter one."""

    def __init__(self, tokens: int, seed: str = "a", layout: Layout = LAYOUT, *, fill: bool = True) -> None:
        self.layout = layout
        self.data = {
            (g, layer, part): bytearray(
                hashlib.shake_128(f"{seed} {g} {layer} {part}".encode()).digest(tokens * group.row_elements * 2)
                if fill
                else tokens * group.row_elements * 2
            )
            for g, group in enumerate(layout.groups)
            for layer in group.layers
            for part in "kv"
        }

    def spans(self, group: int, start: int, stop: int) -> Sequence[memoryview]:
        shape = self.layout.groups[group]
        row = shape.row_elements * 2
        return [
            memoryview(self.data[group, layer, part])[start * row : stop * row]
            for layer in shape.layers
            for part in "kv"
        ]


def tokens_of(count: int, seed: str = "a") -> list[int]:
    """Token ids: those of a longer count start with those of a shorter one."""
    raw = hashlib.shake_128(f"tokens {seed}".encode()).digest(2 * count)
    return [int.from_bytes(raw[2 * i : 2 * i + 2], "big") for i in range(count)]


def save(
    store: Store, name: str | None, tokens: int, seed: str = "a", *, kv: str | None = None, layout: Layout = LAYOUT
) -> Saved:
    """Saves ``tokens`` tokens of ``seed`` with KV of ``kv`` (the same seed by default), with a pending token."""
    return store.save(
        layout,
        IDENTITY,
        tokens_of(tokens, seed),
        Ram(tokens, kv or seed, layout),
        namespace="default",
        name=name,
        lineage=[LINEAGE] * blocks_of(tokens),
        pending=7,
        head=MASTER,
        model="small",
    )


def loaded(
    store: Store, name: str, tokens: int, layout: Layout = LAYOUT
) -> tuple[Ram, tuple[tuple[int, int], ...], int]:
    """Restores a name whole: (its rows, the token runs that were loaded, the pending token)."""
    match = store.match(name, head=MASTER)
    assert match.n == tokens and match.pending is not None
    rows = Ram(tokens, layout=layout, fill=False)
    store.load(match, rows)
    return rows, match.runs, match.pending


def assert_restores(store: Store, name: str, tokens: int, seed: str = "a", layout: Layout = LAYOUT) -> None:
    """What a name restores is, byte for byte over the rows that are there, what was saved."""
    rows, runs, pending = loaded(store, name, tokens, layout)
    origin = Ram(tokens, seed, layout)
    assert pending == 7
    for g, (a, b) in enumerate(runs):
        assert b == tokens
        assert [bytes(s) for s in rows.spans(g, a, b)] == [bytes(s) for s in origin.spans(g, a, b)]


def verify(path: Path) -> None:
    """Every file of a store is what its name says, every name has its manifest, and every promised object is there."""
    with Shelf.open(path, create=False) as shelf:
        for ref in shelf.records.refs():
            assert shelf.records.has_snapshot(ref.snapshot), ref
        for digest in shelf.records.snapshots():
            snapshot = shelf.records.snapshot(digest)
            coverage = shelf.records.coverage(digest, snapshot)
            for group in range(len(snapshot.layout.groups)):
                for block in coverage.blocks(group):
                    name = snapshot.blocks[block][group]
                    shelf.objects.read(name, snapshot.object_bytes(block, group))
        for name in shelf.objects.names():
            data = (path / shelf.objects.path(name)).read_bytes()
            header = decode_header(data[:HEADER], FrameKind.OBJECT, "object")
            assert header.stored == header.name == content_digest([data[HEADER:]]).raw, name
            shelf.objects.read(name, len(data) - HEADER)


def tree(path: Path) -> dict[str, tuple[int, int, int, int]]:
    """Every entry below a folder with what changes when it is touched: (inode, size, mtime, ctime)."""
    found = {}
    for folder, folders, files in os.walk(path):
        for entry in (*folders, *files):
            at = Path(folder) / entry
            stat = at.lstat()
            found[str(at.relative_to(path))] = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return found


def object_files(path: Path) -> list[Path]:
    return sorted((path / "objects").glob("?/*"))


def quarantined(path: Path) -> list[Path]:
    return sorted((path / "quarantine").glob("*/*"))


def pushed(store: Store, stick: Path, *names: str, force: bool = False) -> Moved:
    with Folder.open(stick, create=True) as remote:
        return push(store, remote, names, force=force)


def pulled(
    store: Store, stick: Path, *names: str, trim: bool = False, rename: str | None = None, force: bool = False
) -> Moved:
    with Folder.open(stick) as remote:
        return pull(store, remote, names, trimmed=trim, rename=rename, force=force)
