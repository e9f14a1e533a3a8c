"""The parts of a Gemma 4 bundle: two tables, the tokenizer, chunks, heads, and the files that describe them."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from runtime.build import config
from runtime.build.authoring import WEIGHT_FILE, FunctionRecipe, import_coremltools, write_package
from runtime.build.compress import (
    GROUP_ROWS,
    Half,
    Matrix,
    Palette,
    Rows8,
    as_half,
    compress,
    digests,
    palettise,
    stored_bytes,
)
from runtime.build.digests import TensorDigest, tensor_digest
from runtime.build.emitter import Emitter, Numerics
from runtime.build.gemma4 import description
from runtime.build.gemma4.graph import ChunkFunction, ChunkWeights, chunk_inputs, fold, head_outputs
from runtime.build.gemma4.model import Gemma4Model, Packing
from runtime.build.gemma4.spec import EMBEDDING, FINAL_NORM, PLE_EMBEDDING, PLE_NORM, PLE_PROJECTION, Gemma4Spec
from runtime.build.kmeans import ENTRIES
from runtime.build.packages import share_file
from runtime.build.plan import Digests, Part, Report
from runtime.build.sidecar import quantise_output, write_embedding, write_half_table
from runtime.build.spec import OFFSET_WIDTHS, PLAIN_WIDTH, VERIFY_WIDTH

#: Elements of a table read at a time: 40 MB of float32.
_BLOCK_ELEMENTS = 10_000_000
#: Rows whose tables are made before progress is reported.
_HEAD_ROWS = 4096


def gemma4_parts(model: Gemma4Model, packing: Packing, numerics: Numerics) -> tuple[Part, ...]:
    """In the order they are made. Work is in seconds, measured on one slow core."""
    spec = model.spec

    def tokenizer(folder: Path, report: Report) -> Digests:
        for name, content in model.tokenizer.items():
            if isinstance(content, Path):
                shutil.copyfile(content, folder / name)
            else:
                (folder / name).write_text(content, encoding="utf-8")
        return {}

    def coremltools(folder: Path, report: Report) -> Digests:
        import_coremltools()
        return {}

    def describe(folder: Path, report: Report) -> Digests:
        converted = description.convert_config(spec, packing)
        (folder / "convert_config.json").write_bytes(config.dump(converted))
        manifest = description.manifest(spec, packing, model.turns)
        (folder / "manifest.json").write_bytes(config.dump(manifest))
        if model.terms is not None:
            (folder / "NOTICE").write_text(model.terms + "\n", encoding="utf-8")
        return {}

    vocabulary, width = spec.vocabulary / 1e6, spec.layers * spec.ple
    work = {"pal6": 0.08, "int8": 0.03, "fp16": 0.02}[packing.weights]
    return (
        Part("embedding", 0.014 * vocabulary * spec.hidden, partial(_table, model, packing, "embed", spec.hidden)),
        Part("per-layer embedding", 0.014 * vocabulary * width, partial(_table, model, packing, "ple", width)),
        Part("tokenizer", 0.1, tokenizer),
        Part("coremltools", 2.0, coremltools),
        *(
            Part(
                config.chunk_package(index),
                0.7 * (bounds[1] - bounds[0]) + work * chunk_elements(spec, bounds) / 1e6,
                partial(_chunk, model, packing, numerics, index),
            )
            for index, bounds in enumerate(spec.chunk_bounds)
        ),
        Part("heads", 0.023 * vocabulary * spec.hidden + 0.2, partial(_heads, model, packing, numerics)),
        Part("description", 0.1, describe),
    )


def chunk_elements(spec: Gemma4Spec, bounds: tuple[int, int]) -> int:
    """Elements of a chunk's matrices."""
    layers = [out * width for i in range(*bounds) for out, width in spec.matrices(i).values()]
    return sum(layers) + (bounds[1] - bounds[0]) * spec.ple * spec.hidden


