"""What is to be built, whatever the model: named parts that each write their files, and what the record says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from runtime.build.digests import TensorDigest
from runtime.build.emitter import Numerics
from runtime.build.source import Origin

#: Called with what is being made and the finished fraction of the whole, 0 to 1, never decreasing.
Progress = Callable[[str, float], None]
#: Called with the finished fraction of one part.
Report = Callable[[float], None]
#: Digests of the tensors that a part wrote, by name. Names that begin with "output" are the heads'.
Digests = Mapping[str, TensorDigest]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the bundle: what it is called, its share of the work, and what writes it into a folder."""

    name: str
    work: float
    write: Callable[[Path, Report], Digests]


@dataclass(frozen=True, slots=True)
class Plan:
    """The parts of a bundle in the order they are made, and the license of its weights."""

    license: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan that can be opened: it reads its source while open. ``open`` may use the folder it is given, and leave what it likes there.

    ``origin`` and ``numerics`` say what the bundle is made from: two drafts of one name in which they are equal give the same bundle.
    """

    name: str
    origin: Origin
    terms: str | None
    numerics: Numerics
    open: Callable[[Path], AbstractContextManager[Plan]]
