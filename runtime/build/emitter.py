"""Small steps of a decoder as ML Program operations: constants, projections, norms, rotary positions.

An :class:`Emitter` writes into the function that is open in coremltools' builder. Values are coremltools' own (typed ``Any``: the package
carries no types). Every norm divides by the row's maximum before it squares, because x² of a projection passes fp16's 65,504.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.build.authoring import six_bits
from runtime.build.compress import Half, Matrix, Rows8

F16 = np.float16
#: A row whose largest magnitude is smaller is divided by this instead, so that an all-zero row gives 0 and not NaN. Any
#: divisor is exact, because epsilon is divided by its square too. 2⁻¹⁰ keeps that quotient inside fp16.
NORM_FLOOR = 2.0**-10
#: fp16's smallest normal number. No row of up to 16,384 elements has a smaller mean plus epsilon, but hardware that takes
#: subnormals for 0 makes it 0 for an all-zero row, and 0 · (1/√0) would be NaN.
MEAN_FLOOR = 2.0**-14


@dataclass(frozen=True, slots=True)
class Numerics:
    """What keeps the graph inside fp16. Bundles are built with the defaults; tests undo them one by one.

    ``residual_scale`` divides the residual stream (a power of two, so exact): undivided, Gemma's passes 100,000.
    """

    residual_scale: float = 32.0
    norm_by_maximum: bool = True


@dataclass(slots=True)
class Emitter:
    """Emits operations into the open function. ``mb`` is coremltools' MIL builder."""

    mb: Any
    numerics: Numerics
    constants: dict[str, Any] = field(default_factory=dict)

    def scalar(self, value: float) -> Any:
        """An fp16 scalar, one constant per function and value."""
        return self._constant(f"scalar_{value!r}", F16(value))

    def ints(self, *values: int) -> Any:
        """An int32 vector (axes, shapes, permutations), one constant per function and value."""
        return self._constant("ints_" + "_".join(map(str, values)), np.array(values, np.int32))

    def axis(self, value: int) -> Any:
        """An int32 scalar."""
        return self._constant(f"axis_{value}", np.int32(value))

    def boolean(self, value: bool) -> Any:
        return self._constant(f"bool_{value}", value)

    def text(self, value: str) -> Any:
        return self._constant(f"text_{value}", value)

    def _constant(self, key: str, value: Any) -> Any:
        if key not in self.constants:
            name = key.replace("-", "m").replace(".", "p").replace("+", "")
            self.constants[key] = self.mb.const(val=value, name=name)
        return self.constants[key]

    def weight(self, key: str, value: NDArray[Any]) -> Any:
        """A weight. ``key`` is its ``weight_id``: functions of one package that use the same key share one blob."""
        if key not in self.constants:
            var = self.mb.const(val=value, name=key.replace(".", "_"))
            var.op.weight_id = key
            self.constants[key] = var
        return self.constants[key]

    def linear(self, x: Any, key: str, value: NDArray[Any], name: str) -> Any:
        """x [n, in] times ``value`` [out, in] transposed: [n, out]."""
        return self.project(x, self.weight(key, value), name)

    def project(self, x: Any, weight: Any, name: str) -> Any:
        """The same with a weight that is emitted already. The operation wants a bias: one zero vector per length serves all."""
        length = weight.shape[0]
        bias = self.weight(f"zeros.{length}", np.zeros(length, F16))
        return self.mb.linear(x=x, weight=weight, bias=bias, name=name)

    def reshape(self, x: Any, shape: tuple[int, ...], name: str) -> Any:
        if tuple(x.shape) == shape:
            return x
        return self.mb.reshape(x=x, shape=self.ints(*shape), name=name)

    def matrix(self, key: str, value: Matrix) -> Any:
        """A weight matrix [out, in] in the form it is stored in. ``key`` as for :meth:`weight`, which its parts share."""
        if key not in self.constants:
            name = key.replace(".", "_")
            if isinstance(value, Half):
                return self.weight(key, value.values)
            if isinstance(value, Rows8):
                rows, steps = self.weight(f"{key}.rows", value.rows), self.weight(f"{key}.steps", value.steps)
                var = self.mb.constexpr_blockwise_shift_scale(data=rows, scale=steps, name=name)
            else:
                indices = self.weight(f"{key}.indices", six_bits(value.indices))
                tables = self.weight(f"{key}.tables", value.tables[:, None, :, None])
                var = self.mb.constexpr_lut_to_dense(indices=indices, lut=tables, name=name)
            self.constants[key] = var
        return self.constants[key]

    def norm(self, x: Any, key: str, gain: NDArray[np.float16] | None, epsilon: float, name: str) -> Any:
        """RMSNorm over the last axis: x / sqrt(mean(x²) + epsilon), times the gain where there is one; same shape."""
        mb, keep, last = self.mb, self.boolean(True), self.ints(-1)
        root = math.sqrt(epsilon)
        if self.numerics.norm_by_maximum:
            largest = mb.reduce_max(
                x=mb.abs(x=x, name=f"{name}_abs"), axes=last, keep_dims=keep, name=f"{name}_largest"
            )
            divisor = mb.maximum(x=largest, y=self.scalar(NORM_FLOOR), name=f"{name}_divisor")
            x = mb.real_div(x=x, y=divisor, name=f"{name}_scaled")
            root_scaled = mb.real_div(x=self.scalar(root), y=divisor, name=f"{name}_root_epsilon")
            shift = mb.mul(x=root_scaled, y=root_scaled, name=f"{name}_epsilon")
        else:
            shift = self.scalar(epsilon)
        square = mb.mul(x=x, y=x, name=f"{name}_square")
        mean = mb.reduce_mean(x=square, axes=last, keep_dims=keep, name=f"{name}_mean")
        shifted = mb.add(x=mean, y=shift, name=f"{name}_shifted")
        if self.numerics.norm_by_maximum:
            shifted = mb.maximum(x=shifted, y=self.scalar(MEAN_FLOOR), name=f"{name}_floored")
        inverse = mb.rsqrt(x=shifted, epsilon=self.scalar(0.0), name=f"{name}_rsqrt")
        if gain is None:
            return mb.mul(x=x, y=inverse, name=name)
        unit = mb.mul(x=x, y=inverse, name=f"{name}_unit")
        return mb.mul(x=unit, y=self.weight(key, gain), name=name)

    def rotate(self, x: Any, cos: Any, sin: Any, name: str) -> Any:
        """Rotary position: x [n, heads, head_dim], cos and sin [n, 1, head_dim]; pairs are (i, i + head_dim/2)."""
        mb, (n, heads, width) = self.mb, tuple(x.shape)
        half = width // 2
        low = mb.slice_by_size(x=x, begin=self.ints(0, 0, 0), size=self.ints(n, heads, half), name=f"{name}_low")
        high = mb.slice_by_size(x=x, begin=self.ints(0, 0, half), size=self.ints(n, heads, half), name=f"{name}_high")
        negated = mb.mul(x=high, y=self.scalar(-1.0), name=f"{name}_negated")
        turned = mb.concat(
            values=[negated, low], axis=self.axis(-1), interleave=self.boolean(False), name=f"{name}_turned"
        )
        straight = mb.mul(x=x, y=cos, name=f"{name}_cos")
        return mb.add(x=straight, y=mb.mul(x=turned, y=sin, name=f"{name}_sin"), name=name)
