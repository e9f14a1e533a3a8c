"""What people ask of a cache: how often it had something, how much of it, and what sharing saves. Per model and namespace.

What was asked is counted in the index, which may be lost; what is stored is read from the files each time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from .counts import Asked
from .digest import IdentityDigest
from .errors import Corrupt, FormatTooNew, SnapshotMissing, StoreBusy
from .identity import Identity
from .index import Index
from .plaintext import counted, size_text, table
from .shelf import Shelf
from .store import Store


@dataclass(slots=True)
class Held:
    """Snapshots of one model and namespace. Bytes of content: ``logical``, every snapshot's by itself; ``once``, each object counted once;
    ``stored``, as the files of these objects are, headers included."""

    models: set[str] = field(default_factory=set)
    snapshots: int = 0
    tokens: int = 0
    logical: int = 0
    once: int = 0
    stored: int = 0

    def value(self) -> dict[str, Any]:
        return {
            "snapshots": self.snapshots,
            "tokens": self.tokens,
            "logical_bytes": self.logical,
            "once_bytes": self.once,
            "stored_bytes": self.stored,
            "saved_by_sharing_bytes": self.logical - self.once,
        }


@dataclass(frozen=True, slots=True)
class StoreStats:
    """``asked`` None: this store's index can't be written, so nothing is counted in it. ``held``: by identity and namespace; ``total`` counts an
    object once that several of them have. ``unreadable``: manifests that say nothing."""

    asked: tuple[Asked, ...] | None
    held: tuple[tuple[IdentityDigest, str, Held], ...]
    total: Held
    unreadable: int

    def value(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        asked = {(one.identity, one.namespace): one for one in self.asked or ()}
        held: dict[tuple[IdentityDigest | None, str], Held] = {(who, where): one for who, where, one in self.held}
        keys = sorted(
            asked.keys() | held.keys(), key=lambda key: (key[0] is None, key[1], key[0].raw if key[0] else b"")
        )
        since = min((one.since for one in asked.values()), default=None)
        return {
            "counted_since": None if since is None else _iso(since),
            "asked": None if self.asked is None else _answers(list(asked.values())),
            "models": [
                {
                    "model": ", ".join(sorted(held[key].models)) if key in held else "",
                    "identity": None if key[0] is None else key[0].hex,
                    "namespace": key[1],
                    "asked": None if self.asked is None else _answers([asked[key]] if key in asked else []),
                    **held.get(key, Held()).value(),
                }
                for key in keys
            ],
            **self.total.value(),
            "unreadable": self.unreadable,
        }


def _answers(asked: list[Asked]) -> dict[str, Any]:
    finds, hits = sum(one.finds for one in asked), sum(one.hits for one in asked)
    tokens, reused = sum(one.tokens for one in asked), sum(one.reused for one in asked)
    return {
        "finds": finds,
        "hits": hits,
        "hit_rate": hits / finds if finds else None,
        "tokens": tokens,
        "reused_tokens": reused,
        "reuse_share": reused / tokens if tokens else None,
    }


def _iso(moment: float) -> str:
    try:
        return datetime.fromtimestamp(moment).astimezone().isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):  # a flipped bit: the counts prove nothing
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(0))


def store_stats(store: Store) -> StoreStats:
    """Reads every manifest; damaged ones are counted and passed over. Changes nothing."""
    try:
        asked = store.searched(_counts)
    except StoreBusy:
        asked = None
    held, total, unreadable = _held(store.shelf)
    kept = tuple((identity, namespace, one) for (identity, namespace), one in held.items())
    return StoreStats(asked, kept, total, unreadable)


def _counts(index: Index) -> tuple[Asked, ...] | None:
    return tuple(index.counts()) if index.kept else None


def _held(shelf: Shelf) -> tuple[dict[tuple[IdentityDigest, str], Held], Held, int]:
    held: dict[tuple[IdentityDigest, str], Held] = {}
    names: dict[tuple[IdentityDigest, str], set[bytes]] = {}
    sizes: dict[bytes, int] = {}
    total, unreadable = Held(), 0
    for digest in shelf.records.snapshots():
        try:
            snapshot = shelf.records.snapshot(digest)
            coverage = shelf.records.coverage(digest, snapshot)
        except SnapshotMissing:  # collected meanwhile
            continue
        except (Corrupt, FormatTooNew):
            unreadable += 1
            continue
        key = (snapshot.identity.digest, snapshot.namespace)
        mine, seen = held.setdefault(key, Held()), names.setdefault(key, set())
        mine.models.add(_name(snapshot.identity, snapshot.model))
        for one in (mine, total):
            one.snapshots += 1
            one.tokens += snapshot.tokens
        for group in range(len(snapshot.layout.groups)):
            for block in coverage.blocks(group):
                content, length = snapshot.blocks[block][group], snapshot.object_bytes(block, group)
                mine.logical += length
                total.logical += length
                if content.raw in seen:
                    continue
                seen.add(content.raw)
                if content.raw not in sizes:
                    sizes[content.raw] = shelf.objects.size(content) or 0
                    total.once += length
                    total.stored += sizes[content.raw]
                mine.once += length
                mine.stored += sizes[content.raw]
    return held, total, unreadable


def _name(identity: Identity, model: str) -> str:
    return model or f"model {identity.digest.hex[:12]}"


def stats_text(value: dict[str, Any], width: int | None) -> str:
    """`StoreStats.value` for people. ``width``: as `plaintext.table` has it."""
    asked, lines = value["asked"], []
    if asked is None:
        lines.append("Questions are not counted: the store, or its index, can only be read.")
    elif not asked["finds"]:
        lines.append("Nothing was asked of it yet, or its index was made anew since.")
    else:
        lines.append(
            f"Since {value['counted_since']}: {counted(asked['finds'], 'question')}, {asked['hits']:,} answered with something "
            f"({asked['hit_rate']:.0%}); {asked['reused_tokens']:,} of {counted(asked['tokens'], 'token')} ({asked['reuse_share'] or 0:.0%}) "
            f"did not have to be computed."
        )
    lines.append(
        f"{counted(value['snapshots'], 'snapshot')} of {size_text(value['logical_bytes'])} in {size_text(value['stored_bytes'])} of files; "
        f"sharing saves {size_text(value['saved_by_sharing_bytes'])}."
    )
    if value["unreadable"]:
        lines.append(f"{counted(value['unreadable'], 'manifest')} can't be read; `kvferry check` says which.")
    rows = [
        (
            one["model"] or (one["identity"] or "others")[:12],
            one["namespace"],
            "" if one["asked"] is None else f"{one['asked']['hits']:,}/{one['asked']['finds']:,}",
            "" if one["asked"] is None else f"{one['asked']['reused_tokens']:,}/{one['asked']['tokens']:,}",
            one["snapshots"],
            size_text(one["logical_bytes"]),
            size_text(one["saved_by_sharing_bytes"]),
            size_text(one["stored_bytes"]),
        )
        for one in value["models"]
    ]
    columns = ("model", "namespace", "hits", "tokens reused", "snapshots", "content", "shared", "files")
    right = ("hits", "tokens reused", "content", "shared", "files")
    return "\n".join(lines) + (f"\n\n{table(rows, columns, width, right=right)}" if rows else "")
