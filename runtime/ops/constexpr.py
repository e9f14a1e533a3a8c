"""Compressed constants: affine-quantised and palettised weights, expanded when a kernel first asks.

``constexpr_blockwise_shift_scale`` and ``constexpr_lut_to_dense`` never run: they become ``Source``s.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.mlpackage import TensorSpec
from runtime.ops.call import Call
from runtime.ops.weights import Source, WeightCache


def rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """``values`` as fp16 would hold them."""
    return values.astype(np.float16).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Shifted:
    """scale · (data − offset), where scale and offset hold one element a block of ``data``."""

    spec: TensorSpec
    data: Source
    scale: Source
    offset: Source | None
    rounding: bool
    cache: WeightCache

    @property
    def key(self) -> Hashable:
        offset = self.offset.key if self.offset else None
        return ("shift", self.data.key, self.scale.key, offset, self.rounding)

    def plain(self) -> NDArray[Any]:
        """float32, of ``spec.shape``."""
        return self.cache.get(self.key, self._expand)

    def per_row(self) -> tuple[NDArray[np.int8], NDArray[np.float32]] | None:
        """(int8 data [rows, …], float32 factor [rows]) when it is stored so, without offset; else ``None``."""
        shape = self.scale.spec.shape
        if self.data.spec.dtype != "int8" or self.offset is not None or self.rounding:
            return None
        if any(size != 1 for size in shape[1:]) or shape[0] not in (1, self.spec.shape[0]):
            return None
        factors = np.broadcast_to(self.scale.plain().reshape(-1), self.spec.shape[:1])
        return self.data.plain(), factors

    def _expand(self) -> NDArray[np.float32]:
        shape, blocks = self.spec.shape, self.scale.spec.shape
        # [d0, d1] with blocks [b0, b1] is seen as [b0, d0/b0, b1, d1/b1], scales as [b0, 1, b1, 1]
        split = [size for d, b in zip(shape, blocks, strict=True) for size in (b, d // b)]
        paired = [size for b in blocks for size in (b, 1)]
        out = self.data.plain().astype(np.float32).reshape(split)
        if self.offset is not None:
            out -= self.offset.plain().astype(np.float32).reshape(paired)
        out *= self.scale.plain().reshape(paired)
        return rounded(out.reshape(shape)) if self.rounding else out.reshape(shape)


@dataclass(frozen=True, slots=True, eq=False)
class Palettised:
    """lut[block, index] for each index; the LUT has one table a block and ``vector`` numbers an entry."""

    spec: TensorSpec
    indices: Source
    lut: Source
    vector_axis: int
    cache: WeightCache

    @property
    def key(self) -> Hashable:
        return ("lut", self.indices.key, self.lut.key, self.vector_axis)

    def plain(self) -> NDArray[Any]:
        """The LUT's run-time type (float32 for fp16), of ``spec.shape``."""
        return self.cache.get(self.key, self._expand)

    def _expand(self) -> NDArray[Any]:
        indices, lut = self.indices.plain(), self.lut.plain()
        blocks, vector = lut.shape[:-2], lut.shape[-1]
        steps = [d // b for d, b in zip(indices.shape, blocks, strict=True)]
        out = np.empty((*indices.shape, vector), lut.dtype)
        for block in product(*map(range, blocks)):
            part = tuple(slice(i * s, (i + 1) * s) for i, s in zip(block, steps, strict=True))
            out[part] = lut[block][indices[part]]
        # a vector's numbers lie next to each other along vector_axis
        return np.moveaxis(out, -1, self.vector_axis + 1).reshape(self.spec.shape)


def shift_scale(call: Call) -> Source:
    """``constexpr_blockwise_shift_scale``. Raises ``OperationUnsupported`` on shapes that don't divide."""
    data, scale = _source(call, "data"), _source(call, "scale")
    offset = _source(call, "offset") if call.given("offset") else None
    _check_blocks(call, data.spec.shape, scale.spec.shape, "scale")
    if data.spec.shape != call.out.shape or (offset and offset.spec.shape != scale.spec.shape):
        raise call.unsupported(f"data {data.spec}, scale {scale.spec}, output {call.out}: shapes differ")
    return Shifted(call.out, data, scale, offset, call.rounding, call.cache)


def lut_to_dense(call: Call) -> Source:
    """``constexpr_lut_to_dense``. Raises ``OperationUnsupported`` on shapes that don't divide."""
    indices, lut = _source(call, "indices"), _source(call, "lut")
    shape = lut.spec.shape
    if len(shape) != len(indices.spec.shape) + 2:
        raise call.unsupported(f"lut {lut.spec}: expected two more axes than indices {indices.spec}")
    _check_blocks(call, indices.spec.shape, shape[:-2], "lut")
    vector = shape[-1]
    axis = call.integer("vector_axis", 0) if vector > 1 else 0
    axis %= max(1, len(indices.spec.shape))
    want = tuple(d * vector if i == axis else d for i, d in enumerate(indices.spec.shape))
    if want != call.out.shape:
        raise call.unsupported(f"indices {indices.spec}, lut {lut.spec}: expected output {want}, found {call.out}")
    bits = int(indices.spec.dtype.removeprefix("uint"))
    if shape[-2] != 1 << bits:
        raise call.unsupported(f"lut {lut.spec}: expected {1 << bits} entries for {indices.spec.dtype}")
    return Palettised(call.out, indices, lut, axis, call.cache)


def _source(call: Call, name: str) -> Source:
    source = call.source(name)
    if source is None:
        raise call.unsupported(f"input {name}: expected a constant, found a computed value")
    return source


def _check_blocks(call: Call, shape: tuple[int, ...], blocks: tuple[int, ...], name: str) -> None:
    fits = len(shape) == len(blocks) and all(b and d % b == 0 for d, b in zip(shape, blocks, strict=True))
    if not fits:
        raise call.unsupported(f"{name} {blocks}: expected a shape that divides {shape}")


CONSTANTS: Mapping[str, Callable[[Call], Source]] = {
    "constexpr_blockwise_shift_scale": shift_scale,
    "constexpr_lut_to_dense": lut_to_dense,
}
