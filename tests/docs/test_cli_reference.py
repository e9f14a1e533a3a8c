"""docs/cli.md is what the commands say of themselves, and its JSON keys are those that they answer with."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import pytest
import wire_answers
from command import Kvferry
from json_keys import JSON_KEYS
from make_cli_reference import ENVIRONMENT, EXIT_CODES, reference, verbs
from metrics_lines import APPS, STEPPED, line
from pages import ROOT

from kvstore.__main__ import app
from kvstore.errors import Refused
from runtime.hostkv import HostKV

STORY = ROOT / "kvstore" / "data" / "ferry.txt"
BUNDLE = ("--bundle", "tiny")


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert page == reference(), "run: python tests/docs/make_cli_reference.py > docs/cli.md"


def keys(value: object, before: str = "") -> set[str]:
    """The keys in an answer, in the page's notation; ``a`` alone is left out where ``a.b`` or ``a[].b`` says it."""
    if isinstance(value, dict) and value:
        inner = [keys(v, f"{before}.{k}".removeprefix(".")) for k, v in value.items()]
    elif isinstance(value, list) and any(isinstance(v, dict) for v in value):
        inner = [keys(v, f"{before}[]") for v in value]
    else:
        return {before}
    return set().union(*inner)


def data_folded(found: set[str], documented: set[str]) -> set[str]:
    """``found`` with ``a.*`` for what the page calls data."""
    data = {key.removesuffix("*") for key in documented if key.endswith(".*")}
    return {next((f"{start}*" for start in data if key.startswith(start)), key) for key in found}


def refuse(*_: object) -> Any:
    raise Refused("a test", place="host")


@pytest.mark.slow
def test_every_json_key_is_documented_and_no_other(kvferry: Kvferry, tmp_path: Path, tiny_gemma4_bundle: Path) -> None:
    """One answer or several of each verb, so that every key appears."""
    answers: dict[str, set[str]] = defaultdict(set)

    def told(verb: str, value: Any) -> None:
        answers[verb] |= keys(value)

    def ask(verb: str, *words: str, code: int = 0, stdin: str | None = None) -> Any:
        answer = kvferry(*verb.split(), *words, "--json", stdin=stdin)
        assert answer.code == code, answer.err
        values = [answer.json] if stdin is None else [json.loads(line) for line in answer.out.splitlines()]
        for value in values:
            told(verb, value)
        return values[0]

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The ferry leaves at noon.\n")
    store = tmp_path / "store"
    ask("bundle build", "tiny")
    ask("bundle show", "tiny")
    ask("bundle heads", "tiny")
    ask("find", *BUNDLE, str(STORY))
    ask("prefill", *BUNDLE, str(STORY), "--tokens", "70", "--name", "a", "--receipt", "2", "--stats")
    ask("prefill", *BUNDLE, str(STORY), "--tokens", "75", "--name", "b", "--receipt", "0")
    ask("find", *BUNDLE, str(STORY), "--tokens", "70")
    ask("find", *BUNDLE, str(STORY), "--explain")
    ask("find", *BUNDLE, str(STORY), "--tokens", "72", "--explain")
    ask("find", *BUNDLE, str(STORY), "--tokens", "70", "--explain", "--namespace", "other")
    ask("stats store")
    ask("generate", *BUNDLE, "--from", "a", "-n", "1")
    ask("generate", *BUNDLE, "--from", "a", "-n", "1", "--stats")
    ask("plan", *BUNDLE, "--profile", "iphone15", "--context", "100")
    ask("gate", *BUNDLE, "--quick", "--prompts", str(prompts), "--verify", "margin")
    ask("bench speculation", *BUNDLE, "-n", "4", "--rounds", "1", "--workload", "chat")
    ask("verify", *BUNDLE, "a")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HostKV, "write_rows", refuse)
        ask("chat", *BUNDLE, "-n", "2", code=7, stdin="Hello\n")
    ask("chat", *BUNDLE, "-n", "2", "--system", "Be brief.", "--name", "chat", stdin="Hello\n/stats\n/save other\n")
    ask("rm", "chat", "other")
    lines = b"".join(map(line, [*APPS, STEPPED])) + b"?\n"
    (tmp_path / "metrics.jsonl").write_bytes(lines)
    ask("stats metrics", "metrics.jsonl")
    for verb in ("ls", "du", "doctor", "check"):
        ask(verb)
    ask("show", "a")
    for more in ("--verify", "--dry-run"):
        ask("push", "remote", "a", more)
        ask("pull", "remote", "a", more)
    published = ("--bundle", str(tiny_gemma4_bundle))
    kvferry("prefill", *published, str(STORY), "--tokens", "5", "--name", "g")
    ask("export", "g", "out", "--as", "corellm", *published)
    ask("import", "out", *published)
    ask("export", "a", "a.kvferry")
    ask("import", "a.kvferry", "--name", "again")
    ask("rm", "again")
    with pytest.MonkeyPatch.context() as patched:
        wire_answers.served(ask, told, patched, tmp_path, "a")
        wire_answers.watched(told, tmp_path)
        wire_answers.elsewhere(ask, patched, "a", published)
    ask("rename", "b", "c")
    ask("rm", "c")
    (store / "tmp" / "left").touch()
    for more in ("--dry-run", "--purge"):
        ask("gc", more)
    ask("recode", "--all", "--to", "planes", "--dry-run")
    ask("recode", "--all", "--to", "planes")
    ask("quota", "20GB")
    ask("pin", "a", "--as", "kept")
    ask("pin", "a", "--as", "gone")
    ask("unpin", "gone")
    ask("trash ls")
    ask("trash restore", "pin/gone")
    ask("trash empty")
    ask("du")
    next(path for path in (store / "objects").rglob("*") if path.is_file()).write_bytes(b"")
    ask("check", "--quick", code=4)
    ask("check", "--quick", "--repair", "--dry-run", code=4)
    ask("check", "--repair", code=11)
    ask("demo", "--model", "tiny", "--trimmed")

    assert answers.keys() == JSON_KEYS.keys() == {name for name, _ in verbs()} - {"completion"}
    for verb, found in answers.items():
        documented = set(JSON_KEYS[verb])
        found = data_folded(found, documented)
        # An object or list that was null or empty in one answer says nothing of what is in it.
        outer = {
            key for key in found | documented if any(k.startswith((f"{key}.", f"{key}[]")) for k in found | documented)
        }
        assert found - outer == documented - outer, verb


def test_every_verb_takes_the_common_options() -> None:
    for name, command in verbs():
        options = {option for parameter in command.params for option in parameter.opts}
        assert ({"--json", "--store"} <= options) is (name != "completion"), name


def test_every_variable_that_is_read_is_documented() -> None:
    files = [path for package in ("kvstore", "runtime", "sync") for path in (ROOT / package).rglob("*.py")]
    named = set().union(*(re.findall(r"environ\W+(?:get\W+)?(\w+)", path.read_text()) for path in files))
    assert named == ENVIRONMENT.keys()


def test_the_exit_codes_are_those_of_the_help() -> None:
    told = {int(code) for code in re.findall(r"\b(\d+) \w", (app.help or "").split("Exit codes:")[1])}
    assert told == EXIT_CODES.keys()


@pytest.mark.parametrize(("name", "command"), list(verbs()), ids=[name for name, _ in verbs()])
def test_every_verb_and_option_has_words(name: str, command: click.Command) -> None:
    assert command.help
    wordless = [p.opts[0] for p in command.params if isinstance(p, click.Option) and not p.help]
    assert set(wordless) <= {"--compute", "--model"}, "their choices say it"
