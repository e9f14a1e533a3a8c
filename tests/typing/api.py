"""The public API as a user writes it: type-checked by mypy --strict, and run. What must be an error for the checker is marked, and an
unneeded mark is an error too."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvstore import (
    ArrayRows,
    Group,
    Identity,
    KVError,
    Layout,
    Lineage,
    Match,
    Rows,
    Saved,
    Snapshot,
    SoftToken,
    Store,
)
from kvstore.backend import Backend
from kvstore.digest import ContentDigest, PrefixKey, SnapshotDigest
from kvstore.errors import IdentityMismatch, Missing, NotCovered, RefConflict
from kvstore.memory import MemoryStore
from kvstore.testing import IDENTITY, LAYOUT, PlainRows, save, tokens

LAYERS = Layout((Group("full", None, (0, 1), kv_heads=1, head_dim=4), Group("sliding", 128, (2,), 1, 4)))
MINE = Identity.of({"weights": "w", "tokenizer": "t", "rope": [10_000.0, None], "layers": 3})


def buffers(count: int) -> dict[int, tuple[bytearray, bytearray]]:
    return {layer: (bytearray(8 * count), bytearray(8 * count)) for layer in (0, 1, 2)}


def use(store: Backend) -> tuple[Saved, Match]:
    """Anything with save, find, match and load."""
    prompt: Sequence[int | SoftToken] = [1, 2, SoftToken(7, b"r" * 32)]
    rows: Rows = ArrayRows(LAYERS, buffers(3))
    me = Lineage.of({"engine": "mine"})
    saved = store.save(LAYERS, MINE, prompt, rows, namespace="default", name="a", lineage=[me], expect=None)
    digest: SnapshotDigest | None = saved.digest
    snapshot: Snapshot | None = saved.snapshot
    assert digest is not None and snapshot is not None
    items: tuple[int | SoftToken, ...] = snapshot.items
    assert items == tuple(prompt)
    try:
        store.save(LAYERS, MINE, prompt, rows, namespace="default", name="a", lineage=[me], expect=None)
    except RefConflict as error:
        assert error.exit_code == 7 and "a" in error.message
    match = store.find(LAYERS, MINE, [1, 2, 3], namespace="default", lineage=me)
    assert match is not None and match.first_difference == 2
    read: int = store.load(match, into=ArrayRows(LAYERS, buffers(3)))
    assert read > 0
    try:
        store.match("b")
    except Missing as error:
        label: object = error.details["label"]
        assert label == "b"
    except (NotCovered, IdentityMismatch, KVError):
        raise
    return saved, store.match("a", at=2)


class Mine:
    """A user's own memory."""

    def spans(self, group: int, start: int, stop: int) -> list[memoryview]:
        return [memoryview(bytearray(8 * (stop - start))) for _ in range(2 * len(LAYERS.groups[group].layers))]


def main() -> None:
    own: Rows = Mine()
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "store") as store:
        saved, match = use(store)
        assert store.standing("a") == saved.digest == match.digest
        store.load(match, own)
    with MemoryStore() as memory:
        use(memory)
        save(memory, tokens(70), name="b")
        memory.load(memory.match("b"), PlainRows(LAYOUT, 70))
        assert memory.find(LAYOUT, IDENTITY, tokens(70), namespace="default") is not None


def wrong(store: Backend, match: Match, key: PrefixKey, content: ContentDigest) -> None:
    """Never run."""
    store.find(LAYERS, MINE, [1])  # type: ignore[call-arg]  # the namespace is spelled out
    store.find(LAYERS, MINE, ["word"], namespace="default")  # type: ignore[list-item]  # token ids, not texts
    store.load(match, into=[memoryview(b"")])  # type: ignore[arg-type]  # rows, not buffers
    len(store.find(LAYERS, MINE, [1], namespace="default").runs)  # type: ignore[union-attr]  # None is a miss
    digest: SnapshotDigest = key  # type: ignore[assignment]  # which tokens is not which bytes
    digest = content  # type: ignore[assignment]
    match.n = 3  # type: ignore[misc]  # values are frozen
    store.save(LAYERS, MINE, [1], PlainRows(LAYERS, 1), namespace="default", lineage=[], expect="somewhere")  # type: ignore[arg-type]
    del digest


if __name__ == "__main__":
    main()
