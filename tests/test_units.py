"""The service units in examples/ say commands that kvferry has, with options that they take."""

from __future__ import annotations

import plistlib
import shlex
from pathlib import Path

import click
import pytest

from kvstore.__main__ import app

UNITS = Path(__file__).parents[1] / "examples" / "units"


def commands() -> list[tuple[str, list[str]]]:
    found = [(f.name, plistlib.loads(f.read_bytes())["ProgramArguments"]) for f in sorted(UNITS.glob("*.plist"))]
    for file in sorted(UNITS.glob("*.service")):
        line = next(line for line in file.read_text().splitlines() if line.startswith("ExecStart="))
        found.append((file.name, shlex.split(line.removeprefix("ExecStart="))))
    return found


@pytest.mark.parametrize(("file", "command"), commands())
def test_a_units_command_is_one(file: str, command: list[str]) -> None:
    program, verb, *options = command
    assert program.endswith("/kvferry")
    found = app.get_command(click.Context(app), verb)
    assert found is not None
    context = found.make_context(verb, list(options), parent=click.Context(app), resilient_parsing=False)
    assert context.args == []
