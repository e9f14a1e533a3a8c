"""Building a bundle: every file into a staging folder beside the target, then one rename."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from runtime.build import config
from runtime.build.authoring import import_coremltools
from runtime.build.digests import (
    HEADS_CONTEXT,
    WEIGHTS_CONTEXT,
    TensorDigest,
    canonical_digest,
    file_digest,
    folder_digests,
)
from runtime.build.durable import publish_folder
from runtime.build.emitter import Numerics
from runtime.build.errors import TargetExists
from runtime.build.packages import Digests, write_chunk, write_heads
from runtime.build.sidecar import BLOCK_ROWS, write_embedding
from runtime.build.source import Offer, Source
from runtime.build.spec import EMBEDDING
from runtime.build.staging import Recipe, Staging, staging
from runtime.build.vocabulary import tokenizer_config_json, tokenizer_json

#: Called with what is being made and the finished fraction of the whole, 0 to 1, never decreasing.
Progress = Callable[[str, float], None]
Report = Callable[[float], None]
#: Raised whenever the same source would give other bytes.
BUILDER_VERSION = 3
RECORD = "kvferry.json"
#: The share of the work that opening the source is taken to be.
_SOURCE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class BuiltBundle:
    """A bundle that stands at ``path``. ``made`` is False when it stood there already. Digests in hex, time in seconds."""

    path: Path
    made: bool
    weights: str
    heads: str
    bytes: int
    seconds: float
    terms: str | None


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the bundle: what it is called, its share of the work, and what writes it into a folder."""

    name: str
    work: float
    write: Callable[[Path, Report], Mapping[str, TensorDigest]]


def assemble(source: Source, out: Path, *, progress: Progress, numerics: Numerics | None = None) -> BuiltBundle:
    """Build a source that is open already. As :func:`build`."""
    offer = Offer(source.spec.name, source.origin, source.terms, lambda scratch: nullcontext(source))
    return build(offer, out, progress=progress, numerics=numerics)


def build(offer: Offer, out: Path, *, progress: Progress, numerics: Numerics | None = None) -> BuiltBundle:
    """Build the model as the bundle ``out``. Raises TargetExists unless ``out`` is absent, empty, or already this bundle."""
    started = time.monotonic()
    numerics = numerics or Numerics()
    recipe = _recipe(offer, numerics)
    record = _standing(out, recipe)
    made = record is None
    if record is None:
        progress("reading the weights", 0.0)
        with staging(out, recipe) as stage:
            with offer.open(stage.scratch) as source:
                record = _fill(stage, source, recipe, numerics, progress)
            stage.finish()
            try:
                publish_folder(stage.root, out)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                raise _exists(out, "that somebody else filled it during the build", "Choose another folder") from error
    progress("done", 1.0)
    size = sum({(s.st_dev, s.st_ino): s.st_size for s in (path.stat() for path in out.rglob("*"))}.values())
    elapsed = time.monotonic() - started
    return BuiltBundle(out, made, record["weights"], record["heads"], size, elapsed, offer.terms)


def _fill(stage: Staging, source: Source, recipe: Recipe, numerics: Numerics, progress: Progress) -> dict[str, Any]:
    """Make every part that the staging folder doesn't have yet, then the record of them all, which is returned."""
    parts = _parts(source, numerics)
    whole = sum(part.work for part in parts) / (1 - _SOURCE_SHARE)
    finished = whole * _SOURCE_SHARE
    for part in parts:
        report = partial(_report, progress, part, finished, whole)
        report(0.0)
        stage.add(part.name, partial(_write, part, report))
        finished += part.work
    record = _record(source, recipe, stage)
    (stage.root / RECORD).write_bytes(config.dump(record))
    return record


def _report(progress: Progress, part: Part, finished: float, whole: float, fraction: float) -> None:
    progress(part.name, (finished + part.work * fraction) / whole)


def _write(part: Part, report: Callable[[float], None], folder: Path) -> Mapping[str, TensorDigest]:
    return part.write(folder, report)


def _parts(source: Source, numerics: Numerics) -> list[Part]:
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
        (folder / "tokenizer.json").write_text(tokenizer_json(source.vocabulary), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(tokenizer_config_json(source.vocabulary), encoding="utf-8")
        return {}

    def coremltools(folder: Path, report: Report) -> Digests:
        import_coremltools()
        return {}

    def chunk(index: int, folder: Path, report: Report) -> Digests:
        return write_chunk(folder / config.chunk_package(index), source, numerics, spec.chunk_bounds[index], report)

    def heads(folder: Path, report: Report) -> Digests:
        return write_heads(folder, source, numerics, report)

    def description(folder: Path, report: Report) -> Digests:
        (folder / "convert_config.json").write_bytes(config.dump(config.convert_config(spec)))
        (folder / "manifest.json").write_bytes(config.dump(config.manifest(spec, chat=source.chat)))
        if source.terms is not None:
            (folder / "NOTICE").write_text(source.terms + "\n", encoding="utf-8")
        return {}

    return [
        Part("embedding", 0.014 * matrix, embedding),
        Part("tokenizer", 1e-5 * spec.vocabulary, tokenizer),
        Part("coremltools", 2.0, coremltools),
        *(
            Part(config.chunk_package(index), 0.5 * (b - a), partial(chunk, index))
            for index, (a, b) in enumerate(spec.chunk_bounds)
        ),
        Part("heads", 0.023 * matrix + 0.2, heads),
        Part("description", 0.1, description),
    ]


def _recipe(offer: Offer, numerics: Numerics) -> dict[str, Any]:
    recipe: dict[str, Any] = {"builder": BUILDER_VERSION, "name": offer.name, "origin": dict(offer.origin)}
    if numerics != Numerics():
        recipe["numerics"] = repr(numerics)
    return recipe


def _record(source: Source, recipe: Recipe, stage: Staging) -> dict[str, Any]:
    digests = stage.digests()
    heads = {name: digest for name, digest in digests.items() if name.startswith("output")}
    weights = {name: digest for name, digest in digests.items() if name not in heads}
    return {
        "format": config.FORMAT,
        "weights": canonical_digest(weights, WEIGHTS_CONTEXT),
        "heads": canonical_digest(heads, HEADS_CONTEXT),
        "license": source.license,
        "source": dict(recipe),
        "files": folder_digests(stage.root, leave=(RECORD, *stage.own)),
    }


def _standing(out: Path, recipe: Recipe) -> dict[str, Any] | None:
    """The record of the bundle at ``out`` if it is the one to be built, and whole; None if nothing is there."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    fix = "Choose another folder, or remove this one first"
    try:
        record = json.loads((out / RECORD).read_bytes())
        found, files = record["source"], dict(record["files"])
    except (OSError, ValueError, KeyError, TypeError):
        raise _exists(out, "something that is no bundle of kvferry's builder", fix) from None
    if found != recipe:
        raise _exists(out, f"another bundle, of {json.dumps(found)}", fix)
    for name, expected in files.items():
        path = out / name
        digest = file_digest(path) if path.is_file() else None
        if digest != expected:
            raise _exists(
                out, f"it damaged: {name} has BLAKE3 {digest}, not {expected}", "Remove it and build it again"
            )
    return dict(record)


def _exists(out: Path, found: str, fix: str) -> TargetExists:
    message = f"{out}: expected no folder, an empty one or this very bundle, found {found}. {fix}."
    return TargetExists(message, target=str(out), found=found)
