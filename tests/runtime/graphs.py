"""Functions of the package reader's IR, written by hand: what the engine runs without any package on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.mlpackage import Arg, Const, Function, Name, Op, TensorSpec, Value
from runtime.ops import Call, WeightCache
from runtime.ops.widen import fastest
from runtime.portable.function import PortableFunction
from runtime.portable.graph import Graph
from runtime.portable.placement import Placement, PlacementFinder
from runtime.portable.plan import Planner
from runtime.portable.probe import Probe
from runtime.portable.recognise import Attention, AttentionFinder

Given = NDArray[Any] | float | int | bool | str | list[int] | list[str]
_DTYPES = {"float16": "fp16", "float32": "fp32"}


class Inline:
    """Constants of a hand-written function: they hold their own arrays."""

    def array(self, value: Value) -> NDArray[Any]:
        assert isinstance(value, Const)
        return value.array


def spec_of(array: NDArray[Any]) -> TensorSpec:
    return TensorSpec(array.shape, _DTYPES.get(str(array.dtype), str(array.dtype)))


def const(value: Given) -> Const:
    if isinstance(value, str):
        return Const(TensorSpec((), "string"), np.array(value, object))
    array = np.asarray(value)
    if array.dtype == np.int64:
        array = array.astype(np.int32)
    if array.dtype == np.float64:
        array = array.astype(np.float16)
    return Const(spec_of(array), array)


class Writer:
    """Writes operations one after the other; values are names, anything else becomes a constant."""

    def __init__(self, **inputs: tuple[int, ...] | TensorSpec) -> None:
        self.inputs = {
            name: shape if isinstance(shape, TensorSpec) else TensorSpec(shape, "fp16")
            for name, shape in inputs.items()
        }
        self.ops: list[Op] = []
        self._specs: dict[str, TensorSpec] = dict(self.inputs)

    def __call__(
        self, kind: str, shape: tuple[int, ...], result: str = "fp16", /, *, _name: str = "", **given: Any
    ) -> str:
        """Adds ``kind`` with an output of ``shape`` and element type ``result``; returns the output's name."""
        inputs: dict[str, tuple[Arg, ...]] = {}
        for key, value in given.items():
            if isinstance(value, list) and value and isinstance(value[0], str):
                inputs[key] = tuple(Name(part) for part in value)
            elif isinstance(value, str) and value in self._specs:
                inputs[key] = (Name(value),)
            else:
                inputs[key] = (const(value),)
        name = _name or f"{kind}_{len(self.ops)}"
        outputs = [(name, TensorSpec(shape, result))]
        self.ops.append(Op(kind, inputs, tuple(outputs), {}))
        self._specs.update(outputs)
        return name

    def function(self, *outputs: str, name: str = "main") -> Function:
        return Function(name, self.inputs, {o: self._specs[o] for o in outputs}, tuple(self.ops))


def planned(function: Function, *, rounding: bool = False, fuse: bool = True) -> PortableFunction:
    return Planner(WeightCache(Inline(), fastest()), rounding, fuse).plan(function, function.name)


def evaluate(
    kind: str,
    dynamic: Mapping[str, NDArray[Any]],
    shape: tuple[int, ...],
    result: str = "fp32",
    /,
    *,
    width: int | None = None,
    **static: Any,
) -> NDArray[Any]:
    """One operation on float32 arrays, its result as the engine returns it.

    ``width`` adds a hidden input of so many rows, which decides between one-row kernels and GEMM.
    """
    extra = {} if width is None else {"hidden": np.zeros((width, 1), np.float16)}
    writer = Writer(**{name: spec_of(array) for name, array in {**dynamic, **extra}.items()})
    out = writer(kind, shape, result, **{name: name for name in dynamic}, **static)
    return planned(writer.function(out))({**dynamic, **extra})[out]


def recognised(function: Function) -> tuple[dict[str, Placement], dict[str, Attention]]:
    """What the engine finds in ``function``."""
    graph = Graph(function)
    cache = WeightCache(Inline(), fastest())
    specs = dict(function.inputs)
    for op in function.ops:
        specs.update(op.outputs)
    probe = Probe(graph, lambda op: Call(op, "main", True, False, cache, specs, {}), {}, cache)
    placements = PlacementFinder(graph, probe).found()
    return placements, {a.name: a for a in AttentionFinder(graph, probe, placements).found()}


@dataclass(frozen=True)
class Shape:
    """Attention of ``n`` positions (``None``: decode, without a row axis) over a cache of ``ctx`` slots."""

    n: int | None
    ctx: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8

    @property
    def rows(self) -> int:
        return self.n or 1

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim


