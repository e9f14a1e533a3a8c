"""Matrix products, in two ways: one-row kernels that make rows bit-equal across widths, and GEMM.

BLAS adds in an order that depends on the shape of the call, so a GEMM's rows differ from GEMV's and from each
other's. In an *exact* call every row meets the same sequence of same-shaped kernel calls whatever the number
of rows: the weight is walked in blocks that stay in cache, and inside a block each row has its own GEMV.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from runtime.ops.call import Array, Call, Factory, Step
from runtime.ops.constexpr import Shifted

# Float32 [n, in], C-contiguous, to a new [n, out].
Kernel: TypeAlias = Callable[[Array], Array]

# Small enough to stay in a core's second-level cache while all rows of a narrow function use it.
BLOCK_BYTES = 512 * 1024
_WIDE_BLOCK_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A constant matrix as rows [out, in]: float32, or int8 ``values`` with a float32 ``factors`` [out]."""

    values: NDArray[Any]
    factors: NDArray[np.float32] | None

    def blocks(self, size: int) -> list[tuple[int, int, NDArray[Any]]]:
        """(start, stop, rows) of about ``size`` bytes of float32 each."""
        out, width = self.values.shape
        step = max(1, size // (4 * max(1, width)))
        return [(s, min(s + step, out), self.values[s : s + step]) for s in range(0, out, step)]


def matrix(call: Call, name: str, transposed: bool) -> Matrix | None:
    """The constant ``name`` as rows [out, in] (``transposed``: it is stored [in, out]); ``None`` if it varies.

    Axes of length 1 after the second are dropped (1x1 convolutions).
    """
    source = call.source(name)
    if source is None:
        return None
    shape = source.spec.shape
    if len(shape) < 2 or prod(shape[2:]) != 1:
        return None
    if isinstance(source, Shifted) and not transposed:
        stored = source.per_row()
        if stored is not None:
            return Matrix(stored[0].reshape(shape[:2]), stored[1])
    plain = source
    if not transposed:
        return Matrix(plain.plain().reshape(shape[:2]), None)
    key = ("transposed", plain.key)
    return Matrix(call.cache.get(key, lambda: np.ascontiguousarray(plain.plain().reshape(shape[:2]).T)), None)


def rows_exact(weight: Matrix) -> Kernel:
    """One GEMV a block and row."""
    blocks = [(slice(start, stop), block) for start, stop, block in weight.blocks(BLOCK_BYTES)]
    out_width, width = weight.values.shape
    factors = weight.factors
    dot = np.dot
    if factors is None and len(blocks) == 1:
        only = blocks[0][1]

        def run_one(x: Array) -> Array:
            out = np.empty((len(x), out_width), np.float32)
            for row, result in zip(x, out, strict=True):
                dot(only, row, result)
            return out

        return run_one
    largest = max(len(block) for _, block in blocks)

    def run(x: Array) -> Array:
        out = np.empty((len(x), out_width), np.float32)
        pairs = list(zip(x, out, strict=True))
        scratch = None if factors is None else np.empty((largest, width), np.float32)
        for at, block in blocks:
            if scratch is not None:
                decoded = scratch[: len(block)]
                np.copyto(decoded, block)
                block = decoded
            for row, result in pairs:
                dot(block, row, result[at])
        if factors is not None:
            out *= factors
        return out

    return run


def rows_wide(weight: Matrix) -> Kernel:
    """GEMM over all rows at once."""
    values, factors = weight.values, weight.factors
    if factors is None:
        return lambda x: np.matmul(x, values.T)
    blocks = weight.blocks(_WIDE_BLOCK_BYTES)

    def run(x: Array) -> Array:
        out = np.empty((len(x), len(values)), np.float32)
        for start, stop, block in blocks:
            np.matmul(x, block.astype(np.float32).T, out=out[:, start:stop])
        out *= factors
        return out

    return run


def _over_rows(call: Call, weight: Matrix) -> Kernel:
    """Kernel of ``weight`` over the last axis of an array of any rank, in the call's way."""
    kernel = rows_exact(weight) if call.exact else rows_wide(weight)
    width, out_width = weight.values.shape[1], weight.values.shape[0]

    def run(x: Array) -> Array:
        flat = np.ascontiguousarray(x).reshape(-1, width)
        return kernel(flat).reshape(*x.shape[:-1], out_width)

    return run


def _linear(call: Call) -> Step:
    weight = matrix(call, "weight", transposed=False)
    if weight is None:
        raise call.unsupported("weight: expected a constant matrix")
    run = _over_rows(call, weight)
    if not call.given("bias"):
        return call.step(run, "x")
    bias = call.constant("bias")
    if not bias.any():
        return call.step(run, "x")

    def with_bias(x: Array) -> Array:
        out = run(x)
        out += bias
        return out

    return call.step(with_bias, "x")


def _conv(call: Call) -> Step:
    """Convolutions whose kernel is 1 in every direction: a linear map of the channels at each position."""
    spec, x = call.spec("weight"), call.spec("x")
    padding = call.integers("pad") or ()
    if prod(spec.shape[2:]) != 1 or call.integer("groups", 1) != 1 or spec.shape[1] != x.shape[1]:
        raise call.unsupported(f"weight {spec} on {x}: expected a kernel of 1 and one group")
    if any(s != 1 for s in call.integers("strides") or ()) or (
        call.text("pad_type", "valid") == "custom" and any(padding)
    ):
        raise call.unsupported("expected strides of 1 and no padding")
    weight = matrix(call, "weight", transposed=False)
    if weight is None:
        raise call.unsupported("weight: expected a constant")
    run = _over_rows(call, weight)
    bias = call.constant("bias") if call.given("bias") else None

    def convolve(x: Array) -> Array:
        out = run(np.moveaxis(x, 1, -1))
        if bias is not None:
            out += bias
        return np.moveaxis(out, -1, 1)

    return call.step(convolve, "x")


def _matmul(call: Call) -> Step:
    flip_x, flip_y = bool(call.integer("transpose_x", 0)), bool(call.integer("transpose_y", 0))
    if call.out.dtype not in ("fp16", "fp32"):
        raise call.unsupported(f"expected floating-point operands, found {call.out}")
    weight = matrix(call, "y", transposed=not flip_y) if len(call.spec("y").shape) == 2 else None
    if weight is not None and len(call.spec("x").shape) >= 2:
        run = _over_rows(call, weight)
        return call.step((lambda x: run(np.swapaxes(x, -1, -2))) if flip_x else run, "x")
    rank_1 = len(call.spec("x").shape) == 1 or len(call.spec("y").shape) == 1
    product = matmul_exact if call.exact and not rank_1 else np.matmul

    def multiply(x: Array, y: Array) -> Array:
        if flip_x:
            x = np.swapaxes(x, -1, -2)
        if flip_y:
            y = np.swapaxes(y, -1, -2)
        return product(x, y)

    return call.step(multiply, "x", "y")


def matmul_exact(x: Array, y: Array) -> Array:
    """x [..., m, k] @ y [..., k, n], leading axes broadcast, each of the m rows by a GEMV of its own.

    The layout of y decides which GEMV: a y that is contiguous when transposed is read as rows [n, k].
    """
    lead = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    m, k, n = x.shape[-2], x.shape[-1], y.shape[-1]
    left = np.broadcast_to(x, (*lead, m, k)).reshape(-1, m, k)
    right = np.broadcast_to(y, (*lead, k, n)).reshape(-1, k, n)
    out = np.empty((len(left), m, n), np.float32)
    for rows, matrix_, results in zip(left, right, out, strict=True):
        turned = matrix_.strides[0] == matrix_.itemsize
        held = np.ascontiguousarray(matrix_.T if turned else matrix_)
        for row, result in zip(np.ascontiguousarray(rows), results, strict=True):
            if turned:
                np.dot(held, row, out=result)
            else:
                np.dot(row, held, out=result)
    return out.reshape(*lead, m, n)


OPS: Mapping[str, Factory] = {"linear": _linear, "matmul": _matmul, "conv": _conv}
