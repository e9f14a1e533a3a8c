"""Snapshots described for people and for --json."""

from __future__ import annotations

import time
from typing import Any

from .errors import Corrupt, FormatTooNew, KVError, Missing
from .shelf import Shelf
from .snapshot import Coverage, Snapshot, trimmed, whole
from .store import Store


def kept(snapshot: Snapshot, coverage: Coverage) -> str:
    """What of a snapshot is here: ``whole``, ``trimmed`` (continuable from its end), ``part`` or ``nothing``."""
    full, least = whole(coverage.snapshot, snapshot), trimmed(coverage.snapshot, snapshot)
    if coverage.union(full) == coverage:
        return "whole"
    if coverage.union(least) == coverage:
        return "trimmed"
    return "part" if any(coverage.runs) else "nothing"


def content_bytes(snapshot: Snapshot, coverage: Coverage) -> int:
    """Content bytes of the covered objects, headers left out; shared objects count for each snapshot."""
    groups = range(len(snapshot.layout.groups))
    return sum(snapshot.object_bytes(b, g) for g in groups for b in coverage.blocks(g))


def listing(shelf: Shelf) -> tuple[list[dict[str, Any]], list[KVError]]:
    """One row per readable ref, by name; and what could not be read, which hides nothing else."""
    rows: list[dict[str, Any]] = []
    damage: list[KVError] = []
    for file in shelf.records.ref_files():
        try:
            ref = shelf.records.read_ref(file)
        except (Corrupt, FormatTooNew) as error:
            damage.append(error)
            continue
        if ref is None:
            continue
        row: dict[str, Any] = {"name": ref.label, "snapshot": ref.snapshot.hex, "updated": _when(ref.updated)}
        try:
            snapshot = shelf.records.snapshot(ref.snapshot)
            coverage = shelf.records.coverage(ref.snapshot, snapshot)
        except (Corrupt, FormatTooNew, Missing) as error:
            damage.append(error)
            row |= {"tokens": 0, "kept": "unreadable", "bytes": 0, "model": "", "namespace": "", "pending": None}
        else:
            row |= {
                "tokens": snapshot.tokens,
                "kept": kept(snapshot, coverage),
                "bytes": content_bytes(snapshot, coverage),
                "model": snapshot.model,
                "namespace": snapshot.namespace,
                "pending": snapshot.pending,
            }
        rows.append(row)
    return sorted(rows, key=lambda row: str(row["name"])), damage


def describe(store: Store, name: str) -> dict[str, Any]:
    """One snapshot whole. `SnapshotMissing`."""
    digest = store.resolve(name)
    snapshot = store.shelf.records.snapshot(digest)
    coverage = store.shelf.records.coverage(digest, snapshot)
    layout, receipt = snapshot.layout, snapshot.receipt
    return {
        "name": name,
        "snapshot": digest.hex,
        "model": snapshot.model,
        "namespace": snapshot.namespace,
        "tokens": snapshot.tokens,
        "kept": kept(snapshot, coverage),
        "bytes": content_bytes(snapshot, coverage),
        "kv_bytes_per_token": layout.bytes_per_token,
        "pending": snapshot.pending,
        "receipt": None if receipt is None else {"tokens": list(receipt.tokens), "finish": receipt.finish},
        "groups": [
            {
                "name": g.name,
                "window": g.window,
                "layers": len(g.layers),
                "kv_heads": g.kv_heads,
                "head_dim": g.head_dim,
                "blocks_here": [list(run) for run in coverage.runs[i]],
            }
            for i, g in enumerate(layout.groups)
        ],
        "blocks": len(snapshot.blocks),
        "lineages": [dict(lineage.fields) for lineage in snapshot.lineages],
        "identity": {k: _readable(v) for k, v in snapshot.identity.wire().items()},
        "first_tokens": [t if isinstance(t, int) else f"soft {t.placeholder}" for t in snapshot.items[:16]],
    }


def _readable(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [_readable(v) for v in value] if len(value) <= 40 else f"{len(value)} values"
    return value


def _when(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
