"""`examples/two_machines.sh`, as the README shows it: two machines on one, over TLS."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "two_machines.sh"


@pytest.mark.slow
def test_it_pairs_pulls_and_continues_identically(tmp_path: Path, tiny_bundle: Path) -> None:
    program = tmp_path / "bin" / "kvferry"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvstore "$@"\n')
    program.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
        "KVFERRY_CACHE": str(tmp_path / "cache"),
    }
    shell = shutil.which("dash") or "sh"
    done = subprocess.run(
        [shell, str(SCRIPT), str(tiny_bundle)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical, 32 tokens" in done.stdout
    assert "lighthouse: 976 tokens, trimmed" in done.stdout
    assert not list(tmp_path.glob("tmp.*")), "what it made is gone"
