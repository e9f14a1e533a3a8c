"""Reductions and softmax, row-invariant: the reduced axes are laid out last and contiguous first.

numpy adds a contiguous axis pairwise, in an order set by that axis's length alone; over a strided axis the
order depends on what else the array holds. So every sum here runs over a contiguous last axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import numpy as np

from runtime.ops.call import Array, Call, Factory, Step


def _last(x: Array, axes: tuple[int, ...]) -> Array:
    """``x`` as [kept…, product of the reduced], C-contiguous; ``axes`` ascending and non-negative."""
    kept = [axis for axis in range(x.ndim) if axis not in axes]
    moved = x.transpose([*kept, *axes])
    return np.ascontiguousarray(moved.reshape(*(x.shape[axis] for axis in kept), prod(x.shape[a] for a in axes)))


def _reduction(over_last: Callable[[Array], Array]) -> Factory:
    """``over_last`` reduces a C-contiguous array's last axis to length 1."""

    def factory(call: Call) -> Step:
        rank = len(call.spec("x").shape)
        axes = tuple(sorted({axis % rank for axis in call.integers("axes") or range(rank)}))
        shape = call.out.shape
        if axes == (rank - 1,):
            if len(shape) == rank:
                return call.step(lambda x: over_last(np.ascontiguousarray(x)), "x")
            return call.step(lambda x: over_last(np.ascontiguousarray(x)).reshape(shape), "x")
        return call.step(lambda x: over_last(_last(x, axes)).reshape(shape), "x")

    return factory


def _mean(x: Array) -> Array:
    out: Array = np.add.reduce(x, -1, keepdims=True)
    out /= np.float32(x.shape[-1])
    return out


def _argmax(call: Call) -> Step:
    rank = len(call.spec("x").shape)
    axis = call.integer("axis", -1) % rank
    shape = call.out.shape
    return call.step(lambda x: np.argmax(x, axis).astype(np.int32).reshape(shape), "x", moves=True)


def _topk(call: Call) -> Step:
    """The best ``k`` along the last axis, best first; the indices are not made. Equal numbers count as often as they stand there."""
    axis = call.integer("axis", -1) % len(call.spec("x").shape)
    k = call.integer("k", 1)
    if axis != len(call.spec("x").shape) - 1 or call.integer("ascending", 0) or call.integer("return_indices", 1):
        raise call.unsupported("expected the last axis, descending, without indices")

    def run(x: Array) -> Array:
        left = np.array(x)
        best = np.empty((*x.shape[:-1], k), left.dtype)
        for i in range(k):
            at = np.argmax(left, -1)[..., None]
            best[..., i : i + 1] = np.take_along_axis(left, at, -1)
            np.put_along_axis(left, at, -np.inf, -1)
        return best

    return call.step(run, "x", moves=True)


def softmax_last(x: Array) -> Array:
    """Softmax over the last axis as a new C-contiguous array; a −4e4 mask comes out as exactly 0."""
    out = np.ascontiguousarray(x - np.maximum.reduce(x, -1, keepdims=True))
    np.exp(out, out=out)
    out /= np.add.reduce(out, -1, keepdims=True)
    return out


def _softmax(call: Call) -> Step:
    rank = len(call.spec("x").shape)
    axis = call.integer("axis", -1) % rank
    if axis == rank - 1:
        return call.step(softmax_last, "x")
    return call.step(lambda x: np.moveaxis(softmax_last(np.moveaxis(x, axis, -1)), -1, axis), "x")


OPS: Mapping[str, Factory] = {
    "reduce_sum": _reduction(lambda x: np.add.reduce(x, -1, keepdims=True)),
    "reduce_mean": _reduction(_mean),
    "reduce_max": _reduction(lambda x: np.maximum.reduce(x, -1, keepdims=True)),
    "reduce_min": _reduction(lambda x: np.minimum.reduce(x, -1, keepdims=True)),
    "reduce_argmax": _argmax,
    "softmax": _softmax,
    "topk": _topk,
}
