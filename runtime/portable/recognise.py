"""Finds attention over the host's cache in a graph, whoever built it.

What is looked for: softmax(q · Kᵀ [· scale] + mask) · V, where K and V are views of cache rows, and the cache is
cache · (1 − onehot) + onehotᵀ · rows, an input, or the rows alone. What the one-hot expressions and the views
really do is found out by running them (``probe``), so names and spellings don't matter. A graph that isn't
recognised runs operation by operation.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from math import frexp, prod

import numpy as np
from numpy.typing import NDArray

from runtime.mlpackage import Arg, Op
from runtime.portable.graph import Graph, single
from runtime.portable.probe import Probe


@dataclass(frozen=True, slots=True)
class Reads:
    """Which numbers of a cache each attention row reads: of ``root`` seen as [slots, D], columns from ``starts[row]``."""

    root: str
    slots: int
    width: int
    starts: NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention: ``rows`` queries of ``head_dim`` numbers each, in the order of ``query``'s memory.

    ``mask_rows[r]`` is the row of ``mask`` (seen as [n, slots]) that is added to query r's scores. ``stages`` are
    the names of the values in between, in order: scores, scaled (or None), masked, shares, out.
    """

    name: str
    query: str
    flip_query: bool
    keys: Reads
    values: Reads
    mask: str
    mask_rows: NDArray[np.intp]
    scale: float | None
    rows: int
    head_dim: int
    shape: tuple[int, ...]
    stages: tuple[str, str | None, str, str, str]


