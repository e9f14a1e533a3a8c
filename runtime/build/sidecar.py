"""Rows of eight-bit integers with a scale each: the embedding sidecar and the head's weights.

Both hold the embedding matrix (Gemma ties them), quantised per row, but with different scales: the sidecar's are float32 magnitudes that
the reader divides by 127, the head's are the fp16 steps that ``constexpr_blockwise_shift_scale`` multiplies with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.build.digests import TensorDigest, tensor_digest
from runtime.build.errors import not_finite

#: Rows quantised at a time: 4,096 · 640 float32 is 10 MB.
BLOCK_ROWS = 4096


def quantise_sidecar(block: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """int8 rows and float32 magnitudes [n]: row ≈ q · magnitude / 127. A zero row has magnitude 0. Rows must be finite."""
    magnitude = np.abs(block).max(axis=1)
    inverse = np.divide(127.0, magnitude, out=np.zeros_like(magnitude), where=magnitude > 0)
    return np.rint(block * inverse[:, None]).astype(np.int8), magnitude


def quantise_head(block: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """int8 rows and fp16 steps [n, 1]: row ≈ q · step. The step is rounded to fp16 first, upwards, so that ±127 suffices."""
    exact = np.abs(block).max(axis=1, keepdims=True) / np.float32(127.0)
    step = exact.astype(np.float16)
    step = np.where(step.astype(np.float32) < exact, np.nextafter(step, np.float16(np.inf)), step)
    wide = step.astype(np.float32)
    inverse = np.divide(1.0, wide, out=np.zeros_like(wide), where=wide > 0)
    return np.rint(block * inverse).astype(np.int8), step


def write_embedding(
    name: str,
    blocks: Iterator[NDArray[np.float32]],
    rows_path: Path,
    scales_path: Path,
    *,
    shape: tuple[int, int],
    divide: float,
    progress: Callable[[int], None],
    noted: str = "token_embd",
) -> dict[str, TensorDigest]:
    """Write the embedding sidecar [rows, columns]: int8 rows, and one little-endian float32 scale a row, divided by ``divide``.

    ``name`` is the tensor's, for refusals: SourceFieldError unless all is finite. ``progress`` gets the number of rows written so far. Returns the
    digests of rows and undivided scales, under ``noted``.
    """
    magnitudes = np.empty(shape[0], np.float32)
    done = 0
    with rows_path.open("wb") as rows_file:
        for block in blocks:
            _require_finite(name, block)
            rows, magnitudes[done : done + len(block)] = quantise_sidecar(block)
            rows_file.write(rows.tobytes())
            done += len(block)
            progress(done)
    scales_path.write_bytes((magnitudes / np.float32(divide)).astype("<f4").tobytes())
    written = np.memmap(rows_path, np.int8, "r", shape=shape)
    return {f"{noted}.rows": tensor_digest(written), f"{noted}.scales": tensor_digest(magnitudes)}


def write_half_table(
    name: str,
    blocks: Iterator[NDArray[np.float32]],
    path: Path,
    *,
    shape: tuple[int, int],
    square: int,
    progress: Callable[[int], None],
    noted: str,
) -> dict[str, TensorDigest]:
    """Write a sidecar [rows, columns] of little-endian fp16: each row times the square root of ``square``, as the host uses it.

    The rest as :func:`write_embedding`; the digest is that of what is written.
    """
    factor = np.float32(math.sqrt(square))
    done = 0
    with path.open("wb") as file:
        for block in blocks:
            _require_finite(name, block * factor)
            file.write((block * factor).astype("<f2").tobytes())
            done += len(block)
            progress(done)
    return {noted: tensor_digest(np.memmap(path, "<f2", "r", shape=shape))}


def quantise_output(
    name: str, blocks: Iterator[NDArray[np.float32]], shape: tuple[int, int], progress: Callable[[int], None]
) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """The head's int8 rows [vocabulary, hidden] and fp16 steps [vocabulary, 1]."""
    rows = np.empty(shape, np.int8)
    steps = np.empty((shape[0], 1), np.float16)
    done = 0
    for block in blocks:
        _require_finite(name, block)
        rows[done : done + len(block)], steps[done : done + len(block)] = quantise_head(block)
        done += len(block)
        progress(done)
    return rows, steps


def _require_finite(name: str, block: NDArray[np.float32]) -> None:
    largest = float(np.abs(block).max())
    if not largest <= float(np.finfo(np.float16).max):
        raise not_finite(name, largest)
