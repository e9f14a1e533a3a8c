"""A weight matrix as a package holds it: fp16, int8 with a step a row, or 6 bits into a table for each few rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from runtime.build.digests import TensorDigest, tensor_digest
from runtime.build.errors import SourceFieldError, not_finite
from runtime.build.kmeans import ENTRIES, cluster
from runtime.build.sidecar import quantise_head

Form = Literal["pal6", "int8", "fp16"]
FORMS: tuple[Form, ...] = ("pal6", "int8", "fp16")
#: Rows that share a table. The published head's size (0.756 of the int8 one) leaves room for one table of 64 fp16 numbers in 16 rows.
GROUP_ROWS = 16
F16_MAX = 65504.0


@dataclass(frozen=True, slots=True, eq=False)
class Half:
    """``values`` fp16 [out, in]."""

    values: NDArray[np.float16]


@dataclass(frozen=True, slots=True, eq=False)
class Rows8:
    """Row = ``rows`` · ``step``: int8 [out, in], fp16 [out, 1]."""

    rows: NDArray[np.int8]
    steps: NDArray[np.float16]


@dataclass(frozen=True, slots=True, eq=False)
class Palette:
    """Element = the table of its row's group at its index: ``indices`` uint8 [out, in] below 64, ``tables`` fp16 [groups, 64], ascending."""

    indices: NDArray[np.uint8]
    tables: NDArray[np.float16]


Matrix: TypeAlias = Half | Rows8 | Palette


def compress(name: str, form: Form, values: NDArray[np.float32]) -> Matrix:
    """``values`` float32 [out, in] in the given form. ``name`` is for refusals: SourceFieldError where fp16 can't hold them."""
    half = as_half(name, values)
    if form == "fp16":
        return Half(half)
    if form == "int8":
        return Rows8(*quantise_head(values))
    return palettise(half)


def as_half(name: str, values: NDArray[np.float32]) -> NDArray[np.float16]:
    """A tensor rounded to fp16. Raises SourceFieldError where that is not finite."""
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if not np.isfinite(half).all():
        raise not_finite(name, float(np.abs(values).max()))
    return half


def palettise(values: NDArray[np.float16], rows: int | None = None) -> Palette:
    """6 bits an element, a table for every ``rows`` rows: by default :data:`GROUP_ROWS`, or the largest part of it that divides them."""
    out, width = values.shape
    rows = rows or math.gcd(out, GROUP_ROWS)
    indices = np.empty((out, width), np.uint8)
    tables = np.empty((out // rows, ENTRIES), np.float16)
    for group in range(len(tables)):
        at = slice(group * rows, (group + 1) * rows)
        tables[group], flat = cluster(values[at].reshape(-1))
        indices[at] = flat.reshape(rows, width)
    return Palette(indices, tables)


def dense(matrix: Matrix) -> NDArray[np.float32]:
    """What the matrix stands for, float32 [out, in]."""
    if isinstance(matrix, Half):
        return matrix.values.astype(np.float32)
    if isinstance(matrix, Rows8):
        return matrix.rows.astype(np.float32) * matrix.steps.astype(np.float32)
    rows = len(matrix.indices) // len(matrix.tables)
    return np.take_along_axis(np.repeat(matrix.tables, rows, 0), matrix.indices, 1).astype(np.float32)


def largest(matrix: Matrix) -> float:
    """The largest magnitude of an element."""
    if isinstance(matrix, Half):
        return float(np.abs(matrix.values).max())
    if isinstance(matrix, Rows8):
        return float((np.abs(matrix.rows).max(1, keepdims=True) * matrix.steps.astype(np.float32)).max())
    return float(np.abs(matrix.tables).max())


def scaled(name: str, matrix: Matrix, factor: float) -> Matrix:
    """The matrix times a power of two, which is exact. Raises SourceFieldError, with ``name``, where that leaves fp16."""
    found = largest(matrix)
    if not found * factor <= F16_MAX:
        raise SourceFieldError(
            f"the weights: {name}: expected magnitudes up to {F16_MAX / factor:g}, which times {factor:g} fit fp16 (the residual stream is "
            f"carried divided by {factor:g}, and this matrix reads it undivided), found {found:g}. Give another file.",
            file="the weights",
            field=name,
            expected=f"magnitudes up to {F16_MAX / factor:g}",
            found=f"{found:g}",
        )
    by = np.float16(factor)
    if isinstance(matrix, Half):
        return Half(matrix.values * by)
    if isinstance(matrix, Rows8):
        return Rows8(matrix.rows, matrix.steps * by)
    return Palette(matrix.indices, matrix.tables * by)


def digests(name: str, matrix: Matrix) -> Iterator[tuple[str, TensorDigest]]:
    """The digests of what is stored, by name."""
    if isinstance(matrix, Half):
        yield name, tensor_digest(matrix.values)
    elif isinstance(matrix, Rows8):
        yield f"{name}.rows", tensor_digest(matrix.rows)
        yield f"{name}.steps", tensor_digest(matrix.steps)
    else:
        yield f"{name}.indices", tensor_digest(matrix.indices)
        yield f"{name}.tables", tensor_digest(matrix.tables)


def stored_bytes(form: Form, out: int, width: int) -> int:
    """What a matrix [out, width] takes in a weight file, without the blobs' headers."""
    if form == "fp16":
        return 2 * out * width
    if form == "int8":
        return out * width + 2 * out
    return -(-6 * out * width // 8) + out // math.gcd(out, GROUP_ROWS) * ENTRIES * 2
