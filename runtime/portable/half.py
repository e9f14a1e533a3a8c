"""Rounding to fp16 and noticing when that makes an infinity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.engine import Fp16Overflow
from runtime.ops.widen import finite

Check = Callable[[NDArray[Any]], NDArray[np.float16]]


def to_half(function: str, value: str) -> Check:
    """A cast of float arrays to new fp16 arrays that raises ``Fp16Overflow`` naming ``value`` of ``function``."""

    def cast(x: NDArray[Any]) -> NDArray[np.float16]:
        half = x.astype(np.float16, order="C")
        if not finite(half) and np.isinf(half).any():
            largest = float(np.nanmax(np.abs(x)))
            raise Fp16Overflow(
                f"{function}: {value}: expected magnitudes up to 65504 (fp16), found {largest:g}; "
                "the model's scales don't fit fp16: build the bundle again with smaller ones",
                function=function,
                op=value,
                largest=largest,
            )
        return half

    return cast


def rounder(function: str, value: str) -> Callable[[NDArray[Any]], NDArray[np.float32]]:
    """Like ``to_half``, and back to float32."""
    cast = to_half(function, value)
    return lambda x: cast(x).astype(np.float32)


def entering_rounder(function: str, value: str) -> Callable[[NDArray[Any]], NDArray[np.float32]]:
    """Rounds K or V rows. −0 becomes +0: what passes x·1 + 0 does, so that every way into the cache agrees."""
    cast = to_half(function, value)
    zero = np.float32(0)
    return lambda x: cast(x).astype(np.float32) + zero