class AttentionFinder:
    """Looks for attention in one function."""

    def __init__(self, graph: Graph, probe: Probe, placements: Container[str]) -> None:
        """``placements``: names of the values that are caches with new rows in place."""
        self._graph = graph
        self._probe = probe
        self._placements = placements

    def found(self) -> Iterator[Attention]:
        """Every attention that is recognised, in program order."""
        for op in self._graph.function.ops:
            if op.type == "matmul" and (found := self._attention(op)) is not None:
                yield found

    def _attention(self, last: Op) -> Attention | None:
        if self._probe.flag(last, "transpose_x"):
            return None
        softmax = self._graph.maker(self._graph.back(last.inputs["x"][0], ("reshape", "identity")))
        if softmax is None or softmax.type != "softmax" or not self._last_axis(softmax):
            return None
        masked = self._graph.maker(self._graph.back(softmax.inputs["x"][0], ("reshape", "identity")))
        if masked is None or masked.type != "add":
            return None
        for one, other in (("x", "y"), ("y", "x")):
            mask = single(masked.inputs, other)
            if mask is not None and self._is_mask(mask):
                found = self._scores(last, softmax, masked, masked.inputs[one][0], mask)
                if found is not None:
                    return found
        return None

    def _scores(self, last: Op, softmax: Op, masked: Op, scores: Arg, mask: str) -> Attention | None:
        first = self._graph.maker(self._graph.back(scores, ("reshape", "identity")))
        scale, scaled = None, None
        if first is not None and first.type in ("mul", "real_div"):
            factor = self._factor(first)
            if factor is None:
                return None
            (scale, inner), scaled = factor, first.name
            first = self._graph.maker(self._graph.back(inner, ("reshape", "identity")))
        if first is None or first.type != "matmul":
            return None
        query, keys, values = single(first.inputs, "x"), single(first.inputs, "y"), single(last.inputs, "y")
        if query is None or keys is None or values is None:
            return None
        head_dim, slots = self._sizes(first)
        rows = prod(first.outputs[0][1].shape[:-1])
        shape = last.outputs[0][1].shape
        whole = [first, softmax, masked, last]
        if any(prod(op.outputs[0][1].shape) != rows * slots for op in whole[:3]) or prod(shape) != rows * head_dim:
            return None
        if any(op.outputs[0][1].shape[-1] != slots for op in whole[:3]) or self._graph.spec(mask).shape[-1] != slots:
            return None
        if (
            first.outputs[0][1].shape[-2] != last.outputs[0][1].shape[-2]
            or first.outputs[0][1].shape[:-2] != shape[:-2]
        ):
            return None
        read_keys = self._reads(keys, self._probe.flag(first, "transpose_y"), True, shape, slots, head_dim)
        read_values = self._reads(values, self._probe.flag(last, "transpose_y"), False, shape, slots, head_dim)
        if read_keys is None or read_values is None:
            return None
        lead = self._graph.spec(mask).shape[:-1]
        numbered = np.arange(prod(lead), dtype=np.intp).reshape(lead)
        mask_rows = np.broadcast_to(numbered, masked.outputs[0][1].shape[:-1]).reshape(-1)
        return Attention(
            name=last.name,
            query=query,
            flip_query=self._probe.flag(first, "transpose_x"),
            keys=read_keys,
            values=read_values,
            mask=mask,
            mask_rows=mask_rows,
            scale=scale,
            rows=rows,
            head_dim=head_dim,
            shape=shape,
            stages=(first.name, scaled, masked.name, softmax.name, last.name),
        )

    def _reads(
        self, value: str, flipped: bool, keys: bool, shape: tuple[int, ...], slots: int, head_dim: int
    ) -> Reads | None:
        """How the matmul operand ``value`` looks into the cache it is a view of."""
        best = None
        for root, view in self._probe.moves_from(value):
            if flipped:
                view = view.swapaxes(-1, -2)
            if keys:  # [..., head_dim, slots]
                view = view.swapaxes(-1, -2)
            if view.shape[-2:] != (slots, head_dim) or view.size == 0:
                return None
            size = self._graph.spec(root).size
            width = size // slots
            columns, row = view.strides[-1], view.strides[-2]
            if size % slots or (columns != 1 and head_dim > 1) or (row != width and slots > 1):
                continue
            starts = _offsets(np.broadcast_to(view, (*shape[:-2], slots, head_dim)))
            if starts.size and int(starts.max()) + head_dim > width:
                continue
            best = Reads(root, slots, width, np.repeat(starts, shape[-2]))
            if root in self._placements:
                break
        return best

    def _sizes(self, first: Op) -> tuple[int, int]:
        query = self._graph.spec(single(first.inputs, "x") or "").shape
        head_dim = query[-2] if self._probe.flag(first, "transpose_x") else query[-1]
        shape = first.outputs[0][1].shape
        return head_dim, shape[-1]

    def _factor(self, op: Op) -> tuple[float, Arg] | None:
        """(factor, other operand) of a multiplication or division by a constant scalar."""
        for one, other in (("x", "y"), ("y", "x")):
            constant = self._probe.constant(op.inputs[other][0])
            if constant is None or constant.size != 1:
                continue
            number = float(constant.reshape(()))
            if op.type == "mul":
                return number, op.inputs[one][0]
            # only then is multiplying by the inverse the same as dividing
            if other == "y" and abs(frexp(number)[0]) == 0.5:
                return 1 / number, op.inputs[one][0]
        return None

    def _is_mask(self, value: str) -> bool:
        depends = self._graph.depends(value)
        return bool(depends) and all(name.startswith("mask") for name in depends)

    def _last_axis(self, softmax: Op) -> bool:
        axis = self._probe.constant(softmax.inputs["axis"][0]) if "axis" in softmax.inputs else np.array(-1)
        return axis is not None and int(axis.reshape(())) in (-1, len(softmax.outputs[0][1].shape) - 1)


def _offsets(view: NDArray[np.int8]) -> NDArray[np.intp]:
    """Where each [slots, head_dim] matrix of ``view`` starts in its memory, in elements, flattened."""
    starts = np.zeros((1,) * (view.ndim - 2), np.intp)
    for axis, (size, stride) in enumerate(zip(view.shape[:-2], view.strides[:-2], strict=True)):
        along = [1] * (view.ndim - 2)
        along[axis] = size
        starts = starts + (np.arange(size, dtype=np.intp) * stride).reshape(along)
    return np.broadcast_to(starts, view.shape[:-2]).reshape(-1)
