"""The portable engine: packages opened once, functions planned when first used, BLAS held to few threads."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from runtime.engine import LoadLedger, called
from runtime.mil import Model, open_model
from runtime.mlpackage import TensorSpec
from runtime.ops import WeightCache
from runtime.ops.widen import fastest
from runtime.portable.function import PortableFunction
from runtime.portable.plan import Planner

Compute = Literal["fp32", "fp16-rounding"]


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """``stored``: what the loaded functions read of weight files, each blob once, in its stored size: mapped, so in memory as far as it was
    touched. ``decoded``: arrays made of them, in memory as long as the engine."""

    stored: int
    decoded: int


class PortableEngine:
    """An ``Engine`` over the packages in a folder. One call at a time in a process: the limit on BLAS threads is global."""

    def __init__(self, root: Path, *, compute: Compute = "fp32", threads: int = 1) -> None:
        """``root`` holds the packages, or their compiled siblings. ``compute``: "fp16-rounding" also rounds every operation's result to fp16.

        ``threads`` is how many BLAS may use during a call; on a busy machine more than one can be far slower.
        """
        if threads < 1:
            raise ValueError(f"threads: expected 1 or more, found {threads}")
        self.ledger = LoadLedger()
        self._root = root
        self._compute: Compute = compute
        self._threads = threads
        self._blas = ThreadpoolController()
        self._widen = fastest()
        self._planners: dict[str, tuple[Model, Planner]] = {}
        self._functions: dict[tuple[str, str | None], _Limited] = {}

    def function(self, package: str, function: str | None) -> _Limited:
        """See ``Engine.function``. Raises ``FunctionNotAllowed``, ``PackageError``, ``OperationUnsupported``."""
        key = (package, function)
        found = self._functions.get(key)
        if found is None:
            self.ledger.check(package, function)
            start = perf_counter()
            opened, planner = self._package(package)
            planned = planner.plan(opened.function(function), called(package, function))
            found = self._functions[key] = _Limited(planned, self._blas, self._threads)
            self.ledger.record(package, function, perf_counter() - start)
        return found

    def weight_bytes(self) -> WeightBytes:
        """Of all functions loaded so far. Functions of one package share what they read."""
        caches = [planner.weights for _, planner in self._planners.values()]
        return WeightBytes(sum(c.stored_bytes for c in caches), sum(c.nbytes for c in caches))

    def describe(self) -> dict[str, str]:
        """Strings that are equal on equal machines and installations."""
        blas: Mapping[str, Any] = next((lib for lib in self._blas.info() if lib["user_api"] == "blas"), {})
        return {
            "engine": "portable",
            "compute": self._compute,
            "numpy": np.__version__,
            "blas": f"{blas.get('internal_api', 'unknown')} {blas.get('version', '')}".strip(),
            "blas_core": str(blas.get("architecture", "unknown")),
            "threads": str(self._threads),
            "os": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
            "machine": platform.machine(),
            "python": platform.python_version(),
        }

    def _package(self, name: str) -> tuple[Model, Planner]:
        if name not in self._planners:
            package = open_model(self._root, name)
            planner = Planner(WeightCache(package, self._widen), self._compute == "fp16-rounding")
            self._planners[name] = (package, planner)
        return self._planners[name]


class _Limited:
    """A planned function that runs with BLAS held to ``threads`` threads."""

    def __init__(self, function: PortableFunction, blas: ThreadpoolController, threads: int) -> None:
        self._function = function
        self._blas = blas
        self._threads = threads
        self.name = function.name
        self.inputs: Mapping[str, TensorSpec] = function.inputs
        self.outputs: Mapping[str, TensorSpec] = function.outputs

    def __call__(
        self, inputs: Mapping[str, NDArray[Any]], *, kv_rows: tuple[int, int] | None = None
    ) -> dict[str, NDArray[Any]]:
        with self._blas.limit(limits=self._threads, user_api="blas"):
            return self._function(inputs, kv_rows=kv_rows)
