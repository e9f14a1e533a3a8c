"""The engine's options: which engine computes, on what, and what is said where it can't. Core ML is a stand-in for the framework."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from command import Kvferry

sys.path.append(str(Path(__file__).parents[1] / "runtime"))

if TYPE_CHECKING:
    from core_ml_stand_in import Machine


@pytest.fixture
def mac(kvferry: Kvferry, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Machine]:
    """Makes this a Mac with PyObjC."""

    def make() -> Machine:
        from core_ml_stand_in import Machine, install_framework

        machine = Machine()
        edge = install_framework(machine, monkeypatch)
        monkeypatch.setattr("runtime.coreml.missing", lambda: None)
        monkeypatch.setattr("runtime.coreml.open_edge", lambda: edge)
        return machine

    return make


def test_auto_is_portable_where_core_ml_cannot_run(kvferry: Kvferry, story: Path, tmp_path: Path) -> None:
    made = kvferry("prefill", "--bundle", "tiny", str(story), "--tokens", "70", "--name", "a", "--json").json
    shown = kvferry("show", "a", "--json").json
    assert shown["lineages"][0]["engine"] == "portable"
    assert list(made["specialisation_seconds"]) == made["functions"]
    assert sum(made["specialisation_seconds"].values()) > 0
    assert not (tmp_path / "cache" / "compiled").exists()


def test_what_core_ml_needs_is_said(kvferry: Kvferry, story: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.coreml.routes.missing", lambda: "expected macOS 15 or newer, found Linux")
    answer = kvferry("prefill", "--engine", "coreml", "--bundle", "tiny", str(story), "--name", "a", "--json")
    assert answer.code == 7 and not answer.out
    assert '"EngineUnavailable"' in answer.err and "expected macOS 15 or newer, found Linux" in answer.err


@pytest.mark.parametrize(
    "words",
    [
        ("--compute-units", "all"),
        ("--verify-head-units", "cpu"),
        ("--engine", "portable", "--compute-units", "cpuOnly"),
    ],
)
def test_units_are_refused_where_there_are_none(kvferry: Kvferry, words: tuple[str, ...]) -> None:
    answer = kvferry("bundle", "heads", "tiny", *words)
    assert answer.code == 7 and "expected only with the Core ML engine" in answer.err


@pytest.mark.parametrize("words", [("--threads", "2"), ("--compute", "fp16-rounding")])
def test_the_portable_engines_options_are_refused_by_core_ml(
    kvferry: Kvferry, mac: Callable[[], Machine], words: tuple[str, ...]
) -> None:
    mac()
    answer = kvferry("bundle", "heads", "tiny", *words)
    assert answer.code == 7 and "Add --engine portable" in answer.err
    assert kvferry("bundle", "heads", "tiny", *words, "--engine", "portable").code == 0


def test_a_context_goes_from_core_ml_to_the_portable_engine(
    kvferry: Kvferry, mac: Callable[[], Machine], story: Path, tmp_path: Path
) -> None:
    """As from a Mac to anything else; the stand-in computes what the portable engine computes."""
    machine = mac()
    made = kvferry("prefill", "--bundle", "tiny", str(story), "--tokens", "70", "--name", "a", "--json").json
    assert set(made["specialisation_seconds"]) == {
        "chunk_0.mlpackage:prefill_32", "chunk_1.mlpackage:prefill_32", "chunk_0.mlpackage:prefill_4",
        "chunk_1.mlpackage:prefill_4", "chunk_0.mlpackage:decode", "chunk_1.mlpackage:decode", "lmhead.mlpackage",
    }  # fmt: skip
    assert {units for _, _, units in machine.loaded} == {"all"}
    lineage = kvferry("show", "a", "--json").json["lineages"][0]
    assert (lineage["engine"], lineage["route"], lineage["compute_units"]) == ("coreml", "pyobjc", "all")
    loads = len(machine.loaded)
    assert kvferry("verify", "a", "--bundle", "tiny", "--engine", "portable").code == 0
    assert len(machine.loaded) == loads
    assert kvferry("verify", "a", "--bundle", "tiny", "--compute-units", "cpuOnly").code == 0
    assert machine.loaded[loads:] == [
        ("chunk_0.mlpackage", "decode", "cpuOnly"), ("chunk_1.mlpackage", "decode", "cpuOnly"), ("lmhead.mlpackage", None, "cpuOnly"),
    ]  # fmt: skip
    assert len(machine.compiled) == 3, "compiled once, by the first command"
    assert len(list((tmp_path / "cache" / "compiled").iterdir())) == 3


@pytest.mark.parametrize(
    ("words", "variable", "units"),
    [
        ((), None, "cpuOnly"),
        ((), "gpu", "cpuAndGPU"),
        (("--verify-head-units", "all"), "gpu", "all"),
        (("--compute-units", "cpuAndGPU"), None, "cpuAndGPU"),
        (("--compute-units", "cpuAndGPU"), "", "cpuAndGPU"),
    ],
)
def test_the_batched_heads_units(
    kvferry: Kvferry, mac: Callable[[], Machine], monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...], variable: str | None, units: str,
) -> None:  # fmt: skip
    mac()
    if variable is not None:
        monkeypatch.setenv("CORELLM_VERIFY_HEAD_CU", variable)
    answer = kvferry("bundle", "heads", "tiny", *words, "--json").json
    assert [head["units"] for head in answer["heads"]] == [units]
    assert (
        answer["sequential_units"]
        == answer["engine"]["compute_units"]
        == (words[1] if "--compute-units" in words else "all")
    )
    assert answer["heads"][0]["rows"] == [] and answer["heads"][0]["sequential"] == answer["heads"][0]["batched"]


def test_a_variable_that_says_nothing_known_is_refused(
    kvferry: Kvferry, mac: Callable[[], Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    mac()
    monkeypatch.setenv("CORELLM_VERIFY_HEAD_CU", "cpuOnly")
    answer = kvferry("bundle", "heads", "tiny")
    assert answer.code == 7 and "expected one of cpu, gpu, ane, all, found 'cpuOnly'" in answer.err


def test_a_batched_head_that_answers_zeros_is_told(kvferry: Kvferry, mac: Callable[[], Machine]) -> None:
    def zeros(package: str, outputs: dict[str, np.ndarray]) -> None:
        if package == "lmhead_v4.mlpackage":
            outputs["token"][:] = 0

    mac().change = zeros
    answer = kvferry("bundle", "heads", "tiny", "--json")
    assert answer.code == 7 and '"HeadRefused"' in answer.err
    assert answer.json["heads"][0]["batched"] == [0, 0, 0, 0] and answer.json["heads"][0]["rows"] == [0, 1, 2, 3]
    told = kvferry("bundle", "heads", "tiny")
    assert "on cpuOnly: differs in rows 0, 1, 2, 3" in told.out and "--verify-head-units" in told.err
