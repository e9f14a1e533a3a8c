"""A memory-mapping reader of the safetensors files of a Hugging Face folder: one file, or several with an index.

The numpy side of the safetensors package has no bfloat16, which is what checkpoints are published in. Every size and offset is checked against
the file before anything is viewed; gaps, overlaps and trailing bytes are refused, as the format has it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.jsonfile import JsonInvalid, parse_object, read_object
from runtime.build.errors import SourceDamaged, SourceMissing, field_error
from runtime.build.regular import regular_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: The header's length, and an empty object.
_SMALLEST = 8 + 2
_HEADER_LIMIT = 100_000_000
_INDEX_LIMIT = 64 << 20
_MAX_DIMENSIONS = 8
#: Element sizes of the format's types, in bytes. Only the first three are read; the others may be there, for parts that nobody asks for.
_SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_READABLE = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's place: its file's name, type, shape, and where its bytes start in the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int


class SafetensorsFolder:
    """The tensors of a folder, by name. Close it, or use it in a ``with``. ``files``: the names of the files that hold them.

    Raises SourceMissing without such files, SourceDamaged for a file that is cut short or contradicts itself or the index.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.entries: dict[str, Entry] = {}
        self._maps: dict[str, mmap.mmap] = {}
        indexed = self._index()
        self.files = tuple(sorted({SINGLE} if indexed is None else set(indexed.values())))
        try:
            for name in self.files:
                self._open(name)
        except BaseException:
            self.close()
            raise
        for tensor, name in (indexed or {}).items():
            if tensor not in self.entries or self.entries[tensor].file != name:
                self.close()
                raise _damaged(INDEX, f"weight_map.{tensor}", f"a tensor of {name}", "no such tensor there")

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Arrays that were read stay valid: they are copies."""
        for mapped in self._maps.values():
            mapped.close()

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows [start, stop) of a tensor as float32, owned by the caller. Raises SourceFieldError for a type that isn't floating-point."""
        entry = self.entries[name]
        if entry.dtype not in _READABLE:
            raise field_error(
                entry.file, f"tensor {name}", f"type {' or '.join(_READABLE)}", entry.dtype, "Give unquantised weights"
            )
        width = prod(entry.shape[1:])
        count, size = (stop - start) * width, _SIZES[entry.dtype]
        code = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}[entry.dtype]
        raw = np.frombuffer(self._maps[entry.file], code, count, entry.start + start * width * size)
        if entry.dtype == "BF16":  # the upper half of a float32
            wide: NDArray[np.float32] = (raw.astype(np.uint32) << 16).view(np.float32)
        else:
            wide = raw.astype(np.float32)
        return wide.reshape(stop - start, *entry.shape[1:])

    def _index(self) -> Mapping[str, str] | None:
        """Tensor to file, from the index; None where there is no index."""
        path = self.root / INDEX
        if not regular_file(path):
            return None
        try:
            document, _ = read_object(path, limit=_INDEX_LIMIT)
        except JsonInvalid as error:
            raise _damaged(INDEX, error.field, error.expected, error.found) from error
        found = document.get("weight_map")
        if not isinstance(found, dict) or not found:
            raise _damaged(INDEX, "weight_map", "an object with a file for each tensor", f"{found!r:.60}")
        for tensor, name in found.items():
            if not isinstance(name, str) or not _is_plain(name):
                raise _damaged(INDEX, f"weight_map.{tensor}", "the name of a file in the same folder", f"{name!r:.60}")
        return found

    def _open(self, name: str) -> None:
        if not regular_file(self.root / name):
            raise SourceMissing(
                f"{self.root}: expected {SINGLE}, or {INDEX} and the files it names, found no {name}. Give the folder of a model as it was published.",
                file=str(self.root / name),
            )
        try:
            with (self.root / name).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise _damaged(name, "the file", "a safetensors file", "an empty file") from error
        self._maps[name] = mapped
        for tensor, entry in _header(mapped, name):
            if tensor in self.entries:
                raise _damaged(name, tensor, "each tensor in one file", f"it in {self.entries[tensor].file} too")
            self.entries[tensor] = entry


def _header(mapped: mmap.mmap, file: str) -> Iterator[tuple[str, Entry]]:
    """The entries of one file, checked: together they are all of the file behind its header."""
    if len(mapped) < _SMALLEST:
        raise _damaged(file, "the file's length", f"at least {_SMALLEST} bytes", f"{len(mapped)} bytes")
    length = int.from_bytes(mapped[:8], "little")
    if not 2 <= length <= min(_HEADER_LIMIT, len(mapped) - 8):
        raise _damaged(file, "the header's length", f"2 to {min(_HEADER_LIMIT, len(mapped) - 8)} bytes", str(length))
    try:
        header = parse_object(mapped[8 : 8 + length], file)
    except JsonInvalid as error:
        raise _damaged(file, error.field, error.expected, error.found) from error
    header.pop("__metadata__", None)
    base, reached = 8 + length, 0
    placed = sorted(((_range(file, name, value), name) for name, value in header.items()), key=lambda item: item[0])
    for (start, stop), name in placed:
        dtype, shape = _described(file, name, header[name])
        if start != reached or stop - start != prod(shape) * _SIZES[dtype]:
            expected = f"[{reached}, {reached + prod(shape) * _SIZES[dtype]}]"
            raise _damaged(file, f"{name}.data_offsets", expected, f"[{start}, {stop}]")
        reached = stop
        yield name, Entry(file, dtype, shape, base + start)
    if base + reached != len(mapped):
        raise _damaged(file, "the file's length", f"{base + reached} bytes", f"{len(mapped)} bytes")


def _is_plain(name: str) -> bool:
    """Whether it can be a file's name in the same folder."""
    return 0 < len(name.encode()) <= 255 and name.isprintable() and not set(name) & {"/", "\\"} and name[0] != "."


def _range(file: str, name: str, value: Any) -> tuple[int, int]:
    found = value.get("data_offsets") if isinstance(value, dict) else None
    if not isinstance(found, list) or len(found) != 2 or any(type(v) is not int or v < 0 for v in found):
        raise _damaged(file, f"{name}.data_offsets", "two offsets", f"{found!r:.60}")
    return found[0], found[1]


def _described(file: str, name: str, value: Any) -> tuple[str, tuple[int, ...]]:
    dtype, shape = value.get("dtype"), value.get("shape")
    if not isinstance(dtype, str) or dtype not in _SIZES:
        raise _damaged(file, f"{name}.dtype", f"one of {', '.join(_SIZES)}", f"{dtype!r:.60}")
    if (
        not isinstance(shape, list)
        or len(shape) > _MAX_DIMENSIONS
        or any(type(v) is not int or not 0 <= v < 1 << 40 for v in shape)
    ):
        raise _damaged(file, f"{name}.shape", f"at most {_MAX_DIMENSIONS} lengths", f"{shape!r:.60}")
    return dtype, tuple(shape)


def _damaged(file: str, field: str, expected: str, found: str) -> SourceDamaged:
    return SourceDamaged(
        f"{file}: {field}: expected {expected}, found {found}. Take the file from its source again.",
        file=file,
        field=field,
        expected=expected,
        found=found,
    )
