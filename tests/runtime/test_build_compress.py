"""The forms of a weight matrix: what they stand for, how near it is, what they take, and that k-means finds what it should."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from runtime.build.compress import (
    FORMS,
    GROUP_ROWS,
    Form,
    Palette,
    compress,
    dense,
    digests,
    largest,
    palettise,
    scaled,
    stored_bytes,
)
from runtime.build.errors import SourceFieldError
from runtime.build.kmeans import cluster


def normal(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean()))


@pytest.mark.parametrize(("form", "low", "high"), [("fp16", 1e-5, 3e-4), ("int8", 4e-3, 1e-2), ("pal6", 0.02, 0.03)])
def test_each_form_is_as_near_as_its_bits_allow(form: Form, low: float, high: float) -> None:
    """64 entries for normal numbers: at best √(2.72 / 64²) = 0.026 of their size."""
    matrix = normal(32, 1536) * np.exp(normal(32, 1))
    for half in np.split(matrix, 2):  # rows of very different size share a table only by sixteens
        half *= 1 / np.abs(half).max(1, keepdims=True)
    made = compress("w", form, matrix)
    assert low < relative(dense(made), matrix) < high
    assert largest(made) == pytest.approx(float(np.abs(dense(made)).max()))


def test_numbers_that_fit_the_table_are_kept_exactly() -> None:
    values = np.random.default_rng(1).choice(np.linspace(-3, 3, 64).astype(np.float16), 5000)
    table, indices = cluster(values)
    assert np.array_equal(table[indices], values)
    assert np.array_equal(np.unique(table), np.unique(values))


def test_means_of_separate_heaps_are_found() -> None:
    """65 heaps for 64 entries: the two that lie nearest to each other share one, and every other has its own."""
    middles = np.concatenate([np.arange(64) * 16.0, [1000.0]])  # 992 + 16 would be next: 1000 and 1008 are nearest
    spread = np.random.default_rng(2).uniform(-0.5, 0.5, (65, 200))
    values = (middles[:, None] + spread).astype(np.float16).reshape(-1)
    table, indices = cluster(values)
    error = float(((table[indices].astype(np.float64) - values) ** 2).sum())
    assert error < 1.3 * (65 * 200 / 12 + 400 * 4.0**2), "one shared pair, 8 apart, and the spread of all"


def test_outliers_do_not_waste_the_table() -> None:
    """Heavy tails pull entries outwards; what k-means from one start leaves there is moved to where it serves."""
    few, many = (np.random.default_rng(5).laplace(size=n).astype(np.float16) for n in (1024, 24_576))
    for values, limit in ((few, 0.025), (many, 0.033)):
        table, indices = cluster(values)
        assert relative(table[indices].astype(np.float64), values.astype(np.float64)) < limit


def test_every_number_goes_to_its_nearest_entry() -> None:
    values = normal(1, 20_000)[0].astype(np.float16)
    table, indices = cluster(values)
    distances = np.abs(table.astype(np.float64)[None] - values.astype(np.float64)[:, None])
    chosen = distances[np.arange(len(values)), indices]
    assert np.array_equal(chosen, distances.min(1))
    assert (np.diff(table.astype(np.float32)) > 0).all()


def test_nothing_moves_any_more_when_it_ends() -> None:
    values = normal(1, 20_000, seed=4)[0].astype(np.float16)
    table, indices = cluster(values)
    means = np.array([values[indices == i].astype(np.float64).mean() for i in range(64)])
    # but for the rounding of the table to fp16, which moves a few numbers to a neighbour
    assert np.abs(means - table).max() <= 2 * np.abs(np.spacing(table)).astype(np.float64).max()


@given(
    values=arrays.arrays(
        np.float16,
        st.integers(1, 300),
        elements=st.floats(-65504, 65504, width=16) | st.sampled_from([0.0, -0.0, 6e-8, -6e-8, 65504.0]),
    )
)
def test_any_numbers_have_a_table(values: np.ndarray) -> None:
    table, indices = cluster(values)
    again = cluster(values.copy())
    assert np.array_equal(table, again[0]) and np.array_equal(indices, again[1])
    assert np.isfinite(table).all() and indices.max() < 64
    assert table.min() >= values.min() and table.max() <= values.max()
    if len(np.unique(values)) <= 64:
        assert np.array_equal(table[indices], values)


def test_groups_of_rows_have_tables_of_their_own() -> None:
    matrix = np.concatenate([normal(16, 64), 1000 * normal(16, 64, seed=1)])
    made = compress("w", "pal6", matrix)
    assert isinstance(made, Palette) and made.tables.shape == (2, 64)
    assert largest(palettise(matrix[:16].astype(np.float16))) < 10
    assert relative(dense(made)[:16], matrix[:16]) < 0.03
    odd = compress("w", "pal6", matrix[:24])
    assert isinstance(odd, Palette) and odd.tables.shape == (3, 64), "24 rows are three groups of eight"


@pytest.mark.parametrize("form", FORMS)
def test_scaling_by_a_power_of_two_is_exact_and_bounded(form: Form) -> None:
    made = compress("w", form, normal(32, 64))
    assert np.array_equal(dense(scaled("w", made, 32.0)), dense(made) * 32)
    with pytest.raises(SourceFieldError, match="w: expected magnitudes up to 2047"):
        scaled("w", compress("w", form, normal(32, 64) * 1000), 32.0)


def test_what_fp16_cannot_hold_is_refused() -> None:
    matrix = normal(16, 16)
    matrix[3, 3] = 1e5
    for form in FORMS:
        with pytest.raises(SourceFieldError, match="w"):
            compress("w", form, matrix)


@pytest.mark.parametrize("form", FORMS)
def test_sizes_and_digests_are_of_what_is_stored(form: Form) -> None:
    made = compress("w", form, normal(48, 96))
    noted = dict(digests("w", made))
    elements = sum(
        int(np.prod(d.shape)) * np.dtype(d.dtype).itemsize for name, d in noted.items() if "indices" not in name
    )
    elements += sum(int(np.prod(d.shape)) * 6 // 8 for name, d in noted.items() if "indices" in name)
    assert elements == stored_bytes(form, 48, 96)
    other = dict(digests("w", compress("w", form, normal(48, 96, seed=9))))
    assert all(noted[name] != other[name] for name in noted)


def test_the_head_of_e2b_by_arithmetic() -> None:
    small, large = stored_bytes("pal6", 262_144, 1536), stored_bytes("int8", 262_144, 1536)
    assert (GROUP_ROWS, small, large) == (16, 290 << 20, (384 << 20) + (1 << 19))
    assert round(small / large, 3) == 0.754
