"""The threshold for `--verify margin`: how far apart the two best logits were where a width-4 step and decode disagreed, or could have.

The same tokens are computed twice, one by one and four at a time, and both heads say how clear each choice was. A row whose token is another one
was a near-tie, as clear as the batched head said; a row with the same token moved by the difference of the two margins, and would have been another
one had it been no clearer than that. The threshold is twice the largest of either, because the rows here are a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from kvstore.errors import InputInvalid
from runtime.chain import Chain, Step
from runtime.session import Session
from runtime.speculation import WIDTH, can_verify

from .listening import Half
from .report import Threshold
from .setup import Continuation, Setup

SAFETY = 2


@dataclass(frozen=True, slots=True)
class Said:
    """What a head said of a row: the token, and best logit minus second best."""

    token: int
    margin: float


def measured(setup: Setup, continued: Sequence[Continuation]) -> Threshold:
    """Over the ends of the prompts and their plain continuations, ``continued``, in the prompts' order.

    Raises `InputInvalid` where the bundle can't verify, or its heads don't say how clear a choice was.
    """
    config = setup.bundle.config
    if not can_verify(config) or config.margin_function is None:
        raise InputInvalid(
            "--verify: expected trust or recheck with this bundle, which has no function and batched head of width 4 that also give the margin of "
            "the best logits (corellm.margin_function), found margin. Build it with --margins."
        )
    pairs: list[tuple[Said, Said]] = []
    for prompt, off in zip(setup.prompts, continued, strict=True):
        tokens = (*prompt.tokens, *off.made.tokens)
        start = max(1, len(prompt.tokens) - setup.size.measured)
        stop = start + (len(tokens) - start) // WIDTH * WIDTH
        pairs += zip(_one_by_one(setup, tokens, start, stop), _four_by_four(setup, tokens, start, stop), strict=True)
    return threshold(pairs)


def threshold(pairs: Sequence[tuple[Said, Said]]) -> Threshold:
    """``pairs``: of each row, what the sequential head said after decode and the batched one after a width-4 step."""
    flips = [wide.margin for alone, wide in pairs if wide.token != alone.token]
    moves = [abs(wide.margin - alone.margin) for alone, wide in pairs if wide.token == alone.token]
    flip, move = max(flips, default=0.0), max(moves, default=0.0)
    # Rounded up, so that what is typed from the report is no less.
    return Threshold(len(pairs), len(flips), flip, move, ceil(SAFETY * max(flip, move) * 1e4) / 1e4)


def _one_by_one(setup: Setup, tokens: Sequence[int], start: int, stop: int) -> list[Said]:
    engine = setup.listening(setup.main)
    session = Session.open(setup.bundle, engine)
    session.feed(tokens[:start])
    engine.heard.clear()
    for at in range(start, stop):
        session.feed(tokens[at : at + 1])
    head = engine.function(setup.bundle.config.lmhead, setup.bundle.config.margin_function)
    heard: list[Half] = list(engine.heard)
    return [Said(int(x["token"][0]), float(x["margin"][0])) for x in (head({"hidden": row}) for row in heard)]


def _four_by_four(setup: Setup, tokens: Sequence[int], start: int, stop: int) -> list[Said]:
    bundle, engine = setup.bundle, setup.main.open()
    session = Session.open(bundle, engine)
    session.feed(tokens[:start])
    chain = Chain(bundle, engine, session.kv)
    head = engine.function(bundle.config.lmhead_batched[WIDTH], bundle.config.margin_function)
    said: list[Said] = []
    for at in range(start, stop, WIDTH):
        answer = head({"hidden": chain.run_rows(Step("verify", at, WIDTH), tokens[at : at + WIDTH])})
        session.kv.advance(at + WIDTH)
        said += [
            Said(int(token), float(margin))
            for token, margin in zip(answer["token"].reshape(-1), answer["margin"].reshape(-1), strict=True)
        ]
    return said
