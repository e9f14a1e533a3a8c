"""Runs the command in this process, as `kvferry` would: same arguments, output and exit code."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from command import Answer, Kvferry

from kvstore.__main__ import main

STORY = Path(__file__).parents[2] / "kvstore" / "data" / "ferry.txt"


@pytest.fixture
def kvferry(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, tiny_bundle: Path
) -> Kvferry:
    """``kvferry(*words, stdin=…)``; its store is ``tmp_path/store``, ``--bundle tiny`` is the tests' own, --engine auto is portable."""
    cache = tmp_path / "cache"
    (cache / "bundles").mkdir(parents=True)
    (cache / "bundles" / "tiny").symlink_to(tiny_bundle, target_is_directory=True)
    monkeypatch.setenv("KVFERRY_CACHE", str(cache))
    monkeypatch.setenv("KVFERRY_STORE", str(tmp_path / "store"))
    monkeypatch.delenv("CORELLM_VERIFY_HEAD_CU", raising=False)
    monkeypatch.delenv("KVFERRY_METRICS", raising=False)
    # the same engine on every machine, macOS too
    monkeypatch.setattr("runtime.coreml.missing", lambda: "expected macOS 15 or newer, found a test")
    monkeypatch.chdir(tmp_path)

    def run(*words: str, stdin: str | bytes | None = None) -> Answer:
        monkeypatch.setattr(sys, "argv", ["kvferry", *words])
        if stdin is not None:
            given = io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin)
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(given, "utf-8"))
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        code = ended.value.code
        return Answer(code if isinstance(code, int) else 0, out, err)

    return run


@pytest.fixture
def story(tmp_path: Path) -> Path:
    """A text of 2,100 tokens and more for the tiny tokenizer."""
    path = tmp_path / "story.txt"
    path.write_bytes(STORY.read_bytes())
    return path
