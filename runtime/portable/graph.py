"""A function seen as a graph: who makes a value, who reads it, and which inputs it depends on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from runtime.mlpackage import Arg, Function, Name, Op, TensorSpec

# The one-hot rows say which slots a call writes; the bundle's interface fixes the name.
ONEHOT = frozenset({"onehot"})

# Operations that neither change nor mix values, only where they stand.
MOVES = frozenset({"reshape", "transpose", "expand_dims", "squeeze", "identity", "cast"})


class Graph:
    """Look-ups over one function. Values without a producer are the function's inputs."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.producer: dict[str, Op] = {}
        self.readers: dict[str, list[Op]] = {}
        self._specs: dict[str, TensorSpec] = dict(function.inputs)
        self._depends: dict[str, frozenset[str]] = {name: frozenset({name}) for name in function.inputs}
        for op in function.ops:
            depends: frozenset[str] = frozenset()
            for name in names(op):
                depends |= self._depends[name]
                self.readers.setdefault(name, []).append(op)
            for output, spec in op.outputs:
                self.producer[output] = op
                self._specs[output] = spec
                self._depends[output] = depends

    def spec(self, value: str) -> TensorSpec:
        """The declared shape and type of ``value``."""
        return self._specs[value]

    def depends(self, value: str) -> frozenset[str]:
        """The function inputs that ``value`` is computed from; empty for a constant."""
        return self._depends[value]

    def only(self, arg: Arg, inputs: frozenset[str]) -> bool:
        """Whether ``arg`` varies, and with nothing but ``inputs``."""
        return isinstance(arg, Name) and bool(self._depends[arg.name]) and self._depends[arg.name] <= inputs

    def origin(self, value: str) -> str:
        """``value`` followed back through moves to what made its numbers."""
        while (op := self.producer.get(value)) is not None and op.type in MOVES:
            source = single(op.inputs, "x")
            if source is None:
                break
            value = source
        return value

    def maker(self, arg: Arg) -> Op | None:
        """The operation that makes ``arg``; ``None`` for an input or an inline constant."""
        return self.producer.get(arg.name) if isinstance(arg, Name) else None

    def back(self, arg: Arg, types: tuple[str, ...]) -> Arg:
        """``arg`` followed back through operations of ``types``, along their input x."""
        while (op := self.maker(arg)) is not None and op.type in types:
            arg = op.inputs["x"][0]
        return arg


def names(op: Op) -> Iterator[str]:
    """The names that ``op`` reads, repeated if it reads one twice."""
    for args in op.inputs.values():
        for arg in args:
            if isinstance(arg, Name):
                yield arg.name


def single(inputs: Mapping[str, tuple[Arg, ...]], name: str) -> str | None:
    """The name bound to input ``name`` when exactly one value is, and it is not an inline constant."""
    bound = inputs.get(name, ())
    return bound[0].name if len(bound) == 1 and isinstance(bound[0], Name) else None
