"""Snapshots to the app's checkpoint folders and back, over one store.

A checkpoint names neither weights nor heads. On the way out the snapshot's identity vouches for them, and a bundle if one is given; on
the way in the bundle is taken at its word, and everything that the checkpoint does say is held against it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..digest import SnapshotDigest
from ..errors import NotCovered, Refused
from ..identity import Identity, require_same
from ..items import Item, SoftToken
from ..layout import BLOCK, Layout, blocks_of
from ..match import Match, usable_at
from ..saving import Saved
from ..snapshot import Lineage, Snapshot
from ..store import Store
from .corellm import SOFT, Checkpoint
from .corellm_folder import read_folder, write_folder
from .corellm_geometry import Geometry, geometry_of, require_bundle_format
from .corellm_rows import CheckpointRows

CONTEXT, CONVERT_CONFIG = "context", "convert_config"
"""Lineage fields: the context's tokens, and the hex SHA-256 of `convert_config.json`, of the bundle that computed a block."""

OS, UNITS = "createdOnOS", "createdWithComputeUnits"
"""Lineage fields of imported blocks: what the checkpoint says under these keys."""

ENGINE = "corellm checkpoint"
"""The engine in the lineage of imported blocks. The folder says no more."""


@dataclass(frozen=True, slots=True)
class AppBundle:
    """A bundle as the app and this store know it. ``folder``: its folder's name; ``head``: the digest of its heads."""

    identity: Identity
    layout: Layout
    ctx: int
    convert_config_sha256: str
    format: str
    folder: str
    head: str

    def geometry(self) -> Geometry:
        """`Refused` for a bundle that the app doesn't load."""
        require_bundle_format(self.format)
        return geometry_of(self.identity, self.layout, ctx=self.ctx, convert_config_sha256=self.convert_config_sha256)


@dataclass(frozen=True, slots=True)
class Exported:
    """``made``: False where the same checkpoint was there. ``zeroed_rows``: leading tokens whose sliding rows were not here, and are zero in
    the files. ``notes``: what the app will do with it that one wouldn't expect."""

    snapshot: SnapshotDigest
    made: bool
    tokens: int
    pending: int | None
    bytes: int
    zeroed_rows: int
    soft_tokens: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Imported:
    """``bytes`` of KV read. ``uncovered_rows``: leading tokens whose sliding rows don't count as here. ``notes``: as in `Exported`, of the
    snapshot."""

    saved: Saved
    checkpoint: Checkpoint
    bytes: int
    uncovered_rows: int
    soft_tokens: int
    notes: tuple[str, ...]


def export_snapshot(
    store: Store,
    name: str,
    target: Path,
    *,
    bundle: AppBundle | None,
    created_at: str,
    progress: Callable[[float], None],
) -> Exported:
    """Writes the snapshot ``name`` to the folder ``target``, as the app would have saved it. ``progress`` gets bytes written.

    ``bundle``: the app's; without it the snapshot's lineage must say the context and the convert config. ``created_at``: UTC, as ISO 8601.
    `SnapshotMissing`, `IdentityMismatch` (another model than the bundle's), `NotCovered`, `Refused`; then nothing was written.
    """
    digest = store.resolve(name)
    snapshot = store.shelf.records.snapshot(digest)
    fields = dict(snapshot.lineages[snapshot.lineage[-1]].fields)
    notes: list[str] = []
    pending = snapshot.pending
    if bundle is not None:
        require_same((bundle.identity, bundle.layout), (snapshot.identity, snapshot.layout), f"snapshot {name!r}")
        geometry = bundle.geometry()
        if pending is not None and snapshot.head != bundle.head:
            notes.append("Its next token was chosen by another head than this bundle's, and is left out.")
            pending = None
    else:
        geometry = _recorded(name, snapshot, fields)
    tokens = tuple(_token(name, i, item) for i, item in enumerate(snapshot.items))
    if len(tokens) > geometry.ctx:
        raise Refused(
            f"{name!r}: tokens: expected at most {geometry.ctx} (the bundle's context), found {len(tokens)}.",
            expected=geometry.ctx,
            found=len(tokens),
        )
    rows, first = _rows(store, name, digest, snapshot)
    checkpoint = Checkpoint(
        tokens,
        pending,
        None if bundle is None else bundle.folder,
        fields.get(OS, f"{fields.get('os', 'unknown')} (kvferry)"),
        fields.get(UNITS, "cpuOnly" if fields.get("engine") == "portable" else "unknown"),
        created_at,
    )
    made = write_folder(target, geometry, checkpoint, rows, progress)
    if pending is None:
        notes.append(
            "It has no next token: the app takes 0 for it, so let it read a new prompt instead of going on generating."
        )
    if first:
        notes.append(
            f"The sliding layers' rows of the first {first} tokens are not here and are zero in the files. Going on from the end never reads "
            f"them; rewinding in the app below token {first + _window(snapshot.layout) - 1} would, and the app doesn't notice."
        )
    size = len(tokens) * snapshot.layout.bytes_per_token
    soft = sum(isinstance(item, SoftToken) for item in snapshot.items)
    return Exported(digest, made, len(tokens), pending, size, first, soft, tuple(notes))


