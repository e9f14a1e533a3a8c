"""Weight files: a memory-mapped ``weight.bin`` and the element types packed in it.

A blob is a 64-byte header at a known offset and its bytes elsewhere in the same file. Headers are checked
against the file's size before anything is viewed; nothing here copies a whole-byte blob.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.mlpackage.errors import PackageError
from runtime.mlpackage.ir import BITS, TensorSpec

_HEADER = struct.Struct("<IIQQQ")
_HEADER_BYTES = 64
_SENTINEL = 0xDEADBEEF
_DTYPES = {
    1: "fp16", 2: "fp32", 3: "uint8", 4: "int8", 6: "int16", 7: "uint16", 8: "int4", 9: "uint1",
    10: "uint2", 11: "uint4", 12: "uint3", 13: "uint6", 14: "int32", 15: "uint32",
}  # fmt: skip


class WeightFile:
    """One mapped weight file. Views keep the mapping alive; it is closed when the last one goes."""

    def __init__(self, path: Path, label: str) -> None:
        """Maps ``path`` read-only. ``label`` is how refusals call it. Raises ``PackageError``, ``OSError``."""
        self._label = label
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < _HEADER_BYTES:
                raise PackageError.of(label, "file size", f"at least {_HEADER_BYTES} bytes", size)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return int(self._bytes.size)

    def view(self, offset: int, spec: TensorSpec) -> NDArray[np.generic]:
        """The blob whose header is at ``offset``, as an array of ``spec.shape``.

        Whole-byte types come as read-only views of the mapping; sub-byte types are unpacked into a new
        array of one byte an element. Raises ``PackageError`` when header and ``spec`` disagree.
        """
        dtype, data = self._data(offset)
        if dtype != spec.dtype and not (dtype == "uint8" and spec.dtype == "bool"):
            raise self._wrong(offset, "element type", spec.dtype, dtype)
        bits = BITS[dtype]
        need = -(-spec.size * bits // 8)
        if data.size != need:
            raise self._wrong(offset, "data bytes", f"{need} for {spec}", data.size)
        if bits < 8:
            return unpack(data, dtype, spec.shape)
        return data.view(spec.numpy).reshape(spec.shape)

    def _data(self, offset: int) -> tuple[str, NDArray[np.uint8]]:
        size = self._bytes.size
        if offset < 0 or offset % _HEADER_BYTES or offset + _HEADER_BYTES > size:
            raise self._wrong(offset, "header offset", f"a multiple of 64 up to {size - 64}", offset)
        sentinel, kind, length, start, _ = _HEADER.unpack_from(self._map, offset)
        if sentinel != _SENTINEL:
            raise self._wrong(offset, "sentinel", f"{_SENTINEL:#x}", f"{sentinel:#x}")
        if kind not in _DTYPES:
            raise self._wrong(offset, "element type", f"one of {sorted(_DTYPES)}", kind)
        if start % _HEADER_BYTES or start > size or length > size - start:
            raise self._wrong(offset, "data range", f"inside {size} bytes", f"{length} bytes at {start}")
        return _DTYPES[kind], self._bytes[start : start + length]

    def _wrong(self, offset: int, field: str, expected: object, found: object) -> PackageError:
        return PackageError.of(self._label, f"blob at {offset}: {field}", expected, found)


def unpack(data: NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """``data``'s little-endian bit-packed elements as a new array of ``shape``, one byte an element.

    ``data`` holds ⌈elements · bits / 8⌉ bytes; element i occupies bits [i·b, (i+1)·b), low bit first.
    ``int4`` is two's complement and comes as int8; the unsigned types come as uint8.
    """
    count, bits = prod(shape), BITS[dtype]
    if bits in (1, 2, 4):
        per = 8 // bits
        spread = np.empty((data.size, per), np.uint8)
        for slot in range(per):
            np.right_shift(data, slot * bits, out=spread[:, slot])
        spread &= (1 << bits) - 1
        flat = spread.reshape(-1)[:count]
    else:
        # 3 and 6 bits straddle bytes: 8 elements fill `bits` bytes, so unpack group by group.
        groups = -(-count // 8)
        padded = np.zeros(groups * bits, np.uint8)
        padded[: data.size] = data
        words = np.zeros(groups, np.uint64)
        for index in range(bits):
            words |= padded[index::bits].astype(np.uint64) << np.uint64(8 * index)
        spread = np.empty((groups, 8), np.uint8)
        for slot in range(8):
            spread[:, slot] = (words >> np.uint64(slot * bits)) & np.uint64((1 << bits) - 1)
        flat = spread.reshape(-1)[:count]
    if dtype == "int4":
        flat = ((flat ^ 8).astype(np.int8) - 8).astype(np.int8)
    return flat.reshape(shape)
