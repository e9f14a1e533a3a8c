"""The packages of a bundle from a source: chunks, and the two heads over one weight file."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.build import config
from runtime.build.authoring import WEIGHT_FILE, FunctionRecipe, write_package
from runtime.build.digests import TensorDigest, tensor_digest
from runtime.build.emitter import F16, Emitter, Numerics
from runtime.build.errors import not_finite
from runtime.build.graph import ChunkFunction, Layer, best_margin, chunk_inputs, fold, greedy_token, head_logits
from runtime.build.sidecar import BLOCK_ROWS, quantise_output
from runtime.build.source import Source
from runtime.build.spec import (
    EMBEDDING,
    OFFSET_WIDTHS,
    OUTPUT,
    OUTPUT_NORM,
    PLAIN_WIDTH,
    VERIFY_WIDTH,
    Spec,
)

Digests = dict[str, TensorDigest]


def read_layer(source: Source, index: int) -> Layer:
    """One layer's tensors as the bundle keeps them (fp16), before any gain is folded."""
    return {name: _half(f"blk.{index}.{name}", source) for name in source.spec.layer_tensors}


def _half(name: str, source: Source) -> NDArray[np.float16]:
    """A tensor rounded to fp16. Raises SourceFieldError where that is not finite."""
    tensor = source.weights.tensor(name)
    with np.errstate(over="ignore"):
        half = tensor.astype(F16)
    if not np.isfinite(half).all():
        raise not_finite(name, float(np.abs(tensor).max()))
    return half


def chunk_recipes(
    spec: Spec, numerics: Numerics, bounds: tuple[int, int], layers: Mapping[int, Layer]
) -> list[FunctionRecipe]:
    """A chunk's functions: decode, the plain prefill, and prefill at an offset in each width. ``layers`` are folded."""

    def recipe(name: str, width: int | None, *, plain: bool = False) -> FunctionRecipe:
        def emit(mb: Any, inputs: Mapping[str, Any]) -> list[Any]:
            return ChunkFunction(Emitter(mb, numerics), spec, width, plain, inputs).outputs(bounds, layers)

        return FunctionRecipe(name, chunk_inputs(spec, bounds, width, plain=plain), emit)

    return [
        recipe("decode", None),
        recipe(config.prefill_function(PLAIN_WIDTH), PLAIN_WIDTH, plain=True),
        *(recipe(config.prefill_function(width), width) for width in OFFSET_WIDTHS),
    ]


def write_chunk(
    path: Path, source: Source, numerics: Numerics, bounds: tuple[int, int], progress: Callable[[float], None]
) -> Digests:
    """Write the package of layers ``bounds``; the digests of their tensors by name."""
    first, stop = bounds
    layers: dict[int, Layer] = {}
    digests: Digests = {}
    for index in range(first, stop):
        progress(0.4 * (index - first) / (stop - first))
        layer = read_layer(source, index)
        digests |= {f"blk.{index}.{name}": tensor_digest(tensor) for name, tensor in layer.items()}
        layers[index] = fold(source.spec, numerics, layer)
    write_package(path, chunk_recipes(source.spec, numerics, bounds, layers))
    return digests


def write_heads(folder: Path, source: Source, numerics: Numerics, progress: Callable[[float], None]) -> Digests:
    """Write both head packages into ``folder``, sharing one weight file; the digests of their tensors by name."""
    spec = source.spec
    matrix = OUTPUT if source.weights.has(OUTPUT) else EMBEDDING
    rows, steps = quantise_output(
        matrix,
        source.weights.row_blocks(matrix, BLOCK_ROWS),
        (spec.vocabulary, spec.hidden),
        lambda done: progress(0.8 * done / spec.vocabulary),
    )
    gain = _half(OUTPUT_NORM, source)
    for name, shape in ((config.HEAD, (spec.hidden,)), (config.VERIFY_HEAD, (VERIFY_WIDTH, spec.hidden))):
        write_package(folder / name, head_recipes(spec, numerics, shape, gain, rows, steps))
    share_file(folder / config.HEAD / WEIGHT_FILE, folder / config.VERIFY_HEAD / WEIGHT_FILE)
    return {
        OUTPUT_NORM: tensor_digest(gain),
        "output.rows": tensor_digest(rows),
        "output.steps": tensor_digest(steps),
    }


def head_recipes(
    spec: Spec,
    numerics: Numerics,
    shape: tuple[int, ...],
    gain: NDArray[np.float16],
    rows: NDArray[np.int8],
    steps: NDArray[np.float16],
) -> list[FunctionRecipe]:
    """The functions of a head package, from ``hidden`` of ``shape``: the default one gives ``token`` alone, as the published heads do; the other
    also ``margin``. It is a function of its own so that whoever doesn't ask pays nothing for it."""

    def emit(mb: Any, inputs: Mapping[str, Any], margin: bool) -> list[Any]:
        emitter = Emitter(mb, numerics)
        logits = head_logits(emitter, spec, inputs["hidden"], gain, rows, steps)
        return [greedy_token(emitter, logits), *([best_margin(emitter, logits)] if margin else [])]

    return [
        FunctionRecipe(name, {"hidden": shape}, partial(emit, margin=margin))
        for name, margin in (("main", False), (config.MARGIN_FUNCTION, True))
    ]


def share_file(first: Path, second: Path) -> None:
    """Make ``second`` a hard link to ``first`` if their bytes are equal: 168 MB for Gemma."""
    if not filecmp.cmp(first, second, shallow=False):
        return
    link = second.with_suffix(".link")
    try:
        os.link(first, link)
    except OSError:  # a file system without hard links keeps two copies
        return
    link.replace(second)
