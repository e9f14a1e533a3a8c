"""Core ML through coremltools: the second choice, because it converts.

coremltools replaces fp16 arrays in the caller's dictionary by fp32 copies, and Core ML may let go of inputs about a second after the
call, without the interpreter's lock. So the fp32 copies are made here, in arrays that live as long as the model, and each call
gets a dictionary of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.coreml.edge import failed
from runtime.coreml.units import Units

Array = NDArray[Any]

_UNITS = {
    "cpuOnly": "CPU_ONLY",
    "cpuAndGPU": "CPU_AND_GPU",
    "all": "ALL",
    "cpuAndNeuralEngine": "CPU_AND_NE",
}


class CoremltoolsEdge:
    """An ``Edge``. Importing coremltools takes seconds; it happens when the first package is compiled or loaded."""

    name = "coremltools"

    def versions(self) -> dict[str, str]:
        return {"coremltools": metadata.version("coremltools")}

    def compile(self, package: Path, target: Path) -> None:
        from coremltools.models.utils import compile_model

        try:
            compile_model(str(package), str(target))
        except Exception as error:  # coremltools raises Exception and RuntimeError itself
            raise failed(f"compiling {package.name}", error, "Build the bundle again, or update macOS.") from error

    def load(self, compiled: Path, function: str | None, units: Units) -> CoremltoolsModel:
        import coremltools
        from coremltools.models import CompiledMLModel

        doing = f"loading {compiled.name}{'' if function is None else f', function {function}'}, for {units}"
        try:
            model = CompiledMLModel(str(compiled), getattr(coremltools.ComputeUnit, _UNITS[units]), function)
        except Exception as error:
            todo = f"Try other --compute-units, or delete {compiled} if kvferry compiled it."
            raise failed(doing, error, todo) from error
        return CoremltoolsModel(model, doing.removeprefix("loading "))


class CoremltoolsModel:
    """A ``Model``. ``self._wide`` holds the arrays that Core ML reads."""

    def __init__(self, model: Any, label: str) -> None:
        self._model = model
        self._label = label
        self._wide: dict[str, Array] = {}

    def predict(self, inputs: Mapping[str, Array], backings: Mapping[str, Array]) -> dict[str, Array]:
        for name, array in inputs.items():
            if name not in self._wide:
                wide = np.float32 if array.dtype == np.float16 else array.dtype
                self._wide[name] = np.empty(array.shape, wide)
            np.copyto(self._wide[name], array)
        try:
            results = self._model.predict(dict(self._wide))
        except Exception as error:
            todo = "Try other --compute-units, or --engine portable."
            raise failed(f"running {self._label}", error, todo) from error
        # fp16 outputs come back as fp32 numbers that fp16 holds exactly
        return {n: np.asarray(results[n]).astype(backing.dtype) for n, backing in backings.items() if n in results}
