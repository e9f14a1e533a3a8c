"""Snapshots described for people and for --json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from .errors import Corrupt, FormatTooNew, KVError, Missing
from .layout import BLOCK
from .plaintext import labelled, short, size_text, table
from .shelf import Shelf
from .snapshot import Coverage, Snapshot, trimmed, whole

if TYPE_CHECKING:
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


def listing_text(rows: Sequence[Mapping[str, Any]], width: int | None) -> str:
    """`listing` for people, times to the minute; nothing where there is no name. ``width``: as `plaintext.table` has it."""
    columns = ("name", "tokens", "kept", "size", "model", "updated", "snapshot")
    cells = [
        (
            r["name"],
            r["tokens"],
            r["kept"],
            size_text(r["bytes"]),
            r["model"],
            _minute(r["updated"]),
            r["snapshot"][:12],
        )
        for r in rows
    ]
    return table(cells, columns, width, right=("size",)) if cells else ""


def _minute(moment: str) -> str:
    return moment[:16].replace("T", " ")


def describe(store: Store, name: str, trusted: Mapping[bytes, str] | None = None) -> dict[str, Any]:
    """One snapshot whole. ``trusted``: names of producers by their keys. `SnapshotMissing`, `SignaturesCorrupt`."""
    from .signatures import true_ones

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
        "signatures": [
            {"key": one.key.hex(), "trusted": (trusted or {}).get(one.key)}
            for one in true_ones(store.shelf.records.signatures(digest), digest)
        ],
        "first_tokens": [t if isinstance(t, int) else f"soft {t.placeholder}" for t in snapshot.items[:16]],
    }


def description_text(value: Mapping[str, Any], width: int) -> str:
    """`describe` for people: digests of the identity shortened, long lists counted."""
    blocks, receipt, pending = value["blocks"], value["receipt"], value["pending"]
    about = [
        ("snapshot", value["snapshot"]),
        ("model", value["model"] or "not said"),
        ("namespace", value["namespace"]),
        ("tokens", f"{value['tokens']:,}, in {blocks:,} block{'' if blocks == 1 else 's'} of {BLOCK}"),
        (
            "kept",
            f"{value['kept']}: {size_text(value['bytes'])} here, {size_text(value['kv_bytes_per_token'])} a token",
        ),
        ("next token", "none chosen" if pending is None else f"{pending}, chosen and not fed"),
        ("receipt", f"{len(receipt['tokens'])} tokens, finish: {receipt['finish']}" if receipt else "none"),
        (
            "signed by",
            ", ".join(one["trusted"] or f"{one['key'][:12]} (not trusted)" for one in value["signatures"]) or "nobody",
        ),
        ("begins with", short(value["first_tokens"], 16) or ""),
    ]
    groups = [
        (g["name"], g["layers"], g["kv_heads"], g["head_dim"], g["window"] or "all", _here(g["blocks_here"], blocks))
        for g in value["groups"]
    ]
    header = ("group", "layers", "KV heads", "head size", "window", "blocks here")
    made = list(dict.fromkeys(name for lineage in value["lineages"] for name in lineage))
    makers = [
        (m, " | ".join(dict.fromkeys(str(short(one.get(m, "not said"))) for one in value["lineages"]))) for m in made
    ]
    identity = [(name, text) for name, field in value["identity"].items() if (text := short(field)) is not None]
    parts = [value["name"], labelled(about, width, "  "), "", table(groups, header)]
    parts += ["", "computed by", labelled(makers, width, "  "), "", "identity", labelled(identity, width, "  ")]
    return "\n".join(parts)


def _here(runs: Sequence[Sequence[int]], blocks: int) -> str:
    if [list(run) for run in runs] == [[0, blocks]]:
        return f"all {blocks:,}"
    told = ", ".join(str(a) if z - a == 1 else f"{a} to {z - 1}" for a, z in runs)
    return f"{told or 'none'} of 0 to {blocks - 1}"


def _readable(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [_readable(v) for v in value] if len(value) <= 40 else f"{len(value)} values"
    return value


def _when(seconds: int) -> str:
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat()
    except (ValueError, OverflowError):  # the last hours of the year 9999, east of Greenwich
        return datetime.fromtimestamp(seconds, UTC).isoformat()
