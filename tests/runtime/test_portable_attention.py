"""Fused attention: found however it is spelled, right against double precision, and the same bits for each row."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from graphs import Shape, attention_function, planned, recognised
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from runtime.engine import InputMismatch
from runtime.portable.attention import chunk_slots
from runtime.portable.function import PortableFunction

SPELLINGS = ["grouped", "turned", "odd keep", "select"]
LAYOUTS = ["grouped", "by head"]


def given_inputs(s: Shape, start: int, window: int | None = None, real: int | None = None) -> dict[str, NDArray[Any]]:
    """Inputs of ``attention_function``. Row r's numbers depend on its position only."""
    kv = noise(2, 1, s.ctx, s.kv).copy()
    rows = noise(s.ctx, s.heads * s.head_dim + 2 * s.kv, seed=1)[start : start + s.rows].copy()
    position, slot = np.arange(start, start + s.rows)[:, None], np.arange(s.ctx)[None]
    shown = (slot <= position) & (np.arange(s.rows)[:, None] < (s.rows if real is None else real))
    onehot = shown & (slot == position)
    if window is not None:
        shown &= position - slot < window
    cuts = np.cumsum([s.heads * s.head_dim, s.kv])
    q, k, v = np.split(rows, cuts, 1)
    k[:, 0] = -0.0
    lead = () if s.n is None else (s.n,)
    return {
        "hidden_in": q.reshape(*lead, -1), "k_row": k.copy(), "v_row": v.copy(),
        "onehot": onehot.astype(np.float16).reshape(*lead, s.ctx),
        "mask_f": np.where(shown, 0, -4e4).astype(np.float16).reshape(*lead, s.ctx),
        "k_0_in": kv[0], "v_0_in": kv[1],
    }  # fmt: skip


