"""K and V are rounded to fp16 where they enter the cache: found from the graph alone, before anyone reads them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from graphs import Writer, planned

from runtime.mlpackage import Function, TensorSpec
from runtime.portable.entering import entering_values
from runtime.portable.graph import Graph

CTX, D, N = 6, 4, 2


def prefill() -> Writer:
    return Writer(rows=(N, D), onehot=(N, CTX), k_0_in=(1, CTX, D))


def decode() -> Writer:
    return Writer(rows=(1, D), onehot=(CTX,), k_0_in=(1, CTX, D))


def keep_and_hit(w: Writer) -> tuple[str, str]:
    hit = w("reshape", (1, CTX, 1), x="onehot", shape=[1, CTX, 1], _name="hit")
    return w("sub", (1, CTX, 1), x=1.0, y=hit, _name="keep"), hit


def made(w: Writer, n: int = 1) -> str:
    """Numbers that fp16 doesn't hold."""
    return w("mul", (n, D), x="rows", y=np.float32(1.0009765625), _name="made")


def read(w: Writer, cache: str, shape: tuple[int, ...] = (1, CTX, D)) -> str:
    """What a later operation sees of the cache, unrounded."""
    return w("abs", shape, "fp32", x=cache, _name="seen")


def usual() -> tuple[Function, set[str]]:
    w = decode()
    keep, hit = keep_and_hit(w)
    row = w("reshape", (1, 1, D), x=made(w), shape=[1, 1, D])
    kept = w("mul", (1, CTX, D), x="k_0_in", y=keep)
    w("add", (1, CTX, D), x=w("mul", (1, CTX, D), x=row, y=hit), y=kept, _name="k_0_out")
    return w.function("k_0_out", read(w, "k_0_out")), {"made"}


def one_hot_from_a_comparison() -> tuple[Function, set[str]]:
    w = decode()
    _, hit = keep_and_hit(w)
    is_hit = w("greater", (1, CTX, 1), "bool", x=hit, y=0.5)
    w("select", (1, CTX, D), cond=is_hit, a=made(w), b="k_0_in", _name="k_0_out")
    return w.function("k_0_out", read(w, "k_0_out")), {"made"}


def difference() -> tuple[Function, set[str]]:
    """k_in + onehot · (row − k_in): the row never stands alone, so what is written is rounded."""
    w = decode()
    _, hit = keep_and_hit(w)
    change = w("sub", (1, CTX, D), x=made(w), y="k_0_in")
    w("add", (1, CTX, D), x="k_0_in", y=w("mul", (1, CTX, D), x=hit, y=change), _name="k_0_out")
    return w.function("k_0_out", read(w, "k_0_out")), {"k_0_out"}


def rows_beside_the_cache() -> tuple[Function, set[str]]:
    """A prefill at an offset: the rows go out, and attention reads them through the cache."""
    w = prefill()
    rows = made(w, N)
    hit = w("reduce_sum", (1, CTX), x="onehot", axes=[0], keep_dims=True)
    keep = w("sub", (1, CTX, 1), x=1.0, y=w("reshape", (1, CTX, 1), x=hit, shape=[1, CTX, 1]))
    placed = w("matmul", (CTX, D), x="onehot", y=rows, transpose_x=True, transpose_y=False)
    placed = w("expand_dims", (1, CTX, D), x=placed, axes=[0])
    cache = w("add", (1, CTX, D), x=w("mul", (1, CTX, D), x="k_0_in", y=keep), y=placed)
    out = w("squeeze", (N, D), x=w("reshape", (1, N, D), x=rows, shape=[1, N, D]), axes=[0], _name="k_0_out")
    return w.function(out, read(w, cache)), {"made"}


def plain_rows_after_rotary_position() -> tuple[Function, set[str]]:
    """Position 0, no cache: the sum of two products is the row itself, not a placement."""
    w = Writer(rows=(N, D), cos_f=(N, D), sin_f=(N, D))
    straight = w("mul", (N, D), x=made(w, N), y="cos_f")
    turned = w("mul", (N, D), x="rows", y="sin_f")
    w("add", (N, D), x=straight, y=turned, _name="rope")
    w("identity", (N, D), x="rope", _name="k_0_out")
    return w.function("k_0_out", read(w, "rope", (N, D))), {"rope"}


