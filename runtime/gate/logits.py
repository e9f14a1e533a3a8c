"""The logits behind a token. A head answers with its best token alone; how close the second was shows when its graph is run only up to its
last argmax, by the portable engine in fp32, whatever engine made the hidden state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import KVError
from runtime.bundle import Bundle
from runtime.mil import open_model
from runtime.mlpackage import Function, TensorSpec
from runtime.ops import OperationUnsupported, WeightCache
from runtime.ops.widen import fastest
from runtime.portable.graph import Graph, single
from runtime.portable.plan import Planner

from .report import Margin

LOGITS = "logits of the head"


def logits_function(head: Function) -> Function:
    """``head`` without its argmax: one output, the numbers that it is taken of, in fp32. Raises `OperationUnsupported` where the token is no
    argmax over the last axis, as where a head splits its vocabulary."""
    graph = Graph(head)
    argmax = graph.producer.get(graph.origin("token")) if "token" in head.outputs else None
    value = single(argmax.inputs, "x") if argmax is not None and argmax.type == "reduce_argmax" else None
    rows = head.outputs["token"].size if value is not None else 0
    if value is None or graph.spec(value).size != rows * graph.spec(value).shape[-1]:
        raise OperationUnsupported(
            f"head {head.name}: expected a token that is the argmax of one row of logits, found another graph; margins can't be told"
        )
    # The name is the value's own: the planner looks outputs up by it.
    return replace(head, outputs={value: TensorSpec(graph.spec(value).shape, "fp32")})


class Logits:
    """Logits of the sequential head of a bundle. Reads the head's weights at first use, and keeps them."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._function: Any = None
        self._output = ""
        self.refusal: str | None = None
        """Why there are none, once they were asked for; else None."""

    def of(self, hidden: NDArray[np.float16]) -> NDArray[np.float32] | None:
        """Of one hidden state [hidden]: one for each token id, fp32; None where they can't be had."""
        if self._function is None and self.refusal is None:
            self._load()
        if self._function is None:
            return None
        found: NDArray[np.float32] = self._function({"hidden": hidden})[self._output].reshape(-1)
        return found

    def margin(self, hidden: NDArray[np.float16]) -> Margin | None:
        """How clear the choice after ``hidden`` was; None where logits can't be had."""
        logits = self.of(hidden)
        if logits is None or len(logits) < 2:
            return None
        best = int(logits.argmax())
        others = logits.copy()
        others[best] = -np.inf
        second = int(others.argmax())
        return Margin(best, second, float(logits[best] - logits[second]))

    def _load(self) -> None:
        name = self._bundle.config.lmhead
        try:
            model = open_model(self._bundle.root, name)
            function = logits_function(model.function(None))
            self._function = Planner(WeightCache(model, fastest()), rounding=False).plan(function, f"{name}: {LOGITS}")
            (self._output,) = function.outputs
        except KVError as error:
            self.refusal = str(error)
