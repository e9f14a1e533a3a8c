"""The example with a transformers cache: the part that needs no torch in the first tier, the script where torch was asked for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from optional import opted_in

from kvstore import Lineage, Store
from kvstore.layout import blocks_of

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "transformers_cache.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transformers_cache", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_are_heads_side_by_side_and_come_back(example: ModuleType) -> None:
    cache = np.random.default_rng(2).standard_normal((1, 2, 150, 32)).astype(np.float16)
    rows = example.to_rows(cache)
    assert rows.shape == (150, 64) and rows[140, 32 + 7] == cache[0, 1, 140, 7]
    assert example.from_rows(rows[:70]).tobytes() == cache[:, :, :70].tobytes()


def test_the_examples_identity_tells_weights_apart(example: ModuleType) -> None:
    ones, zeros = np.ones(3, np.float16), np.zeros(3, np.float16)
    given: list[dict[str, Any]] = [{"a": ones}, {"a": zeros}, {"b": ones}, {"a": ones, "b": ones}]
    assert len({example.identity(weights).digest for weights in given}) == 4


@pytest.mark.reference
def test_the_script_continues_with_the_uninterrupted_runs_tokens() -> None:
    opted_in("torch", "transformers")
    run = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    said = dict(line.split(None, 1) for line in run.stdout.splitlines())
    assert said["restored"] == "201 of 201 tokens; prefilled 0"
    assert said["another"] == "150 of 190 tokens reused, 40 prefilled"
    assert said["identical"] and len(set(said["continued"].split())) > 12


@pytest.mark.reference
def test_a_restored_cache_holds_the_prefilled_bytes_and_the_tokens_depend_on_them(
    example: ModuleType, tmp_path: Path
) -> None:
    opted_in("torch", "transformers")
    engine: Any = example.Engine()
    cache = engine.empty()
    pending = engine.feed(cache, example.PROMPT)
    identity = example.identity(engine.weights)
    exported = engine.export(cache)
    with Store.open(tmp_path / "store") as store:
        store.save(
            example.LAYOUT, identity, example.PROMPT, exported, namespace="default",
            lineage=[Lineage.of({"engine": "transformers"})] * blocks_of(201), pending=pending, head="h",
        )  # fmt: skip
        match = store.find(example.LAYOUT, identity, example.PROMPT, namespace="default", head="h")
        assert match is not None and match.n == 201
        restored, broken = engine.restored(store, match), engine.restored(store, match)
        partly = store.find(example.LAYOUT, identity, example.OTHER, namespace="default", head="h")
        assert partly is not None and partly.n == 150
        reused = engine.restored(store, partly)
    assert restored.get_seq_length() == 201
    again = engine.export(restored)
    assert [bytes(s) for s in again.spans(0, 0, 201)] == [bytes(s) for s in exported.spans(0, 0, 201)]
    for layer in broken.layers:
        layer.values[:, :, :100] = 0
    tokens = example.take(engine.decode(restored, pending))
    assert example.take(engine.decode(broken, pending)) != tokens == example.take(engine.decode(cache, pending))

    # The first 150 tokens are the ones of another prompt: as if it had been prefilled there and then.
    prefilled = engine.empty()
    engine.feed(prefilled, example.OTHER[:150])
    first = engine.feed(prefilled, example.OTHER[150:])
    assert engine.feed(reused, example.OTHER[150:]) == first
    assert example.take(engine.decode(reused, first)) == example.take(engine.decode(prefilled, first))
