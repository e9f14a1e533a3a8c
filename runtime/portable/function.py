"""A function ready to run: a flat list of (callable, slots) over numbered values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import KVError
from runtime.engine import require_declared
from runtime.mlpackage import Function, TensorSpec

# (what to call, slots of its arguments, slot of its result, slots that nobody reads afterwards)
Instruction: TypeAlias = tuple[Callable[..., Any], tuple[int, ...], int, tuple[int, ...]]


class ProgramInconsistent(KVError):
    """A function's operations don't fit together: shapes that were declared are not those that come out."""


@dataclass(frozen=True, slots=True)
class Output:
    """Where an output's value is and how it leaves: ``leave(value, rows)`` makes the caller's array.

    ``rows`` is the call's ``kv_rows``; only outputs that hold the whole context look at it.
    """

    slot: int
    leave: Callable[[Any, tuple[int, int] | None], NDArray[Any]]


class PortableFunction:
    """A planned function. Calls may follow each other but not overlap; see ``runtime.engine.Function``."""

    def __init__(
        self,
        function: Function,
        slots: list[Any],
        entry: Mapping[str, int],
        instructions: list[Instruction],
        names: list[str],
        outputs: Mapping[str, Output],
    ) -> None:
        """``slots`` holds the constants; ``entry`` is where the inputs that anyone reads go.

        ``names`` says for messages what each instruction makes.
        """
        self.name = function.name
        self.inputs: Mapping[str, TensorSpec] = function.inputs
        self.outputs: Mapping[str, TensorSpec] = function.outputs
        self._slots = slots
        self._entry = entry
        self._instructions = instructions
        self._names = names
        self._outputs = outputs

    def __call__(
        self, inputs: Mapping[str, NDArray[Any]], *, kv_rows: tuple[int, int] | None = None
    ) -> dict[str, NDArray[Any]]:
        """See ``Function.__call__``."""
        require_declared(self.name, self.inputs, inputs)
        values = list(self._slots)
        for name, slot in self._entry.items():
            values[slot] = inputs[name]
        # infinities are looked for where they matter (half.py), with names; numpy's warnings have none
        at = -1
        try:
            with np.errstate(all="ignore"):
                for at, (run, args, out, dead) in enumerate(self._instructions):  # noqa: B007
                    values[out] = run(*[values[arg] for arg in args])
                    for slot in dead:
                        values[slot] = None
                return {name: output.leave(values[output.slot], kv_rows) for name, output in self._outputs.items()}
        except KVError:
            raise
        except (ValueError, IndexError, TypeError) as error:
            raise ProgramInconsistent(
                f"{self.name}: {self._names[at]}: expected values of the declared shapes, found: {error}; "
                "the package contradicts itself: build it again",
                function=self.name,
                op=self._names[at],
            ) from error
