"""The two JSON files the published bundle format asks for: ``manifest.json`` and ``convert_config.json``."""

from __future__ import annotations

import json
from typing import Any

from runtime.build.source import Turns
from runtime.build.spec import FULL, NEG, OFFSET_WIDTHS, PLAIN_WIDTH, SLIDING, VERIFY_WIDTH, Spec

FORMAT = "kvferry-bundle-1"
HEAD = "lmhead.mlpackage"
VERIFY_HEAD = f"lmhead_v{VERIFY_WIDTH}.mlpackage"
MARGIN_FUNCTION = "margin"
EMBED_ROWS = "embed_int8.bin"
EMBED_SCALES = "embed_scale_f32.bin"


def chunk_package(index: int) -> str:
    return f"chunk_{index}.mlpackage"


def prefill_function(width: int) -> str:
    return f"prefill_{width}"


def convert_config(spec: Spec, embed_divisor: float) -> dict[str, Any]:
    """``convert_config.json``: geometry, what the host supplies, and the names of packages, functions and sidecars.

    ``embed_divisor``: what the rows of the embedding sidecar are divided by.
    """
    widths = (PLAIN_WIDTH, *OFFSET_WIDTHS)
    return {
        "num_layers": spec.layers,
        "hidden": spec.hidden,
        "ple_dim": 0,
        "first_shared": spec.layers,
        "chunk_bounds": [list(bounds) for bounds in spec.chunk_bounds],
        "eos_token_ids": list(spec.eos_token_ids),
        "hostio": {
            "CTX": spec.context,
            "HD": spec.head_dim,
            "GHD": spec.head_dim,
            "KV_HEADS": spec.kv_heads,
            **({} if spec.window is None else {"SLIDING": spec.window}),
            "NEG": NEG,
            "EMBED_DIVISOR": embed_divisor,
            "layer_types": list(spec.layer_types),
            **({} if spec.window is None else {"inv_slide": list(spec.rope_frequencies(SLIDING))}),
            "inv_full": list(spec.rope_frequencies(FULL)),
        },
        "corellm": {
            "chunks": [chunk_package(index) for index in range(len(spec.chunk_bounds))],
            "lmhead": HEAD,
            "margin_function": MARGIN_FUNCTION,
            "decode_function": "decode",
            "prefill": {
                "N": list(widths),
                "functions": {str(width): prefill_function(width) for width in widths},
                "plain_N": PLAIN_WIDTH,
            },
            "verify": {
                "widths": [VERIFY_WIDTH],
                "functions": {str(VERIFY_WIDTH): prefill_function(VERIFY_WIDTH)},
                "lmhead_batched": {str(VERIFY_WIDTH): VERIFY_HEAD},
            },
            "sidecars": {
                "default_stage": "int8",
                "int8": {
                    "embed": {
                        "file": EMBED_ROWS,
                        "shape": [spec.vocabulary, spec.hidden],
                        "scale": EMBED_SCALES,
                        "runtime_scale_sqrt": spec.embedding_square,
                    }
                },
            },
        },
    }


def manifest(spec: Spec, turns: Turns | None) -> dict[str, Any]:
    """``manifest.json``. ``turns``: what the app may wrap messages in."""
    document: dict[str, Any] = {
        "name": spec.name,
        "architecture": spec.architecture,
        "format": FORMAT,
        "contextLength": spec.context,
        "modelRelativePath": ".",
        "tokenizerRelativePath": ".",
        "eos": list(spec.eos_token_ids),
        "sidecarStage": "int8",
        "computeUnits": "all",
    }
    if turns is not None:
        document["promptPrefix"] = turns.prefix
        document["promptSuffix"] = turns.suffix
        document["assistantSuffix"] = turns.assistant_suffix
    return document


def dump(document: dict[str, Any]) -> bytes:
    """Pretty-printed UTF-8 JSON with a final newline: the same document gives the same bytes."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
