"""`kvferry gate`: its report, its JSON, its exit code, what it leaves behind when it is made to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import Kvferry

from runtime.bundle import Bundle
from runtime.gate_command import configured

QUICK = ("--quick", "--json")


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """Prompts that take little time."""
    file = tmp_path / "prompts.txt"
    file.write_text(
        "The ferry leaves the harbour at noon, and who is late waits until the ferry leaves the harbour again.\nOh\n"
    )
    return file


@pytest.mark.slow
def test_our_own_prompts_on_tiny(kvferry: Kvferry, tmp_path: Path) -> None:
    answer = kvferry("gate", "--bundle", "tiny", *QUICK)
    assert answer.code == 0, answer.err
    value = answer.json
    assert value["ok"] and value["size"] == "quick" and value["margins"]
    assert [(p["name"], p["tokens"], p["splits"]) for p in value["prompts"]][::2] == [
        ("story", 650, [64, 576, 650]),
        ("word", 1, [1]),
    ]
    lines = value["lines"]
    assert not [line for line in lines if line["holds"] is False]
    assert {line["check"] for line in lines} == {"heads", "speculation", "restore", "receipt", "process", "cross"}
    assert [line["kind"] for line in lines if line["check"] == "process"] == ["trimmed"]
    assert {(x["saved_under"], x["restored_under"], x["rule"]) for x in lines if x["check"] == "cross"} == {
        ("fp32", "fp32", "exact"),
        ("fp32", "fp16-rounding", "bounded"),
        ("fp16-rounding", "fp32", "bounded"),
        ("fp16-rounding", "fp16-rounding", "exact"),
    }
    assert all(line["bound"] for line in lines if line["rule"] == "bounded")
    assert value["near_ties"] and all(t["margin"] <= value["near_tie"] for t in value["near_ties"])
    assert not (tmp_path / "store").exists(), "the user's store is not touched"


@pytest.mark.slow
def test_the_published_shape_and_the_report_for_people(kvferry: Kvferry, tiny_gemma4_bundle: Path, short: Path) -> None:
    answer = kvferry("gate", "--bundle", str(tiny_gemma4_bundle), "--quick", "--prompts", str(short))
    assert answer.code == 0, answer.err
    head = answer.out.splitlines()[0]
    assert head.startswith("tiny-gemma4: all holds: ")
    for words in ("speculation on = off", "fp32 → fp16-rounding", "in another process", "near-ties (margin of at most"):
        assert words in answer.out
    assert "prompt line 1" in answer.out and "prompt line 2" in answer.out


@pytest.mark.slow
def test_a_gate_that_fails_says_where(kvferry: Kvferry, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore.store import Store

    load = Store.load

    def spoilt(self: Store, match: Any, into: Any) -> int:
        read = load(self, match, into)
        row = into.spans(0, 0, 1)[0]
        row[:] = np.full(len(row) // 2, 3, np.float16).tobytes()
        return read

    monkeypatch.setattr(Store, "load", spoilt)
    answer = kvferry("gate", "--bundle", "tiny", "--prompts", str(short), *QUICK)
    assert answer.code == 9 and '"GateFailed"' in answer.err and "restore, line 1" in answer.err
    value = answer.json
    assert not value["ok"]
    failed = [line for line in value["lines"] if line["holds"] is False]
    assert all(
        line["kv_token"] == 0 and line["kv_part"] == "k" for line in failed if line["check"] in ("restore", "cross")
    )


def test_the_configurations_of_each_engine(
    kvferry: Kvferry, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runtime import engine_options

    bundle = Bundle.open(tiny_bundle)
    given = {
        "engine": "auto",
        "compute": "fp16-rounding",
        "threads": 2,
        "compute_units": None,
        "verify_head_units": None,
    }
    main, found = configured(bundle, given)
    assert main.name == "fp16-rounding" and [one.name for one in found] == ["fp32", "fp16-rounding"]
    assert found[0].words == ("--engine", "portable", "--compute", "fp32", "--threads", "2")
    assert [one.open().describe()["compute"] for one in found] == ["fp32", "fp16-rounding"]

    class Mac:
        def __init__(self, units: str | None) -> None:
            self.units = units or "cpuAndGPU"

        def describe(self) -> dict[str, str]:
            return {"engine": "coreml", "compute_units": self.units}

    monkeypatch.setattr("runtime.coreml.missing", lambda: None)
    monkeypatch.setattr(engine_options, "_coreml", lambda bundle, asked, head: Mac(asked))
    main, found = configured(bundle, given | {"compute": "fp32", "threads": 1, "verify_head_units": "ane"})
    assert main.name == "cpuAndGPU", "the bundle's own wish"
    assert sorted(one.name for one in found) == ["all", "cpuAndGPU", "cpuAndNeuralEngine", "cpuOnly"]
    assert [one.open().describe()["compute_units"] for one in found] == [one.name for one in found]
    assert main.words[-4:] == ("--compute-units", "cpuAndGPU", "--verify-head-units", "ane")


def test_ended_from_outside_it_leaves_nothing(kvferry: Kvferry, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "kvstore", "gate", "--bundle", "tiny"]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(temporary)}, stderr=subprocess.PIPE) as child:
        while not list(temporary.glob("kvferry-gate-*/whole")) and child.poll() is None:
            time.sleep(0.02)
        child.send_signal(signal.SIGTERM)
        child.communicate()
    assert child.returncode == 128 + signal.SIGTERM and not list(temporary.iterdir())
