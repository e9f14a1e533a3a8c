"""Engines around the real one: they look at, or break, single calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from runtime.engine import Engine, Function, LoadLedger

Change = Callable[[NDArray[Any]], NDArray[Any]]
Look = Callable[[str, str | None, Mapping[str, NDArray[Any]], tuple[int, int] | None], None]


class Watched:
    """Calls ``look(package, function, inputs, kv_rows)`` before each call of the engine inside; it may raise."""

    def __init__(self, inside: Engine, look: Look) -> None:
        self._inside = inside
        self.look = look

    @property
    def ledger(self) -> LoadLedger:
        return self._inside.ledger

    def function(self, package: str, function: str | None) -> Function:
        return _WatchedFunction(self, package, function, self._inside.function(package, function))

    def describe(self) -> dict[str, str]:
        return self._inside.describe()


class _WatchedFunction:
    def __init__(self, engine: Watched, package: str, function: str | None, inside: Function) -> None:
        self._engine = engine
        self._place = (package, function)
        self._inside = inside
        self.name = inside.name
        self.inputs = inside.inputs
        self.outputs = inside.outputs

    def __call__(
        self, inputs: Mapping[str, NDArray[Any]], *, kv_rows: tuple[int, int] | None = None
    ) -> dict[str, NDArray[Any]]:
        self._engine.look(*self._place, inputs, kv_rows)
        return self._inside(inputs, kv_rows=kv_rows)


def fail_at(engine: Engine, call: int, error: BaseException) -> Watched:
    """Raises ``error`` instead of the ``call``-th call (from 0), once."""
    left = [call]

    def look(*_: object) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise error

    return Watched(engine, look)


class Lying:
    """The engine inside, but the tokens of ``package`` pass through ``change``."""

    def __init__(self, inside: Engine, package: str, change: Change) -> None:
        self._inside, self._package, self._change = inside, package, change
        self.ledger: LoadLedger = inside.ledger
        self.describe = inside.describe

    def function(self, package: str, function: str | None) -> Function:
        found = self._inside.function(package, function)
        return _Changed(found, self._change) if package == self._package else found


class _Changed:
    def __init__(self, inside: Function, change: Change) -> None:
        self._inside, self._change = inside, change
        self.name, self.inputs, self.outputs = inside.name, inside.inputs, inside.outputs

    def __call__(
        self, inputs: Mapping[str, NDArray[Any]], *, kv_rows: tuple[int, int] | None = None
    ) -> dict[str, NDArray[Any]]:
        results = self._inside(inputs, kv_rows=kv_rows)
        return {**results, "token": self._change(results["token"])}
