"""The typed form of an ML Program: what the reader hands out and the engine runs.

Everything here is frozen. Names are the package's own; nothing is renamed or folded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

# Bits of one element as stored, and the numpy type an unpacked element is held in.
BITS: Mapping[str, int] = {
    "bool": 8, "string": 0, "fp16": 16, "fp32": 32, "fp64": 64,
    "int4": 4, "int8": 8, "int16": 16, "int32": 32, "int64": 64,
    "uint1": 1, "uint2": 2, "uint3": 3, "uint4": 4, "uint6": 6, "uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64,
}  # fmt: skip
_HELD: Mapping[str, str] = {
    "bool": "?", "fp16": "<f2", "fp32": "<f4", "fp64": "<f8",
    "int4": "i1", "int8": "i1", "int16": "<i2", "int32": "<i4", "int64": "<i8",
    "uint1": "u1", "uint2": "u1", "uint3": "u1", "uint4": "u1", "uint6": "u1",
    "uint8": "u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and element type of a value, as the package declares them. ``dtype`` is a key of ``BITS``."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The numpy type that holds one element: sub-byte types are held in a byte, strings in objects."""
        return np.dtype(_HELD.get(self.dtype, "O"))

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Name:
    """A reference to a function input or to an earlier operation's output."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Const:
    """A value written in the program itself: ``array`` has ``spec.shape`` and is read-only."""

    spec: TensorSpec
    array: NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Blob:
    """A value stored in a weight file of the package, at the blob header's byte ``offset``."""

    spec: TensorSpec
    file: str
    offset: int


Value: TypeAlias = Const | Blob
Arg: TypeAlias = Name | Const | Blob


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. An input bound to one value is a list of one; ``concat``'s ``values`` has several."""

    type: str
    inputs: Mapping[str, tuple[Arg, ...]]
    outputs: tuple[tuple[str, TensorSpec], ...]
    attributes: Mapping[str, Value]

    @property
    def name(self) -> str:
        """The first output's name, by which messages call this operation."""
        return self.outputs[0][0] if self.outputs else self.type


@dataclass(frozen=True, slots=True)
class Function:
    """One function in single-assignment form: ``ops`` are in an order in which each reads earlier values."""

    name: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """All functions of a package, in description order."""

    functions: tuple[Function, ...]
