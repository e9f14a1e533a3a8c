"""A reader and writer of the published app's checkpoint folder, from docs/checkpoint.md alone.

It worked before its author saw kvferry's own, and never saw the other stand-in (`corellm_independent.py`) or the
app's source: what the page gets wrong is wrong here too.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

KINDS = {"sliding_attention": "hd", "full_attention": "ghd"}
NUMBERS = ("numLayers", "hidden", "pleDim", "firstShared", "ctx", "hd", "ghd", "sliding")
IDENTITY = {"convertConfigSHA256", *NUMBERS, "sidecarStage", "ownLayerHeadDims", "storeLayers"}
MADE = ("createdOnOS", "createdWithComputeUnits", "createdAtISO8601")


@dataclass(frozen=True)
class Checkpoint:
    identity: dict[str, Any]
    tokens: list[int]
    kinds: list[str]  # of each layer that owns KV
    rows: dict[tuple[int, str], np.ndarray[Any, Any]]  # for each of them and "k" or "v": [tokens, head dim]
    pending: int | None = None
    bundle: str | None = None
    made: dict[str, str] = field(default_factory=dict)


def need(true: object, what: str) -> None:
    if not true:
        raise ValueError(what)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    need(len(dict(pairs)) == len(pairs), f"a key stands twice in {[key for key, _ in pairs]}")
    return dict(pairs)


def no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def parse(data: bytes) -> dict[str, Any]:
    need(len(data) <= 32 << 20, "over 32 MiB of JSON")
    out = json.loads(data.decode("utf-8"), object_pairs_hook=once, parse_constant=no_constant)
    json.dumps(out, ensure_ascii=False).encode("utf-8")  # a lone surrogate has no UTF-8
    need(isinstance(out, dict), "a manifest is an object")
    return dict(out)


def sha256_of(tokens: list[int]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(tokens)}q", *tokens)).hexdigest()


def identity_of(bundle: Path) -> dict[str, Any]:
    """What the app says of its bundle."""
    raw = (bundle / "convert_config.json").read_bytes()
    config, stage = parse(raw), parse((bundle / "manifest.json").read_bytes()).get("sidecarStage")
    io, first = config["hostio"], config["first_shared"]
    dims = {"sliding_attention": io["HD"], "full_attention": io["GHD"]}
    return {
        "convertConfigSHA256": hashlib.sha256(raw).hexdigest(),
        "numLayers": config["num_layers"],
        "hidden": config["hidden"],
        "pleDim": config["ple_dim"],
        "firstShared": first,
        "ctx": io["CTX"],
        "hd": io["HD"],
        "ghd": io["GHD"],
        "sliding": io["SLIDING"],
        "sidecarStage": stage or config["corellm"]["sidecars"].get("default_stage", "fp16"),
        "ownLayerHeadDims": [dims[kind] for kind in io["layer_types"][:first]],
        "storeLayers": config["store_layers"],
    }


def read(folder: Path) -> Checkpoint:
    m = parse((folder / "manifest.json").read_bytes())
    need(m["schemaVersion"] == 1, f"schemaVersion {m['schemaVersion']}: this reads 1")
    identity, n, tokens = m["identity"], m["position"], m["processedTokens"]
    layers = sorted(m["layers"], key=lambda x: int(x["layer"]))
    need(set(identity) >= IDENTITY and all(type(identity[x]) is int for x in NUMBERS), "identity: other fields")
    need(set(identity["storeLayers"]) == set(KINDS), "storeLayers: other kinds")
    need(isinstance(tokens, list) and type(n) is int, "position or processedTokens of another type")
    need(0 < n <= identity["ctx"] and n == len(tokens) == m["tokenCount"], "position, tokens and tokenCount differ")
    need(all(type(token) is int and token >= 0 for token in tokens), "a token is no id")
    need(sha256_of(tokens) == m["tokenSeqSHA256"], "tokenSeqSHA256 is of other tokens")
    need([x["layer"] for x in layers] == [*range(identity["firstShared"])], "not the layers below firstShared")
    rows = {}
    for i, (x, dim) in enumerate(zip(layers, identity["ownLayerHeadDims"], strict=True)):
        need(identity[KINDS[x["type"]]] == x["headDim"] == dim, f"layer {i}: headDim {x['headDim']} of {x['type']}")
        need(x["rows"] == n, f"layer {i}: {x['rows']} rows of {n}")
        for kv in "kv":
            data, said = (folder / f"{kv}_{i}.bin").read_bytes(), x[f"{kv}Bytes"]
            need(x[f"{kv}File"] == f"{kv}_{i}.bin", f"layer {i}: a file of another name")
            need(len(data) == said == 2 * n * dim, f"{kv}_{i}.bin: {len(data)} bytes, said {said}, rows {2 * n * dim}")
            rows[i, kv] = np.frombuffer(data, "<f2").reshape(n, dim)
            need(np.isfinite(rows[i, kv]).all(), f"{kv}_{i}.bin: a NaN or an infinity")
    made = {x: str(m[x]) for x in MADE}
    kinds = [x["type"] for x in layers]
    return Checkpoint(identity, tokens, kinds, rows, m.get("pendingNextToken"), m.get("bundleName"), made)


def write(folder: Path, it: Checkpoint) -> None:
    folder.mkdir()
    layers = []
    for i, kind in enumerate(it.kinds):
        entry: dict[str, Any] = {"layer": i, "type": kind, "headDim": it.identity[KINDS[kind]], "rows": len(it.tokens)}
        for kv in "kv":
            data = np.ascontiguousarray(it.rows[i, kv], "<f2").tobytes()
            (folder / f"{kv}_{i}.bin").write_bytes(data)
            entry |= {f"{kv}File": f"{kv}_{i}.bin", f"{kv}Bytes": len(data)}
        layers.append(entry)
    manifest: dict[str, Any] = {
        "schemaVersion": 1,
        "identity": it.identity,
        "position": len(it.tokens),
        "tokenCount": len(it.tokens),
        "tokenSeqSHA256": sha256_of(it.tokens),
        "processedTokens": it.tokens,
        "layers": layers,
        **it.made,
    }
    manifest |= {} if it.pending is None else {"pendingNextToken": it.pending}
    manifest |= {} if it.bundle is None else {"bundleName": it.bundle}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True), encoding="utf-8")
