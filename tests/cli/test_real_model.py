"""The main job on real models, Gemma 3 270M and SmolLM2, by the commands a user types. Second tier of `.ci/run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvstore import Store

pytestmark = pytest.mark.real_model
CONTEXTS = (1, 64, 513, 1500, 2008, 2039, 2047)
STORY = Path(__file__).parents[2] / "kvstore" / "data" / "ferry.txt"


@dataclass(frozen=True)
class Model:
    """``windowed``: it has sliding layers, so that trimming leaves something behind."""

    name: str
    bytes_per_token: int
    windowed: bool


MODELS = {"gemma": Model("gemma3-270m", 18_432, True), "smollm2": Model("smollm2", 23_040, False)}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def bundle(request: pytest.FixtureRequest, model: Model) -> Path:
    return Path(request.getfixturevalue(f"{'gemma' if model.windowed else 'smollm2'}_bundle"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, bundle: Path) -> Callable[..., Any]:
    """``run(store, *words)`` in a process of its own; its JSON."""
    folder = tmp_path_factory.mktemp("ferry")
    twice = folder / "twice.txt"
    twice.write_text(STORY.read_text() + "\n" + STORY.read_text())

    def kvferry(store: str, *words: str) -> Any:
        filled = [w.format(bundle=bundle, folder=folder, story=twice) for w in words]
        done = subprocess.run(
            [sys.executable, "-m", "kvstore", "--json", "--store", str(folder / store), *filled],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return kvferry


@pytest.mark.parametrize("trimmed", [False, True])
def test_the_demo(run: Callable[..., Any], model: Model, trimmed: bool) -> None:
    value = run("unused", "demo", "--model", model.name, *(["--trimmed"] if trimmed else []))
    assert value["identical"] is True
    assert value["kv_bytes_per_token"] == model.bytes_per_token
    assert value["context_tokens"] == 1500 and value["snapshot_bytes"] == 1500 * model.bytes_per_token
    whole = value["snapshot_bytes"] <= value["moved_bytes"]
    assert whole == (not trimmed or not model.windowed), "full attention reads everything: trimmed is whole"
    assert value["continuation"].startswith(" Amber Heron")
    assert "Heron" not in value["continuation_without_context"]
    assert {name.rpartition(":")[2] for name in value["consumer_functions"]} == {"decode", "lmhead.mlpackage"}


def test_bytes_a_token_from_layout_and_from_files(run: Callable[..., Any], model: Model, tmp_path: Path) -> None:
    shown = run("unused", "bundle", "show", "{bundle}")
    assert shown["kv_bytes_per_token"] == model.bytes_per_token
    made = run(str(tmp_path / "kv"), "prefill", "--bundle", "{bundle}", "{story}", "--name", "a", "--tokens", "64")
    with Store.open(tmp_path / "kv") as store:
        files = [store.shelf.objects.size(name) or 0 for name in store.shelf.objects.names()]
    assert sum(files) - 128 * len(files) == 64 * model.bytes_per_token == made["snapshot_bytes"]


@pytest.mark.parametrize("n", CONTEXTS)
def test_restore_equals_uninterrupted(run: Callable[..., Any], n: int) -> None:
    """The producer's receipt is its uninterrupted run; a fresh decode-only process must give the same, whole and trimmed."""
    made = run("producer", "prefill", "--bundle", "{bundle}", "{story}", "--name", f"n{n}", "--tokens", str(n))
    receipt = made["receipt"]
    assert len(receipt["tokens"]) == max(0, min(32, 2048 - n - 8)) or receipt["finish"] == "eos"
    run("producer", "push", "{folder}/remote", f"n{n}")
    for how in ("whole", "trimmed"):
        run(how, "pull", "{folder}/remote", f"n{n}", *(["--trimmed"] if how == "trimmed" else []))
        went = run(how, "generate", "--bundle", "{bundle}", "--from", f"n{n}", "-n", "32", "--decode-only")
        assert (went["tokens"], went["finish"]) == (receipt["tokens"], receipt["finish"])
        assert went["reused_tokens"] == n
