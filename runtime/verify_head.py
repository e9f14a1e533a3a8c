"""Whether a batched head may be trusted: it must say, row by row, what the sequential head says.

A published batched head answered 0 for every row on the Neural Engine, without an error. So before a batched head is used it runs once
on hidden rows of real decode steps, chosen so that no constant answer is right, and is refused where a row differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import KVError, Refused

from .bundle import Bundle
from .chain import Chain, decode_only
from .engine import Engine, Function
from .hostkv import HostKV

Half = NDArray[np.float16]

TEXT = "The ferry leaves the harbour at noon. 12 passengers wait in the rain, and a dog: who is first?"
STEPS = 48
"""Decode steps at most, to find rows whose tokens differ."""


class HeadRefused(Refused):
    """A batched head that disagrees with the sequential one, or could not be compared. ``details``: package, width, rows, sequential,
    batched."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message, **details)
        self.rows: tuple[int, ...] = tuple(details.get("rows", ()))


class WidthUnknown(KVError, LookupError):
    """The bundle has no batched head of the width that was asked for."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class HeadCheck:
    """What both heads said of the same rows, one token a row; ``positions``: whose hidden states the rows are."""

    package: str
    width: int
    positions: tuple[int, ...]
    sequential: tuple[int, ...]
    batched: tuple[int, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows that differ."""
        return tuple(i for i, (a, b) in enumerate(zip(self.sequential, self.batched, strict=True)) if a != b)


def check_head(bundle: Bundle, engine: Engine, width: int, function: str | None = None) -> HeadCheck:
    """Run both heads on ``width`` rows of decode steps of this bundle. Loads the decode functions and the two heads, of the batched one
    ``function`` (by default its default one).

    Raises ``WidthUnknown``, ``HeadRefused`` where no rows with different tokens were found, and what the engine raises.
    """
    package = bundle.config.lmhead_batched.get(width)
    if package is None:
        have = ", ".join(map(str, sorted(bundle.config.lmhead_batched))) or "none"
        raise WidthUnknown(f"batched head: expected one of the bundle's widths ({have}), found {width}.", width=width)
    chosen = _varied(_decoded(bundle, engine), width)
    sequential = tuple(token for _, token, _ in chosen)
    if len(chosen) < width or len(set(sequential)) == 1 < width:
        raise HeadRefused(
            f"{package}: expected {width} decode steps whose tokens are not all equal, found {list(sequential)} in {STEPS} steps: nothing "
            "would show whether the batched head computes anything. Decode without verification.",
            package=package,
            width=width,
            sequential=list(sequential),
        )
    hidden = np.stack([row for _, _, row in chosen])
    batched = engine.function(package, function)({"hidden": hidden})["token"].reshape(-1)
    return HeadCheck(package, width, tuple(p for p, _, _ in chosen), sequential, tuple(int(token) for token in batched))


def verified_head(bundle: Bundle, engine: Engine, width: int, function: str | None = None) -> Function:
    """The batched head of this width (its ``function``, by default its default one), after both heads agreed on it here. Raises as `check_head`
    does, and ``HeadRefused``, naming the rows that differ."""
    require_agreement(check_head(bundle, engine, width, function))
    return engine.function(bundle.config.lmhead_batched[width], function)


def require_agreement(check: HeadCheck) -> None:
    """Raises ``HeadRefused`` unless the heads agree on every row."""
    if not check.rows:
        return
    raise HeadRefused(
        f"{check.package}: rows {', '.join(map(str, check.rows))} of {check.width}: expected the sequential head's tokens "
        f"{list(check.sequential)}, found {list(check.batched)}. Run the verify head on other compute units (--verify-head-units), or decode "
        "without verification.",
        package=check.package,
        width=check.width,
        rows=list(check.rows),
        sequential=list(check.sequential),
        batched=list(check.batched),
    )


def _decoded(bundle: Bundle, engine: Engine) -> Iterator[tuple[int, int, Half]]:
    """(position, token of the sequential head, hidden [H]) of the decode steps after the first, over a text and then what follows it."""
    kv = HostKV(bundle.layout(), bundle.config.ctx)
    chain = Chain(bundle, engine, kv)
    text = bundle.tokenizer.encode(TEXT)
    token = text[0]
    for step in decode_only(0, min(STEPS, bundle.config.ctx)):
        given = text[step.start] if step.start < len(text) else token
        hidden = chain.run(step, [given])
        kv.advance(step.start + 1)
        if step.start > 0:
            token = chain.token(hidden)
            yield step.start, token, hidden


def _varied(steps: Iterator[tuple[int, int, Half]], width: int) -> Sequence[tuple[int, int, Half]]:
    """``width`` of the steps, in order: as soon as there are that many different tokens those, else what there is, different ones first."""
    first: dict[int, tuple[int, int, Half]] = {}
    rest: list[tuple[int, int, Half]] = []
    for step in steps:
        if step[1] in first:
            rest.append(step)
        else:
            first[step[1]] = step
        if len(first) == width:
            break
    return sorted([*first.values(), *rest][:width], key=lambda step: step[0])
