"""One function of a bundle's package in onnxruntime, and how far its results are from recorded ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from closeness import Distance, distance
from mil_to_onnx import NotConverted, convert
from numpy.typing import NDArray

from runtime.mlpackage import Package

__all__ = ["Agreement", "NotConverted", "Peer", "agreements", "convert", "without_cache"]


class Peer:
    """``function`` of the package at ``path`` (None: its default), ready to run in float32 on one CPU thread."""

    def __init__(self, path: Path, function: str | None, *, round_entering: bool = True) -> None:
        package = Package.open(path)
        also = ["logits"] if function is None else []
        model = convert(package, package.function(function), also=also, round_entering=round_entering)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def __call__(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        names = [output.name for output in self._session.get_outputs()]
        given = {name: array.astype(np.float32) for name, array in inputs.items()}
        return dict(zip(names, self._session.run(None, given), strict=True))


@dataclass(frozen=True)
class Agreement:
    """Of one output: the share of numbers that are the same fp16 numbers, and how far the fp16 numbers are apart."""

    name: str
    equal: float
    apart: Distance

    def __str__(self) -> str:
        return f"{self.name} equal {self.equal:.3f} {self.apart}"


def agreements(ours: Mapping[str, NDArray[Any]], theirs: Mapping[str, NDArray[Any]]) -> list[Agreement]:
    """``theirs`` is float32, and rounded to fp16 here as an engine does it when outputs leave. What is shown besides outputs is left out."""
    found = []
    for name, array in ours.items():
        if array.dtype == np.float16:
            width = array.shape[-1]
            mine, other = array.reshape(-1, width), theirs[name].astype(np.float16).reshape(-1, width)
            found.append(Agreement(name, float((mine == other).mean()), distance(mine, other)))
    return found


def without_cache(results: Mapping[str, NDArray[Any]], inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Results of ``decode`` with K and V cut to the row that was written: what our engine was asked for."""
    slot = int(inputs["onehot"].argmax())
    return {name: array[:, slot : slot + 1] if array.ndim == 3 else array for name, array in results.items()}
