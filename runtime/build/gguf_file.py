"""A memory-mapping reader of GGUF files (versions 2 and 3, little-endian).

``gguf.GGUFReader`` makes an array object of every string of the vocabulary and takes 27 s for Gemma's; this one takes a fraction of a
second. Every count and offset is checked against what is left of the file before anything is allocated.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.build.errors import SourceDamaged, field_error, tool_missing

Value = int | float | bool | str | tuple["Value", ...]

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
#: Shortest possible encodings, to bound counts by the bytes that are left: key length + type + 1 byte; name length + dimensions + type + offset.
_SMALLEST_FIELD, _SMALLEST_TENSOR = 13, 24
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's place in the file. ``shape`` is row-major ([out, in]); ``start`` and ``size`` in bytes."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int
    size: int
    row_bytes: int


class GgufFile:
    """An open GGUF file: ``metadata`` by key, ``entries`` by tensor name. Close it, or use it in a ``with``.

    Raises SourceDamaged when the file is cut short or inconsistent, SourceFieldError on a version, byte order or type it can't read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise self._damaged("the file is empty") from error
        try:
            cursor = _Cursor(self._map, self)
            self.metadata, self.entries = self._read(cursor)
        except BaseException:
            self._map.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()

    def rows(self, entry: TensorEntry, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start..stop of a tensor, dequantised to float32 [stop − start, columns]; a vector counts as one row. Owned by the caller."""
        quants, constants = _gguf()
        begin = entry.start + start * entry.row_bytes
        raw = np.frombuffer(self._map[begin : entry.start + stop * entry.row_bytes], np.uint8)
        kind = constants.GGMLQuantizationType(entry.type_id)
        values = quants.dequantize(raw.reshape(stop - start, entry.row_bytes), kind)
        return np.asarray(values, np.float32).reshape(stop - start, entry.shape[-1])

    def _read(self, cursor: _Cursor) -> tuple[Mapping[str, Value], Mapping[str, TensorEntry]]:
        if bytes(cursor.take(4)) != _MAGIC:
            raise field_error(self.path, "magic", repr(_MAGIC), bytes(self._map[:4]), "give a GGUF file")
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise field_error(
                str(self.path), "version", "2 or 3, little-endian", version, "convert the file with a current llama.cpp"
            )
        tensors = cursor.count("tensor_count", _SMALLEST_TENSOR)
        fields = cursor.count("metadata_kv_count", _SMALLEST_FIELD)
        metadata: dict[str, Value] = {}
        for _ in range(fields):
            key = cursor.string()
            if key in metadata:
                raise self._damaged(f"the metadata key {key!r:.80} occurs twice")
            metadata[key] = cursor.value(cursor.scalar("I"), key)
        listed = [cursor.tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise field_error(self.path, "general.alignment", "a power of two", alignment, "convert the file again")
        data = -(-cursor.position // alignment) * alignment
        entries: dict[str, TensorEntry] = {}
        for name, shape, type_id, offset in listed:
            if name in entries:
                raise self._damaged(f"the tensor {name!r:.80} occurs twice")
            entries[name] = self._entry(name, shape, type_id, data + offset)
        return MappingProxyType(metadata), MappingProxyType(entries)

    def _entry(self, name: str, shape: tuple[int, ...], type_id: int, start: int) -> TensorEntry:
        _, constants = _gguf()
        try:
            block, block_bytes = constants.GGML_QUANT_SIZES[constants.GGMLQuantizationType(type_id)]
        except (ValueError, KeyError):
            raise field_error(
                str(self.path),
                f"{_shown(name)}: type",
                "a tensor type that the gguf package knows",
                type_id,
                "convert to Q8_0 or F16",
            ) from None
        if not shape or min(shape) <= 0 or shape[-1] % block:
            raise self._damaged(f"the tensor {name!r:.80} has shape {shape}, not rows of whole blocks of {block}")
        row_bytes = shape[-1] // block * block_bytes
        size = row_bytes
        for length in shape[:-1]:
            size *= length
        if start + size > len(self._map):
            raise self._damaged(f"the tensor {name!r:.80} ends at byte {start + size}, the file at {len(self._map)}")
        return TensorEntry(name, shape, type_id, start, size, row_bytes)

    def _damaged(self, what: str) -> SourceDamaged:
        return SourceDamaged(f"{self.path}: {what}: the file is damaged. Fetch it again.", file=str(self.path))


class _Cursor:
    """Reads the header in order; every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, owner: GgufFile) -> None:
        self._data = data
        self._owner = owner
        self.position = 0

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self._data):
            raise self._owner._damaged(f"the header ends at byte {end} or later, the file at {len(self._data)}")
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def scalar(self, code: str) -> int:
        """One little-endian value. (Floats and booleans come through here too; the caller knows.)"""
        value: int = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]
        return value

    def count(self, field: str, smallest: int) -> int:
        """A count of things that take at least ``smallest`` bytes each."""
        count = self.scalar("Q")
        if count * smallest > len(self._data) - self.position:
            raise self._owner._damaged(
                f"{field} is {count}, more than {len(self._data) - self.position} bytes can hold"
            )
        return count

    def string(self) -> str:
        return self.take(self.count("a string's length", 1)).decode("utf-8", "surrogateescape")

    def value(self, kind: int, key: str) -> Value:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(key)
        raise field_error(self._owner.path, _shown(key), "a value type from 0 to 12", kind, "convert the file again")

    def _array(self, key: str) -> tuple[Value, ...]:
        kind = self.scalar("I")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            size = struct.calcsize("<" + code)
            count = self.count(_shown(key), size)
            return struct.unpack(f"<{count}{code}", self.take(count * size))
        if kind == _STRING:
            return tuple(self.string() for _ in range(self.count(_shown(key), 8)))
        raise field_error(
            self._owner.path, _shown(key), "an array of scalars or strings", f"type {kind}", "convert the file again"
        )

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        dimensions = self.scalar("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._owner._damaged(
                f"the tensor {name!r:.80} has {dimensions} dimensions, not 1 to {_MAX_DIMENSIONS}"
            )
        # GGUF lists the fastest-running dimension first.
        shape = tuple(reversed([self.scalar("Q") for _ in range(dimensions)]))
        return name, shape, self.scalar("I"), self.scalar("Q")


def _shown(name: str) -> str:
    """A key or a tensor's name for people: damage may make anything of it."""
    return name if name.isprintable() and len(name) <= 80 else f"{name!r:.80}"


def _gguf() -> tuple[Any, Any]:
    """The block formats of ggml: ``gguf.quants`` and ``gguf.constants``."""
    try:
        import gguf
        from gguf import quants
    except ModuleNotFoundError as error:
        raise tool_missing(error, "Reading GGUF weights", "build") from error
    return quants, gguf.constants


class GgufWeights:
    """The tensors of a GGUF file as :class:`runtime.build.spec.Weights`."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def has(self, name: str) -> bool:
        return name in self._file.entries

    def tensor(self, name: str) -> NDArray[np.float32]:
        entry = self._file.entries[name]
        rows = entry.size // entry.row_bytes
        return self._file.rows(entry, 0, rows).reshape(entry.shape)

    def row_blocks(self, name: str, rows: int) -> Iterator[NDArray[np.float32]]:
        entry = self._file.entries[name]
        for start in range(0, entry.shape[0], rows):
            yield self._file.rows(entry, start, min(start + rows, entry.shape[0]))
