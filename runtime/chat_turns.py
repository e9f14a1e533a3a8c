"""How a conversation is written for a model, and read back from the tokens of a snapshot. No model runs here.

A bundle's manifest says what stands around messages. A user's turn is ``promptPrefix``, text, ``promptSuffix``; the reply follows, and then
``assistantSuffix``. So the tokens alone say who said what: there is no transcript beside them that could differ from the KV.

Nothing that was processed is encoded again. What ends a reply is encoded only as far as no text behind it can change its tokens (`Writing.closing`);
a rest, if a bundle has one, is encoded with the next turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from kvstore.items import Item, common_prefix

from .bundle import Bundle
from .tokenizer import Tokenizer

Role = Literal["context", "system", "user", "assistant"]

MEDIUM = "\ufffc"
"""Stands for a soft token in text."""

BLANK_LINE = "\n\n"
"""Between a system text and the first message, for a model that has no turn for it."""

_WITH_SYSTEM = ("<|im_start|>", "<|turn>", "<|start_header_id|>")
"""What begins the turns of models that know a turn of the role ``system``: ChatML, Gemma 4, Llama 3. A manifest doesn't say it."""

_SPARE = 4
"""Tokens that a marker may take more than when it is encoded alone."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Who said what; tokens ``[start, stop)`` of the conversation, markers included. ``context`` is what stands before the first turn,
    a prefilled text for instance. A system text that stands in the first message has no tokens of its own; there the last blank line ends it, so that
    a first message with a blank line is read as one."""

    role: Role
    text: str
    start: int
    stop: int


