"""Operations that only move values: shapes, slices, joins, look-ups. Results may be views of the inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvstore.errors import KVError
from runtime.ops.call import Array, Call, Factory, Step


class IndexOutOfRange(KVError, IndexError):
    """An index computed by the program lies outside the tensor it looks into."""


def _reshape(call: Call) -> Step:
    # the declared output is the shape with -1 and 0 already worked out
    shape = call.out.shape
    return call.step(lambda x: x.reshape(shape), "x", moves=True)


def _transpose(call: Call) -> Step:
    perm = call.integers("perm")
    return call.step(lambda x: x.transpose(perm), "x", moves=True)


def _slice_by_size(call: Call) -> Step:
    shape, source = call.out.shape, call.spec("x").shape

    def cut(x: Array, begin: Sequence[int]) -> Array:
        return x[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))]

    def inside(begin: Sequence[int]) -> bool:
        return all(b >= 0 and b + n <= d for b, n, d in zip(begin, shape, source, strict=True))

    if call.source("begin") is not None:
        begin = call.integers("begin") or ()
        begin = tuple(b + d if b < 0 else b for b, d in zip(begin, source, strict=True))
        if not inside(begin):
            raise call.unsupported(f"begin {begin}, size {shape}: outside {source}")
        window = tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))
        return call.step(lambda x: x[window], "x", moves=True)

    where = f"{call.function}: {call.op.name}"

    def run(x: Array, begin: Array) -> Array:
        start = [int(b) for b in begin]
        if not inside(start):
            raise IndexOutOfRange(f"{where}: begin {start}, size {shape}: expected a range inside {source}")
        return cut(x, start)

    return call.step(run, "x", "begin", moves=True)


def _slice_by_index(call: Call) -> Step:
    begin, end = call.integers("begin") or (), call.integers("end") or ()
    rank = len(begin)
    stride = call.integers("stride") or (1,) * rank
    free_begin = call.integers("begin_mask") or (0,) * rank
    free_end = call.integers("end_mask") or (0,) * rank
    squeeze = call.integers("squeeze_mask") or (0,) * rank
    window = tuple(
        b if q else slice(None if fb else b, None if fe else e, s)
        for b, e, s, fb, fe, q in zip(begin, end, stride, free_begin, free_end, squeeze, strict=True)
    )
    return call.step(lambda x: x[window], "x", moves=True)


def _concat(call: Call) -> Step:
    axis = call.integer("axis")
    if call.integer("interleave", 0):
        raise call.unsupported("interleave: expected false, found true")
    return Step(lambda *parts: np.concatenate(parts, axis), tuple(call.op.inputs["values"]), moves=True)


def _stack(call: Call) -> Step:
    axis = call.integer("axis")
    return Step(lambda *parts: np.stack(parts, axis), tuple(call.op.inputs["values"]), moves=True)


def _split(call: Call) -> Step:
    axis = call.integer("axis")
    sizes = [spec.shape[axis] for _, spec in call.op.outputs]
    ends = list(np.cumsum(sizes)[:-1])
    return call.step(lambda x: tuple(np.split(x, ends, axis)), "x", moves=True)


def _tile(call: Call) -> Step:
    reps = call.integers("reps") or ()
    return call.step(lambda x: np.tile(x, reps), "x", moves=True)


def _gather(call: Call) -> Step:
    if call.integer("batch_dims", 0):
        raise call.unsupported("batch_dims: expected 0")
    axis = call.integer("axis", 0)
    size = call.spec("x").shape[axis]
    where = f"{call.function}: {call.op.name}"

    def run(x: Array, indices: Array) -> Array:
        if indices.size and not (-size <= int(indices.min()) and int(indices.max()) < size):
            raise IndexOutOfRange(
                f"{where}: indices: expected [-{size}, {size}), found {indices.min()}..{indices.max()}"
            )
        return np.take(x, indices.astype(np.intp), axis)

    return call.step(run, "x", "indices", moves=True)


OPS: Mapping[str, Factory] = {
    "identity": lambda call: call.step(lambda x: x, "x", moves=True),
    "reshape": _reshape,
    "expand_dims": _reshape,
    "squeeze": _reshape,
    "transpose": _transpose,
    "slice_by_size": _slice_by_size,
    "slice_by_index": _slice_by_index,
    "concat": _concat,
    "stack": _stack,
    "split": _split,
    "tile": _tile,
    "gather": _gather,
}
