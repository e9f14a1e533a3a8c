"""The examples run as scripts, and the part of them that needs no engine runs in the first tier."""

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
from optional import require

from kvstore import ArrayRows, Lineage, Store
from kvstore.layout import blocks_of

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "mlx_cache.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mlx_cache", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_engines_arrays_go_through_a_store_and_come_back(example: ModuleType, tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    shape = (1, example.CONFIG["num_key_value_heads"], 150, example.CONFIG["head_dim"])
    layers = example.LAYOUT.groups[0].layers
    caches = {i: [random.standard_normal(shape).astype(np.float16) for _ in "kv"] for i in layers}
    rows = {i: tuple(example.to_rows(a) for a in pair) for i, pair in caches.items()}
    assert rows[1][0][140, 32 + 7] == caches[1][0][0, 1, 140, 7]
    identity = example.identity({"w": np.ones(3, np.float16)})
    with Store.open(tmp_path / "store") as store:
        store.save(
            example.LAYOUT, identity, range(150), ArrayRows(example.LAYOUT, rows), namespace="default",
            lineage=[Lineage.of({"engine": "test"})] * blocks_of(150),
        )  # fmt: skip
        match = store.find(example.LAYOUT, identity, [*range(70), 999], namespace="default")
        assert match is not None and match.n == 70
        back = {i: tuple(np.empty((70, 64), np.float16) for _ in "kv") for i in layers}
        store.load(match, into=ArrayRows(example.LAYOUT, back))
    for i in layers:
        for there, here in zip(back[i], caches[i], strict=True):
            assert example.from_rows(there, 2).tobytes() == here[:, :, :70].tobytes()


def test_the_examples_identity_tells_weights_apart(example: ModuleType) -> None:
    weights = {"a": np.ones(3, np.float16), "b": np.ones((2, 2), np.float16)}
    digests = {
        example.identity(w).digest
        for w in (
            weights,
            {**weights, "a": np.zeros(3, np.float16)},
            {"a": weights["a"]},
            {"b": weights["b"], "c": weights["a"]},
        )
    }
    assert len(digests) == 4
    assert example.identity(dict(reversed(weights.items()))).digest == example.identity(weights).digest


@pytest.mark.reference
def test_the_script_continues_with_the_uninterrupted_runs_tokens(example: ModuleType) -> None:
    require("mlx_lm")
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
def test_the_restored_cache_holds_the_prefilled_bytes_and_the_tokens_depend_on_them(
    example: ModuleType, tmp_path: Path
) -> None:
    require("mlx_lm")
    engine: Any = example.Engine()
    caches = engine.empty()
    pending = engine.feed(caches, example.PROMPT)
    identity = example.identity(engine.weights)
    exported = engine.export(caches)
    with Store.open(tmp_path / "store") as store:
        store.save(
            example.LAYOUT, identity, example.PROMPT, exported, namespace="default",
            lineage=[Lineage.of({"engine": "mlx-lm"})] * blocks_of(201), pending=pending, head="h",
        )  # fmt: skip
        match = store.find(example.LAYOUT, identity, example.PROMPT, namespace="default", head="h")
        assert match is not None and match.n == 201
        restored = engine.restored(store, match)
    again = engine.export(restored)
    assert [bytes(s) for s in again.spans(0, 0, 201)] == [bytes(s) for s in exported.spans(0, 0, 201)]
    tokens = example.take(engine.decode(restored, pending))
    broken = engine.empty()
    engine.feed(broken, example.PROMPT)
    for cache in broken:
        cache.values[:, :, :100] = 0
    assert example.take(engine.decode(broken, pending)) != tokens == example.take(engine.decode(caches, pending))
