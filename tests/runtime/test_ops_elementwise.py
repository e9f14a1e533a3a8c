"""Each elementwise operation against its definition in double precision, and bit-equal wherever an element stands."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import Writer, evaluate, planned, spec_of
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from runtime.mlpackage import TensorSpec
from runtime.ops import OperationUnsupported

X = np.concatenate(
    [np.linspace(-12, 12, 241), [0.0, -0.0, 1e-6, -1e-6, 88.0, -88.0, 300.0, -300.0]]
).astype(np.float32)  # fmt: skip
P = np.abs(X) + np.float32(0.01)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


DEFINITIONS: dict[str, tuple[NDArray[np.float32], Callable[[float], float], dict[str, Any]]] = {
    "abs": (X, abs, {}),
    "square": (X, lambda x: x * x, {}),
    "sqrt": (P, math.sqrt, {}),
    "rsqrt": (P, lambda x: 1 / math.sqrt(x + 0.25), {"epsilon": np.float32(0.25)}),
    "inverse": (P, lambda x: 1 / (x + 0.25), {"epsilon": np.float32(0.25)}),
    "log": (P, lambda x: math.log(x + 0.25), {"epsilon": np.float32(0.25)}),
    "exp": (np.clip(X, -80, 80), math.exp, {}),
    "sin": (X, math.sin, {}),
    "cos": (X, math.cos, {}),
    "tanh": (X, math.tanh, {}),
    "relu": (X, lambda x: max(x, 0.0), {}),
    "sigmoid": (X, _sigmoid, {}),
    "silu": (X, lambda x: x * _sigmoid(x), {}),
    "clip": (X, lambda x: min(max(x, -1.5), 2.5), {"alpha": np.float32(-1.5), "beta": np.float32(2.5)}),
    "gelu": (X, lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))), {"mode": "EXACT"}),
    "gelu tanh": (
        np.clip(X, -50, 50),
        lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        {"mode": "TANH_APPROXIMATION"},
    ),
    "gelu sigmoid": (X, lambda x: x * _sigmoid(1.702 * x), {"mode": "SIGMOID_APPROXIMATION"}),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_one_operand_follows_its_definition(name: str) -> None:
    x, definition, static = DEFINITIONS[name]
    found = evaluate(name.split(" ")[0], {"x": x}, x.shape, **static)
    want = np.array([definition(float(v)) for v in x])
    assert np.allclose(found, want, rtol=2e-6, atol=2e-7)


def test_gelu_without_a_mode_is_the_exact_one() -> None:
    assert np.array_equal(evaluate("gelu", {"x": X}, X.shape), evaluate("gelu", {"x": X}, X.shape, mode="EXACT"))


def test_gelu_refuses_a_mode_it_does_not_know() -> None:
    with pytest.raises(OperationUnsupported, match="CUBIC"):
        evaluate("gelu", {"x": X}, X.shape, mode="CUBIC")


@pytest.mark.parametrize(
    ("kind", "definition"),
    [
        ("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("real_div", np.divide),
        ("maximum", np.maximum), ("minimum", np.minimum),
    ],
)  # fmt: skip
def test_two_operands_broadcast_and_keep_their_order(kind: str, definition: Any) -> None:
    x, y = X[:24].reshape(2, 1, 12), P[5:8].reshape(1, 3, 1)
    found = evaluate(kind, {"x": x, "y": y}, (2, 3, 12))
    assert np.allclose(found, definition(x.astype(np.float64), y.astype(np.float64)), rtol=1e-6)


def test_pow_takes_the_first_to_the_second() -> None:
    found = evaluate("pow", {"x": np.array([2, 9], np.float32), "y": np.array([3, 0.5], np.float32)}, (2,))
    assert found.tolist() == [8.0, 3.0]


def test_real_div_of_integers_is_refused() -> None:
    with pytest.raises(OperationUnsupported, match="floating-point"):
        evaluate("real_div", {"x": np.array([4], np.int32), "y": np.array([2], np.int32)}, (1,), "int32")


def test_cast_to_integers_goes_towards_zero_and_stops_at_the_ends() -> None:
    x = np.array([1.9, -1.9, 0.5, 3e9, -3e9, np.nan], np.float32)
    assert evaluate("cast", {"x": x}, x.shape, "int32", dtype="int32").tolist() == [1, -1, 0, 2**31 - 1, -(2**31), 0]
    assert evaluate("cast", {"x": np.array([0, 3], np.int32)}, (2,), "fp32", dtype="fp32").tolist() == [0.0, 3.0]


def test_select_and_comparisons() -> None:
    writer = Writer(x=TensorSpec((4,), "fp32"))
    big = writer("greater", (4,), "bool", x="x", y=np.float32(1))
    out = writer("select", (4,), "fp32", cond=big, a="x", b=np.float32(-1))
    found = planned(writer.function(out))({"x": np.array([0, 1, 2, 3], np.float32)})
    assert found[out].tolist() == [-1, -1, 2, 3]


@pytest.mark.parametrize("name", DEFINITIONS)
@given(start=st.integers(0, 70), length=st.integers(1, 70), step=st.sampled_from([1, 2, 3]))
def test_an_element_has_the_same_bits_at_every_offset_length_and_stride(
    name: str, start: int, length: int, step: int
) -> None:
    """numpy picks vector, tail and strided loops by alignment and length; they must agree for rows to be exact."""
    x, _, static = DEFINITIONS[name]
    whole = evaluate(name.split(" ")[0], {"x": x}, x.shape, **static)
    part = x[start::step][:length]
    padded = np.zeros(len(part) + 7, np.float32)
    for shift in (0, 1, 5):
        moved = padded[shift : shift + len(part)]
        moved[:] = part
        found = evaluate(name.split(" ")[0], {"x": moved}, moved.shape, **static)
        assert found.tobytes() == np.ascontiguousarray(whole[start::step][:length]).tobytes()
    strided = evaluate(name.split(" ")[0], {"x": part}, part.shape, **static)
    assert strided.tobytes() == np.ascontiguousarray(whole[start::step][:length]).tobytes()


def test_specs_name_the_types_of_arrays() -> None:
    assert spec_of(X) == TensorSpec(X.shape, "fp32")