def reference(s: Shape, x: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
    """The same in double precision, written out."""
    onehot, mask = (x[name].reshape(s.rows, s.ctx).astype(np.float64) for name in ("onehot", "mask_f"))
    cache = {}
    for part in "kv":
        new = (x[f"{part}_row"].astype(np.float32) * np.float32(1.25)).astype(np.float16).astype(np.float64)
        old = x[f"{part}_0_in"][0].astype(np.float64)
        cache[part] = (old * (1 - onehot.sum(0))[:, None] + onehot.T @ new).reshape(s.ctx, s.kv_heads, s.head_dim)
    q = x["hidden_in"].reshape(s.rows, s.heads, s.head_dim).astype(np.float64)
    out = np.empty_like(q)
    for head in range(s.heads):
        kv = head // (s.heads // s.kv_heads)
        scores = q[:, head] @ cache["k"][:, kv].T / 2 + mask
        shares = np.exp(scores - scores.max(1, keepdims=True))
        out[:, head] = shares / shares.sum(1, keepdims=True) @ cache["v"][:, kv]
    return out.reshape(s.rows, -1)


@pytest.mark.parametrize("n", [None, 4, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_attention_is_found_in_every_spelling(spelling: str, layout: str, n: int | None) -> None:
    s = Shape(n)
    placements, attentions = recognised(attention_function(s, spelling, layout))
    assert len(placements) == (0 if spelling == "select" else 2) and len(attentions) == 1
    for found in attentions.values():
        assert spelling == "select" or {found.keys.root, found.values.root} == placements.keys()
        assert found.rows == s.rows * s.heads and found.head_dim == s.head_dim and found.scale == 0.5
        assert sorted({int(start) for start in found.keys.starts}) == [0, 8]
        assert sorted(found.mask_rows.tolist()) == sorted(list(range(s.rows)) * s.heads)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("n", [None, 4, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_attention_equals_double_precision(spelling: str, layout: str, n: int | None, fuse: bool) -> None:
    s = Shape(n)
    run = planned(attention_function(s, spelling, layout), fuse=fuse)
    for start, window in ((0, None), (50, None), (s.ctx - s.rows, 20), (70, 1)):
        x = given_inputs(s, start, window=window)
        before = {name: array.copy() for name, array in x.items()}
        found = run(x)
        assert np.abs(found["mixed"] - reference(s, x)).max() < 2e-3
        assert all(np.array_equal(x[name], before[name]) for name in x), "inputs stay as they are"


@pytest.mark.parametrize("n", [4, 16])
def test_a_row_that_sees_nothing_is_spread_as_the_program_says(n: int) -> None:
    s = Shape(n)
    x = given_inputs(s, 40, real=3)
    assert np.abs(planned(attention_function(s))(x)["mixed"] - reference(s, x)).max() < 2e-3


@cache
def kept(s: Shape, layout: str, rounding: bool, fuse: bool) -> PortableFunction:
    return planned(attention_function(s, "grouped", layout), rounding=rounding, fuse=fuse)


@cache
def noise(*shape: int, seed: int = 0) -> NDArray[np.float16]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(deadline=None, max_examples=30)
@given(
    n=st.integers(2, 8),
    geometry=st.sampled_from([(1, 1, 256), (4, 1, 256), (4, 2, 64), (3, 3, 16), (2, 1, 1024)]),
    start=st.sampled_from([0, 1, 60, 63, 64, 65, 126, 127, 128, 129, 254, 255, 256, 257, 500]) | st.integers(0, 640),
    window=st.sampled_from([None, 1, 7, 64, 200]),
    rounding=st.booleans(),
)
@example(n=4, geometry=(4, 1, 256), start=510, window=None, rounding=False)
@example(n=8, geometry=(2, 1, 1024), start=444, window=None, rounding=False)  # 7 chunks, then 8
def test_a_row_has_decodes_bits(
    fuse: bool, layout: str, n: int, geometry: tuple[int, int, int], start: int, window: int | None, rounding: bool
) -> None:
    """Over several chunks and a last one that is cut short: 650 slots in chunks of 64 to 256."""
    heads, kv_heads, head_dim = geometry
    shapes = [Shape(rows, 650, heads, kv_heads, head_dim) for rows in (n, None)]
    many, one = (kept(s, layout, rounding, fuse) for s in shapes)
    start = min(start, 650 - n)
    x = given_inputs(shapes[0], start, window=window)
    together = many(x)
    for row in range(n):
        alone = given_inputs(shapes[1], start + row, window=window)
        for part in "kv":  # what earlier rows of the same step have written
            alone[f"{part}_0_in"] = alone[f"{part}_0_in"].copy()
            alone[f"{part}_0_in"][0, start : start + row] = together[f"{part}_0_out"][:row]
        found = one(alone, kv_rows=(start + row, start + row + 1))
        assert found["mixed"].tobytes() == together["mixed"][row].tobytes()
        for part in "kv":
            assert found[f"{part}_0_out"].tobytes() == together[f"{part}_0_out"][row].tobytes()


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_that_reads_anothers_cache(layout: str, fuse: bool) -> None:
    """Layers without K and V of their own get the store layer's, new rows already in them."""
    runs = {n: planned(attention_function(Shape(n), "shared", layout), fuse=fuse) for n in (None, 4, 16)}
    assert len(recognised(attention_function(Shape(4), "shared", layout))[1]) == 1
    for n in (4, 16):
        s = Shape(n)
        x = given_inputs(s, 40, window=30)
        want = reference(s, {**x, "onehot": x["onehot"] * 0})
        given = {"hidden_in": x["hidden_in"], "mask_f": x["mask_f"], "skf": x["k_0_in"], "svf": x["v_0_in"]}
        found = runs[n](given)["mixed"]
        assert np.abs(found - want).max() < 2e-3
        for row in range(4):
            alone = given | {name: given[name][row] for name in ("hidden_in", "mask_f")}
            assert n > 8 or runs[None](alone)["mixed"].tobytes() == found[row].tobytes()


def test_chunks_depend_on_the_caches_width_alone() -> None:
    assert [chunk_slots(width) for width in (1, 32, 256, 300, 512, 1024, 4096, 1 << 20)] == [
        65536, 2048, 256, 128, 128, 64, 64, 64,
    ]  # fmt: skip


def test_decode_returns_the_whole_cache_or_the_rows_asked_for() -> None:
    s = Shape(None)
    for fuse in (True, False):
        run = planned(attention_function(s), fuse=fuse)
        x = given_inputs(s, 30)
        x["k_0_in"][0, 5] = -0.0
        whole = run(x)
        row = (x["k_row"].astype(np.float32) * np.float32(1.25)).astype(np.float16)
        assert np.array_equal(whole["k_0_out"][0, 30], row[0])
        others = [slot for slot in range(s.ctx) if slot != 30]
        assert np.array_equal(whole["k_0_out"][0, others], x["k_0_in"][0, others])
        for a, b in ((30, 31), (28, 33), (0, s.ctx), (0, 0)):
            part = run(x, kv_rows=(a, b))
            assert part["k_0_out"].shape == (1, b - a, s.kv)
            assert not np.shares_memory(part["k_0_out"], x["k_0_in"])
            assert part["k_0_out"].tobytes() == whole["k_0_out"][:, a:b].tobytes()
            assert np.array_equal(part["mixed"], whole["mixed"])


def test_both_ways_return_the_same_bytes() -> None:
    s = Shape(None)
    fused, plain = (planned(attention_function(s), fuse=fuse) for fuse in (True, False))
    x = given_inputs(s, 30)
    x["k_0_in"][0, 5] = -0.0
    x["k_row"][0, :3] = [-1e-8, -0.0, 0.0]
    a, b = fused(x), plain(x)
    assert a["k_0_out"].tobytes() == b["k_0_out"].tobytes() and a["v_0_out"].tobytes() == b["v_0_out"].tobytes()


@pytest.mark.parametrize("n", [None, 4])
def test_rows_that_are_not_one_hot_are_refused(n: int | None) -> None:
    s = Shape(n)
    run = planned(attention_function(s))
    for value in (0.5, -1.0, np.nan):
        x = given_inputs(s, 3)
        x["onehot"].reshape(s.rows, s.ctx)[0, 3] = value
        with pytest.raises(InputMismatch, match="onehot"):
            run(x)
    x = given_inputs(s, 3)
    x["onehot"].reshape(s.rows, s.ctx)[0, 4:6] = 1
    with pytest.raises(InputMismatch, match="onehot"):
        run(x)


def test_infinities_in_the_cache_are_seen() -> None:
    """The fast conversion would make them finite; a NaN must stay one."""
    s = Shape(None, ctx=400)
    x = given_inputs(s, 300)
    x["v_0_in"][0, 7, 0] = np.inf
    found = planned(attention_function(s))
    assert np.isinf(found(x)["mixed"]).any()
    x["v_0_in"][0, 7, 0] = np.nan
    assert np.isnan(found(x)["mixed"]).any()
