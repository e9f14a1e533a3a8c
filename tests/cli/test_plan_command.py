"""`kvferry plan`: answers and exit codes; and --stats of the verbs that run a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import Kvferry
from gemma4_e2b import E2B

MODEL = ("--bundle", "tiny")
PHONE = ("--profile", "iphone15", "--context", "1500")


@pytest.fixture
def e2b(tmp_path: Path) -> tuple[str, ...]:
    file = tmp_path / "gemma-4-e2b.json"
    file.write_text(json.dumps(E2B))
    return "--config", str(file)


def test_what_would_be_killed_is_refused_by_name(kvferry: Kvferry, e2b: tuple[str, ...]) -> None:
    assert kvferry("plan", *e2b, *PHONE).code == 0, "restoring fits"
    assert kvferry("plan", *e2b, *PHONE, "--way", "restore").code == 0
    refused = kvferry("plan", *e2b, *PHONE, "--way", "prefill", "--json")
    assert refused.code == 7
    error = json.loads(refused.err)
    assert error["error"] == "WouldBeKilled" and error["details"]["expected"] == refused.json["limit_bytes"]
    found = {(way["way"], way["speculation"]): way for way in refused.json["ways"]}
    assert found["prefill", False]["bytes"] == error["details"]["found"] > refused.json["limit_bytes"]
    larger = ("--profile", "iphone17pro", "--context", "1500")
    assert kvferry("plan", *e2b, *larger, "--way", "prefill").code == 0
    assert "killed" not in kvferry("plan", *e2b, *larger).out


def test_the_int8_verify_head(kvferry: Kvferry, e2b: tuple[str, ...]) -> None:
    words = ("plan", *e2b, *PHONE, "--speculation")
    published = kvferry(*words)
    assert (published.code, published.err) == (0, "")
    int8 = kvferry(*words, "--verify-head", "same")
    assert int8.code == 0 and "every round: 3.1 s" in int8.err and "stalls" in int8.out
    assert kvferry(*words, "--verify-head", "same", "--verify-head-units", "ane").code == 7
    unasked = kvferry("plan", *e2b, *PHONE, "--verify-head", "same", "--verify-head-units", "ane")
    assert unasked.code == 0, "speculation is off by default below 7 GiB"


def test_explain_says_where_every_number_is_from(kvferry: Kvferry) -> None:
    answer = kvferry("plan", *MODEL, *PHONE, "--explain")
    value = kvferry("plan", *MODEL, *PHONE, "--json").json
    for name, figure in value["figures"].items():
        line = next(line for line in answer.out.splitlines() if line.startswith(name))
        assert figure["source"] in line and figure["why"] in line
    for way in value["ways"]:
        assert sum(line["bytes"] for line in way["ledgers"]) == way["bytes"]
        assert all(function in " ".join(answer.out.split()) for function in way["functions"])


def test_a_profile_is_printed_changed_and_used(kvferry: Kvferry, e2b: tuple[str, ...], tmp_path: Path) -> None:
    printed = kvferry("plan", "--profile", "iphone15", "--show-profile")
    document = json.loads(printed.out)
    document["name"], document["limit_share"]["value"] = "mine", 0.9
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(document))
    words = ("plan", *e2b, "--profile", str(file), "--context", "1500", "--way", "prefill", "--json")
    assert kvferry(*words).json["profile"] == "mine"
    del document["limit_share"]
    file.write_text(json.dumps(document))
    refused = kvferry(*words)
    assert refused.code == 7 and json.loads(refused.err)["details"]["field"] == "limit_share"
    assert "iphone15, iphone17pro, mac" in kvferry("plan", "--profile", "nokia", "--show-profile").err


def test_bytes_to_carry_are_those_that_pull_carries(kvferry: Kvferry, story: Path) -> None:
    kvferry("prefill", *MODEL, str(story), "--name", "a", "--tokens", "700", "--receipt", "0")
    kvferry("push", "remote", "a")
    value = kvferry("plan", *MODEL, "--profile", "mac", "--context", "700", "--json").json
    for name, words in (("whole_bytes", ()), ("trimmed_bytes", ("--trimmed",))):
        pulled = kvferry("pull", "remote", "a", "--store", f"other{name}", *words, "--json").json
        assert value[name] == pulled["payload_bytes"]


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--profile", "mac"),
        ("--profile", "mac", "--context", "5"),
        ("--profile", "mac", "--bundle", "tiny"),
        ("--profile", "mac", "--context", "5", "--bundle", "tiny", "--config", "."),
        ("--profile", "mac", "--context", "5", "--bundle", "tiny", "--weights", "int8"),
        ("--profile", "mac", "--context", "0", "--bundle", "tiny"),
    ],
)
def test_what_is_missing_or_too_much_is_said(kvferry: Kvferry, words: tuple[str, ...]) -> None:
    answer = kvferry("plan", *words)
    assert answer.code == 2 and "UsageError" in answer.err


def test_a_context_or_configuration_that_cannot_be(kvferry: Kvferry, tmp_path: Path) -> None:
    over = kvferry("plan", *MODEL, "--profile", "mac", "--context", "2048")
    assert over.code == 7 and "1 to 2,047 tokens" in over.err
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    assert "model_type" in kvferry("plan", "--config", ".", "--profile", "mac", "--context", "5").err


def test_stats_are_asked_for(kvferry: Kvferry, story: Path) -> None:
    words = ("prefill", *MODEL, str(story), "--name", "a", "--tokens", "70", "--receipt", "0")
    plain = kvferry(*words, "--json")
    assert plain.json["stats"] is None
    told = kvferry(*words, "--stats")
    assert "footprint" in told.err and "footprint" not in told.out
    stats = kvferry("generate", *MODEL, "--from", "a", "-n", "3", "--stats", "--json")
    assert stats.err == "" and stats.json["stats"]["kv_bytes"] == 72 * 768, "the last token stays pending"
    assert stats.json["stats"]["weights_stored_bytes"] > 0
