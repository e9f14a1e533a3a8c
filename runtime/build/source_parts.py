"""The parts of a bundle of a :class:`Source`: the embedding, the tokenizer, chunks, heads, and the files that describe them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from runtime.build import config
from runtime.build.authoring import import_coremltools
from runtime.build.emitter import Numerics
from runtime.build.packages import write_chunk, write_heads
from runtime.build.plan import Digests, Part, Report
from runtime.build.sidecar import BLOCK_ROWS, write_embedding
from runtime.build.source import Source
from runtime.build.spec import EMBEDDING


def source_parts(source: Source, numerics: Numerics) -> tuple[Part, ...]:
    """The parts in the order they are made, with their work in seconds (measured on one slow core)."""
    spec = source.spec
    matrix = spec.vocabulary * spec.hidden / 1e6

    def embedding(folder: Path, report: Report) -> Digests:
        return write_embedding(
            EMBEDDING,
            source.weights.row_blocks(EMBEDDING, BLOCK_ROWS),
            folder / config.EMBED_ROWS,
            folder / config.EMBED_SCALES,
            shape=(spec.vocabulary, spec.hidden),
            divide=numerics.residual_scale,
            progress=lambda done: report(done / spec.vocabulary),
        )

    def tokenizer(folder: Path, report: Report) -> Digests:
        (folder / "tokenizer.json").write_text(source.vocabulary.tokenizer_json(), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(source.vocabulary.tokenizer_config_json(), encoding="utf-8")
        return {}

    def coremltools(folder: Path, report: Report) -> Digests:
        import_coremltools()
        return {}

    def chunk(index: int, folder: Path, report: Report) -> Digests:
        return write_chunk(folder / config.chunk_package(index), source, numerics, spec.chunk_bounds[index], report)

    def heads(folder: Path, report: Report) -> Digests:
        return write_heads(folder, source, numerics, report)

    def description(folder: Path, report: Report) -> Digests:
        (folder / "convert_config.json").write_bytes(config.dump(config.convert_config(spec, numerics.residual_scale)))
        (folder / "manifest.json").write_bytes(config.dump(config.manifest(spec, source.turns)))
        if source.terms is not None:
            (folder / "NOTICE").write_text(source.terms + "\n", encoding="utf-8")
        return {}

    return (
        Part("embedding", 0.014 * matrix, embedding),
        Part("tokenizer", 1e-5 * spec.vocabulary, tokenizer),
        Part("coremltools", 2.0, coremltools),
        *(
            Part(config.chunk_package(index), 0.5 * (b - a), partial(chunk, index))
            for index, (a, b) in enumerate(spec.chunk_bounds)
        ),
        Part("heads", 0.023 * matrix + 0.2, heads),
        Part("description", 0.1, description),
    )