class Writing:
    """The turns of one bundle. Immutable."""

    def __init__(self, tokenizer: Tokenizer, prefix: str, suffix: str, ending: str | None) -> None:
        """``ending``: ``assistantSuffix``; None: ``suffix`` up to what opens the model's turn in it."""
        self._tokenizer = tokenizer
        self._prefix = prefix
        self._suffix = suffix
        self._ending = before_the_models_turn(prefix, suffix) if ending is None else ending
        known = prefix.startswith(_WITH_SYSTEM) and prefix.count("user") == 1
        self._system = prefix.replace("user", "system") if known else None
        alone = tokenizer.encode(self._ending, bos=False)
        # Without a marker anything may follow: then nothing of the ending is settled.
        settled = common_prefix(alone, tokenizer.encode(self._ending + prefix, bos=False)) if prefix else 0
        written = tokenizer.written(alone[:settled])
        if not self._ending.startswith(written):
            settled, written = 0, ""
        self.closing: tuple[int, ...] = tuple(alone[:settled])
        """Ends a reply, whatever is said next."""
        self._settled = written
        self._rest = self._ending[len(written) :]

    @classmethod
    def of(cls, bundle: Bundle) -> Writing:
        config = bundle.config
        return cls(bundle.tokenizer, config.prompt_prefix or "", config.prompt_suffix or "", config.assistant_suffix)

    @property
    def marked(self) -> bool:
        """Whether anything tells turns apart."""
        return bool(self._prefix)

    def user(self, text: str, *, system: str | None, first: bool, after_reply: bool) -> list[int]:
        """The tokens of a user's turn. ``system``: to be said before it. ``first``: nothing stands before, so BOS does if the tokenizer has
        one. ``after_reply``: a reply stands before, and `closing`."""
        before = self._rest if after_reply else ""
        if system and self._system is not None:
            before += self._system_turn(system)
        elif system:
            text = f"{system}{BLANK_LINE}{text}"
        return self._tokenizer.encode(f"{before}{self._prefix}{text}{self._suffix}", bos=first)

    def closed(self, items: Sequence[Item]) -> bool:
        return not self.closing or tuple(items[-len(self.closing) :]) == self.closing

    def text(self, items: Sequence[Item]) -> str:
        """As it is written, markers and special tokens included."""
        if all(isinstance(item, int) for item in items):
            return self._tokenizer.written([item for item in items if isinstance(item, int)])
        return "".join(self._tokenizer.written([i]) if isinstance(i, int) else MEDIUM for i in items)

    def read(self, items: Sequence[Item]) -> tuple[Turn, ...]:
        """Who said what, from the markers. A marker that somebody typed, or the model made up, is one too."""
        starts = self._places(items, self._prefix, 0, len(items)) if self._prefix else []
        first = starts[0] if starts else len(items)
        turns = self._before_the_first(items, first)
        for start, stop in pairwise([*starts, len(items)]):
            turns += self._exchange(items, start, stop, first=start == first)
        return tuple(turns)

    def system_of(self, turns: Sequence[Turn]) -> str:
        """The system text; empty where there is none."""
        return next((turn.text for turn in turns if turn.role == "system"), "")

    def with_system(self, items: Sequence[Item], system: str) -> tuple[Item, ...]:
        """The same conversation under another system text (empty: none). Turns that don't hold it keep their tokens; nothing changes before
        the first message was said."""
        turns = self.read(items)
        user = next((turn for turn in turns if turn.role == "user"), None)
        if user is None:
            return tuple(items)
        if self._system is not None:
            start = next((turn.start for turn in turns if turn.role == "system"), user.start)
            turn = self._tokenizer.encode(self._system_turn(system), bos=False) if system else []
            return (*items[:start], *turn, *items[user.start :])
        first = self.user(user.text, system=system, first=user.start == 0, after_reply=False)
        return (*items[: user.start], *first, *items[user.stop :])

    def _system_turn(self, text: str) -> str:
        return f"{self._system}{text}{self._ending}"

    def _before_the_first(self, items: Sequence[Item], first: int) -> list[Turn]:
        start = first
        turns: list[Turn] = []
        if self._system is not None and (places := self._places(items, self._system, 0, first)):
            start = places[0]
            text = self.text(items[start:first])[len(self._system) :].removesuffix(self._ending)
            turns = [Turn("system", text, start, first)]
        context = [item for item in items[:start] if item != self._tokenizer.bos_id]
        return [Turn("context", self.text(context), 0, start), *turns] if context else turns

    def _exchange(self, items: Sequence[Item], start: int, stop: int, *, first: bool) -> list[Turn]:
        """A user's turn and the reply, if there is one."""
        ends = self._places(items, self._suffix, start, stop) if self._suffix else []
        text = self.text(items[start : ends[0] if ends else stop])[len(self._prefix) :]
        reply = self._behind(items, self._suffix, ends[0], stop) if ends else stop
        turns = []
        if first and self._system is None and BLANK_LINE in text:
            system, _, text = text.rpartition(BLANK_LINE)
            turns.append(Turn("system", system, start, start))
        turns.append(Turn("user", text, start, reply))
        if reply < stop:
            said = [item for item in items[reply : self._unended(items, reply, stop)] if isinstance(item, int)]
            turns.append(Turn("assistant", self._tokenizer.decode(said), reply, stop))
        return turns

    def _unended(self, items: Sequence[Item], start: int, stop: int) -> int:
        """Where the ending of the reply ``[start, stop)`` begins; ``stop`` where it has none."""
        most = len(self._tokenizer.encode(self._ending, bos=False)) + _SPARE
        for at in range(stop - 1, max(start, stop - most) - 1, -1):
            if self.text(items[at:stop]) in (self._ending, self._settled):
                return at
        return stop

    def _places(self, items: Sequence[Item], marker: str, start: int, stop: int) -> list[int]:
        """Where in ``[start, stop)`` a token begins ``marker``."""
        length = len(self._tokenizer.encode(marker, bos=False)) + _SPARE
        return [i for i in range(start, stop) if self.text(items[i : min(stop, i + length)]).startswith(marker)]

    def _behind(self, items: Sequence[Item], marker: str, start: int, stop: int) -> int:
        """The first token behind ``marker``, which begins at ``start``."""
        return next(i for i in range(start + 1, stop + 1) if self.text(items[start:i]).startswith(marker))


def before_the_models_turn(prefix: str, suffix: str) -> str:
    """What of ``suffix`` ends a turn: the part before the marker that opens the model's. That marker begins as the user's does, so it is the
    last place of the longest beginning of ``prefix`` in ``suffix``; all of ``suffix`` where there is none."""
    for length in range(len(prefix), 0, -1):
        if (at := suffix.rfind(prefix[:length])) >= 0:
            return suffix[:at]
    return suffix
