"""A ``.mlmodelc`` folder on disk: its program text and its weight files; nothing else in it is read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.mlpackage.errors import NAMES, PackageError, PackageMissing
from runtime.mlpackage.ir import Blob, Const, Function, Program, Value
from runtime.mlpackage.weights import Weights, file_label

from .reader import TextReader
from .text import Text

PROGRAM = "model.mil"
LIMIT = 1 << 26
_AGAIN = "compile or copy the model again"


class Compiled:
    """An opened compiled model, with the surface of a ``Package``. Functions and weights are read when asked for.

    Not locked: one thread at a time, or a lock of the caller's. Holds the mapped weight files until dropped.
    """

    def __init__(self, path: Path, reader: TextReader) -> None:
        self.path = path
        self._reader = reader
        self._functions: dict[str, Function] = {}
        self._weights = Weights(path, path / PROGRAM)

    @classmethod
    def open(cls, path: Path) -> Compiled:
        """Opens the compiled model at ``path``. Raises ``PackageError`` (malformed), ``PackageMissing``."""
        program = path / PROGRAM
        label = file_label(path, program)
        try:
            with program.open("rb") as file:
                data = file.read(LIMIT + 1)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise PackageMissing(
                f"{path}: expected a compiled ML Program with a {PROGRAM}, found none; {_AGAIN}", path=str(path)
            ) from error
        except OSError as error:
            raise PackageError.of(label, "content", "a file that can be read", error.strerror, _AGAIN) from error
        if len(data) > LIMIT:
            raise PackageError.of(label, "file size", f"at most {LIMIT} bytes", "more", _AGAIN)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise PackageError.of(label, f"line {line}", "UTF-8", f"byte 0x{data[error.start]:02x}", _AGAIN) from error
        return cls(path, TextReader(Text(label, text)))

    @property
    def functions(self) -> tuple[str, ...]:
        """Function names in the text's order."""
        return self._reader.names

    @property
    def default_function(self) -> str | None:
        """What runs when no function is named; ``None`` where the text doesn't say."""
        return self._reader.default

    def function(self, name: str | None = None) -> Function:
        """The IR of ``name`` (``None``: the default function), read at first use. Raises ``PackageError``."""
        chosen = self.default_function if name is None else name
        if chosen is None or chosen not in self.functions:
            found = "no name, and no default" if chosen is None else chosen
            raise PackageError.of(self.path.name, "function", f"one of {', '.join(self.functions)}", found, NAMES)
        if chosen not in self._functions:
            self._functions[chosen] = self._reader.function(chosen)
        return self._functions[chosen]

    def program(self) -> Program:
        """Every function, in the text's order."""
        return Program(tuple(self.function(name) for name in self.functions))

    def array(self, value: Value) -> NDArray[np.generic]:
        """``value``'s elements: read-only views where the stored form allows it (see ``WeightFile.view``)."""
        return value.array if isinstance(value, Const) else self.blob(value)

    def blob(self, blob: Blob) -> NDArray[np.generic]:
        """The stored elements of ``blob``, shaped, not dequantised. Raises ``PackageError``."""
        return self._weights.view(blob)
