"""From a function's operations to the flat list that runs: kernels chosen, attention fused, leftovers dropped.

Everything that can be decided without inputs is decided here, once: constants read, shapes fixed, values given
slots, and the slots emptied after their last reader.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import KVError
from runtime.engine import is_whole_cache
from runtime.mlpackage import Arg, Function, Name, Op, TensorSpec
from runtime.ops import CONSTANTS, OPERATIONS, Call, OperationUnsupported, Source, Step, Stored, WeightCache
from runtime.ops.widen import widened
from runtime.portable.attention import Rounds, fits_exact, kernel, sight
from runtime.portable.caches import Placed, Rows, slots_of
from runtime.portable.entering import entering_values
from runtime.portable.function import Instruction, Output, PortableFunction
from runtime.portable.graph import Graph
from runtime.portable.half import entering_rounder, rounder, to_half
from runtime.portable.placement import Placement, PlacementFinder
from runtime.portable.probe import Probe
from runtime.portable.recognise import Attention, AttentionFinder, Reads

# Up to here functions are row-exact: each row is computed just as decode computes it.
EXACT_WIDTH = 8


@dataclass(frozen=True, slots=True)
class _Node:
    run: Callable[..., Any]
    args: tuple[Hashable, ...]
    out: Hashable


class Planner:
    """Turns functions of one package into runnable ones that share decoded weights."""

    def __init__(self, cache: WeightCache, rounding: bool, fuse: bool = True) -> None:
        """``rounding``: round every operation's result to fp16. ``fuse`` False runs attention op by op (tests)."""
        self._cache = cache
        self._rounding = rounding
        self._fuse = fuse

    @property
    def weights(self) -> WeightCache:
        """What the functions planned so far have read."""
        return self._cache

    def plan(self, function: Function, label: str) -> PortableFunction:
        """``function``, ready. ``label`` is how messages call it. Raises ``OperationUnsupported``, ``PackageError``."""
        refuse_unknown(function, label)
        try:
            return _Draft(function, label, self._cache, self._rounding, self._fuse).finish()
        except (LookupError, ValueError, TypeError) as error:
            if isinstance(error, KVError):
                raise
            raise OperationUnsupported(
                f"{label}: operations: expected ones that fit together, found {type(error).__name__}: {error}; "
                "the package contradicts itself: build it again",
                function=label,
            ) from error


def refuse_unknown(function: Function, label: str) -> None:
    """Raises ``OperationUnsupported`` listing every operation of ``function`` that isn't implemented."""
    unknown = sorted({op.type for op in function.ops} - OPERATIONS.keys() - CONSTANTS.keys() - {"const"})
    if unknown:
        raise OperationUnsupported(
            f"{label}: operations: expected ones the portable engine has, found {', '.join(unknown)}; "
            "run this bundle with Core ML on a Mac, or build it without them",
            function=label,
            ops=unknown,
        )


def width_of(function: Function) -> int:
    """Rows that ``function`` computes at once: of its hidden input, [H] or [N, H]; 1 without one."""
    for name in ("hidden_in", "hidden"):
        spec = function.inputs.get(name)
        if spec is not None:
            return spec.shape[0] if len(spec.shape) > 1 else 1
    return 1


