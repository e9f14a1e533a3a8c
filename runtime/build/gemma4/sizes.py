"""What a Gemma 4 bundle's functions and tables will take, from the configuration alone: for plans before anything is downloaded or built."""

from __future__ import annotations

from math import prod
from pathlib import Path

from kvstore.jsonfile import JsonInvalid, read_object
from runtime.build import config
from runtime.build.compress import Form, stored_bytes
from runtime.build.errors import SourceDamaged
from runtime.build.gemma4 import description
from runtime.build.gemma4.config import CONFIG, read_config
from runtime.build.gemma4.graph import chunk_inputs
from runtime.build.gemma4.model import Packing
from runtime.build.gemma4.parts import chunk_bytes
from runtime.build.gemma4.spec import Gemma4Spec
from runtime.build.spec import OFFSET_WIDTHS, PLAIN_WIDTH, VERIFY_WIDTH
from runtime.bundle import parse_config
from runtime.engine import is_host_cache
from runtime.plan_sizes import FunctionSize, ModelSizes

_HALF = 2
_TOKEN = 4
_LIMIT = 8 << 20


def config_sizes(path: Path, packing: Packing) -> ModelSizes:
    """Of the model that a ``config.json`` (or the folder with one) describes; nothing else is read.

    Raises SourceDamaged, SourceFieldError, ArchitectureUnsupported, OSError.
    """
    file = path / CONFIG if path.is_dir() else path
    try:
        document, _ = read_object(file, limit=_LIMIT)
    except JsonInvalid as error:
        raise SourceDamaged(str(error), file=str(file), field=error.field) from error
    name = file.resolve().parent.name if file.name == CONFIG else file.stem
    return gemma4_sizes(read_config(document, name or "gemma4"), packing)


def gemma4_sizes(spec: Gemma4Spec, packing: Packing) -> ModelSizes:
    """As `runtime.plan_sizes.bundle_sizes` of the bundle that would be built: buffers exactly, weights but for small constants."""
    described = parse_config(description.manifest(spec, packing, None), description.convert_config(spec, packing))
    sizes: dict[tuple[str, str | None], FunctionSize] = {}
    for index, bounds in enumerate(spec.chunk_bounds):
        weights = chunk_bytes(spec, packing, bounds) + _HALF * spec.ple  # the norm of the per-layer embeddings
        package = config.chunk_package(index)
        sizes[package, described.decode_function] = FunctionSize(weights, _buffers(spec, bounds, None))
        for width in (PLAIN_WIDTH, *OFFSET_WIDTHS):
            sizes[package, described.prefill_functions[width]] = FunctionSize(weights, _buffers(spec, bounds, width))
    verify: Form = "pal6" if packing.verify_head == "pal6" else "int8"
    sizes[config.HEAD, None] = _head(spec, "int8", 1)
    sizes[config.VERIFY_HEAD, None] = _head(spec, verify, VERIFY_WIDTH)
    return ModelSizes(described, sizes)


def _buffers(spec: Gemma4Spec, bounds: tuple[int, int], width: int | None) -> int:
    """``width`` None is ``decode``, which returns the whole cache of its layers; the others return their rows."""
    rows = 1 if width is None else width
    inputs = chunk_inputs(spec, bounds, width, plain=width == PLAIN_WIDTH)
    given = sum(prod(shape) for name, shape in inputs.items() if not is_host_cache(name))
    kept = spec.context if width is None else width
    caches = sum(2 * kept * spec.head_dim_of(i) for i in range(*bounds) if spec.owns(i))
    return _HALF * (given + rows * spec.hidden + caches)


def _head(spec: Gemma4Spec, form: Form, rows: int) -> FunctionSize:
    matrix = stored_bytes(form, spec.vocabulary, spec.hidden)
    return FunctionSize(matrix + _HALF * spec.hidden, rows * (_HALF * spec.hidden + _TOKEN))
