"""A function that Core ML runs: its inputs in memory that stays, its outputs taken out row by row.

The host's K and V rows are read where they lie. Everything else a step gives is small; it is copied into buffers of this function's
own, so that Core ML meets the same memory in every call and whatever it still holds between calls stays alive.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.coreml.edge import Model, failed
from runtime.engine import Fp16Overflow, is_cache_output, is_host_cache, is_whole_cache, require_declared
from runtime.mlpackage import Function, TensorSpec

Array = NDArray[Any]


def aligned(spec: TensorSpec) -> Array:
    """Zeros of ``spec`` in memory of their own that begins at a page."""
    memory = mmap.mmap(-1, max(1, spec.size * spec.numpy.itemsize))
    return np.frombuffer(memory, spec.numpy, spec.size).reshape(spec.shape)


class CoreMLFunction:
    """See ``runtime.engine.Function``. Calls may follow each other but not overlap."""

    def __init__(self, declared: Function, label: str, model: Model) -> None:
        """``declared``: the function as its package states it. ``label``: how messages call it."""
        self.name = declared.name
        self.inputs: Mapping[str, TensorSpec] = declared.inputs
        self.outputs: Mapping[str, TensorSpec] = declared.outputs
        self._label = label
        self._model = model
        self._given: dict[str, Array] = {}
        self._own: dict[str, Array] = {}
        self._backings = {name: aligned(spec) for name, spec in declared.outputs.items()}
        self._whole = {n for n, spec in declared.outputs.items() if is_whole_cache(n, spec, declared.inputs)}

    def __call__(self, inputs: Mapping[str, Array], *, kv_rows: tuple[int, int] | None = None) -> dict[str, Array]:
        """See ``Function.__call__``."""
        require_declared(self._label, self.inputs, inputs)
        given = {name: self._placed(name, inputs[name]) for name in self.inputs}
        results = self._model.predict(given, dict(self._backings))
        return {name: self._taken(name, results, kv_rows) for name in self.outputs}

    def _placed(self, name: str, array: Array) -> Array:
        """``array``'s numbers where Core ML reads them: the host's cache in place, all else in this function's buffer."""
        if is_host_cache(name) and array.flags.c_contiguous:
            before = self._given.get(name)
            if before is None or _address(before) != _address(array):
                self._given[name] = before = array  # keeps the host's memory alive as long as Core ML may hold it
            return before
        if name not in self._own:
            self._own[name] = aligned(self.inputs[name])
        np.copyto(self._own[name], array)
        return self._own[name]

    def _taken(self, name: str, results: Mapping[str, Array], rows: tuple[int, int] | None) -> Array:
        """The caller's own copy of an output, or of its ``rows``."""
        spec, value = self.outputs[name], results.get(name)
        if value is None or value.size != spec.size or value.dtype != spec.numpy:
            found = "none" if value is None else f"{value.dtype}{list(value.shape)}"
            raise failed(
                f"{self._label}: output {name}: {spec}", found, "The compiled package is not the one that was read."
            )
        value = value.reshape(spec.shape)
        if rows is not None and name in self._whole:
            value = value[:, rows[0] : rows[1]]
        taken = value.copy()
        if spec.dtype == "fp16" and (name == "hidden" or is_cache_output(name)) and not np.isfinite(taken).all():
            raise Fp16Overflow(
                f"{self._label}: {name}: expected finite fp16 numbers, found infinities or NaN. Run it with --engine portable "
                "--compute fp16-rounding, which names the operation that overflows, or with other --compute-units.",
                function=self.name,
                op=name,
            )
        return taken


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
