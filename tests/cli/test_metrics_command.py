"""--metrics of the verbs, and `stats metrics`: what is recorded, what never is, and that a failing file costs nothing but itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from command import Kvferry

from runtime.metrics.records import FIELDS, OUR_FIELDS

BUNDLE = ("--bundle", "tiny")
REQUIRED = {"kind", "timestamp", "deviceModel", "osVersion", "appBuild"}


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_a_run_of_verbs_and_its_records(kvferry: Kvferry, story: Path, tmp_path: Path) -> None:
    metrics = ("--metrics", "m.jsonl")
    assert kvferry("prefill", *BUNDLE, str(story), "--tokens", "70", "--name", "zanzibar", *metrics).code == 0
    made = kvferry(
        "generate", *BUNDLE, "--from", "zanzibar", "--prompt", " Quixotic", "-n", "5", "--save", "b", *metrics, "--json"
    ).json
    found = records(tmp_path / "m.jsonl")
    assert [(r["kind"], r.get("kvOp")) for r in found] == [
        ("session", None),
        ("kv", "save"),
        ("session", None),
        ("kv", "restore"),
        ("message", None),
        ("kv", "save"),
    ]
    assert all(
        r.keys() >= REQUIRED and r.keys() <= set(FIELDS) and r["kvferry"].keys() <= set(OUR_FIELDS) for r in found
    )
    assert all(value is not None for r in found for value in r.values()), "absent, not null"
    runs = [r["kvferry"]["run"] for r in found]
    assert runs[0] == runs[1] != runs[2] and len(set(runs)) == 2
    _, saved, session, restored, message, again = found
    bundle = (tmp_path / "cache" / "bundles" / "tiny").resolve().name
    assert (session["models"], session["bundleFolder"], session["contextLength"]) == (["tiny"], bundle, 2048)
    assert saved["promptTokens"] == 70 and saved["kvBytes"] == 70 * 768
    assert saved["feedWidths"] == [4, 32] and saved["prefillSeconds"] > 0
    assert restored["kvBytes"] == made["restored_bytes"] and restored["kvDurationSeconds"] == made["restore_seconds"]
    assert message["generatedTokens"] == len(message["perTokenMillis"]) == 5 and message["finishReason"] == "cap"
    assert message["promptTokens"] == 70 + made["fed_tokens"] and message["reusedTokens"] == made["reused_tokens"] == 70
    assert message["ttftSeconds"] > message["prefillSeconds"] >= restored["kvDurationSeconds"]
    assert message["perTokenMedianMs"] == sorted(message["perTokenMillis"])[2]
    assert again["kvferry"]["writtenBytes"] < again["kvBytes"], "the first block was there"
    assert "prefillSeconds" not in again, "the message has it"
    assert "computeUnits" not in message and "thermalStateStart" not in message, "unknown here"
    # Neither what was asked and said nor anything that a user named.
    text = (tmp_path / "m.jsonl").read_text("utf-8")
    for secret in ("Quixotic", "zanzibar", str(tmp_path), made["text"].strip() or "?"):
        assert secret not in text
    assert not any(isinstance(value, list) and made["tokens"] == value for r in found for value in r.values())


def test_errors_are_recorded_with_their_phase_and_nothing_else(kvferry: Kvferry, story: Path, tmp_path: Path) -> None:
    metrics = ("--metrics", "m.jsonl")
    assert kvferry("generate", "--bundle", "nowhere", "--prompt", "x", *metrics).code != 0
    kvferry("prefill", *BUNDLE, str(story), "--tokens", "5", "--name", "a")
    assert kvferry("generate", *BUNDLE, "--from", "zanzibar", *metrics).code == 3
    assert kvferry("generate", *BUNDLE, "--prompt", "x", "--at", "3", *metrics).code == 2, "of no interest"
    assert kvferry("export", "zanzibar", "out", "--as", "corellm", *metrics).code == 3
    found = [r for r in records(tmp_path / "m.jsonl") if r["kind"] == "error"]
    assert [(r["errorPhase"], r["errorReason"]) for r in found] == [
        ("open", "BundleFileMissing"),
        ("restore", "SnapshotMissing"),
        ("export", "SnapshotMissing"),
    ]
    assert "zanzibar" not in (tmp_path / "m.jsonl").read_text("utf-8")


def test_export_and_import(kvferry: Kvferry, story: Path, tmp_path: Path, tiny_gemma4_bundle: Path) -> None:
    published = ("--bundle", str(tiny_gemma4_bundle))
    kvferry("prefill", *published, str(story), "--tokens", "5", "--name", "g")
    assert kvferry("export", "g", "out", "--as", "corellm", *published, "--metrics", "m.jsonl").code == 0
    answer = kvferry("import", "out", *published, "--metrics", "m.jsonl", "--json").json
    exported, imported = records(tmp_path / "m.jsonl")
    for found, op in ((exported, "export"), (imported, "import")):
        assert (found["kind"], found["kvOp"], found["promptTokens"]) == ("kv", op, 5)
        assert found["kvBytes"] == answer["bytes"] and found["contextLength"] == 2048
        assert found["modelID"] == "tiny-gemma4"


def test_a_conversation(kvferry: Kvferry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    for words in (("--name", "zanzibar"), ("--resume", "zanzibar")):
        monkeypatch.setattr("sys.stdin", io.StringIO("Quixotic?\nAnd then?\n"))
        answer = kvferry("chat", *BUNDLE, *words, "-n", "4", "--metrics", "m.jsonl", "--json")
        assert answer.code == 0, answer.err
    found = records(tmp_path / "m.jsonl")
    kinds = [r.get("kvOp", r["kind"]) for r in found]
    assert kinds == ["session", *["message", "save"] * 2, "session", "restore", *["message", "save"] * 2]
    messages = [r for r in found if r["kind"] == "message"]
    prompts = [r["promptTokens"] for r in messages]
    assert prompts == sorted(set(prompts)) and all(0 < r["reusedTokens"] < r["promptTokens"] for r in messages[1:])
    assert not any("prefillSeconds" in r for r in found if r["kind"] == "kv"), "nobody's typing is in it"
    assert all(r["generatedTokens"] == len(r["perTokenMillis"]) <= 4 for r in messages)
    assert "uixotic" not in (tmp_path / "m.jsonl").read_text("utf-8")


def test_the_variable_names_the_file_for_writing_and_reading(
    kvferry: Kvferry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = kvferry("stats", "metrics")
    assert refused.code == 2 and "KVFERRY_METRICS" in refused.err
    monkeypatch.setenv("KVFERRY_METRICS", str(tmp_path / "there.jsonl"))
    assert kvferry("generate", *BUNDLE, "--prompt", "Once", "-n", "12").code == 0
    answer = kvferry("stats", "metrics")
    assert answer.code == 0 and answer.err == ""
    assert "generations  1 (1 cap)" in answer.out and "milliseconds per token, 12 tokens" in answer.out
    assert "█" in answer.out and max(map(len, answer.out.splitlines())) <= 80
    elsewhere = kvferry("stats", "metrics", "absent.jsonl")
    assert elsewhere.code == 1 and "absent.jsonl" in elsewhere.err


def test_damaged_lines_are_named_on_stderr_and_an_image_is_drawn(kvferry: Kvferry, tmp_path: Path) -> None:
    kvferry("generate", *BUNDLE, "--prompt", "Once", "-n", "12", "--metrics", "m.jsonl")
    kvferry("generate", *BUNDLE, "--prompt", "Once", "-n", "3", "--metrics", "m.jsonl")
    path = tmp_path / "m.jsonl"
    path.write_bytes(path.read_bytes() + b"{cut off\n")
    answer = kvferry("stats", "metrics", "m.jsonl", "--svg", "o.svg", "--message", "1", "--json")
    assert answer.code == 0 and answer.err.startswith("kvferry: m.jsonl:5: no record, left out: ")
    assert answer.json["damaged"]["lines"][0]["line"] == 5 and answer.json["drawn"] == 1
    root = ElementTree.parse(tmp_path / "o.svg").getroot()
    assert sum(e.get("class") == "token" for e in root.iter()) == 12
    none = kvferry("stats", "metrics", "m.jsonl", "--message", "3")
    assert none.code == 7 and "expected generation 3" in none.err


def test_a_file_that_cannot_be_written_costs_only_itself(kvferry: Kvferry, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("a device that is always full is Linux's")
    answer = kvferry("generate", *BUNDLE, "--prompt", "Once", "-n", "3", "--metrics", "/dev/full")
    assert answer.code == 0 and answer.out.strip()
    assert answer.err.count("--metrics") == 1 and "No space left on device" in answer.err
    early = kvferry("generate", *BUNDLE, "--prompt", "Once", "-n", "3", "--metrics", "no/where.jsonl")
    assert early.code == 1 and not early.out and "no/where.jsonl" in early.err, "before any work"


def test_stats_loads_no_arrays(kvferry: Kvferry) -> None:
    import subprocess
    import sys

    program = (
        "import sys, runtime.stats_commands, runtime.metrics.summary, runtime.metrics.summary_text, runtime.metrics.latency_plot\n"
        "assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
