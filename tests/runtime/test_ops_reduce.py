"""Reductions and softmax: their definitions, stability, and the same bits whatever stands in other rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import evaluate
from hypothesis import given
from hypothesis import strategies as st

from runtime.ops import OperationUnsupported

RNG = np.random.default_rng(3)
X = RNG.standard_normal((3, 5, 7)).astype(np.float32)


@pytest.mark.parametrize("axes", [[-1], [0], [1], [0, 2], None])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    ("kind", "definition"),
    [("reduce_sum", np.sum), ("reduce_mean", np.mean), ("reduce_max", np.max), ("reduce_min", np.min)],
)
def test_reductions_follow_their_definition(kind: str, definition: Any, axes: list[int] | None, keep: bool) -> None:
    want = np.asarray(definition(X.astype(np.float64), axis=None if axes is None else tuple(axes), keepdims=keep))
    static: dict[str, Any] = {"keep_dims": keep} | ({} if axes is None else {"axes": axes})
    found = evaluate(kind, {"x": X}, want.shape, **static)
    assert np.allclose(found, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_argmax_is_the_first_of_the_largest(axis: int, keep: bool) -> None:
    x = np.round(X)  # ties
    want = np.argmax(x, axis)
    want = np.expand_dims(want, axis) if keep else want
    found = evaluate("reduce_argmax", {"x": x}, want.shape, "int32", axis=axis, keep_dims=keep)
    assert found.dtype == np.int32 and np.array_equal(found, want)


@given(st.lists(st.integers(-3, 3), min_size=3, max_size=30), st.integers(1, 3))
def test_topk_is_sorting_and_counts_equal_numbers_each(values: list[int], k: int) -> None:
    x = np.array([values, values[::-1]], np.float32)
    kept = x.copy()
    found = evaluate("topk", {"x": x}, (2, k), k=k, axis=-1, ascending=False, sort=True, return_indices=False)
    assert np.array_equal(found, -np.sort(-x, -1)[:, :k]) and np.array_equal(x, kept)


@pytest.mark.parametrize("other", [{"ascending": True}, {"axis": 0}, {"return_indices": True}])
def test_other_forms_of_topk_are_refused(other: dict[str, Any]) -> None:
    static = {"k": 2, "axis": -1, "ascending": False, "return_indices": False} | other
    with pytest.raises(OperationUnsupported, match="last axis, descending, without indices"):
        evaluate("topk", {"x": X[0]}, (5, 2), **static)


@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_softmax_follows_its_definition(axis: int) -> None:
    e = np.exp(X.astype(np.float64))
    found = evaluate("softmax", {"x": X}, X.shape, axis=axis)
    assert np.allclose(found, e / e.sum(axis, keepdims=True), rtol=1e-6)


def test_softmax_is_stable_and_gives_masked_slots_exactly_nothing() -> None:
    x = np.array([[6e4, 6e4 - 1, -4e4], [-4e4 + 3, -4e4 + 3, -4e4 + 3]], np.float32)
    found = evaluate("softmax", {"x": x}, x.shape, axis=-1)
    assert np.allclose(found[0], [1 / (1 + np.exp(-1)), np.exp(-1) / (1 + np.exp(-1)), 0])
    assert found[0, 2] == 0 and np.allclose(found[1], 1 / 3)


@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 300),
    shift=st.integers(0, 15),
    seed=st.integers(0, 99),
    kind=st.sampled_from(["reduce_sum", "reduce_mean", "reduce_max", "softmax"]),
)
def test_a_row_has_the_same_bits_alone_and_among_others(
    rows: int, width: int, shift: int, seed: int, kind: str
) -> None:
    memory = np.zeros(rows * width + shift, np.float32)
    x = memory[shift:].reshape(rows, width)
    x[:] = np.random.default_rng(seed).standard_normal((rows, width))
    static: dict[str, Any] = {"axis": -1} if kind == "softmax" else {"axes": [-1], "keep_dims": True}
    shape = (rows, width if kind == "softmax" else 1)
    together = evaluate(kind, {"x": x}, shape, **static)
    for row, result in zip(x, together, strict=True):
        assert evaluate(kind, {"x": row[None].copy()}, (1, shape[1]), **static).tobytes() == result.tobytes()
        flat = {"axis": -1} if kind == "softmax" else {"axes": [0], "keep_dims": True}
        assert evaluate(kind, {"x": row.copy()}, shape[1:], **flat).tobytes() == result.tobytes()


@given(rows=st.integers(1, 9), heads=st.integers(1, 4), width=st.integers(1, 200), seed=st.integers(0, 99))
def test_a_sum_over_another_axis_does_not_depend_on_what_lies_between(
    rows: int, heads: int, width: int, seed: int
) -> None:
    x = np.random.default_rng(seed).standard_normal((width, rows, heads)).astype(np.float32)
    together = evaluate("reduce_sum", {"x": x}, (rows, heads), axes=[0], keep_dims=False)
    for r in range(rows):
        alone = evaluate("reduce_sum", {"x": x[:, r : r + 1].copy()}, (1, heads), axes=[0], keep_dims=False)
        assert alone.tobytes() == together[r : r + 1].tobytes()
