"""A small bundle of the published shape, KV for it that no model computed, and short ways to carry it in and out of a store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bundle_folder
import corellm_independent as independent
import numpy as np
from numpy.typing import NDArray

from kvstore import Lineage, Saved, Store
from kvstore.formats.corellm_rows import CheckpointRows
from kvstore.formats.corellm_store import AppBundle, Exported, Imported, export_snapshot, import_checkpoint
from kvstore.layout import blocks_of
from runtime.bundle import Bundle
from runtime.checkpoint_commands import app_bundle

Rows = dict[int, tuple[NDArray[np.float16], NDArray[np.float16]]]
WHEN = "2026-11-30T19:00:00Z"
VOCABULARY = bundle_folder.ROWS


def write_bundle(root: Path, *, ctx: int = 2048, sliding: int = 512, form: str = "published", **hostio: Any) -> Path:
    """Six layers, of which four own KV: sliding, full, sliding, full; head dims 8 and 16."""
    config = bundle_folder.convert_config(form)
    config["hostio"] |= {"CTX": ctx, "SLIDING": sliding, **hostio}
    return bundle_folder.write_bundle(root, form, convert=config)


def app(root: Path) -> AppBundle:
    return app_bundle(Bundle.open(root))


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, VOCABULARY, count)]


def some_rows(bundle: Path, count: int, seed: int = 0) -> Rows:
    """K and V of every layer that owns KV; every number is finite, some are -0.0, none is +0.0."""
    made: Rows = {}
    for layer, head_dim in enumerate(independent.identity_of(bundle)["ownLayerHeadDims"]):
        pair = []
        for letter in (0, 1):
            values = np.random.default_rng((seed, layer, letter)).normal(0, 8, (2048, head_dim)).astype(np.float16)
            values[values == 0] = np.float16(-0.0)
            pair.append(values[:count])
        made[layer] = (pair[0], pair[1])
    return made


def with_zeros(bundle: Path, rows: Rows, first: int) -> Rows:
    """The same with zeros in the first rows of the sliding layers."""
    made = {layer: (k.copy(), v.copy()) for layer, (k, v) in rows.items()}
    for layer, kind in enumerate(independent.kinds_of(bundle)):
        if kind == "sliding_attention":
            for array in made[layer]:
                array[:first] = 0
    return made


def in_memory(bundle: AppBundle, rows: Rows) -> CheckpointRows:
    memory = CheckpointRows(bundle.layout, len(rows[0][0]))
    for layer, pair in rows.items():
        for target, array in zip(memory.files(layer), pair, strict=True):
            target[:] = array.tobytes()
    return memory


def save(store: Store, root: Path, name: str, tokens: Sequence[Any], rows: Rows, **other: Any) -> Saved:
    """A snapshot as a session over this bundle would save it."""
    bundle = app(root)
    lineage = Lineage.of({"engine": "portable", "os": "Linux 6.1"})
    other = {"pending": 7, "head": bundle.head, "lineage": [lineage] * blocks_of(len(tokens)), "model": "m", **other}
    return store.save(
        bundle.layout, bundle.identity, tokens, in_memory(bundle, rows), namespace="default", name=name, **other
    )


def export(store: Store, name: str, target: Path, bundle: AppBundle | None, created_at: str = WHEN) -> Exported:
    return export_snapshot(store, name, target, bundle=bundle, created_at=created_at, progress=lambda _: None)


def take(store: Store, folder: Path, root: Path, name: str = "taken") -> Imported:
    return import_checkpoint(
        store, folder, bundle=app(root), namespace="default", name=name, model="m", progress=lambda _: None
    )


def loaded(store: Store, name: str) -> tuple[Any, Rows]:
    """What a restore by name reads: the match, and the rows (zero where nothing was read)."""
    match = store.match(name, head=store.shelf.records.snapshot(store.resolve(name)).head)
    memory = CheckpointRows(match.snapshot.layout, match.n)
    store.load(match, into=memory)
    made: Rows = {}
    for group in match.snapshot.layout.groups:
        for layer in group.layers:
            k, v = (np.frombuffer(a, "<f2").reshape(match.n, -1) for a in memory.files(layer))
            made[layer] = (k, v)
    return match, made


def same_rows(a: Rows, b: Rows) -> bool:
    """To the bit: -0.0 is not 0.0."""
    return a.keys() == b.keys() and all(
        x.tobytes() == y.tobytes() for layer in a for x, y in zip(a[layer], b[layer], strict=True)
    )


def manifest(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return value


def tree(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}
