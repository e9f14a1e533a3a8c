"""Speculation on is speculation off: the same tokens, the same end, the same KV bytes; and batched heads say what the sequential one says.

Each prompt is continued with the drafts that prompt lookup finds, and then with drafts that are told: what plain decoding gave, every
fifth token wrong. So rounds, accepted and rejected drafts do not depend on how much a text repeats itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from kvstore.items import Item
from runtime.reports import Generation
from runtime.session import Session
from runtime.speculation import Speculation, can_verify
from runtime.verify_head import check_head

from .held import Held, state_difference, token_difference
from .prompts import Prompt
from .report import BOUND, Line, NearTie, Rounds, Verify
from .setup import Continuation, Setup, chosen_by, continuation, judged

WRONG = 5
"""Every so manyth told draft is another token."""

Drafts = Literal["lookup", "told"]
WAYS: Mapping[Verify, tuple[tuple[Drafts, Verify], ...]] = {
    "trust": (("lookup", "trust"), ("told", "trust"), ("told", "recheck")),
    "recheck": (("lookup", "recheck"), ("told", "recheck")),
    "margin": (("lookup", "margin"), ("told", "margin")),
}
"""By what --verify asks for: what must hold then. Whoever asks for `recheck` or `margin` doesn't believe the batched head alone, so it need not be
right alone."""


def heads(setup: Setup) -> Iterator[Line]:
    """A line for each batched head; one that says so where there is none."""
    widths = sorted(setup.bundle.config.lmhead_batched)
    if not widths:
        yield Line("heads", "exact", None, "the bundle has no batched head")
    for width in widths:
        package = setup.bundle.config.lmhead_batched[width]

        def compare(width: int = width) -> Line:
            function = setup.bundle.config.margin_function if setup.verify == "margin" else None
            check = check_head(setup.bundle, setup.main.open(), width, function)
            found = f"{check.package}: rows {', '.join(map(str, check.rows)) or 'none'} of {width} differ"
            found += f": sequential {list(check.sequential)}, batched {list(check.batched)}"
            return Line("heads", "exact", not check.rows, found, tokens=width)

        yield judged(Line("heads", "exact", None, package), compare)


def plain(setup: Setup, prompt: Prompt) -> tuple[Continuation, Held]:
    """The prompt continued without speculation, and what is held then."""
    engine = setup.listening(setup.main)
    session = Session.open(setup.bundle, engine)
    session.feed(prompt.tokens)
    made = continuation(session, engine, setup.size.speculated, chosen_by(engine))
    return made, Held.by(session)


def near_ties(setup: Setup, prompt: Prompt, configuration: str, went: Continuation) -> list[NearTie]:
    """Of one continuation, where its logits can be had."""
    found = ((i, went.margin(i, setup.logits)) for i in range(len(went.hidden)))
    return [
        NearTie(prompt.name, configuration, went.made.prompt + i, margin)
        for i, margin in found
        if margin is not None and margin.near_tie
    ]


def speculated(setup: Setup, prompt: Prompt, off: Continuation, held: Held, threshold: float | None) -> Iterator[Line]:
    """A line for each way of speculating; exact where the engine's narrow steps are decode's bit for bit, else bounded by near-ties. ``threshold``:
    logits, for "margin"."""
    line = Line("speculation", "exact", None, "", prompt.name)
    if not setup.row_exact:
        line = replace(line, rule="bounded", bound=BOUND)
    if not can_verify(setup.bundle.config):
        yield replace(line, told="the bundle has no function and batched head of width 4")
        return
    engine = setup.main.open()
    for drafts, verify in WAYS[setup.verify]:

        def compare(drafts: Drafts = drafts, verify: Verify = verify) -> Line:
            how = Speculation(verify, threshold)
            if drafts == "told":
                how = replace(how, draft=_told(setup, prompt, off.made))
            session = Session.open(setup.bundle, engine)
            session.feed(prompt.tokens)
            on = session.generate(setup.size.speculated, speculate=how)
            assert on.speculation is not None
            stats = on.speculation
            done = replace(
                line,
                tokens=len(on.tokens),
                speculation=Rounds(drafts, verify, stats.rounds, stats.drafted, stats.accepted),
            )
            told = _line(setup, done, off, on, held, Held.by(session))
            ended = f"; a near-tie ended {stats.unsettled} of {stats.rounds} rounds" if stats.unsettled else ""
            return replace(told, told=told.told + ended)

        failed = replace(line, speculation=Rounds(drafts, verify, 0, 0, 0))
        yield judged(failed, compare)


def _line(setup: Setup, line: Line, off: Continuation, on: Generation, held: Held, now: Held) -> Line:
    found, difference = token_difference(off.made, on, lambda at: off.margin(at, setup.logits))
    if found is not None:
        near = difference is not None and difference.margin is not None and difference.margin.near_tie
        return replace(line, holds=line.rule == "bounded" and near, told=found, difference=difference)
    apart, rows = state_difference(held, now)
    if apart is not None and (line.rule == "exact" or rows is None):
        return replace(line, holds=False, told=apart, rows=rows)
    told = f"{len(on.tokens)} tokens the same; " + ("the KV too" if apart is None else f"not required: {apart}")
    assert line.speculation is not None
    if not line.speculation.rounds:
        return replace(line, holds=None, told=f"{told}; but no draft was found, so nothing is shown", rows=rows)
    return replace(line, holds=True, told=told, rows=rows)


class _Drafter:
    """Knows what comes: the next tokens of a continuation, every `WRONG`-th another one."""

    def __init__(self, start: int, tokens: Sequence[int], vocabulary: int) -> None:
        self._start = start
        self._tokens = [(t + 1) % vocabulary if i % WRONG == WRONG - 1 else t for i, t in enumerate(tokens)]

    def __call__(self, tokens: Sequence[Item], most: int) -> tuple[int, ...]:
        at = len(tokens) - self._start
        return tuple(self._tokens[at : at + most])


def _told(setup: Setup, prompt: Prompt, off: Generation) -> _Drafter:
    return _Drafter(len(prompt.tokens), off.tokens, setup.bundle.config.vocab_size)
