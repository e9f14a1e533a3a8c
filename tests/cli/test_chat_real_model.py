"""A conversation with SmolLM2, resumed in a new process after every turn. Second tier of `.ci/run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.real_model

MESSAGES = (
    "My name is Ada and I sail a small ferry between two islands.",
    "What is my name?",
    "What do I sail?",
    "What is the capital of France?",
    "And of Italy?",
    "Thank you.",
)
SYSTEM = ("--system", "You are a helpful assistant. Answer in one short sentence.")


def chat(bundle: Path, store: Path, stdin: str, *words: str) -> list[Any]:
    command = ["chat", "--bundle", str(bundle), "--store", str(store), "-n", "12", "--json", *words]
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", *command], input=stdin, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONUTF8": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_it_goes_on_in_another_process_after_every_turn(smollm2_bundle: Path, tmp_path: Path) -> None:
    unbroken = chat(smollm2_bundle, tmp_path / "whole", "\n".join(MESSAGES), "--name", "talk", *SYSTEM)
    before = 0
    for i, message in enumerate(MESSAGES):
        (turn,) = chat(
            smollm2_bundle, tmp_path / "parts", message, *(["--resume", "talk"] if i else ["--name", "talk", *SYSTEM])
        )
        assert (turn["text"], turn["tokens"], turn["finish"]) == tuple(
            unbroken[i][k] for k in ("text", "tokens", "finish")
        )
        assert turn["reused_tokens"] == before < turn["saved_tokens"], "all of what the turn before saved"
        before = turn["saved_tokens"]
    assert "Paris" in unbroken[3]["text"] and "Rome" in unbroken[4]["text"]
    (stats,) = chat(smollm2_bundle, tmp_path / "parts", "/stats\n", "--resume", "talk")
    assert [t["text"] for t in stats["stats"]["turns"] if t["role"] == "user"] == list(MESSAGES)
