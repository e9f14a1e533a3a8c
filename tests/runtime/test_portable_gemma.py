"""The real model: narrow functions are decode at its sizes, and rounding every result finds no overflow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from feeding import Feeder, Half, decode_each, fill

from runtime.portable import PortableEngine

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def feeder(gemma_bundle: Path) -> Feeder:
    return Feeder(gemma_bundle, PortableEngine(gemma_bundle))


@pytest.fixture(scope="module")
def rows() -> Half:
    """Hidden rows of the size of Gemma's scaled-down embeddings."""
    return (np.random.default_rng(1).standard_normal((1100, 640)) * 0.03).astype(np.float16)


@pytest.fixture(scope="module")
def whole(feeder: Feeder, rows: Half) -> dict[str, Half]:
    fill(feeder, rows[:1024], (("prefill_512", 512), ("prefill_256", 256)))
    return feeder.kv


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("start", [0, 254, 509, 1000, 2040])
def test_a_narrow_step_is_so_many_decodes(
    feeder: Feeder, whole: dict[str, Half], rows: Half, start: int, width: int
) -> None:
    part = rows[start % 1000 :][:width]
    feeder.kv = {name: array.copy() for name, array in whole.items()}
    one = decode_each(feeder, part, start)
    kv_one = feeder.kv
    feeder.kv = {name: array.copy() for name, array in whole.items()}
    many = feeder.feed(f"prefill_{width}", part, start)
    assert many.tobytes() == one.tobytes()
    assert all(array.tobytes() == kv_one[name].tobytes() for name, array in feeder.kv.items())
    single = feeder.engine.function("lmhead.mlpackage", None)
    batched = feeder.engine.function("lmhead_v4.mlpackage", None)
    tokens = [int(single({"hidden": row})["token"][0]) for row in many[:4]]
    assert batched({"hidden": many[:4]})["token"].tolist() == tokens


def test_rounding_every_result_overflows_nowhere(gemma_bundle: Path, rows: Half) -> None:
    feeder = Feeder(gemma_bundle, PortableEngine(gemma_bundle, compute="fp16-rounding"))
    found = decode_each(feeder, rows[:8], 0)
    plain = Feeder(gemma_bundle, PortableEngine(gemma_bundle))
    want = decode_each(plain, rows[:8], 0).astype(np.float32)
    assert np.abs(found - want).max() < 0.05 * np.abs(want).max()
