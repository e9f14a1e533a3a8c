"""What a remote answered: good for a while, and for longer while the remote is away. One question at a time, each asked once."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from kvstore.errors import Unreachable

_T = TypeVar("_T")
FRESH = 2.0
"""Seconds for which an answer that may change is not asked for again."""
AWAY = 5.0
"""Seconds for which a remote that did not answer is not asked again."""


class Recent:
    """May be used from many threads. ``kept``: answers in memory; of more, those that were used last."""

    def __init__(self, kept: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._kept, self._clock = kept, clock
        self._asking = threading.Lock()
        self._lock = threading.Lock()
        self._answers: OrderedDict[Hashable, tuple[float, Any]] = OrderedDict()
        self._away: tuple[float, Unreachable] | None = None

    def ask(self, key: Hashable, question: Callable[[], _T], *, fresh: float = FRESH) -> _T:
        """The answer to a question that ``key`` stands for, at most ``fresh`` seconds old; an old one where the remote is away, `Unreachable` without one.

        Other errors of ``question`` are raised, and the old answer is forgotten: the remote did answer.
        """
        found = self._answered(key)
        if found is not None and self._clock() - found[0] <= fresh:
            value: _T = found[1]
            return value
        with self._asking:
            found = self._answered(key)  # by who asked the same before us
            if found is not None and self._clock() - found[0] <= fresh:
                value = found[1]
                return value
            try:
                value = self.reach(question)
            except Unreachable:
                if found is None:
                    raise
                value = found[1]
                return value
            except BaseException:
                with self._lock:
                    self._answers.pop(key, None)
                raise
            with self._lock:
                self._answers[key] = self._clock(), value
                while len(self._answers) > self._kept:
                    self._answers.popitem(last=False)
            return value

    def reach(self, question: Callable[[], _T]) -> _T:
        """``question()``, unless the remote was away a moment ago."""
        with self._lock:
            if self._away is not None and self._clock() < self._away[0]:
                raise Unreachable(self._away[1].message, **self._away[1].details)
        try:
            value = question()
        except Unreachable as error:
            with self._lock:
                self._away = self._clock() + AWAY, error
            raise
        with self._lock:
            self._away = None
        return value

    def _answered(self, key: Hashable) -> tuple[float, Any] | None:
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
            return self._answers.get(key)
