"""What the gate is given: a bundle, the configurations that may run it, prompts, and how much is to be tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvstore.errors import KVError
from runtime.bundle import Bundle
from runtime.engine import Engine
from runtime.reports import Generation
from runtime.session import Session

from .listening import Half, Listening
from .logits import Logits
from .prompts import Prompt, splits
from .report import Line, Margin, Verify


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to run the bundle. ``open`` makes an engine that has loaded nothing; ``words`` are the command line's for the same."""

    name: str
    open: Callable[[], Engine]
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Size:
    """How much: tokens ``continued`` after a restore, after the ``tail`` of the prompt's next tokens; tokens of a ``receipt``; tokens ``speculated``; and
    tokens of a prompt (``crossed``) and of its continuation (``cross_continued``) in the matrix of configurations.

    ``all_edges``: interrupt before, at and after each edge. ``measured``: of a prompt's last tokens, how many the threshold of near-ties is measured on,
    besides the continuation.
    """

    name: str
    continued: int
    tail: int
    receipt: int
    speculated: int
    crossed: int
    cross_continued: int
    all_edges: bool
    measured: int = 64

    @property
    def most(self) -> int:
        """Tokens beyond a prompt that anything here needs: the tail of `restoring` may lie behind the prompt's end."""
        return max(self.tail + max(self.continued, self.receipt) + self.tail, self.speculated, self.cross_continued)


DEFAULT = Size("default", continued=6, tail=3, receipt=4, speculated=16, crossed=66, cross_continued=12, all_edges=True)
QUICK = Size(
    "quick", continued=4, tail=2, receipt=3, speculated=12, crossed=40, cross_continued=6, all_edges=False, measured=32
)


@dataclass(frozen=True)
class Setup:
    """``main`` is one of ``configurations``: what everything but the matrix is tried under. ``verify``: how speculation is."""

    bundle: Bundle
    main: Configuration
    configurations: Sequence[Configuration]
    prompts: Sequence[Prompt]
    size: Size
    verify: Verify = "trust"

    @cached_property
    def logits(self) -> Logits:
        return Logits(self.bundle)

    @cached_property
    def row_exact(self) -> bool:
        """Whether the main engine promises that narrow steps give decode's bytes: the portable one does, Core ML doesn't."""
        return self.main.open().describe().get("engine") == "portable"

    def splits(self, prompt: Prompt) -> tuple[int, ...]:
        return splits(self.bundle.config, len(prompt.tokens), all_edges=self.size.all_edges)

    def listening(self, configuration: Configuration) -> Listening:
        """A fresh engine of ``configuration`` that remembers hidden states."""
        return Listening(configuration.open(), self.bundle.config.lmhead)


@dataclass(frozen=True, slots=True)
class Continuation:
    """A generation from a session's pending token on, and per token the hidden state that it was chosen by."""

    made: Generation
    hidden: tuple[Half, ...]

    def margin(self, at: int, logits: Logits) -> Margin | None:
        """Of the choice of token ``at``; None behind the last, and where logits can't be had."""
        return logits.margin(self.hidden[at]) if at < len(self.hidden) else None


def chosen_by(engine: Listening) -> Half:
    """The hidden state that the pending token of a session over ``engine`` was chosen by, right after its last feed."""
    return engine.heard[-1]


def continuation(session: Session, engine: Listening, n: int, first: Half) -> Continuation:
    """``n`` tokens of a session over ``engine``, whose pending token was chosen by ``first``."""
    engine.heard.clear()
    made = session.generate(n)
    return Continuation(made, (first, *engine.heard)[: len(made.tokens)])


def judged(line: Line, compare: Callable[[], Line]) -> Line:
    """What ``compare`` says; an error that it raises is a finding like any other: ``line``, which does not hold. Errors of the disk pass."""
    try:
        return compare()
    except KVError as error:
        return replace(line, holds=False, told=f"{type(error).__name__}: {error}")
