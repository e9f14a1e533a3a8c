"""The two JSON files the published bundle format asks for: ``manifest.json`` and ``convert_config.json``."""

from __future__ import annotations

import json
from typing import Any

from runtime.build.spec import FULL, NEG, OFFSET_WIDTHS, PLAIN_WIDTH, SLIDING, VERIFY_WIDTH, Spec

FORMAT = "kvferry-bundle-1"
HEAD = "lmhead.mlpackage"
VERIFY_HEAD = f"lmhead_v{VERIFY_WIDTH}.mlpackage"
EMBED_ROWS = "embed_int8.bin"
EMBED_SCALES = "embed_scale_f32.bin"


def chunk_package(index: int) -> str:
    return f"chunk_{index}.mlpackage"


def prefill_function(width: int) -> str:
    return f"prefill_{width}"


def convert_config(spec: Spec) -> dict[str, Any]:
    """``convert_config.json``: geometry, what the host supplies, and the names of packages, functions and sidecars."""
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
            "SLIDING": spec.window,
            "NEG": NEG,
            "layer_types": list(spec.layer_types),
            "inv_slide": list(spec.rope_frequencies(SLIDING)),
            "inv_full": list(spec.rope_frequencies(FULL)),
        },
        "corellm": {
            "chunks": [chunk_package(index) for index in range(len(spec.chunk_bounds))],
            "lmhead": HEAD,
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
                        "runtime_scale_sqrt": spec.hidden,
                    }
                },
            },
        },
    }


def manifest(spec: Spec, *, chat: bool) -> dict[str, Any]:
    """``manifest.json``. ``chat``: the model was trained on Gemma's turns, so the app may wrap messages in them."""
    document: dict[str, Any] = {
        "name": spec.name,
        "architecture": "gemma3",
        "format": FORMAT,
        "contextLength": spec.context,
        "modelRelativePath": ".",
        "tokenizerRelativePath": ".",
        "eos": list(spec.eos_token_ids),
        "sidecarStage": "int8",
        "computeUnits": "all",
    }
    if chat:
        document["promptPrefix"] = "<start_of_turn>user\n"
        document["promptSuffix"] = "<end_of_turn>\n<start_of_turn>model\n"
        document["assistantSuffix"] = "<end_of_turn>\n"
    return document


def dump(document: dict[str, Any]) -> bytes:
    """Pretty-printed UTF-8 JSON with a final newline: the same document gives the same bytes."""
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
