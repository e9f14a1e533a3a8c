"""The two JSON files of a Gemma 4 bundle, in the published names and keys; one more where the heads give margins."""

from __future__ import annotations

from typing import Any

from runtime.build import config
from runtime.build.gemma4.model import Packing
from runtime.build.gemma4.spec import Gemma4Spec
from runtime.build.source import Turns
from runtime.build.spec import FULL, NEG, OFFSET_WIDTHS, PLAIN_WIDTH, SLIDING, VERIFY_WIDTH

FORMAT = "coreml-corellm-r1"
ARCHITECTURE = "gemma4"
#: File names by stage: values, and scales where there are any.
EMBED = {"int8": ("embed_int8.bin", "embed_scale_f32.bin"), "fp16": ("embed_fp16.bin", None)}
PLE = {"int8": ("ple_int8.bin", "ple_scale_f32.bin"), "fp16": ("ple_fp16.bin", None)}


def convert_config(spec: Gemma4Spec, packing: Packing) -> dict[str, Any]:
    """``convert_config.json``."""
    widths = (PLAIN_WIDTH, *OFFSET_WIDTHS)
    tables = {
        "embed": _table(EMBED[packing.sidecars], (spec.vocabulary, spec.hidden), spec.hidden),
        "ple": _table(PLE[packing.sidecars], (spec.vocabulary, spec.layers * spec.ple), spec.ple),
    }
    return {
        "num_layers": spec.layers,
        "hidden": spec.hidden,
        "ple_dim": spec.ple,
        "first_shared": spec.first_shared,
        "store_layers": {kind: spec.store_layer(kind) for kind in (SLIDING, FULL)},
        "chunk_bounds": [list(bounds) for bounds in spec.chunk_bounds],
        "eos_token_ids": list(spec.eos_token_ids),
        "hostio": {
            "CTX": spec.context,
            "HD": spec.head_dim,
            "GHD": spec.global_head_dim,
            "SLIDING": spec.window,
            "NEG": NEG,
            "layer_types": list(spec.layer_types),
            "inv_slide": list(spec.rope_frequencies(SLIDING)),
            "inv_full": list(spec.rope_frequencies(FULL)),
        },
        "corellm": {
            "chunks": [config.chunk_package(index) for index in range(len(spec.chunk_bounds))],
            "lmhead": config.HEAD,
            **({"margin_function": config.MARGIN_FUNCTION} if packing.margins else {}),
            "decode_function": "decode",
            "prefill": {
                "N": list(widths),
                "functions": {str(width): config.prefill_function(width) for width in widths},
                "plain_N": PLAIN_WIDTH,
            },
            "verify": {
                "widths": [VERIFY_WIDTH],
                "functions": {str(VERIFY_WIDTH): config.prefill_function(VERIFY_WIDTH)},
                "lmhead_batched": {str(VERIFY_WIDTH): config.VERIFY_HEAD},
            },
            "sidecars": {"default_stage": packing.sidecars, packing.sidecars: tables},
        },
    }


def _table(files: tuple[str, str | None], shape: tuple[int, int], square: int) -> dict[str, Any]:
    values, scales = files
    table: dict[str, Any] = {"file": values, "shape": list(shape)}
    return table if scales is None else table | {"scale": scales, "runtime_scale_sqrt": square}


def manifest(spec: Gemma4Spec, packing: Packing, turns: Turns | None) -> dict[str, Any]:
    """``manifest.json``."""
    document: dict[str, Any] = {
        "name": spec.name,
        "architecture": ARCHITECTURE,
        "format": FORMAT,
        "contextLength": spec.context,
        "modelRelativePath": ".",
        "tokenizerRelativePath": ".",
        "eos": list(spec.eos_token_ids),
        "sidecarStage": packing.sidecars,
        "computeUnits": "all",
    }
    if turns is not None:
        document["promptPrefix"] = turns.prefix
        document["promptSuffix"] = turns.suffix
        document["assistantSuffix"] = turns.assistant_suffix
    return document