class _Draft:
    """One function while it is planned: nodes in program order, then only the needed ones, then slots."""

    def __init__(self, function: Function, label: str, cache: WeightCache, rounding: bool, fuse: bool) -> None:
        self._function = function
        self._label = label
        self._cache = cache
        self._rounding = rounding
        self._widen = cache.widen
        self._exact = width_of(function) <= EXACT_WIDTH
        self._specs: dict[str, TensorSpec] = dict(function.inputs)
        self._sources: dict[str, Source] = {}
        for op in function.ops:
            self._specs.update(op.outputs)
            if op.type == "const":
                self._sources[op.name] = Stored(op.attributes["val"], cache)
            elif op.type in CONSTANTS:
                self._sources[op.name] = CONSTANTS[op.type](self._call(op))
        graph = Graph(function)
        self._entering = entering_values(graph)
        self._placements: dict[str, Placement] = {}
        self._attentions: dict[str, Attention] = {}
        if fuse:
            probe = Probe(graph, self._call, self._sources, cache)
            self._placements = PlacementFinder(graph, probe).found()
            attentions = AttentionFinder(graph, probe, self._placements).found()
            self._attentions = {a.name: a for a in attentions if not self._exact or fits_exact(a)}
        self._nodes: list[_Node] = []
        self._made: set[Hashable] = set()
        self._constants: dict[Hashable, Callable[[], NDArray[Any]]] = {}

    def finish(self) -> PortableFunction:
        """The whole plan."""
        for op in self._function.ops:
            if op.name in self._placements:
                self._place(self._placements[op.name])
            if op.name in self._attentions:
                self._attend(self._attentions[op.name])
            elif op.name not in self._sources:
                self._compute(op)
        leaving = {name: self._leaving(name, spec) for name, spec in self._function.outputs.items()}
        needed = _needed(self._nodes, {key for key, _ in leaving.values()})
        return self._assign(needed, leaving)

    # Nodes

    def _call(self, op: Op) -> Call:
        return Call(op, self._label, self._exact, self._rounding, self._cache, self._specs, self._sources)

    def _node(self, run: Callable[..., Any], args: tuple[Hashable, ...], out: Hashable) -> Hashable:
        """Adds a node once per ``out``."""
        if out not in self._made:
            self._made.add(out)
            self._nodes.append(_Node(run, args, out))
        return out

    def _compute(self, op: Op) -> None:
        step = OPERATIONS[op.type](self._call(op))
        args = tuple(self._key(arg) for arg in step.args)
        if len(op.outputs) == 1:
            self._node(self._finished(step, op.name), args, op.name)
            return
        whole = self._node(step.run, args, ("parts", op.name))
        for index, (name, _) in enumerate(op.outputs):
            pick = Step(lambda parts, index=index: parts[index], (), step.moves)
            self._node(self._finished(pick, name), (whole,), name)

    def _finished(self, step: Step, name: str) -> Callable[..., Any]:
        """The step's function, followed by the rounding that its result needs."""
        run = step.run
        if self._specs[name].dtype != "fp16":
            return run
        if name in self._entering:
            enter = entering_rounder(self._label, name)
            return lambda *args: enter(run(*args))
        if self._rounding and not step.moves:
            round_ = rounder(self._label, name)
            return lambda *args: round_(run(*args))
        return run

    def _key(self, arg: Arg) -> Hashable:
        """The key of ``arg``'s run-time value."""
        if not isinstance(arg, Name):
            self._constants[id(arg)] = lambda: Stored(arg, self._cache).plain()
            return id(arg)
        if arg.name in self._sources:
            source = self._sources[arg.name]
            self._constants[arg.name] = source.plain
        elif arg.name in self._function.inputs:
            self._node(self._entering_float(arg.name), (("input", arg.name),), arg.name)
        return arg.name

    def _entering_float(self, name: str) -> Callable[[NDArray[Any]], NDArray[Any]]:
        spec, widen = self._function.inputs[name], self._widen
        if spec.dtype == "fp16":
            return lambda x: widened(x, widen)
        return lambda x: x

    # Fused steps

    def _slots(self) -> Hashable:
        label = self._label
        return self._node(lambda onehot: slots_of(onehot, label), (("input", "onehot"),), ("slots",))

    def _place(self, placement: Placement) -> None:
        widen, width = self._widen, self._specs[placement.name].shape[-1]

        def place(base: NDArray[Any], rows: NDArray[Any], slots: tuple[int, ...]) -> Placed:
            return Placed(base, rows.reshape(-1, width), slots, widen)

        rows = self._key(Name(placement.rows))
        self._node(place, (("input", placement.base), rows, self._slots()), ("cache", placement.name))

    def _cache_of(self, reads: Reads) -> Hashable:
        """The key of the cache that ``reads`` looks into."""
        key, widen = ("cache", reads.root), self._widen
        spec = self._function.inputs.get(reads.root)
        if reads.root in self._placements:
            return key
        shape = (reads.slots, reads.width)
        if spec is not None and spec.dtype == "fp16":
            return self._node(
                lambda base: Placed(base.reshape(1, *shape), None, (), widen), (("input", reads.root),), key
            )
        return self._node(
            lambda rows: Rows(np.ascontiguousarray(rows).reshape(shape)), (self._key(Name(reads.root)),), key
        )

    def _attend(self, attention: Attention) -> None:
        seen = self._node(sight, (self._key(Name(attention.mask)),), ("sight", attention.mask))
        rounds = (rounder(self._label, name) if self._rounding and name else None for name in attention.stages)
        keys, values = self._cache_of(attention.keys), self._cache_of(attention.values)
        run = kernel(attention, self._exact, Rounds(*rounds))
        self._node(run, (self._key(Name(attention.query)), seen, keys, values), attention.name)

    # Outputs, needs, slots

    def _leaving(self, name: str, spec: TensorSpec) -> tuple[Hashable, Callable[..., NDArray[Any]]]:
        """The key of output ``name`` and the function that makes the caller's array of it."""
        whole = is_whole_cache(name, spec, self._function.inputs)
        if name in self._placements:
            length = spec.shape[1]
            return ("cache", name), lambda cache, rows: cache.stored(*(rows or (0, length)))
        half = to_half(self._label, name)

        def leave(value: NDArray[Any], rows: tuple[int, int] | None) -> NDArray[Any]:
            if rows is not None and whole:
                value = value[:, rows[0] : rows[1]]
            return half(value) if spec.dtype == "fp16" else np.array(value, spec.numpy)

        return self._key(Name(name)), leave

    def _assign(
        self, nodes: list[_Node], leaving: dict[str, tuple[Hashable, Callable[..., NDArray[Any]]]]
    ) -> PortableFunction:
        places: dict[Hashable, int] = {}
        slots: list[Any] = []
        entry: dict[str, int] = {}

        def place(key: Hashable) -> int:
            if key not in places:
                places[key] = len(slots)
                slots.append(self._constants[key]() if key in self._constants else None)
                if isinstance(key, tuple) and key[0] == "input":
                    entry[key[1]] = places[key]
            return places[key]

        steps = [(node.run, tuple(place(arg) for arg in node.args), place(node.out)) for node in nodes]
        outputs = {name: Output(place(key), leave) for name, (key, leave) in leaving.items()}
        keep = {output.slot for output in outputs.values()}
        keep |= {places[key] for key in self._constants if key in places}
        names = [str(node.out[-1] if isinstance(node.out, tuple) else node.out) for node in nodes]
        return PortableFunction(self._function, slots, entry, _with_liveness(steps, keep), names, outputs)


def _needed(nodes: list[_Node], wanted: set[Hashable]) -> list[_Node]:
    """The nodes that ``wanted`` values are computed from, in order."""
    kept = []
    for node in reversed(nodes):
        if node.out in wanted:
            kept.append(node)
            wanted.update(node.args)
    return kept[::-1]


def _with_liveness(steps: list[tuple[Callable[..., Any], tuple[int, ...], int]], keep: set[int]) -> list[Instruction]:
    """Each step with the slots that nobody reads after it."""
    last: dict[int, int] = {}
    for index, (_, args, out) in enumerate(steps):
        for slot in (*args, out):
            last[slot] = index
    dead: dict[int, list[int]] = {}
    for slot, index in last.items():
        if slot not in keep:
            dead.setdefault(index, []).append(slot)
    return [(run, args, out, tuple(dead.get(index, ()))) for index, (run, args, out) in enumerate(steps)]
