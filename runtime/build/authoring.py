"""Making a ``.mlpackage`` with coremltools: the one file that imports it, and the one function with its private calls.

coremltools takes 2.4 s to import and writes lines about missing macOS libraries, so it is imported when a package is made, quietly.
The package folder is written here, not by coremltools: its own writer draws random identifiers, and ours is the same bytes every time.
"""

from __future__ import annotations

import gc
import json
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.build.errors import tool_missing

_MODEL = "com.apple.CoreML/model.mlmodel"
_WEIGHTS = "com.apple.CoreML/weights"
WEIGHT_FILE = f"Data/{_WEIGHTS}/weight.bin"


@dataclass(frozen=True, slots=True)
class FunctionRecipe:
    """One function of a package: fp16 inputs by name, and what emits its outputs (given the builder and the inputs)."""

    name: str
    inputs: Mapping[str, tuple[int, ...]]
    emit: Callable[[Any, Mapping[str, Any]], Sequence[Any]]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back warnings: coremltools logs one for each macOS library it misses, and so do packages that it probes for."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


def import_coremltools() -> Any:
    """coremltools, without its start-up lines. Raises ToolMissing when it isn't installed."""
    with _quiet():
        try:
            import coremltools
        except ModuleNotFoundError as error:
            raise tool_missing(error, "Making Core ML packages", "build") from error
    return coremltools


def six_bits(indices: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """``indices`` below 64, marked as 6 bits each for the builder: it packs them when it writes them. Shares memory."""
    from coremltools.converters.mil.mil.types import np_uint6_dtype

    marked: NDArray[np.uint8] = indices.view(np_uint6_dtype)
    return marked


def write_package(path: Path, recipes: Sequence[FunctionRecipe]) -> None:
    """Make the ML Program package ``path`` (iOS 18) of the given functions; the first is the default one.

    Deterministic: the same recipes give the same bytes. Functions that use a weight under the same id share its blob.
    """
    import_coremltools()
    data = path / "Data"
    (data / _WEIGHTS).mkdir(parents=True)
    with _quiet():
        specification = _convert(recipes, data / _WEIGHTS)
    gc.collect()  # programs are full of reference cycles, each holding a chunk's weights
    (data / _MODEL).write_bytes(specification.SerializeToString(deterministic=True))
    (path / "Manifest.json").write_text(_package_manifest(), encoding="utf-8")


def _convert(recipes: Sequence[FunctionRecipe], weights: Path) -> Any:
    """The model specification; its blobs are written into the folder ``weights``.

    Everything here that coremltools 9.0 doesn't promise: a ``Program`` of several functions, ``weight_id`` (what its own deduplication sets after
    comparing all constants, with a tolerance), and the last step of ``ct.convert`` by itself. The steps before it are graph passes, which would rewrite
    a graph that is written as it should be read, and a copy of the package with today's date in it.
    """
    import coremltools as ct
    from coremltools.converters.mil.backend.mil.load import load
    from coremltools.converters.mil.mil import Builder, Function, Program, types

    program = Program()
    for recipe in recipes:
        Builder.name_count.clear()  # names of implicit constants restart with every function
        inputs = {name: Builder.placeholder(shape, dtype=types.fp16) for name, shape in recipe.inputs.items()}
        with Function(inputs, opset_version=ct.target.iOS18) as function:
            outputs = list(recipe.emit(Builder, function.inputs))
            function.set_outputs(outputs)
        function.set_input_types(
            tuple(ct.TensorType(name, shape, dtype=types.fp16) for name, shape in recipe.inputs.items())
        )
        function.set_output_types([ct.TensorType(dtype=output.dtype) for output in outputs])
        program.add_function(recipe.name, function)
    program.default_function_name = recipes[0].name
    program.export_as_multifunction = len(recipes) > 1
    program._check_early_error_out_for_invalid_program()
    return load(program, str(weights), specification_version=ct.target.iOS18.value)


def _package_manifest() -> str:
    """``Manifest.json`` of a package, with identifiers derived from the item paths."""
    items = {}
    for path, name, text in (
        (_MODEL, "model.mlmodel", "CoreML Model Specification"),
        (_WEIGHTS, "weights", "CoreML Model Weights"),
    ):
        identifier = str(uuid.uuid5(uuid.NAMESPACE_URL, f"kvferry:{path}")).upper()
        items[identifier] = {"author": "com.apple.CoreML", "description": text, "name": name, "path": path}
    root = next(identifier for identifier, item in items.items() if item["path"] == _MODEL)
    manifest = {"fileFormatVersion": "1.0.0", "itemInfoEntries": items, "rootModelIdentifier": root}
    # exactly as coremltools spells it: it writes the file anew whenever it opens a package
    return json.dumps(manifest, indent=4, sort_keys=True) + "\n"
