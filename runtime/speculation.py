"""Speculation as values: whether it is wanted, how it is verified, and what came of it.

A *round* guesses tokens (the *draft*), computes them and the pending token in one step of width 4, and keeps what plain decoding would
have chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvstore.errors import InputInvalid
from kvstore.items import Item

from .bundle import BundleConfig
from .lookup import prompt_lookup

WIDTH = 4
"""Rows of a round's step: the pending token and at most three drafts. So also the most tokens that a round can give."""

FEWEST = 3
"""Rows that a step is worth: with fewer than two drafts, decode is used."""

Verify = Literal["trust", "recheck", "margin"]
Drafter = Callable[[Sequence[Item], int], Sequence[int]]
"""(everything fed and then the pending token, how many ids at most) → ids that may follow."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How to speculate.

    ``verify``: "trust" takes the batched head's tokens (it is compared with the sequential head once, before its first use); "recheck" asks
    the sequential head about every row that is kept, and its word counts; "margin" leaves each row whose two best logits are at most
    ``threshold`` apart to plain decode (``threshold``: required there, in logits, and only there; the heads must say how far apart they are). ``refused``: what to do where the
    batched head fails its comparison: "raise" `HeadRefused`, or "decode" plainly and say so in the statistics. ``draft``: what guesses.
    """

    verify: Verify = "trust"
    threshold: float | None = None
    refused: Literal["raise", "decode"] = "raise"
    draft: Drafter = prompt_lookup

    def __post_init__(self) -> None:
        found = self.threshold
        if self.verify == "margin":
            if found is None or not (math.isfinite(found) and found >= 0):
                raise InputInvalid(
                    f"speculation: threshold: expected a number of logits, 0 or more, with verify margin, found {found}. Give the one that "
                    "was measured for this bundle on this engine."
                )
        elif found is not None:
            raise InputInvalid(
                f"speculation: threshold: expected none with verify {self.verify}, found {found}. It is for verify margin."
            )


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """What came of it, in tokens. Counts exclude the pending token, which every round computes besides its draft; those named
    ``…_with_pending`` count it as drafted and accepted.

    ``rounds``: steps of width 4. ``fallback_rounds``: steps of decode because there were fewer than 2 drafts. ``drafted``, ``accepted``:
    drafts computed, and those of them whose rows were kept. ``step_tokens``: how many tokens each step gave, in order, the first being 1 where
    a token was at hand without one; their sum is that of the generation. ``step_drafts``: drafts of each step, 0 for decode.
    ``corrected``: rows where the sequential head overruled the batched one ("recheck"). ``unsettled``: rounds that a near-tie ended
    ("margin"). ``refusal``: why the batched head was not used, else None.
    """

    rounds: int
    fallback_rounds: int
    drafted: int
    accepted: int
    step_tokens: tuple[int, ...]
    step_drafts: tuple[int, ...]
    corrected: int
    unsettled: int
    refusal: str | None

    @property
    def drafted_with_pending(self) -> int:
        return self.drafted + self.rounds

    @property
    def accepted_with_pending(self) -> int:
        return self.accepted + self.rounds

    @property
    def acceptance(self) -> float | None:
        """Accepted of drafted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_with_pending(self) -> float | None:
        """The same with the pending tokens, as the published runtime's message records count."""
        return self.accepted_with_pending / self.drafted_with_pending if self.rounds else None


@dataclass(slots=True)
class Tally:
    """Collects the statistics of one generation."""

    fallback_rounds: int = 0
    corrected: int = 0
    unsettled: int = 0
    refusal: str | None = None
    step_tokens: list[int] = field(default_factory=list)
    step_drafts: list[int] = field(default_factory=list)

    def begin(self, drafts: int = 0) -> None:
        """A step starts, with that many drafts; 0: decode, or a token that was at hand."""
        self.step_tokens.append(0)
        self.step_drafts.append(drafts)

    def token(self) -> None:
        """The step gave a token."""
        self.step_tokens[-1] += 1

    def stats(self) -> SpeculationStats:
        rounds = [(tokens, drafts) for tokens, drafts in zip(self.step_tokens, self.step_drafts, strict=True) if drafts]
        return SpeculationStats(
            rounds=len(rounds),
            fallback_rounds=self.fallback_rounds,
            drafted=sum(drafts for _, drafts in rounds),
            # A round of n tokens kept the rows of the pending token and of n − 1 drafts: its last token is the pending one now.
            accepted=sum(max(0, tokens - 1) for tokens, _ in rounds),
            step_tokens=tuple(self.step_tokens),
            step_drafts=tuple(self.step_drafts),
            corrected=self.corrected,
            unsettled=self.unsettled,
            refusal=self.refusal,
        )


def drafts_at(draft: Drafter, tokens: Sequence[Item], ctx: int) -> tuple[int, ...]:
    """The drafts to follow ``tokens`` (the pending one last), no more than a round takes and than the context of ``ctx`` holds; empty if they
    are too few to be worth a round."""
    position = len(tokens) - 1
    most = min(WIDTH - 1, ctx - 1 - position)
    drafts = tuple(draft(tokens, most))[: max(0, most)]
    return drafts if 1 + len(drafts) >= FEWEST else ()


Asked = Literal["on", "off", "auto"]


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether to speculate; ``reason`` says why, for people."""

    on: bool
    reason: str


def choose(
    asked: Asked, config: BundleConfig, *, decode_only: bool, allow_verify: bool, device: Choice | None = None
) -> Choice:
    """What "on", "off" and "auto" mean for this bundle and session. ``device``: what a device's profile says about "auto", if there is one; it
    cannot turn on what the session or the bundle does not have.

    "on" is answered with on, also where the session will refuse it: then the refusal says what is missing.
    """
    if asked != "auto":
        return Choice(asked == "on", "asked for")
    if decode_only and not allow_verify:
        return Choice(False, "the session is decode-only")
    if not can_verify(config):
        return Choice(False, f"the bundle has no function and batched head of width {WIDTH}")
    return device or Choice(True, f"the bundle has a function and a batched head of width {WIDTH}")


def can_verify(config: BundleConfig) -> bool:
    """Whether the bundle has the function and the batched head that a round needs."""
    return WIDTH in config.verify_functions and WIDTH in config.lmhead_batched


def verify_assets(config: BundleConfig) -> tuple[tuple[str, str | None], ...]:
    """The (package, function) pairs that rounds may load besides those of plain decoding. Empty where the bundle lacks them."""
    if not can_verify(config):
        return ()
    function, head = config.verify_functions[WIDTH], config.lmhead_batched[WIDTH]
    margins = () if config.margin_function is None else ((head, config.margin_function),)
    return (*((chunk, function) for chunk in config.chunks), (head, None), *margins)
