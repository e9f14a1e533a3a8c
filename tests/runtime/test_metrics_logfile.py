"""Several processes append to one file, and every line is whole; a line that a writer left unfinished costs nobody else's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runtime.metrics.logfile import LogFile

WRITER = """
import sys
from pathlib import Path
from runtime.metrics.logfile import LogFile

file, letter = LogFile(Path(sys.argv[1])), sys.argv[2].encode()
print("ready", flush=True)
sys.stdin.readline()
for i in range(200):
    file.append(letter * (1 + 977 * i % 20_000) + b"\\n")
"""


def test_lines_of_several_processes_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), letter], stdin=-1, stdout=-1, text=True)
        for letter in "abc"
    ]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    for writer in writers:  # together, as far as may be
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    for writer in writers:
        assert writer.stdin is not None and writer.stdout is not None
        writer.stdin.close()
        writer.stdout.close()
    lines = path.read_bytes().splitlines()
    wanted = [letter * (1 + 977 * i % 20_000) for letter in (b"a", b"b", b"c") for i in range(200)]
    assert sorted(lines) == sorted(wanted)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_cut_off_line_is_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"whole":1}\n{"cut o')
    file = LogFile(path)
    file.append(b"{}\n")
    file.append(b"[]\n")
    file.close()
    assert path.read_bytes() == b'{"whole":1}\n{"cut o\n{}\n[]\n'


def test_a_folder_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LogFile(tmp_path / "nowhere" / "metrics.jsonl")