def chunk_bytes(spec: Gemma4Spec, packing: Packing, bounds: tuple[int, int]) -> int:
    """What a chunk's weights take on disk, without the blobs' headers."""
    matrices = [shape for i in range(*bounds) for shape in spec.matrices(i).values()]
    matrices += [((bounds[1] - bounds[0]) * spec.ple, spec.hidden)]
    vectors = sum(2 * length for i in range(*bounds) for (length,) in spec.vectors(i).values())
    return vectors + sum(stored_bytes(packing.weights, out, width) for out, width in matrices)


def _table(
    model: Gemma4Model, packing: Packing, which: str, width: int, folder: Path, report: Report
) -> dict[str, TensorDigest]:
    """A sidecar, undivided: the host feeds its rows to every chunk, and the first divides."""
    spec = model.spec
    name, square = (EMBEDDING, spec.hidden) if which == "embed" else (PLE_EMBEDDING, spec.ple)
    values, scales = (description.EMBED if which == "embed" else description.PLE)[packing.sidecars]
    blocks = model.weights.row_blocks(name, max(1, _BLOCK_ELEMENTS // width))
    shape, noted = (spec.vocabulary, width), name.removesuffix(".weight")

    def done(rows: int) -> None:
        report(rows / spec.vocabulary)

    if scales is None:
        return write_half_table(
            name, blocks, folder / values, shape=shape, square=square, progress=done, noted=f"{noted}.half"
        )
    return write_embedding(
        name, blocks, folder / values, folder / scales, shape=shape, divide=1.0, progress=done, noted=noted
    )


def _chunk(
    model: Gemma4Model, packing: Packing, numerics: Numerics, index: int, folder: Path, report: Report
) -> dict[str, TensorDigest]:
    bounds = model.spec.chunk_bounds[index]
    weights, noted = read_chunk(model, packing, bounds, report)
    folded = fold(model.spec, numerics, bounds, weights)
    write_package(folder / config.chunk_package(index), chunk_recipes(model.spec, numerics, bounds, folded))
    return noted


def read_chunk(
    model: Gemma4Model, packing: Packing, bounds: tuple[int, int], report: Report
) -> tuple[ChunkWeights, dict[str, TensorDigest]]:
    """A chunk's tensors as the bundle keeps them, before anything is folded, and their digests, which don't depend on the chunk's bounds."""
    spec = model.spec
    matrices: dict[str, Matrix] = {}
    vectors = {PLE_NORM: as_half(PLE_NORM, model.weights.tensor(PLE_NORM))}
    noted = {PLE_NORM: tensor_digest(vectors[PLE_NORM])}
    projections: list[Matrix] = []
    # compressed layer by layer, so that no group of rows reaches into another layer
    by_layer = islice(model.weights.row_blocks(PLE_PROJECTION, spec.ple), *bounds)
    for i, projection in zip(range(*bounds), by_layer, strict=True):
        report(0.8 * (i - bounds[0]) / (bounds[1] - bounds[0]))
        for name in spec.matrices(i):
            matrices[name] = compress(name, packing.weights, model.weights.tensor(name))
            noted |= digests(name, matrices[name])
        for name in spec.vectors(i):
            vectors[name] = as_half(name, model.weights.tensor(name))
            noted[name] = tensor_digest(vectors[name])
        projections.append(compress(PLE_PROJECTION, packing.weights, projection))
        noted |= digests(f"{i}.{PLE_PROJECTION}", projections[-1])
    matrices[PLE_PROJECTION] = _stacked(projections)
    return ChunkWeights(matrices, vectors), noted


def _stacked(parts: list[Matrix]) -> Matrix:
    """Matrices of one form above each other."""
    first = parts[0]
    if isinstance(first, Half):
        return Half(np.concatenate([p.values for p in parts if isinstance(p, Half)]))
    if isinstance(first, Rows8):
        rows = [p for p in parts if isinstance(p, Rows8)]
        return Rows8(np.concatenate([p.rows for p in rows]), np.concatenate([p.steps for p in rows]))
    palettes = [p for p in parts if isinstance(p, Palette)]
    return Palette(np.concatenate([p.indices for p in palettes]), np.concatenate([p.tables for p in palettes]))


def chunk_recipes(
    spec: Gemma4Spec, numerics: Numerics, bounds: tuple[int, int], weights: ChunkWeights
) -> list[FunctionRecipe]:
    """A chunk's functions: decode, the plain prefill, and prefill at an offset in each width. ``weights`` are folded."""

    def recipe(name: str, width: int | None, *, plain: bool = False) -> FunctionRecipe:
        def emit(mb: Any, inputs: Mapping[str, Any]) -> list[Any]:
            return ChunkFunction(Emitter(mb, numerics), spec, bounds, width, plain, weights, inputs).outputs()

        return FunctionRecipe(name, chunk_inputs(spec, bounds, width, plain=plain), emit)

    return [
        recipe("decode", None),
        recipe(config.prefill_function(PLAIN_WIDTH), PLAIN_WIDTH, plain=True),
        *(recipe(config.prefill_function(width), width) for width in OFFSET_WIDTHS),
    ]


def _heads(
    model: Gemma4Model, packing: Packing, numerics: Numerics, folder: Path, report: Report
) -> dict[str, TensorDigest]:
    """Both heads: int8 rows of the embedding, which the model ties to its output, and the verification head as the packing has it."""
    spec = model.spec
    gain = as_half(FINAL_NORM, model.weights.tensor(FINAL_NORM))
    shape = (spec.vocabulary, spec.hidden)
    rows = Rows8(
        *quantise_output(
            EMBEDDING,
            model.weights.row_blocks(EMBEDDING, _HEAD_ROWS),
            shape,
            lambda done: report(0.4 * done / spec.vocabulary),
        )
    )
    noted = {"output_norm": tensor_digest(gain), **dict(digests("output", rows))}

    def write(package: str, shape: tuple[int, ...], name: str, matrix: Matrix) -> None:
        def emit(mb: Any, inputs: Mapping[str, Any], margin: bool) -> list[Any]:
            return head_outputs(Emitter(mb, numerics), spec, inputs["hidden"], gain, name, matrix, margin=margin)

        functions = {"main": False, **({config.MARGIN_FUNCTION: True} if packing.margins else {})}
        write_package(
            folder / package,
            [FunctionRecipe(f, {"hidden": shape}, partial(emit, margin=margin)) for f, margin in functions.items()],
        )

    write(config.HEAD, (spec.hidden,), "output", rows)
    batch = (VERIFY_WIDTH, spec.hidden)
    if packing.verify_head == "same":
        write(config.VERIFY_HEAD, batch, "output", rows)
        share_file(folder / config.HEAD / WEIGHT_FILE, folder / config.VERIFY_HEAD / WEIGHT_FILE)
        return noted
    del rows
    small = _palettised(model, report)
    write(config.VERIFY_HEAD, batch, "output_verify", small)
    return {**noted, **dict(digests("output_verify", small))}


def _palettised(model: Gemma4Model, report: Report) -> Palette:
    """The output matrix in 6 bits, some thousand rows at a time: whole, its float32 numbers would take 1.6 GB for E2B."""
    shape = (model.spec.vocabulary, model.spec.hidden)
    rows = math.gcd(shape[0], GROUP_ROWS)
    made = Palette(np.empty(shape, np.uint8), np.empty((shape[0] // rows, ENTRIES), np.float16))
    done = 0
    for block in model.weights.row_blocks(EMBEDDING, _HEAD_ROWS):
        part, stop = palettise(as_half(EMBEDDING, block), rows), done + len(block)
        made.indices[done:stop], made.tables[done // rows : stop // rows] = part.indices, part.tables
        done = stop
        report(0.4 + 0.5 * done / shape[0])
    return made
