"""Runs a part of a graph at load, to see what it does instead of guessing from how it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.mlpackage import Arg, Name, Op
from runtime.ops import OPERATIONS, Call, Source, Stored, WeightCache
from runtime.portable.graph import MOVES, Graph, single

CallOf = Callable[[Op], Call]


class Probe:
    """Evaluates values of one function for given inputs. Only for values that depend on small inputs."""

    def __init__(self, graph: Graph, call: CallOf, sources: Mapping[str, Source], cache: WeightCache) -> None:
        self._graph = graph
        self._call = call
        self._sources = sources
        self._cache = cache

    def constant(self, arg: Arg) -> NDArray[Any] | None:
        """The array of a constant; ``None`` when ``arg`` varies."""
        if not isinstance(arg, Name):
            return Stored(arg, self._cache).plain()
        source = self._sources.get(arg.name)
        return None if source is None else source.plain()

    def flag(self, op: Op, name: str) -> bool:
        """The constant bool input ``name`` of ``op``; false when unbound."""
        bound = op.inputs.get(name)
        constant = self.constant(bound[0]) if bound else None
        return constant is not None and bool(constant.reshape(()))

    def evaluate(self, arg: Arg, inputs: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """``arg``'s value as the engine would compute it (float32 for fp16)."""
        return self._value(arg, dict(inputs))

    def _value(self, arg: Arg, known: dict[str, NDArray[Any]]) -> NDArray[Any]:
        constant = self.constant(arg)
        if constant is not None:
            return constant
        assert isinstance(arg, Name)
        if arg.name not in known:
            op = self._graph.producer[arg.name]
            step = OPERATIONS[op.type](self._call(op))
            result = step.run(*(self._value(inner, known) for inner in step.args))
            parts = result if isinstance(result, tuple) else (result,)
            known.update(zip((name for name, _ in op.outputs), parts, strict=True))
        return known[arg.name]

    def moves_from(self, value: str) -> list[tuple[str, NDArray[np.int8]]]:
        """Each value that ``value`` is a pure view of, nearest first, with ``value`` as a view of its memory.

        The second item has ``value``'s shape, and strides that count elements of the first: no memory is touched.
        """
        found: list[tuple[str, NDArray[np.int8]]] = []
        ops: list[Op] = []
        while True:
            spec = self._graph.spec(value)
            view = base = np.empty(spec.shape, np.int8)
            for op in reversed(ops):
                view = OPERATIONS[op.type](self._call(op)).run(view)
            if ops and not np.may_share_memory(view, base):
                return found
            found.append((value, view))
            producer = self._graph.producer.get(value)
            source = (
                single(producer.inputs, "x") if producer is not None and producer.type in MOVES - {"cast"} else None
            )
            if producer is None or source is None:
                return found
            ops.append(producer)
            value = source
