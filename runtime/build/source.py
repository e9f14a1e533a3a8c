"""Where a bundle's model comes from: its geometry, weights, vocabulary, origin and license, in one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from runtime.build.spec import Spec, Weights
from runtime.build.vocabulary import Vocabulary

#: What a model was made from: plain values. Two sources of one name with equal origin give the same bundle.
Origin = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class Source:
    """A model ready to be built. ``terms`` are for the user to read; ``chat``: it was trained on Gemma's turns."""

    spec: Spec
    weights: Weights
    vocabulary: Vocabulary
    origin: Origin
    license: str
    terms: str | None
    chat: bool


@dataclass(frozen=True, slots=True)
class Offer:
    """A model that can be opened. ``open`` may use the folder it is given while the source is in use, and leave what it likes there."""

    name: str
    origin: Origin
    terms: str | None
    open: Callable[[Path], AbstractContextManager[Source]]
