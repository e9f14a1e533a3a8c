"""Drafters that know what the model will say, and guess right or wrong as told: the tiny models never repeat themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.items import Item

Guess = tuple[int, int | None]
"""(drafts, index of the first wrong one; None: all right)."""


@dataclass
class Oracle:
    """``known``: everything fed, and what plain decoding gives after it. ``plan``: a guess for each call, over and over. ``strict``: whether it
    asserts that the text is what it knows."""

    known: Sequence[Item]
    plan: Sequence[Guess]
    strict: bool = True
    asked: list[tuple[int, int]] = field(default_factory=list)
    """(tokens, most) of each call."""

    def __call__(self, tokens: Sequence[Item], most: int) -> Sequence[int]:
        assert not self.strict or tuple(tokens) == tuple(self.known[: len(tokens)]), "speculation changed the text"
        count, wrong = self.plan[len(self.asked) % len(self.plan)]
        self.asked.append((len(tokens), most))
        right = [*self.known[len(tokens) : len(tokens) + count], *[5] * count][:count]
        return [
            int(token) ^ 1 if wrong is not None and i >= wrong else int(token)  # type: ignore[arg-type]
            for i, token in enumerate(right)
        ]


RIGHT: Sequence[Guess] = [(3, None)]
WRONG: Sequence[Guess] = [(3, 0)]
