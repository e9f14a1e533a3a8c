"""The narrow place where this engine meets Core ML: compile a package, load a function, run it.

Two implementations call the framework: ``through_pyobjc`` and ``through_coremltools``. Everything else in this package
is ours and runs anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from kvstore.errors import KVError
from runtime.coreml.units import Units


class CoreMLFailed(KVError):
    """Core ML refused or failed, in its own words. ``details``: doing (what), said."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message, **details)
        self.said: str = details.get("said", "")


def failed(doing: str, said: object, todo: str) -> CoreMLFailed:
    """``doing``: ``compiling chunk_0.mlpackage``; ``todo``: what to do next, a sentence."""
    return CoreMLFailed(f"Core ML: {doing}: expected it to succeed, found: {said}. {todo}", doing=doing, said=str(said))


class Model(Protocol):
    """One function, loaded by the framework. Calls follow each other and never overlap."""

    def predict(
        self, inputs: Mapping[str, NDArray[Any]], backings: Mapping[str, NDArray[Any]]
    ) -> Mapping[str, NDArray[Any]]:
        """Runs once on the memory of ``inputs`` as it is now; C-contiguous arrays, fp16 or int32.

        The caller keeps every array alive, and gives the same array object for the same memory from call to call. ``backings`` is
        where the framework may put the outputs. An output is returned as its backing if it was put there, else as an array of
        the framework's numbers in the output's own element type; either is valid until the next call. Raises ``CoreMLFailed``.
        """
        ...


class Edge(Protocol):
    """One way to the framework."""

    @property
    def name(self) -> str:
        """``pyobjc`` or ``coremltools``; lineage and messages call it so."""
        ...

    def versions(self) -> dict[str, str]:
        """Of what it goes through, for lineage."""
        ...

    def compile(self, package: Path, target: Path) -> None:
        """Compiles the ``.mlpackage`` to the folder ``target``, which ends in ``.mlmodelc`` and isn't there yet."""
        ...

    def load(self, compiled: Path, function: str | None, units: Units) -> Model:
        """Loads, and so specialises, one function of a compiled package. ``function`` None: no function is named.

        Raises ``CoreMLFailed``.
        """
        ...
