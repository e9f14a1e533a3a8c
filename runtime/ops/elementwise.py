"""Operations on each element alone. All are row-invariant: an element's bits never depend on its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from runtime.ops.call import Array, Call, Factory, Step, held

_SQRT_HALF = np.float32(0.7071067811865476)
_SQRT_2_OVER_PI = np.float32(0.7978845608028654)


def erf(x: Array) -> Array:
    """The error function in float64, within 1e-9: all terms positive, so nothing cancels.

    erf(x) = 2/√π · e^(−x²) · Σ 2ⁿ x^(2n+1) / (2n+1)!!; from |x| = 6 on it is ±1 in float64's sight of float32.
    """
    bounded = np.clip(x.astype(np.float64), -6, 6)
    square = bounded * bounded
    term = bounded * np.exp(-square) * (2 / np.sqrt(np.pi))
    total: Array = term.copy()
    for n in range(1, 130):
        term *= 2 * square / (2 * n + 1)
        total += term
    return total


def _sigmoid(x: Array) -> Array:
    # e^-|x| never overflows: 1/(1+e) for x ≥ 0 and e/(1+e) below
    small = np.exp(-np.abs(x))
    out: Array = np.where(x >= 0, np.float32(1), small)
    out /= 1 + small
    return out


def _gelu_exact(x: Array) -> Array:
    out: Array = 0.5 * x * (1 + erf(x * _SQRT_HALF))
    return out.astype(np.float32)


def _gelu_tanh(x: Array) -> Array:
    inner = x * x
    inner *= x
    inner *= np.float32(0.044715)
    inner += x
    inner *= _SQRT_2_OVER_PI
    np.tanh(inner, out=inner)
    inner += np.float32(1)
    inner *= x
    inner *= np.float32(0.5)
    return inner


def _gelu_sigmoid(x: Array) -> Array:
    return x * _sigmoid(np.float32(1.702) * x)


_GELU = {"EXACT": _gelu_exact, "TANH_APPROXIMATION": _gelu_tanh, "SIGMOID_APPROXIMATION": _gelu_sigmoid}


def _gelu(call: Call) -> Step:
    mode = call.text("mode", "EXACT")
    if mode not in _GELU:
        raise call.unsupported(f"mode: expected one of {sorted(_GELU)}, found {mode}")
    return call.step(_GELU[mode], "x")


def _one(run: Callable[[Array], Array]) -> Factory:
    return lambda call: call.step(run, "x")


def _two(run: Callable[[Array, Array], Array]) -> Factory:
    return lambda call: call.step(run, "x", "y")


def _compare(run: Callable[[Array, Array], Array]) -> Factory:
    return lambda call: call.step(run, "x", "y", moves=True)


def _real_div(call: Call) -> Step:
    if call.out.dtype not in ("fp16", "fp32"):
        raise call.unsupported(f"expected floating-point operands, found {call.out}")
    return call.step(np.divide, "x", "y")


def _with_epsilon(run: Callable[[Array], Array], default: float) -> Factory:
    def factory(call: Call) -> Step:
        epsilon = np.float32(call.number("epsilon", default))
        return call.step(lambda x: run(x + epsilon), "x")

    return factory


def _clip(call: Call) -> Step:
    low, high = np.float32(call.number("alpha", 0.0)), np.float32(call.number("beta", 0.0))
    return call.step(lambda x: np.clip(x, low, high), "x")


def _cast(call: Call) -> Step:
    target = held(call.out)
    limits = np.iinfo(target) if target.kind in "iu" else None

    def run(x: Array) -> Array:
        if limits is not None and x.dtype.kind == "f":
            # towards zero; what doesn't fit is clipped, because numpy leaves it undefined
            x = np.nan_to_num(np.trunc(x), nan=0.0)
            return np.clip(x.astype(np.float64), limits.min, limits.max).astype(target)
        return x.astype(target, copy=False)

    return call.step(run, "x")


def _select(call: Call) -> Step:
    def run(cond: Array, a: Array, b: Array) -> Array:
        return np.where(cond, a, b)

    return call.step(run, "cond", "a", "b", moves=True)


def _rsqrt(x: Array) -> Any:
    return np.float32(1) / np.sqrt(x)


OPS: Mapping[str, Factory] = {
    "add": _two(np.add),
    "sub": _two(np.subtract),
    "mul": _two(np.multiply),
    "real_div": _real_div,
    "maximum": _two(np.maximum),
    "minimum": _two(np.minimum),
    "pow": _two(np.power),
    "abs": _one(np.abs),
    "square": _one(np.square),
    "sqrt": _one(np.sqrt),
    "exp": _one(np.exp),
    "sin": _one(np.sin),
    "cos": _one(np.cos),
    "tanh": _one(np.tanh),
    "relu": _one(lambda x: np.maximum(x, np.float32(0))),
    "sigmoid": _one(_sigmoid),
    "silu": _one(lambda x: x * _sigmoid(x)),
    "gelu": _gelu,
    "rsqrt": _with_epsilon(_rsqrt, 1e-12),
    "inverse": _with_epsilon(np.reciprocal, 1e-4),
    "log": _with_epsilon(np.log, 1e-45),
    "clip": _clip,
    "cast": _cast,
    "select": _select,
    "equal": _compare(np.equal),
    "not_equal": _compare(np.not_equal),
    "greater": _compare(np.greater),
    "greater_equal": _compare(np.greater_equal),
    "less": _compare(np.less),
    "less_equal": _compare(np.less_equal),
    "logical_and": _compare(np.logical_and),
    "logical_or": _compare(np.logical_or),
    "logical_not": lambda call: call.step(np.logical_not, "x", moves=True),
}
