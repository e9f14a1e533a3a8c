"""What it takes to build a Gemma 4 bundle: a draft for each source, and its needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from runtime.build.compress import stored_bytes
from runtime.build.emitter import Numerics
from runtime.build.gemma4.folder import check_files, folder_origin, open_folder, read_folder_config
from runtime.build.gemma4.model import Gemma4Model, Packing
from runtime.build.gemma4.parts import chunk_bytes, chunk_elements, gemma4_parts
from runtime.build.gemma4.spec import Gemma4Spec
from runtime.build.gemma4.tiny import tiny_gemma4
from runtime.build.plan import Draft, Plan

#: coremltools, and one matrix of float32 numbers beside what it is made into.
_BASE_MEMORY = 300_000_000
#: A program's operations: six functions a chunk, with about 70 of them a layer.
_GRAPH_BYTES = 160_000


def model_draft(model: Gemma4Model, packing: Packing, numerics: Numerics | None = None) -> Draft:
    """Of a model that is open already."""
    chosen = numerics or Numerics()
    plan = Plan(model.license, gemma4_parts(model, packing, chosen))
    origin = {**model.origin, **packing.origin()}
    return Draft(model.spec.name, origin, model.terms, chosen, lambda scratch: nullcontext(plan))


def seeded_draft(seed: int, packing: Packing) -> Draft:
    """Of ``tiny-gemma4``."""
    return model_draft(tiny_gemma4(seed), packing)


def folder_draft(root: Path, name: str | None, packing: Packing) -> Draft:
    """Of a Hugging Face folder, all of whose weights are read once for their digest. Raises what opening it raises."""
    spec = read_folder_config(root, name)
    check_files(root, spec)
    origin = folder_origin(root)
    numerics = Numerics()

    @contextmanager
    def opened(scratch: Path) -> Iterator[Plan]:
        with open_folder(root, name, origin) as model:
            yield Plan(model.license, gemma4_parts(model, packing, numerics))

    return Draft(spec.name, {**origin, **packing.origin()}, None, numerics, opened)


def bundle_bytes(spec: Gemma4Spec, packing: Packing) -> int:
    """What the bundle takes on disk, rounded up; the heads once where they share a file."""
    head = stored_bytes("int8", spec.vocabulary, spec.hidden)
    if packing.verify_head == "pal6":
        head += stored_bytes("pal6", spec.vocabulary, spec.hidden)
    each = {"int8": 1, "fp16": 2}[packing.sidecars]
    tables = spec.vocabulary * (each * (spec.hidden + spec.layers * spec.ple) + 8)
    chunks = sum(chunk_bytes(spec, packing, bounds) for bounds in spec.chunk_bounds)
    return head + tables + chunks + spec.layers * _GRAPH_BYTES + 200 * spec.vocabulary + 2_000_000


def extra_bytes(spec: Gemma4Spec, packing: Packing) -> int:
    """What hard links save, for file systems that have none."""
    return stored_bytes("int8", spec.vocabulary, spec.hidden) if packing.verify_head == "same" else 0


def memory_bytes(spec: Gemma4Spec, packing: Packing) -> int:
    """The largest working set of the build."""
    each = {"pal6": 1, "int8": 1, "fp16": 2}[packing.weights]
    chunk = max(chunk_elements(spec, bounds) for bounds in spec.chunk_bounds)
    head = spec.vocabulary * spec.hidden
    largest = max(out * width for i in range(spec.layers) for out, width in spec.matrices(i).values())
    return _BASE_MEMORY + 12 * largest + max(each * chunk, head)
