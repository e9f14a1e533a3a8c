"""Matrix products against double precision, and narrow ones bit-equal row by row."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from graphs import Writer, const, evaluate, planned
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from runtime.mlpackage import Name, Op, TensorSpec
from runtime.ops import OperationUnsupported
from runtime.ops.linear import BLOCK_BYTES, Matrix, rows_exact

RNG = np.random.default_rng(11)


def normal(*shape: int) -> NDArray[np.float32]:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("width", [1, 4, 32])
def test_linear_with_and_without_bias(width: int) -> None:
    x, w, b = normal(width, 24), normal(10, 24), normal(10)
    want = x.astype(np.float64) @ w.T.astype(np.float64)
    found = evaluate("linear", {"x": x}, want.shape, width=width, weight=w)
    assert np.allclose(found, want, atol=1e-5)
    found = evaluate("linear", {"x": x}, want.shape, width=width, weight=w, bias=b)
    assert np.allclose(found, want + b, atol=1e-5)


@pytest.mark.parametrize("width", [4, 32])
@pytest.mark.parametrize("flips", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("lead", [((), ()), ((3,), (3,)), ((2, 1), (1, 3)), ((3,), ())])
def test_matmul_flips_and_broadcasts(
    width: int, flips: tuple[bool, bool], constant: bool, lead: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    x, y = normal(*lead[0], 5, 6), normal(*lead[1], 6, 7)
    want = x.astype(np.float64) @ y.astype(np.float64)
    x = np.ascontiguousarray(x.swapaxes(-1, -2)) if flips[0] else x
    y = np.ascontiguousarray(y.swapaxes(-1, -2)) if flips[1] else y
    dynamic, static = ({"x": x}, {"y": y}) if constant else ({"x": x, "y": y}, {})
    found = evaluate("matmul", dynamic, want.shape, width=width, transpose_x=flips[0], transpose_y=flips[1], **static)
    assert found.shape == want.shape and np.allclose(found, want, atol=1e-5)


@pytest.mark.parametrize("width", [1, 32])
@pytest.mark.parametrize("spatial", [(1, 9), (9, 1), (3, 3), (9,)])
def test_a_convolution_of_size_one_is_a_linear_map_of_channels(width: int, spatial: tuple[int, ...]) -> None:
    x, w, b = normal(2, 6, *spatial), normal(4, 6, *(1 for _ in spatial)), normal(4)
    want = np.einsum("oc,nc...->no...", w.reshape(4, 6).astype(np.float64), x) + b.reshape(4, *(1 for _ in spatial))
    found = evaluate("conv", {"x": x}, want.shape, width=width, weight=w, bias=b, pad_type="valid", groups=1)
    assert np.allclose(found, want, atol=1e-5)


@pytest.mark.parametrize(
    "bad",
    [
        {"weight": np.zeros((4, 6, 3, 1), np.float32)},
        {"strides": [2, 1]},
        {"groups": 2},
        {"pad_type": "custom", "pad": [1, 1, 0, 0]},
    ],
)
def test_other_convolutions_are_refused(bad: dict[str, Any]) -> None:
    static = {"weight": np.zeros((4, 6, 1, 1), np.float32), **bad}
    with pytest.raises(OperationUnsupported, match="conv"):
        evaluate("conv", {"x": normal(1, 6, 5, 5)}, (1, 4, 5, 5), **static)


def test_a_linear_weight_that_varies_is_refused() -> None:
    with pytest.raises(OperationUnsupported, match="weight: expected a constant"):
        evaluate("linear", {"x": normal(2, 3), "weight": normal(4, 3)}, (2, 4))


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(1, 8),
    out=st.integers(1, 700),
    width=st.sampled_from([1, 3, 16, 33, 64, 160, 640, 2048]),
    shift=st.integers(0, 15),
    coded=st.booleans(),
)
def test_a_row_has_the_same_bits_alone_and_among_others(
    rows: int, out: int, width: int, shift: int, coded: bool
) -> None:
    rng = np.random.default_rng(out)
    if coded:
        weight = Matrix(rng.integers(-127, 128, (out, width)).astype(np.int8), rng.random(out).astype(np.float32))
    else:
        weight = Matrix(rng.standard_normal((out, width)).astype(np.float32), None)
    kernel = rows_exact(weight)
    memory = np.zeros(rows * width + shift, np.float32)
    x = memory[shift:].reshape(rows, width)
    x[:] = rng.standard_normal((rows, width))
    together = kernel(x)
    for row, result in zip(x, together, strict=True):
        assert kernel(row[None].copy()).tobytes() == result.tobytes()


def test_weights_are_walked_in_blocks_of_about_half_a_megabyte() -> None:
    blocks = Matrix(np.zeros((5000, 640), np.float32), None).blocks(BLOCK_BYTES)
    assert all(start == stop_before for (_, stop_before, _), (start, _, _) in pairwise(blocks))
    assert blocks[0][0] == 0 and blocks[-1][1] == 5000
    assert all(block.nbytes <= BLOCK_BYTES for _, _, block in blocks) and blocks[0][2].nbytes > BLOCK_BYTES * 0.9


def test_int8_rows_equal_their_expansion() -> None:
    """The head's shape of weight: int8 with one factor a row, never expanded in memory."""
    codes, factors = RNG.integers(-127, 128, (300, 40)).astype(np.int8), RNG.random((300, 1)).astype(np.float16)
    x = normal(4, 40)
    for width in (4, 32):
        writer = Writer(x=TensorSpec((4, 40), "fp32"), hidden=(width, 1))
        weight = ("weight", TensorSpec((300, 40), "fp16"))
        constants = {"data": (const(codes),), "scale": (const(factors),)}
        writer.ops.append(Op("constexpr_blockwise_shift_scale", constants, (weight,), {}))
        out = ("y", TensorSpec((4, 300), "fp32"))
        writer.ops.append(Op("linear", {"x": (Name("x"),), "weight": (Name("weight"),)}, (out,), {}))
        writer._specs.update([weight, out])
        found = planned(writer.function("y"))({"x": x, "hidden": np.zeros((width, 1), np.float16)})["y"]
        want = x.astype(np.float64) @ (codes * factors.astype(np.float64)).T
        assert np.allclose(found, want, rtol=1e-5, atol=1e-4)
