"""The fast conversion from fp16 equals numpy's cast on every number, at every size and layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.ops.widen import by_bits, by_cast, fastest, finite, widened

EVERY = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
FINITE = EVERY[np.isfinite(EVERY)]


def test_every_finite_half_keeps_its_value_and_sign() -> None:
    out = np.empty(FINITE.shape, np.float32)
    by_bits(FINITE, out)
    assert np.array_equal(out.view(np.uint32), FINITE.astype(np.float32).view(np.uint32))
    assert fastest() is by_bits


def test_infinities_and_nan_survive() -> None:
    out = np.empty(EVERY.shape, np.float32)
    by_bits(EVERY, out)
    assert np.array_equal(out, EVERY.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_a_single_odd_number_is_noticed_anywhere(odd: float) -> None:
    for at in (0, 77, 4999):
        half = np.zeros(5000, np.float16)
        assert finite(half)
        half[at] = odd
        assert not finite(half)
    assert not finite(-np.array([odd], np.float16)) and finite(np.zeros(0, np.float16))


@given(
    rows=st.integers(1, 40),
    columns=st.sampled_from([1, 7, 64, 2049]),
    step=st.sampled_from([1, 2]),
    seed=st.integers(0, 9),
)
def test_widened_is_a_contiguous_copy_of_any_layout(rows: int, columns: int, step: int, seed: int) -> None:
    whole = np.random.default_rng(seed).standard_normal((rows, columns * step)).astype(np.float16)
    for half in (whole[:, ::step], whole[:, ::step].T):
        for widen in (by_bits, by_cast):
            found = widened(half, widen)
            assert found.flags.c_contiguous and found.flags.owndata
            assert np.array_equal(found, half.astype(np.float32))
