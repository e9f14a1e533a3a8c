"""How an operation meets the engine: a ``Call`` at load, a ``Step`` to run.

A factory reads a call's constant inputs once, checks them, and returns a step: a plain function over the
inputs that vary. Values at run time are C-ordered or strided numpy arrays: fp16 and fp32 are held as float32,
integers and bool as declared. A step never writes into its arguments and may return a view of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import Refused
from runtime.mlpackage import Arg, Name, Op, TensorSpec
from runtime.ops.weights import Source, Stored, WeightCache

Array: TypeAlias = NDArray[Any]
Run: TypeAlias = Callable[..., Any]


class OperationUnsupported(Refused):
    """A function uses an operation, or a form of one, that isn't implemented: another engine may run it. Raised at load."""


@dataclass(frozen=True, slots=True)
class Step:
    """``run`` over ``args`` in order. ``moves`` says that it only moves values (so nothing needs rounding)."""

    run: Run
    args: tuple[Arg, ...]
    moves: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of ``function`` at load.

    ``exact`` asks for one-row kernels (see ``runtime.ops.linear``); ``rounding`` for weights rounded to fp16.
    """

    op: Op
    function: str
    exact: bool
    rounding: bool
    cache: WeightCache
    specs: Mapping[str, TensorSpec]
    sources: Mapping[str, Source]

    def given(self, name: str) -> bool:
        """Whether the optional input ``name`` is bound."""
        return bool(self.op.inputs.get(name))

    def arg(self, name: str) -> Arg:
        """The one value bound to ``name``."""
        bound = self.op.inputs.get(name, ())
        if len(bound) != 1:
            raise self.unsupported(f"input {name}: expected one value, found {len(bound)}")
        return bound[0]

    def spec(self, name: str) -> TensorSpec:
        """Declared shape and type of input ``name``."""
        arg = self.arg(name)
        return self.specs[arg.name] if isinstance(arg, Name) else arg.spec

    @property
    def out(self) -> TensorSpec:
        """Declared shape and type of the first output."""
        return self.op.outputs[0][1]

    def source(self, name: str) -> Source | None:
        """The constant bound to ``name``, not yet read; ``None`` when it varies from call to call."""
        arg = self.arg(name)
        return self.sources.get(arg.name) if isinstance(arg, Name) else Stored(arg, self.cache)

    def constant(self, name: str) -> Array:
        """The constant bound to ``name``. Raises ``OperationUnsupported`` when it varies."""
        source = self.source(name)
        if source is None:
            raise self.unsupported(f"input {name}: expected a constant, found a computed value")
        return source.plain()

    def integer(self, name: str, default: int | None = None) -> int:
        """A scalar integer (or bool) constant; ``default`` when unbound."""
        if default is not None and not self.given(name):
            return default
        return int(self.constant(name).reshape(()))

    def number(self, name: str, default: float) -> float:
        """A scalar float constant; ``default`` when unbound."""
        return float(self.constant(name).reshape(())) if self.given(name) else default

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A constant list of integers; ``None`` when unbound."""
        return tuple(int(v) for v in self.constant(name).reshape(-1)) if self.given(name) else None

    def text(self, name: str, default: str) -> str:
        """A string constant; ``default`` when unbound."""
        return str(self.constant(name).reshape(())[()]) if self.given(name) else default

    def step(self, run: Run, *names: str, moves: bool = False) -> Step:
        """The step of ``run`` over the inputs called ``names``."""
        return Step(run, tuple(self.arg(name) for name in names), moves)

    def unsupported(self, why: str) -> OperationUnsupported:
        """The refusal of this operation's form."""
        return OperationUnsupported(
            f"{self.function}: {self.op.type} {self.op.name!r}: {why}; the portable engine can't run this form",
            function=self.function,
            op=self.op.type,
            name=self.op.name,
        )


Factory: TypeAlias = Callable[[Call], Step]


def held(spec: TensorSpec) -> np.dtype[Any]:
    """The numpy type that ``spec``'s values have at run time."""
    return np.dtype(np.float32) if spec.dtype in ("fp16", "fp32") else np.dtype(spec.numpy)
