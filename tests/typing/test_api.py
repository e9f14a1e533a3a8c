"""`api.py` passes a strict type checker, as a user's program would, and runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import api
import pytest
from optional import require

ROOT = Path(__file__).parents[2]


def mypy(path: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    words = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file",
        "",
        "--cache-dir",
        str(tmp_path / "cache"),
        str(path),
    ]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


def test_it_runs() -> None:
    api.main()


@pytest.mark.slow
def test_it_is_typed_as_a_user_sees_it(tmp_path: Path) -> None:
    require("mypy")
    done = mypy(Path(api.__file__), tmp_path)
    found = [line for line in done.stdout.splitlines() if "api.py:" in line]
    assert not found, done.stdout


@pytest.mark.slow
def test_the_checker_would_tell(tmp_path: Path) -> None:
    """Without its marks the file is full of errors: nothing public is of type Any."""
    require("mypy")
    text = Path(api.__file__).read_text("utf-8")
    marks = text.count("# type: ignore[")
    bare = tmp_path / "bare.py"
    bare.write_text("\n".join(line.partition("  # type: ignore[")[0] for line in text.splitlines()) + "\n", "utf-8")
    done = mypy(bare, tmp_path)
    assert sum("bare.py:" in line and ": error:" in line for line in done.stdout.splitlines()) == marks, done.stdout
