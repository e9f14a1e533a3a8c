"""The app's checkpoint manifest (schemaVersion 1): bytes ⇄ values, with every check that needs no other file; no I/O.

It names no weights: whoever writes or reads a checkpoint here says by a bundle, or by a snapshot's identity, whose KV it is.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from ..errors import FormatTooNew, IdentityMismatch, Refused
from ..identity import ABSENT
from ..items import MAX_ID
from ..jsonfile import JsonInvalid, parse_object
from .corellm_geometry import Geometry
from .errors import corrupt

SCHEMA = 1
MANIFEST = "manifest.json"
MAX_MANIFEST = 32 << 20
"""Largest manifest that is read, in bytes: 2^20 tokens, one a line, and room."""

SOFT = frozenset({258880, 258881})
"""The ids that stand for an image's and for audio's positions: what lies there is media, and the manifest doesn't say which."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a manifest says beside its geometry. ``tokens``: one for each row; ``pending``: the next one, None where it isn't known.

    ``created_*`` and ``bundle_name`` (the bundle's folder, where the checkpoint was saved) are for people.
    """

    tokens: tuple[int, ...]
    pending: int | None
    bundle_name: str | None
    created_on_os: str
    created_with_compute_units: str
    created_at: str


def k_file(layer: int) -> str:
    return f"k_{layer}.bin"


def v_file(layer: int) -> str:
    return f"v_{layer}.bin"


def tokens_sha256(tokens: Sequence[int]) -> str:
    """Hex SHA-256 over each token as a little-endian int64."""
    return hashlib.sha256(struct.pack(f"<{len(tokens)}q", *tokens)).hexdigest()


def encode_manifest(geometry: Geometry, checkpoint: Checkpoint) -> bytes:
    """The manifest: pretty-printed, keys sorted. An unknown pending token and an unknown bundle name are left out."""
    rows = len(checkpoint.tokens)
    value: dict[str, Any] = {
        "schemaVersion": SCHEMA,
        "identity": geometry.value(),
        "position": rows,
        "tokenCount": rows,
        "tokenSeqSHA256": tokens_sha256(checkpoint.tokens),
        "processedTokens": list(checkpoint.tokens),
        "layers": [
            {
                "layer": layer,
                "type": geometry.layer_types[layer],
                "headDim": geometry.head_dim_of(layer),
                "rows": rows,
                "kFile": k_file(layer),
                "vFile": v_file(layer),
                "kBytes": geometry.file_bytes(layer, rows),
                "vBytes": geometry.file_bytes(layer, rows),
            }
            for layer in range(geometry.first_shared)
        ],
        "createdOnOS": checkpoint.created_on_os,
        "createdWithComputeUnits": checkpoint.created_with_compute_units,
        "createdAtISO8601": checkpoint.created_at,
    }
    if checkpoint.pending is not None:
        value["pendingNextToken"] = checkpoint.pending
    if checkpoint.bundle_name is not None:
        value["bundleName"] = checkpoint.bundle_name
    return json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True).encode()


_Text = Annotated[str, msgspec.Meta(max_length=4096)]


class _Layer(msgspec.Struct):
    layer: int
    type: str
    headDim: int
    rows: int
    kFile: str
    vFile: str
    kBytes: int
    vBytes: int


class _Manifest(msgspec.Struct):
    """What the app's own reader needs to be there; keys that it doesn't know it ignores, and so does this one."""

    position: int
    tokenCount: int
    tokenSeqSHA256: str
    processedTokens: tuple[int, ...]
    layers: tuple[_Layer, ...]
    createdOnOS: _Text
    createdWithComputeUnits: _Text
    createdAtISO8601: _Text
    pendingNextToken: int | None = None
    bundleName: _Text | None = None


def parse(data: bytes) -> dict[str, Any]:
    """The JSON object in ``data``. `CheckpointCorrupt` for anything that two readers could understand differently."""

    try:
        return parse_object(data, MANIFEST, largest=2**127)  # one beyond 64 bits is refused by its field's name
    except JsonInvalid as error:
        raise corrupt(MANIFEST, error.field, error.expected, error.found) from error


def decode_manifest(data: bytes, geometry: Geometry) -> Checkpoint:
    """What a manifest says, for the model of ``geometry``.

    `FormatTooNew` for another schemaVersion, `IdentityMismatch` with every differing field, `CheckpointCorrupt`, and `Refused` for one
    that is sound but holds no row, or more than the context.
    """
    value = parse(data)
    version = value.get("schemaVersion")
    if type(version) is not int:
        raise corrupt(MANIFEST, "schemaVersion", str(SCHEMA), version)
    if version != SCHEMA:
        raise FormatTooNew(
            f"{MANIFEST}: schemaVersion: this kvferry reads {SCHEMA}, found {version}. Save the checkpoint with a version of the app that "
            f"writes {SCHEMA}, or upgrade kvferry.",
            supported=SCHEMA,
            found=version,
        )
    _require_identity(value.get("identity"), geometry)
    try:
        manifest = msgspec.convert(value, _Manifest)
    except msgspec.ValidationError as error:
        raise corrupt(MANIFEST, "its fields", "those of schemaVersion 1", str(error)) from error
    rows = manifest.position
    if rows < 0:
        raise corrupt(MANIFEST, "position", "0 or more", rows)
    if rows == 0:
        raise Refused(
            f"{MANIFEST}: position: expected 1 row or more, found 0: there is no KV in it. Nothing was imported.",
            found=0,
        )
    if rows > geometry.ctx:
        raise Refused(
            f"{MANIFEST}: position: expected at most {geometry.ctx} (the bundle's context), found {rows}. Nothing was imported.",
            expected=geometry.ctx,
            found=rows,
        )
    _check_layers(manifest, geometry)
    _check_tokens(manifest, geometry)
    return Checkpoint(
        manifest.processedTokens,
        manifest.pendingNextToken,
        manifest.bundleName,
        manifest.createdOnOS,
        manifest.createdWithComputeUnits,
        manifest.createdAtISO8601,
    )


def _require_identity(found: object, geometry: Geometry) -> None:
    if not isinstance(found, dict):
        raise corrupt(MANIFEST, "identity", "an object", found)
    # Compared as JSON: there 1, 1.0 and true are three values.
    fields = [
        (name, want, found.get(name, ABSENT))
        for name, want in geometry.value().items()
        if name not in found or json.dumps(want, sort_keys=True) != json.dumps(found[name], sort_keys=True)
    ]
    if fields:
        lines = "; ".join(f"{name}: expected {want!r:.100}, found {got!r:.100}" for name, want, got in fields)
        raise IdentityMismatch(
            f"{MANIFEST}: identity: the checkpoint holds the KV of another bundle ({lines}). Give the bundle that it was saved with; nothing "
            f"was imported.",
            fields=fields,
        )


def _check_layers(manifest: _Manifest, geometry: Geometry) -> None:
    entries = {entry.layer: entry for entry in manifest.layers}
    if len(manifest.layers) != geometry.first_shared:
        raise corrupt(MANIFEST, "layers", f"{geometry.first_shared} entries (firstShared)", f"{len(manifest.layers)}")
    lacking = [layer for layer in range(geometry.first_shared) if layer not in entries]
    if lacking:
        raise corrupt(MANIFEST, "layers", f"an entry for layer {lacking[0]}", f"layers {sorted(entries)}")
    for layer in range(geometry.first_shared):
        entry, length = entries[layer], geometry.file_bytes(layer, manifest.position)
        for name, want, got in (
            ("type", geometry.layer_types[layer], entry.type),
            ("headDim", geometry.head_dim_of(layer), entry.headDim),
            ("rows", manifest.position, entry.rows),
            ("kFile", k_file(layer), entry.kFile),
            ("vFile", v_file(layer), entry.vFile),
            ("kBytes", length, entry.kBytes),
            ("vBytes", length, entry.vBytes),
        ):
            if want != got:
                raise corrupt(MANIFEST, f"layers: layer {layer}: {name}", repr(want), got)


def _check_tokens(manifest: _Manifest, geometry: Geometry) -> None:
    tokens, rows = manifest.processedTokens, manifest.position
    if manifest.tokenCount != rows:
        raise corrupt(MANIFEST, "tokenCount", f"{rows} (one token a row)", manifest.tokenCount)
    if len(tokens) != rows:
        raise corrupt(MANIFEST, "processedTokens", f"{rows} tokens (one a row)", f"{len(tokens)}")
    below = min(geometry.vocab_size, MAX_ID + 1)
    pending = [] if manifest.pendingNextToken is None else [("pendingNextToken", manifest.pendingNextToken)]
    for where, token in [*((f"processedTokens[{i}]", t) for i, t in enumerate(tokens) if t not in SOFT), *pending]:
        if not 0 <= token < below:
            raise corrupt(MANIFEST, where, f"a token id from 0 to {below - 1}", token)
    if manifest.tokenSeqSHA256 != (digest := tokens_sha256(tokens)):
        raise corrupt(MANIFEST, "tokenSeqSHA256", f"{digest} (of processedTokens)", manifest.tokenSeqSHA256)