def heads_side_by_side() -> tuple[Function, set[str]]:
    """Two KV heads, computed apart and joined; one passes a cast."""
    w = decode()
    keep, hit = keep_and_hit(w)
    left = w("mul", (1, D // 2), x=w("slice_by_size", (1, D // 2), x="rows", begin=[0, 0], size=[1, D // 2]), y=np.float32(1.01), _name="left")  # fmt: skip
    right = w("mul", (1, D // 2), x=w("slice_by_size", (1, D // 2), x="rows", begin=[0, D // 2], size=[1, D // 2]), y=np.float32(1.01), _name="right")  # fmt: skip
    right = w("cast", (1, D // 2), x=right, dtype="fp16")
    row = w("concat", (1, D), values=[left, right], axis=-1, interleave=False)
    row = w("transpose", (1, D), x=row, perm=[0, 1])
    kept = w("mul", (1, CTX, D), x="k_0_in", y=keep)
    w("add", (1, CTX, D), x=kept, y=w("mul", (1, CTX, D), x=hit, y=row), _name="k_0_out")
    return w.function("k_0_out", read(w, "k_0_out")), {"left", "right"}


def scaled_after_the_fact() -> tuple[Function, set[str]]:
    """A constant factor is computing, even between the rows and the output."""
    w = Writer(rows=(N, D))
    made(w, N)
    w("mul", (N, D), x="made", y=3.0, _name="tripled")
    w("identity", (N, D), x="tripled", _name="v_7_out")
    return w.function("v_7_out", read(w, "tripled", (N, D))), {"tripled"}


def a_slice_of_one_projection() -> tuple[Function, set[str]]:
    w = Writer(rows=(N, 3 * D))
    w("mul", (N, 3 * D), x="rows", y=np.float32(1.01), _name="qkv")
    w("slice_by_size", (N, D), x="qkv", begin=[0, D], size=[N, D], _name="k")
    w("identity", (N, D), x="k", _name="k_0_out")
    return w.function("k_0_out", read(w, "k", (N, D))), {"k"}


def an_input_handed_through() -> tuple[Function, set[str]]:
    w = decode()
    w("identity", (1, CTX, D), x="k_0_in", _name="k_0_out")
    return w.function("k_0_out", read(w, "k_0_out")), set()


VARIANTS: list[Callable[[], tuple[Function, set[str]]]] = [
    usual, one_hot_from_a_comparison, difference, rows_beside_the_cache, plain_rows_after_rotary_position,
    heads_side_by_side, scaled_after_the_fact, a_slice_of_one_projection, an_input_handed_through,
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.__name__)
def test_the_values_that_enter_are_found(variant: Callable[[], tuple[Function, set[str]]]) -> None:
    function, want = variant()
    assert entering_values(Graph(function)) == want


@pytest.mark.parametrize("rounding", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.__name__)
def test_whoever_reads_the_cache_reads_what_the_host_will_store(
    variant: Callable[[], tuple[Function, set[str]]], fuse: bool, rounding: bool
) -> None:
    function, _ = variant()
    rng = np.random.default_rng(2)
    inputs = {name: rng.standard_normal(spec.shape).astype(np.float16) for name, spec in function.inputs.items()}
    if "onehot" in inputs:
        inputs["onehot"] = np.eye(CTX, dtype=np.float16)[[4, 1][: function.inputs["onehot"].size // CTX]]
        inputs["onehot"] = inputs["onehot"].reshape(function.inputs["onehot"].shape)
    found = planned(function, fuse=fuse, rounding=rounding)(inputs)
    seen = found["seen"]
    assert np.array_equal(seen, seen.astype(np.float16).astype(np.float32)), "an unrounded number was read"
    stored = next(value for name, value in found.items() if name.endswith("_out"))
    assert stored.dtype == np.float16
    if stored.shape == seen.shape:
        assert np.array_equal(np.abs(stored), seen)
    else:
        assert np.array_equal(np.abs(stored), seen[0, [4, 1]])


def test_a_function_without_cache_outputs_rounds_nothing() -> None:
    w = Writer(hidden=TensorSpec((1, D), "fp16"))
    w("mul", (1, D), x="hidden", y=2.0, _name="k")
    assert entering_values(Graph(w.function("k"))) == frozenset()
