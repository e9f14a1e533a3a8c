"""A Gemma 4 model ready to be built, and how it is to be packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtime.build.compress import Form
from runtime.build.gemma4.spec import Gemma4Spec
from runtime.build.source import Origin, Turns
from runtime.build.spec import Weights

Stage = Literal["int8", "fp16"]
VerifyHead = Literal["same", "pal6"]


@dataclass(frozen=True, slots=True)
class Packing:
    """``weights``: the form of the chunks' matrices. ``verify_head``: "same" weights as the sequential head's, so that verification is exact, or
    the published pairing, "pal6". ``sidecars``: the stage of both tables. ``margins``: whether the heads have a second function that also gives the best
    logit minus the second best, which the published shape has not."""

    weights: Form = "pal6"
    verify_head: VerifyHead = "same"
    sidecars: Stage = "int8"
    margins: bool = False

    def origin(self) -> Origin:
        """What it adds to a bundle's origin."""
        packed = {"weights": self.weights, "verify_head": self.verify_head, "sidecars": self.sidecars}
        return {**packed, "margins": True} if self.margins else packed


@dataclass(frozen=True, slots=True)
class Gemma4Model:
    """``weights`` by the names of ``spec.tensors()``. ``tokenizer``: files of the bundle by name, as text or as a file to copy.

    ``turns`` None: it was not trained on turns. ``terms`` are for the user to read.
    """

    spec: Gemma4Spec
    weights: Weights
    tokenizer: Mapping[str, str | Path]
    turns: Turns | None
    origin: Origin
    license: str
    terms: str | None
