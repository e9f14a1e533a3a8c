"""What a session's methods answer: values to print or compare. Positions and counts in tokens, times in seconds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvstore.layout import blocks_of
from kvstore.match import Match
from kvstore.snapshot import Lineage, Receipt

from .speculation import SpeculationStats
from .state import FUNCTIONS

Finish = Literal["eos", "cap", "contextFull"]
Source = Literal["session", "store", "nothing"]

MARGIN = 8
"""Positions at the end of the context that generation leaves free."""


def budget(asked: int, ctx: int, prompt: int) -> tuple[int, Finish]:
    """How many tokens generation from position ``prompt`` may give, and what it is that stops it there."""
    room = max(0, ctx - prompt - MARGIN)
    return (asked, "cap") if asked <= room else (room, "contextFull")


def makers(match: Match) -> tuple[Lineage, ...]:
    """Who computed the blocks that ``match`` reuses: each lineage once, in the blocks' order."""
    snapshot = match.snapshot
    return tuple(dict.fromkeys(snapshot.lineages[snapshot.lineage[block]] for block in range(blocks_of(match.n))))


def otherwise(lineages: Sequence[Lineage], engine: Mapping[str, str]) -> str | None:
    """In which fields these lineages differ from ``engine`` (as `Engine.describe` gives it), for people; None if in none.

    Fields that one side doesn't have, and the functions, which follow from the lengths that were fed, are not compared.
    """
    said: dict[str, dict[str, None]] = {}
    for lineage in lineages:
        for name, value in lineage.fields:
            said.setdefault(name, {})[value] = None
    told = [
        f"{name} {' | '.join(values)} (here {engine[name]})"
        for name, values in said.items()
        if name != FUNCTIONS and name in engine and set(values) != {engine[name]}
    ]
    return ", ".join(told) or None


@dataclass(frozen=True, slots=True)
class Fed:
    """``tokens`` fed through ``functions`` (in order of first use)."""

    tokens: int
    functions: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Generation:
    """Greedy ``tokens`` from position ``prompt`` on. With ``eos`` the EOS token is the last one. ``seconds``: per token, from the token
    before it (the first: from the call) until it was chosen; of a round's tokens the first has the round's time, and the others almost none.
    ``speculation``: None where it was not asked for."""

    tokens: tuple[int, ...]
    finish: Finish
    prompt: int
    seconds: tuple[float, ...]
    speculation: SpeculationStats | None = None

    @property
    def token_seconds(self) -> float | None:
        """Median seconds of a token, each token of a round taken to last its share of the round; the first token, which loads, is left out. None
        with fewer than two."""
        steps = (1,) * len(self.tokens) if self.speculation is None else self.speculation.step_tokens
        shares: list[float] = []
        for count in steps:
            # A round that gave nothing has its time in the next step's first token.
            began = len(shares)
            shares += [sum(self.seconds[began : began + count]) / count] * count if count else []
        return statistics.median(shares[1:]) if len(shares) > 1 else None


@dataclass(frozen=True, slots=True)
class Prompted:
    """How a prompt came to be held: ``reused`` tokens from ``source``, then ``fed``. ``match``: what the store offered, if anything."""

    reused: int
    source: Source
    fed: Fed
    match: Match | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class Restored:
    """``n``: the position now; ``reused_tokens`` of it came from the store, the rest was fed. ``seconds``: from the call until the rows lay
    verified in host memory. ``bytes`` read. ``functions``: everything the engine has loaded, as its ledger names it. ``lineage``: of the last
    reused block."""

    n: int
    reused_tokens: int
    seconds: float
    bytes: int
    functions: tuple[str, ...]
    lineage: Lineage | None
    match: Match = field(repr=False)


@dataclass(frozen=True, slots=True)
class ReceiptReport:
    """Whether a continuation is the producer's. ``first_difference``: index into the receipt's tokens; there ``expected`` stands in the
    receipt and ``found`` was decoded (None: one of them ended before). With equal tokens the finish reasons may still differ: then it is
    the tokens' count, and both are None."""

    identical: bool
    first_difference: int | None
    expected: int | None
    found: int | None
    receipt: Receipt
    decoded: Receipt


def compare(receipt: Receipt, decoded: Receipt) -> ReceiptReport:
    """A difference is a finding to report, not an error: another engine may round differently."""
    if receipt.tokens == decoded.tokens and receipt.finish == decoded.finish:
        return ReceiptReport(True, None, None, None, receipt, decoded)
    pairs = zip(receipt.tokens, decoded.tokens, strict=False)
    shorter = min(len(receipt.tokens), len(decoded.tokens))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    expected = receipt.tokens[at] if at < len(receipt.tokens) else None
    found = decoded.tokens[at] if at < len(decoded.tokens) else None
    return ReceiptReport(False, at, expected, found, receipt, decoded)
