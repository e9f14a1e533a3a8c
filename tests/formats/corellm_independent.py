"""The app's checkpoint folder (docs/checkpoint.md), written and read with nothing of kvferry's: a stand-in for the app.

What the reader refuses is what the published app's reader refuses, no more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Half = NDArray[np.float16]
Json = dict[str, Any]


class Refusal(Exception):
    """What the reader says no to."""


def identity_of(bundle: Path) -> Json:
    """What a checkpoint saved with the bundle in this folder says of it."""
    raw = (bundle / "convert_config.json").read_bytes()
    config, manifest = json.loads(raw), json.loads((bundle / "manifest.json").read_bytes())
    io = config["hostio"]
    own = range(config["first_shared"])
    stage = manifest.get("sidecarStage") or config["corellm"]["sidecars"].get("default_stage", "fp16")
    return {
        "convertConfigSHA256": hashlib.sha256(raw).hexdigest(),
        "numLayers": config["num_layers"],
        "hidden": config["hidden"],
        "pleDim": config["ple_dim"],
        "firstShared": config["first_shared"],
        "ctx": io["CTX"],
        "hd": io["HD"],
        "ghd": io["GHD"],
        "sliding": io["SLIDING"],
        "sidecarStage": stage,
        "ownLayerHeadDims": [io["GHD"] if io["layer_types"][i] == "full_attention" else io["HD"] for i in own],
        "storeLayers": config["store_layers"],
    }


def kinds_of(bundle: Path) -> list[str]:
    """The kind of each layer that owns KV."""
    config = json.loads((bundle / "convert_config.json").read_bytes())
    return list(config["hostio"]["layer_types"][: config["first_shared"]])


def tokens_digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(np.array(tokens, "<i8").tobytes()).hexdigest()


def write(
    folder: Path,
    bundle: Path,
    tokens: Sequence[int],
    rows: Mapping[int, tuple[Half, Half]],
    *,
    pending: int | None,
    name: str | None = None,
    os: str = "Version 26.1 (Build 23B85)",
    units: str = "cpuAndNeuralEngine",
    created: str = "2026-11-30T18:00:00Z",
) -> Json:
    """Writes a checkpoint: ``rows`` has K and V of each layer that owns KV, [tokens, head dim]. Returns its manifest."""
    folder.mkdir(parents=True)
    identity, kinds = identity_of(bundle), kinds_of(bundle)
    layers = []
    for i, kind in enumerate(kinds):
        entry = {"layer": i, "type": kind, "headDim": identity["ownLayerHeadDims"][i], "rows": len(tokens)}
        for letter, array in zip("kv", rows[i], strict=True):
            assert array.shape == (len(tokens), identity["ownLayerHeadDims"][i])
            data = np.ascontiguousarray(array, "<f2").tobytes()
            (folder / f"{letter}_{i}.bin").write_bytes(data)
            entry |= {f"{letter}File": f"{letter}_{i}.bin", f"{letter}Bytes": len(data)}
        layers.append(entry)
    manifest: Json = {
        "schemaVersion": 1,
        "identity": identity,
        "position": len(tokens),
        "tokenCount": len(tokens),
        "tokenSeqSHA256": tokens_digest(tokens),
        "processedTokens": list(tokens),
        "layers": layers,
        "bundleName": bundle.name if name is None else name,
        "createdOnOS": os,
        "createdWithComputeUnits": units,
        "createdAtISO8601": created,
    }
    if pending is not None:
        manifest["pendingNextToken"] = pending
    put(folder, manifest)
    return manifest


def put(folder: Path, manifest: Json) -> None:
    """The manifest as Foundation lays it out, more or less: a space before each colon."""
    text = json.dumps(manifest, indent=2, sort_keys=True, separators=(",", " : ")).replace("/", "\\/")
    (folder / "manifest.json").write_text(text, encoding="utf-8")


def read(
    folder: Path, bundle: Path, expected: Sequence[int] | None = None
) -> tuple[Json, dict[int, tuple[Half, Half]]]:
    """The manifest, and K and V of each layer. `Refusal` as the app refuses."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refusal(f"manifest.json: {error}") from error
    if manifest["schemaVersion"] != 1:
        raise Refusal(f"schemaVersion {manifest['schemaVersion']}")
    identity = identity_of(bundle)
    if manifest["identity"] != identity:
        raise Refusal(f"identity: expected {identity}, found {manifest['identity']}")
    position = manifest["position"]
    if expected is not None and (len(expected), tokens_digest(expected)) != (position, manifest["tokenSeqSHA256"]):
        raise Refusal("other tokens than expected")
    if len(manifest["layers"]) != identity["firstShared"]:
        raise Refusal(f"{len(manifest['layers'])} layers")
    entries = {entry["layer"]: entry for entry in manifest["layers"]}
    found: dict[int, tuple[Half, Half]] = {}
    for i, head_dim in enumerate(identity["ownLayerHeadDims"]):
        if i not in entries:
            raise Refusal(f"layer {i} is missing")
        entry = entries[i]
        if entry["headDim"] != head_dim or entry["rows"] != position:
            raise Refusal(f"layer {i}: {entry}")
        pair = []
        for letter in "kv":
            path = folder / entry[f"{letter}File"]
            if not path.exists():
                raise Refusal(f"{path.name} is missing")
            data = path.read_bytes()
            if not len(data) == position * head_dim * 2 == entry[f"{letter}Bytes"]:
                raise Refusal(f"{path.name}: {len(data)} bytes")
            pair.append(np.frombuffer(data, "<f2").reshape(position, head_dim))
        found[i] = (pair[0], pair[1])
    return manifest, found
