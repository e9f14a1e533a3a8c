"""`kvferry send` through a stand-in for xcrun that records what it was told, and copies as devicectl would. Nothing of this ran on a Mac."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest
from command import Kvferry

STAND_IN = """#!{python}
import json, os, pathlib, shutil, sys
arguments = sys.argv[1:]
pathlib.Path({log!r}).write_text(json.dumps(arguments))
given = dict(zip(arguments, arguments[1:]))
mode = os.environ.get("STAND_IN", "")
if mode == "locked":
    sys.exit("ERROR: The device is locked.")
if mode == "lies":
    pathlib.Path(given["--json-output"]).write_text(json.dumps({{"info": {{"outcome": "failed"}}}}))
    sys.exit(0)
shutil.copytree(given["--source"], pathlib.Path({device!r}) / given["--destination"])
pathlib.Path(given["--json-output"]).write_text(json.dumps({{"info": {{"outcome": "success"}}}}))
"""


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tools = tmp_path / "tools"
    tools.mkdir()
    program = tools / "xcrun"
    program.write_text(
        STAND_IN.format(python=sys.executable, log=str(tmp_path / "told"), device=str(tmp_path / "device"))
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "device"


@pytest.fixture
def book(kvferry: Kvferry, story: Path, tiny_gemma4_bundle: Path) -> list[str]:
    kvferry(
        "prefill",
        "--bundle",
        str(tiny_gemma4_bundle),
        str(story),
        "--name",
        "shelf/book",
        "--tokens",
        "70",
        "--receipt",
        "0",
    )
    return [
        "send",
        "shelf/book",
        "--device",
        "Anna's iPhone",
        "--bundle-id",
        "com.example.app",
        "--bundle",
        str(tiny_gemma4_bundle),
    ]


def test_the_folder_lands_in_the_apps_documents(
    kvferry: Kvferry, device: Path, book: list[str], tiny_gemma4_bundle: Path, tmp_path: Path
) -> None:
    value = kvferry(*book, "--json").json
    assert (value["path"], value["tokens"], value["device"]) == ("Documents/shelf-book", 70, "Anna's iPhone")
    told = json.loads((tmp_path / "told").read_text())
    source, report = told[told.index("--source") + 1], told[told.index("--json-output") + 1]
    assert told == [
        "devicectl", "device", "copy", "to", "--device", "Anna's iPhone", "--domain-type", "appDataContainer",
        "--domain-identifier", "com.example.app", "--source", source, "--destination", "Documents/shelf-book", "--json-output", report,
    ]  # fmt: skip
    assert not Path(source).exists(), "what was exported for it is gone"
    back = kvferry(
        "import",
        str(device / "Documents" / "shelf-book"),
        "--bundle",
        str(tiny_gemma4_bundle),
        "--name",
        "back",
        "--json",
    ).json
    assert back["tokens"] == 70


@pytest.mark.parametrize(("mode", "word"), [("locked", "device is locked"), ("lies", "exit code 0")])
def test_what_devicectl_says_is_told(
    kvferry: Kvferry, device: Path, book: list[str], mode: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN", mode)
    done = kvferry(*book)
    assert done.code == 8 and word in done.err and "xcrun devicectl list devices" in done.err


def test_without_the_developer_tools(kvferry: Kvferry, book: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    done = kvferry(*book)
    assert done.code == 7 and "Xcode" in done.err and "kvferry export" in done.err
