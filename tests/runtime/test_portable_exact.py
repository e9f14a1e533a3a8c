"""Narrow functions are decode, row by row and bit by bit: hidden states, KV bytes and tokens, on the tiny bundle of each family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from families import every_family_slow
from feeding import KV, Feeder, Half, decode_each, fill
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from runtime.bundle import Bundle
from runtime.portable import PortableEngine

CTX = 2048
# The ends, the grid that attention walks on, the window's edge, and the middle of nowhere.
OFFSETS = [0, 1, 2, 3, 60, 63, 64, 255, 256, 257, 504, 508, 509, 510, 511, 512, 513, 514, 767, 1023, 1024, 1025, 2000]
property_test = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@pytest.fixture(scope="module")
def rows() -> Half:
    """Hidden rows of the size that embeddings have, one a position."""
    return np.random.default_rng(1).standard_normal((CTX, 64)).astype(np.float16)


@pytest.fixture(scope="module", params=["fp32", pytest.param("fp16-rounding", marks=pytest.mark.slow)])
def feeder(request: pytest.FixtureRequest, bundle: Bundle) -> Feeder:
    return Feeder(bundle.root, PortableEngine(bundle.root, compute=request.param))


@pytest.fixture(scope="module")
def whole(feeder: Feeder, rows: Half) -> KV:
    """KV of a full context."""
    feeder.kv = feeder.empty()
    fill(feeder, rows, (("prefill_512", 512), ("prefill_256", 256), ("prefill_32", 32)))
    return feeder.kv


def past(whole: KV, start: int, beyond: str) -> KV:
    """The KV before ``start``; past it nothing, what an earlier run left there, or anything."""
    rng = np.random.default_rng(start)
    kv = {name: array.copy() for name, array in whole.items()}
    for array in kv.values():
        if beyond == "zeros":
            array[0, start:] = 0
        elif beyond == "wild":
            array[0, start:] = (rng.standard_normal(array[0, start:].shape) * 100).astype(np.float16)
    return kv


@every_family_slow
@pytest.mark.parametrize("width", [4, 8])
@property_test
@example(start=511, beyond="stale", seed=0)
@example(start=508, beyond="wild", seed=0)
@example(start=CTX - 8, beyond="zeros", seed=0)
@given(
    start=st.sampled_from(OFFSETS) | st.integers(0, CTX - 8),
    beyond=st.sampled_from(["zeros", "stale", "wild"]),
    seed=st.integers(0, 1000),
)
def test_a_narrow_step_is_so_many_decodes(
    feeder: Feeder, whole: KV, width: int, start: int, beyond: str, seed: int
) -> None:
    rows = np.random.default_rng(seed).standard_normal((width, feeder.hidden)).astype(np.float16)
    feeder.kv = past(whole, start, beyond)
    one = decode_each(feeder, rows, start)
    kv_one = {name: array.tobytes() for name, array in feeder.kv.items()}
    feeder.kv = past(whole, start, beyond)
    many = feeder.feed(f"prefill_{width}", rows, start)
    assert many.tobytes() == one.tobytes()
    assert {name: array.tobytes() for name, array in feeder.kv.items()} == kv_one


@every_family_slow
@property_test
@given(start=st.sampled_from(OFFSETS) | st.integers(0, CTX - 8), real=st.integers(1, 3), seed=st.integers(0, 1000))
def test_padding_rows_change_nothing(feeder: Feeder, whole: KV, start: int, real: int, seed: int) -> None:
    rows = np.random.default_rng(seed).standard_normal((4, feeder.hidden)).astype(np.float16)
    feeder.kv = past(whole, start, "stale")
    one = decode_each(feeder, rows[:real], start)
    kv_one = {name: array.tobytes() for name, array in feeder.kv.items()}
    feeder.kv = past(whole, start, "stale")
    many = feeder.feed("prefill_4", rows, start, real=real)
    assert many[:real].tobytes() == one.tobytes() and np.isfinite(many).all()
    assert {name: array.tobytes() for name, array in feeder.kv.items()} == kv_one


@property_test
@given(seed=st.integers(0, 10_000), spread=st.sampled_from([0.01, 1.0, 100.0]))
def test_the_batched_head_is_four_single_ones(feeder: Feeder, seed: int, spread: float) -> None:
    rows = (np.random.default_rng(seed).standard_normal((4, feeder.hidden)) * spread).astype(np.float16)
    single = feeder.engine.function("lmhead.mlpackage", None)
    batched = feeder.engine.function("lmhead_v4.mlpackage", None)
    tokens = [int(single({"hidden": row})["token"][0]) for row in rows]
    found = batched({"hidden": rows})["token"]
    assert found.dtype == np.int32 and found.tolist() == tokens


@pytest.mark.parametrize("function", ["prefill_32", "prefill_256", "prefill_512"])
def test_wide_steps_agree_to_rounding(feeder: Feeder, whole: KV, rows: Half, function: str) -> None:
    width = int(function.removeprefix("prefill_"))
    start = 0 if width == 512 else 600
    feeder.kv = past(whole, start, "zeros")
    wide = feeder.feed(function, rows[start : start + width], start).astype(np.float32)
    kv_wide = {name: array[0, start : start + width].astype(np.float32) for name, array in feeder.kv.items()}
    feeder.kv = past(whole, start, "zeros")
    one = decode_each(feeder, rows[start : start + width], start).astype(np.float32)
    # fp16 rounding after every operation leaves three digits of the largest number
    assert np.abs(wide - one).max() <= 0.02 * np.abs(one).max()
    for name, array in kv_wide.items():
        there = feeder.kv[name][0, start : start + width].astype(np.float32)
        assert np.abs(array - there).max() <= 0.02 * np.abs(there).max(), name


def test_rounding_every_result_stays_near_float32(tiny_bundle: Path, rows: Half) -> None:
    found = []
    for compute in ("fp32", "fp16-rounding"):
        feeder = Feeder(tiny_bundle, PortableEngine(tiny_bundle, compute=compute))
        found.append(decode_each(feeder, rows[:40], 0).astype(np.float32))
    assert not np.array_equal(*found)
    assert np.abs(found[0] - found[1]).max() < 0.05 * np.abs(found[0]).max()
