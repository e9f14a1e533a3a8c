"""Where a bundle's model comes from: its geometry, weights, vocabulary, origin and license, in one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from runtime.build.spec import Spec, Weights

#: What a model was made from: plain values. Two sources of one name with equal origin give the same bundle.
Origin = Mapping[str, str | int]


class Tokens(Protocol):
    """A vocabulary that can be written as the two files of a tokenizer: the same text every time."""

    def tokenizer_json(self) -> str: ...

    def tokenizer_config_json(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Turns:
    """What an app puts around messages: a user's is ``prefix`` + text + ``suffix``, the model's ends with ``assistant_suffix``."""

    prefix: str
    suffix: str
    assistant_suffix: str


@dataclass(frozen=True, slots=True)
class Source:
    """A model ready to be built. ``terms`` are for the user to read; ``turns`` None: it was not trained on turns."""

    spec: Spec
    weights: Weights
    vocabulary: Tokens
    origin: Origin
    license: str
    terms: str | None
    turns: Turns | None


@dataclass(frozen=True, slots=True)
class Offer:
    """A model that can be opened. ``open`` may use the folder it is given while the source is in use, and leave what it likes there."""

    name: str
    origin: Origin
    terms: str | None
    open: Callable[[Path], AbstractContextManager[Source]]
