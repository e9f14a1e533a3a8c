"""Constants of a package, read when first used and shared by all of its functions.

A ``Source`` is a constant that may still be compressed. ``WeightCache`` keeps what was decoded, keyed by where
it is stored, so that ``decode`` and ``prefill_4`` hold one float32 copy of a matrix between them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from runtime.mlpackage import Blob, TensorSpec, Value
from runtime.mlpackage.ir import BITS
from runtime.ops.widen import Widen, by_cast, widened


class Values(Protocol):
    """Where constants are read from: a ``Package``."""

    def array(self, value: Value) -> NDArray[Any]:
        """The stored elements of ``value``."""
        ...


class WeightCache:
    """Decoded arrays of one package by key. Arrays are read-only; they live as long as the cache."""

    def __init__(self, values: Values, widen: Widen = by_cast) -> None:
        """``widen`` is how fp16 becomes float32."""
        self.values = values
        self.widen = widen
        self._arrays: dict[Hashable, NDArray[Any]] = {}
        self._read: dict[tuple[str, int], int] = {}

    def get(self, key: Hashable, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """The array of ``key``, made once."""
        found = self._arrays.get(key)
        if found is None:
            found = make()
            found.flags.writeable = False
            self._arrays[key] = found
        return found

    def note(self, blob: Blob) -> None:
        """``blob`` of a weight file is about to be viewed or decoded."""
        self._read[blob.file, blob.offset] = -(-blob.spec.size * BITS[blob.spec.dtype] // 8)

    @property
    def stored_bytes(self) -> int:
        """Size in the weight files of everything that was viewed or decoded so far, each blob once."""
        return sum(self._read.values())

    @property
    def nbytes(self) -> int:
        """Bytes held (mapped views excluded)."""
        return sum(array.nbytes for array in self._arrays.values())


class Source(Protocol):
    """A constant of the program. ``key`` is equal for equal stored constants of one package."""

    @property
    def spec(self) -> TensorSpec: ...

    @property
    def key(self) -> Hashable: ...

    def plain(self) -> NDArray[Any]:
        """The elements as run-time values: float32 for fp16 and fp32, else the stored type. Read-only."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A constant as the package stores it."""

    value: Value
    cache: WeightCache

    @property
    def spec(self) -> TensorSpec:
        return self.value.spec

    @property
    def key(self) -> Hashable:
        if isinstance(self.value, Blob):
            return (self.value.file, self.value.offset, self.value.spec)
        return id(self.value)

    def raw(self) -> NDArray[Any]:
        """The stored elements, unconverted."""
        if isinstance(self.value, Blob):
            self.cache.note(self.value)
        return self.cache.values.array(self.value)

    def plain(self) -> NDArray[Any]:
        if self.spec.dtype == "fp16":
            return self.cache.get(self.key, lambda: widened(self.raw(), self.cache.widen))
        return self.raw()
