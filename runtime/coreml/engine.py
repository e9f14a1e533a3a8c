"""The Core ML engine: packages compiled once and kept, functions loaded when first asked for."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from time import perf_counter

import numpy as np

from runtime.coreml.compiled import CompiledPackages
from runtime.coreml.edge import Edge
from runtime.coreml.function import CoreMLFunction
from runtime.coreml.units import Units, UnitsPolicy
from runtime.engine import LoadLedger, called
from runtime.mil import Model, open_model


class CoreMLEngine:
    """An ``Engine`` over one bundle's packages. One call at a time."""

    def __init__(
        self,
        edge: Edge,
        find: Callable[[str], Path],
        compiled: CompiledPackages,
        units: UnitsPolicy,
        verify_heads: Collection[str],
    ) -> None:
        """``find(name)`` is the folder to load for a package, as ``Bundle.package_path`` gives it. ``verify_heads``: the packages that
        run on ``units.verify_head``."""
        self.ledger = LoadLedger()
        self.units = units
        self._edge = edge
        self._find = find
        self._compiled = compiled
        self._verify_heads = frozenset(verify_heads)
        self._described: dict[str, Model] = {}
        self._functions: dict[tuple[str, str | None], CoreMLFunction] = {}

    def function(self, package: str, function: str | None) -> CoreMLFunction:
        """See ``Engine.function``. Raises ``FunctionNotAllowed``, ``PackageError``, ``CoreMLFailed``.

        The recorded seconds are those of compiling (once) and of Core ML's loading, which specialises the function for this
        machine the first time that the machine sees it.
        """
        key = (package, function)
        found = self._functions.get(key)
        if found is None:
            self.ledger.check(package, function)
            start = perf_counter()
            folder = self._find(package)
            declared = self._model(package, folder).function(function)
            path = self._compiled.path(folder, self._edge.compile)
            model = self._edge.load(path, function, self.units_of(package))
            found = self._functions[key] = CoreMLFunction(declared, called(package, function), model)
            self.ledger.record(package, function, perf_counter() - start)
        return found

    def units_of(self, package: str) -> Units:
        """The compute units that ``package`` is loaded for."""
        return self.units.verify_head if package in self._verify_heads else self.units.bundle

    def describe(self) -> dict[str, str]:
        """Strings that are equal on equal machines and installations. The verify head computes no KV, so its units are left out."""
        return {
            "engine": "coreml",
            "route": self._edge.name,
            "compute_units": self.units.bundle,
            **self._edge.versions(),
            "numpy": np.__version__,
            "core": core_type(),
            "os": system(),
            "machine": platform.machine(),
            "python": platform.python_version(),
        }

    def _model(self, name: str, folder: Path) -> Model:
        """The package as our own reader sees it: that is where functions declare their inputs and outputs."""
        if name not in self._described:
            self._described[name] = open_model(folder.parent, folder.name)
        return self._described[name]


def system() -> str:
    """``macOS 15.6 (24G84)``: version and build, since Core ML comes with the system."""
    if sys.platform != "darwin":
        return f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}"
    return f"macOS {platform.mac_ver()[0]} ({_sysctl('kern.osversion')})"


def core_type() -> str:
    """``Apple M3``, or what the system calls the processor elsewhere."""
    return _sysctl("machdep.cpu.brand_string") if sys.platform == "darwin" else platform.processor() or "unknown"


def _sysctl(name: str) -> str:
    run = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"
