"""A ``.mlpackage`` folder on disk: its manifest, its one model file, its weight files."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.mlpackage.errors import NAMES, PackageError, PackageMissing
from runtime.mlpackage.ir import Blob, Const, Function, Program, Value
from runtime.mlpackage.program import ProgramReader
from runtime.mlpackage.schema import parse_model
from runtime.mlpackage.weights import Weights, file_below, file_label

_MANIFEST_LIMIT = 1 << 20
_MODEL_LIMIT = 1 << 29

_READING = threading.Lock()
"""Held around every use of protobuf messages: two threads that read their own messages at once have crashed the interpreter."""


class Package:
    """An opened package. Opening parses the model file once; functions and weights are read when asked for.

    Not locked: one thread at a time, or a lock of the caller's. Holds the mapped weight files until dropped.
    """

    def __init__(self, path: Path, model: Path, reader: ProgramReader) -> None:
        self.path = path
        self._reader = reader
        self._functions: dict[str, Function] = {}
        self._weights = Weights(path, model)

    @classmethod
    def open(cls, path: Path) -> Package:
        """Opens the package at ``path``. Raises ``PackageError`` (malformed), ``PackageMissing``."""
        model = _model_file(path)
        label = file_label(path, model)
        size = model.stat().st_size
        if size > _MODEL_LIMIT:
            raise PackageError.of(label, "file size", f"at most {_MODEL_LIMIT} bytes", size)
        with _READING:
            try:
                message = parse_model(model.read_bytes())
            except ValueError as error:
                raise PackageError.of(label, "protobuf message", "a Core ML Model", error) from error
            return cls(path, model, ProgramReader(message, label))

    @property
    def functions(self) -> tuple[str, ...]:
        """Function names in description order."""
        return self._reader.names

    @property
    def default_function(self) -> str:
        """What Core ML runs when no function is named."""
        return self._reader.default

    def function(self, name: str | None = None) -> Function:
        """The IR of ``name`` (``None``: the default function), read at first use. Raises ``PackageError``."""
        chosen = self.default_function if name is None else name
        if chosen not in self.functions:
            raise PackageError.of(self.path.name, "function", f"one of {', '.join(self.functions)}", chosen, NAMES)
        if chosen not in self._functions:
            with _READING:
                self._functions[chosen] = self._reader.function(chosen)
        return self._functions[chosen]

    def program(self) -> Program:
        """Every function, in description order."""
        return Program(tuple(self.function(name) for name in self.functions))

    def array(self, value: Value) -> NDArray[np.generic]:
        """``value``'s elements: read-only views where the stored form allows it (see ``WeightFile.view``)."""
        if isinstance(value, Const):
            return value.array
        return self.blob(value)

    def blob(self, blob: Blob) -> NDArray[np.generic]:
        """The stored elements of ``blob``, shaped, not dequantised. Raises ``PackageError``."""
        return self._weights.view(blob)


def _model_file(path: Path) -> Path:
    """The model file that ``path``'s manifest names as its root."""
    manifest = path / "Manifest.json"
    label = file_label(path, manifest)
    if not manifest.is_file():
        raise PackageMissing(
            f"{path}: expected a package folder with a Manifest.json, found none; copy or build the bundle again",
            path=str(path),
        )
    size = manifest.stat().st_size
    if size > _MANIFEST_LIMIT:
        raise PackageError.of(label, "file size", f"at most {_MANIFEST_LIMIT} bytes", size)
    try:
        root: Any = json.loads(manifest.read_bytes())
    except (ValueError, RecursionError) as error:
        raise PackageError.of(label, "content", "JSON", error) from error
    entry: Any = root
    for field in ("itemInfoEntries", root.get("rootModelIdentifier") if isinstance(root, dict) else None, "path"):
        if not isinstance(entry, dict) or not isinstance(field, str) or field not in entry:
            raise PackageError.of(label, "rootModelIdentifier", "an entry with a path", str(field)[:80])
        entry = entry[field]
    model = file_below(path / "Data", entry) if isinstance(entry, str) else None
    if model is None:
        raise PackageError.of(label, "path", "a file inside Data/", str(entry)[:80])
    return model