def _recorded(name: str, snapshot: Snapshot, fields: Mapping[str, str]) -> Geometry:
    ctx, sha256 = fields.get(CONTEXT, ""), fields.get(CONVERT_CONFIG, "")
    if not re.fullmatch(r"[1-9][0-9]{0,8}", ctx) or not re.fullmatch(r"[0-9a-f]{64}", sha256):
        # Models that the format can't hold are told so, and not sent for a bundle that would be refused.
        geometry_of(snapshot.identity, snapshot.layout, ctx=1, convert_config_sha256="")
        raise Refused(
            f"{name!r}: lineage: expected one {CONTEXT} and one {CONVERT_CONFIG}, which the app compares with its own bundle, found "
            f"{ctx or 'none'} and {sha256 or 'none'}. Give the app's bundle with --bundle."
        )
    return geometry_of(snapshot.identity, snapshot.layout, ctx=int(ctx), convert_config_sha256=sha256)


def _token(name: str, position: int, item: Item) -> int:
    if isinstance(item, int):
        return item
    if item.placeholder not in SOFT:
        raise Refused(
            f"{name!r}: item {position}: expected a token, or a soft token with a placeholder of {sorted(SOFT)}, which the app knows for media, "
            f"found a soft token with placeholder {item.placeholder}. The app would take it for text.",
            position=position,
            found=item.placeholder,
        )
    return item.placeholder


def _window(layout: Layout) -> int:
    return max(group.window or 1 for group in layout.groups)


def _rows(store: Store, name: str, digest: SnapshotDigest, snapshot: Snapshot) -> tuple[CheckpointRows, int]:
    """All rows that are here, verified, and the first token whose rows are here in every group."""
    count = snapshot.tokens
    coverage = store.shelf.records.coverage(digest, snapshot)
    usable, runs = usable_at(snapshot, coverage, count)
    if usable != count:
        raise NotCovered(
            f"{name!r} can't be continued from its end, after {count} tokens: its rows are not all here. Pull it from a remote that has it.",
            name=name,
            asked=count,
            usable=usable,
        )
    rows = CheckpointRows(snapshot.layout, count)
    store.load(Match(digest, snapshot, count, runs, count, count, None, ""), into=rows)
    return rows, max(first for first, _ in runs)


def import_checkpoint(
    store: Store,
    folder: Path,
    *,
    bundle: AppBundle,
    namespace: str,
    name: str,
    model: str,
    progress: Callable[[float], None],
) -> Imported:
    """Reads the checkpoint in ``folder``, saved with ``bundle``, and saves it under ``name``. ``progress`` gets bytes read.

    Raises what `corellm_folder.read_folder` raises, and `NotCovered` where zero rows reach into what going on from its end reads; then nothing
    was saved.
    """
    geometry = bundle.geometry()
    checkpoint, rows = read_folder(folder, geometry, progress)
    count, layout = len(checkpoint.tokens), bundle.layout
    first = tuple(
        0 if g.window is None else -(-rows.zero_rows(i) // BLOCK) * BLOCK for i, g in enumerate(layout.groups)
    )
    continued = count if checkpoint.pending is not None else count - 1  # without a next token the last is decoded again
    for group, start in zip(layout.groups, first, strict=True):
        if group.window is not None and start and continued < start + group.window - 1:
            raise NotCovered(
                f"{folder}: group {group.name}: expected rows from token {max(0, continued - group.window + 1)} on, which going on from "
                f"token {continued} reads, found zero rows up to token {start} (in blocks of {BLOCK}). Save the checkpoint again from a "
                f"session that has them; nothing was imported.",
                expected=max(0, continued - group.window + 1),
                found=start,
            )
    items = tuple(SoftToken(t, rows.soft_key(i)) if t in SOFT else t for i, t in enumerate(checkpoint.tokens))
    lineage = Lineage.of(
        {
            "engine": ENGINE,
            OS: checkpoint.created_on_os,
            UNITS: checkpoint.created_with_compute_units,
            CONTEXT: str(bundle.ctx),
            CONVERT_CONFIG: bundle.convert_config_sha256,
        }
    )
    saved = store.save(
        layout,
        bundle.identity,
        items,
        rows,
        namespace=namespace,
        name=name,
        lineage=[lineage] * blocks_of(count),
        pending=checkpoint.pending,
        head=None if checkpoint.pending is None else bundle.head,
        model=model,
        covered=first,
        known=[rows.contents(block, first) for block in range(max(first) // BLOCK)],
    )
    soft = sum(isinstance(item, SoftToken) for item in items)
    size = count * layout.bytes_per_token
    notes = tuple(_notes(checkpoint, bundle, items, max(first)))
    return Imported(saved, checkpoint, size, max(first), soft, notes)


def _notes(checkpoint: Checkpoint, bundle: AppBundle, items: tuple[Item, ...], uncovered: int) -> list[str]:
    notes = []
    if checkpoint.bundle_name not in (None, bundle.folder):
        notes.append(
            f"It was saved with a bundle in a folder called {checkpoint.bundle_name!r}; this one is called {bundle.folder!r}."
        )
    if any(isinstance(item, SoftToken) for item in items):
        notes.append(
            "It holds media that it doesn't name: it can be restored by name, and is never found by its tokens."
        )
    if checkpoint.pending is None:
        last = "is media and can't be" if isinstance(items[-1], SoftToken) else "is"
        notes.append(f"It has no next token: the last token {last} decoded again to choose one.")
    if uncovered:
        notes.append(
            f"The sliding layers' rows of the first {uncovered} tokens are zero, or in a block with such: they don't count as here, as in a "
            f"trimmed snapshot."
        )
    return notes