def _caches(w: Writer, s: Shape, spelling: str) -> dict[str, str]:
    """k and v as attention reads them [1, ctx, kv]; the outputs k_0_out and v_0_out are made on the way."""
    onehot = w("reshape", (s.rows, s.ctx), x="onehot", shape=[s.rows, s.ctx])
    hit = w("reduce_sum", (1, s.ctx), x=onehot, axes=[0], keep_dims=True)
    hit = w("expand_dims", (1, s.ctx, 1), x=hit, axes=[-1])
    keep = w("sub", (1, s.ctx, 1), x=1.0, y=hit)
    if spelling == "odd keep":  # 1 − onehot, written as (onehot − 1) · (−1)
        keep = w("mul", (1, s.ctx, 1), x=w("sub", (1, s.ctx, 1), x=hit, y=1.0), y=-1.0)
    found = {}
    for part in "kv":
        row = w("mul", (s.rows, s.kv), x=f"{part}_row", y=1.25)  # what enters is computed, and not fp16
        kept = w("mul", (1, s.ctx, s.kv), x=keep, y=f"{part}_0_in")
        whole = "" if s.n is not None else f"{part}_0_out"
        if s.n is None:
            slot = w("reshape", (1, 1, s.kv), x=row, shape=[1, 1, s.kv])
            new = w("mul", (1, s.ctx, s.kv), x=hit, y=slot)
        else:
            w("identity", (s.rows, s.kv), x=row, _name=f"{part}_0_out")
            if spelling == "turned":
                turned = w("transpose", (s.ctx, s.rows), x=onehot, perm=[1, 0])
                new = w("matmul", (s.ctx, s.kv), x=turned, y=row, transpose_x=False, transpose_y=False)
            else:
                new = w("matmul", (s.ctx, s.kv), x=onehot, y=row, transpose_x=True, transpose_y=False)
            new = w("reshape", (1, s.ctx, s.kv), x=new, shape=[1, s.ctx, s.kv])
        if spelling == "select":
            is_hit = w("greater", (1, s.ctx, 1), "bool", x=hit, y=0.5)
            found[part] = w("select", (1, s.ctx, s.kv), _name=whole, cond=is_hit, a=new, b=f"{part}_0_in")
        else:
            found[part] = w("add", (1, s.ctx, s.kv), _name=whole, x=new, y=kept)
    return found


def attention_function(s: Shape, spelling: str = "grouped", layout: str = "grouped") -> Function:
    """softmax(q kᵀ / 2 + mask) v with new rows in the cache; outputs mixed [n, heads · head_dim], k_0_out, v_0_out.

    ``mixed`` leaves as float32: rounding to fp16 would hide differences.

    ``spelling`` is how the cache is updated ("shared": it is another layer's, and only read); ``layout`` whether a
    position's queries stand together or a head's.
    """
    lead = () if s.n is None else (s.n,)
    w = Writer(
        hidden_in=(*lead, s.heads * s.head_dim), k_row=(s.rows, s.kv), v_row=(s.rows, s.kv),
        onehot=(*lead, s.ctx), mask_f=(*lead, s.ctx), k_0_in=(1, s.ctx, s.kv), v_0_in=(1, s.ctx, s.kv),
    )  # fmt: skip
    if spelling == "shared":
        w = Writer(
            hidden_in=w.inputs["hidden_in"], mask_f=w.inputs["mask_f"], skf=w.inputs["k_0_in"], svf=w.inputs["v_0_in"]
        )
    cache = {"k": "skf", "v": "svf"} if spelling == "shared" else _caches(w, s, spelling)
    group = s.heads // s.kv_heads
    q = w("reshape", (s.rows, s.heads, s.head_dim), x="hidden_in", shape=[s.rows, s.heads, s.head_dim])
    heads = {}
    for part, name in cache.items():
        split = w("reshape", (s.ctx, s.kv_heads, s.head_dim), x=name, shape=[s.ctx, s.kv_heads, s.head_dim])
        perm, shape = (
            ([1, 2, 0], (s.kv_heads, s.head_dim, s.ctx))
            if part == "k"
            else ([1, 0, 2], (s.kv_heads, s.ctx, s.head_dim))
        )
        heads[part] = w("transpose", shape, x=split, perm=perm)
    rows = s.rows * group
    if layout == "grouped":
        q = w("reshape", (s.rows, s.kv_heads, group, s.head_dim), x=q, shape=[s.rows, s.kv_heads, group, s.head_dim])
        q = w("transpose", (s.kv_heads, s.rows, group, s.head_dim), x=q, perm=[1, 0, 2, 3])
        order, back = (s.kv_heads, s.rows, group), [1, 0, 2, 3]
        mask = w("reshape", (1, s.rows, 1, s.ctx), x="mask_f", shape=[1, s.rows, 1, s.ctx])
    else:
        q = w("transpose", (s.heads, s.rows, s.head_dim), x=q, perm=[1, 0, 2])
        order, back = (s.kv_heads, group, s.rows), [2, 0, 1, 3]
        mask = w("reshape", (s.rows, s.ctx), x="mask_f", shape=[s.rows, s.ctx])
    q = w("reshape", (s.kv_heads, rows, s.head_dim), x=q, shape=[s.kv_heads, rows, s.head_dim])
    scores = w("matmul", (s.kv_heads, rows, s.ctx), x=q, y=heads["k"], transpose_x=False, transpose_y=False)
    scores = w("real_div", (s.kv_heads, rows, s.ctx), x=scores, y=2.0)
    masked_shape = (*order, s.ctx)
    scores = w("reshape", masked_shape, x=scores, shape=list(masked_shape))
    scores = w("add", masked_shape, x=mask, y=scores)
    shares = w("softmax", masked_shape, x=scores, axis=-1)
    shares = w("reshape", (s.kv_heads, rows, s.ctx), x=shares, shape=[s.kv_heads, rows, s.ctx])
    mixed = w("matmul", (s.kv_heads, rows, s.head_dim), x=shares, y=heads["v"], transpose_x=False, transpose_y=False)
    mixed = w("reshape", (*order, s.head_dim), x=mixed, shape=[*order, s.head_dim])
    places = {0: s.kv_heads, 1: s.rows, 2: group} if layout == "grouped" else {0: s.kv_heads, 1: group, 2: s.rows}
    mixed = w("transpose", (*(places[axis] for axis in back[:3]), s.head_dim), x=mixed, perm=back)
    w("reshape", (s.rows, s.heads * s.head_dim), "fp32", x=mixed, shape=[s.rows, s.heads * s.head_dim], _name="mixed")
    return w.function("mixed") if spelling == "shared" else w.function("mixed", "k_0_out", "v_0_out")
