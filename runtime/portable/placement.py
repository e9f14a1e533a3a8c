"""Finds where a function puts new K and V rows into the cache it was given.

Programs write cache · (1 − onehot) + onehotᵀ · rows, over the whole context, in one spelling or another. What an
expression of the one-hot rows really does is found out by running it on samples (``probe``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.mlpackage import Arg, Name, Op
from runtime.portable.graph import ONEHOT, Graph, single
from runtime.portable.probe import Probe


@dataclass(frozen=True, slots=True)
class Placement:
    """Value ``name`` is input ``base`` [1, CTX, D] with the rows of value ``rows`` in the slots of ``onehot``."""

    name: str
    base: str
    rows: str


class PlacementFinder:
    """Looks for placements in one function."""

    def __init__(self, graph: Graph, probe: Probe) -> None:
        self._graph = graph
        self._probe = probe
        self._onehots = self._samples()

    def found(self) -> dict[str, Placement]:
        """Every placement that is recognised, by name."""
        adds = (op for op in self._graph.function.ops if op.type == "add" and self._onehots)
        return {op.name: found for op in adds if (found := self._placement(op)) is not None}

    def _samples(self) -> list[NDArray[np.float32]]:
        """Two one-hot inputs to try expressions on: rows at the start in order, and spread out."""
        spec = self._graph.function.inputs.get("onehot")
        if spec is None or not spec.shape or spec.size == 0:
            return []
        context = spec.shape[-1]
        rows = spec.size // context
        if rows > context:
            return []
        spread = (np.arange(rows)[::-1] * (context // rows) + context // rows - 1).astype(np.intp)
        samples = []
        for slots in (np.arange(rows), spread):
            sample = np.zeros((rows, context), np.float32)
            sample[np.arange(rows), slots] = 1
            samples.append(sample.reshape(spec.shape))
        return samples

    def _placement(self, op: Op) -> Placement | None:
        """``op`` (an add) as a placement: one side keeps the cache, the other places rows."""
        shape = op.outputs[0][1].shape
        for one, other in (("x", "y"), ("y", "x")):
            base = self._kept(op.inputs[one][0], shape)
            rows = self._written(op.inputs[other][0], shape)
            if base is not None and rows is not None:
                return Placement(op.name, base, rows)
        return None

    def _kept(self, arg: Arg, shape: tuple[int, ...]) -> str | None:
        """The function input that ``arg`` is, with the slots of the one-hot rows zeroed."""
        op = self._graph.maker(arg)
        if op is None or op.type != "mul":
            return None
        for one, other in (("x", "y"), ("y", "x")):
            base, keep = op.inputs[one][0], op.inputs[other][0]
            if not isinstance(base, Name) or not self._graph.only(keep, ONEHOT):
                continue
            spec = self._graph.function.inputs.get(base.name)
            if spec is None or spec.shape != shape or len(shape) != 3 or shape[0] != 1 or spec.dtype != "fp16":
                continue
            if all(self._is(keep, sample, 1 - _hit(sample)) for sample in self._onehots):
                return base.name
        return None

    def _written(self, arg: Arg, shape: tuple[int, ...]) -> str | None:
        """The value whose rows [N, D] ``arg`` puts into the one-hot slots of zeros."""
        op = self._graph.maker(arg)
        while op is not None and op.type in ("reshape", "identity", "expand_dims", "squeeze"):
            op = self._graph.maker(op.inputs["x"][0])
        if op is None or len(shape) != 3:
            return None
        context, width = shape[1], shape[2]
        if op.type == "matmul":
            onehot, rows = op.inputs["x"][0], single(op.inputs, "y")
            flip_x, flip_y = self._probe.flag(op, "transpose_x"), self._probe.flag(op, "transpose_y")
            if rows is None or flip_y or not self._graph.only(onehot, ONEHOT):
                return None
            fits = self._graph.spec(rows).size == width * (self._onehots[0].size // context)
            turned = [s.reshape(-1, context) for s in self._onehots]
            want = [t if flip_x else t.T for t in turned]
            matches = all(self._is(onehot, s, w) for s, w in zip(self._onehots, want, strict=True))
            return rows if fits and matches else None
        if op.type == "mul" and self._onehots[0].size == context:
            for one, other in (("x", "y"), ("y", "x")):
                rows, hit = single(op.inputs, one), op.inputs[other][0]
                if rows is None or not self._graph.only(hit, ONEHOT) or self._graph.spec(rows).size != width:
                    continue
                if self._graph.spec(rows).shape[-1:] == (width,) and all(
                    self._is(hit, s, _hit(s)) for s in self._onehots
                ):
                    return rows
        return None

    def _is(self, arg: Arg, onehot: NDArray[np.float32], want: NDArray[np.float32]) -> bool:
        value = self._probe.evaluate(arg, {"onehot": onehot})
        squeezed = tuple(size for size in value.shape if size != 1)
        # [1, CTX, 1] multiplies slot by slot; a bare [CTX] would multiply columns
        if want.ndim == 3 and (value.ndim < 2 or value.shape[-2] != want.shape[1]):
            return False
        return squeezed == tuple(s for s in want.shape if s != 1) and np.array_equal(value.reshape(want.shape), want)


def _hit(onehot: NDArray[np.float32]) -> NDArray[np.float32]:
    """[1, CTX, 1]: 1 at the slots that are written."""
    hit: NDArray[np.float32] = np.add.reduce(onehot.reshape(-1, onehot.shape[-1]), 0, dtype=np.float32).reshape(
        1, -1, 1
    )
    return hit
