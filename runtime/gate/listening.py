"""An engine that remembers what the sequential head was given: the hidden states that tokens were chosen by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.engine import Engine, Function, LoadLedger
from runtime.mlpackage import TensorSpec

Half = NDArray[np.float16]


class Listening:
    """``inside``, and in ``heard`` a copy of each hidden state [hidden] that the head ``package`` was called with, in order."""

    def __init__(self, inside: Engine, package: str) -> None:
        self._inside = inside
        self._package = package
        self._head: _Heard | None = None
        self.heard: list[Half] = []

    @property
    def ledger(self) -> LoadLedger:
        return self._inside.ledger

    def function(self, package: str, function: str | None) -> Function:
        found = self._inside.function(package, function)
        if package != self._package or function is not None:  # the head's other function chooses nothing
            return found
        if self._head is None:
            self._head = _Heard(found, self.heard)
        return self._head

    def describe(self) -> dict[str, str]:
        return self._inside.describe()


class _Heard:
    def __init__(self, inside: Function, heard: list[Half]) -> None:
        self._inside = inside
        self._heard = heard
        self.name = inside.name
        self.inputs: Mapping[str, TensorSpec] = inside.inputs
        self.outputs: Mapping[str, TensorSpec] = inside.outputs

    def __call__(
        self, inputs: Mapping[str, NDArray[Any]], *, kv_rows: tuple[int, int] | None = None
    ) -> dict[str, NDArray[Any]]:
        self._heard.append(np.array(inputs["hidden"], np.float16))
        return self._inside(inputs, kv_rows=kv_rows)
