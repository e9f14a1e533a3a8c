"""Every command and program in the documents runs: on the tiny model, with a store, a cache and a remote of the test's own."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from command import Kvferry
from pages import ROOT, Fence, code_spans, fences, page_name, pages

from kvstore.__main__ import app

RUN = {"sh", "console", "python"}
SHOWN = {"text", "json"}
"""Languages of blocks that nobody types."""

STANDS_FOR = {"gemma3-270m": "tiny", "smollm2": "tiny", "/Volumes/Share/kv": "remote"}
"""What the test has in place of a large model and of somebody's disk."""

STORY = (ROOT / "kvstore" / "data" / "ferry.txt").read_text(encoding="utf-8")
FENCES = [fence for page in pages() for fence in fences(page)]
SHELL = sorted({fence.page for fence in FENCES if fence.language in ("sh", "console")})
PROGRAMS = [fence for fence in FENCES if fence.language == "python"]


def commands(fence: Fence) -> Iterator[tuple[list[str], str]]:
    """The command lines of a block, as words, each with its comment; of a ``console`` block those behind ``$``."""
    for line in fence.text.replace("\\\n", " ").splitlines():
        if fence.language == "console":
            if not line.startswith("$ "):
                continue
            line = line.removeprefix("$ ")
        words = shlex.split(line, comments=True)
        if words:
            yield words, line.partition("#")[2].strip()


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The click command that ``words`` (without ``kvferry``) call, and the words that are left for it."""
    command: click.Command = app
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, f"kvferry has no {words[0]!r}"
        command, words = found, words[1:]
    return command, words


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]\w*):", makefile, re.M))
    variables = set(re.findall(r"^([A-Z]+) *=", makefile, re.M))
    asked = {word for word in words if "=" not in word}
    assert asked and asked <= targets, f"the Makefile has {sorted(targets)}"
    assert {word.partition("=")[0] for word in words if "=" in word} <= variables, f"it has {sorted(variables)}"


def check_pip(words: list[str]) -> None:
    """``pip install [-e] WHAT[extras]``: the extras exist. Nothing is installed."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words[0] == "install"
    asked = re.fullmatch(r"(?:\.|kvferry)\[([\w,]+)\]", words[-1])
    assert asked is not None and set(asked[1].split(",")) <= extras.keys(), f"the extras are {sorted(extras)}"


def check_source(words: list[str]) -> None:
    """The environment that the Makefile makes, which puts the command on PATH."""
    venv = re.search(r"^VENV = (.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert venv is not None and words == [f"{venv[1]}/bin/activate"]


def check_pytest(words: list[str]) -> None:
    """The same choice of tests is not empty. What chooses ``reference`` lies in one folder; the rest is not collected."""
    assert any("reference" in word for word in words), "say in this test where to look for what these words choose"
    words = [*words, "--collect-only", "-q", "-p", "no:cacheprovider", "tests/reference"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def check_sh(words: list[str]) -> None:
    """A script of the examples, which tests/test_two_machines.py runs."""
    script, _bundle = words
    assert (ROOT / script).name == "two_machines.sh" and (ROOT / script).is_file()


CHECKED = {"sh": check_sh, "source": check_source, "make": check_make, "pip": check_pip, "pytest": check_pytest}


@pytest.fixture
def typed(kvferry: Kvferry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """``typed(page)`` runs the page's commands in their order. A comment that begins with "elsewhere" says that from here on it is
    another machine: another store."""

    def run(page: Path) -> None:
        (tmp_path / "book.txt").write_text(STORY, encoding="utf-8")
        (tmp_path / "other.txt").write_text(STORY[:9000] + " And then it was another story.", encoding="utf-8")
        for fence in (fence for fence in fences(page) if fence.language in ("sh", "console")):
            for words, comment in commands(fence):
                where = f"{fence}: {' '.join(words)}"
                given = None
                if words[0] == "printf" and "|" in words:
                    given, words = words[1].replace("\\n", "\n"), words[words.index("|") + 1 :]
                program, *rest = words
                if comment.startswith("elsewhere"):
                    monkeypatch.setenv("KVFERRY_STORE", str(tmp_path / "elsewhere"))
                if program == "kvferry":
                    rest = [STANDS_FOR.get(word, word) for word in rest]
                    answer = kvferry(*rest, stdin=given)
                    assert answer.code == 0, f"{where}\n{answer.err}"
                    assert answer.out, f"{where}: says nothing"
                else:
                    assert program in CHECKED, f"{where}: this test does not know how to run {program}"
                    CHECKED[program](rest)
                if "also:" in comment:
                    for verb in re.findall(r"\w+", comment.partition("also:")[2]):
                        command_of([verb])

    return run


LONG = {"docs/gate.md", "docs/checks.md", "docs/checkpoint.md"}
"""Pages whose commands take many seconds: the second tier's."""


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if page_name(page) in LONG else page for page in SHELL],
    ids=page_name,
)
def test_every_command_runs(page: Path, typed: Callable[[Path], None], kvferry: Kvferry, tmp_path: Path) -> None:
    typed(page)
    if page_name(page) != "README.md":
        return
    # What the README says that its commands do, seen in what they leave: two stores, the name in each, the text found.
    here, there = (kvferry("ls", "--store", str(tmp_path / s), "--json").json for s in ("store", "elsewhere"))
    assert [(row["name"], row["kept"]) for row in here + there] == [("book", "whole"), ("book", "trimmed")]
    assert here[0]["snapshot"] == there[0]["snapshot"]
    found = kvferry("find", "--bundle", "tiny", "other.txt", "--json").json
    assert found["reused_tokens"] == found["common_tokens"] == here[0]["tokens"] < found["asked_tokens"]


def run_program(text: str, folder: Path) -> str:
    """What a program prints; one that holds tests is given to pytest."""
    words = [sys.executable, "-c", text]
    if re.search(r"^class Test", text, re.M):
        (folder / "test_page.py").write_text(text, encoding="utf-8")
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("fence", PROGRAMS, ids=str)
def test_every_program_runs_and_goes_on_in_another_process(fence: Fence, tiny_bundle: Path, tmp_path: Path) -> None:
    """As written: the folder that it names is the tiny bundle. The second program, of one that saves, is the page's sentence below the first."""
    (tmp_path / "gemma3-270m").symlink_to(tiny_bundle, target_is_directory=True)
    said = run_program(fence.text, tmp_path)
    assert len(said.strip()) > 0
    if "Session" not in fence.text:
        return
    other = fence.text.replace("store=store)", "store=store, decode_only=True)")
    saved = re.search(r'session\.save\(("\w+")\)', fence.text)
    assert saved is not None or "store" not in fence.text
    if saved is None:
        return
    other = re.sub(r"session\.prompt\(.*\)\n", f"session.restore({saved[1]})\n", other)
    other = re.sub(r"^ *session\.save\(.*\n", "", other, flags=re.M)
    other += "print(sorted(name.rpartition(':')[2] for name in session.engine.ledger.names()))\n"
    assert other.count("decode_only=True") == other.count("restore") == 1 and "save" not in other
    functions = "['decode', 'decode', 'lmhead.mlpackage']\n"
    assert run_program(other, tmp_path) == said + functions


@pytest.mark.parametrize("fence", FENCES, ids=str)
def test_a_block_is_run_or_says_that_it_is_none(fence: Fence) -> None:
    assert fence.language in RUN | SHOWN, f"{fence}: give it a language; one of {sorted(SHOWN)} is not run"
    if fence.language == "json":
        json.loads(fence.text)
    if fence.language in SHOWN:
        assert not re.search(r"^(\$ )?(kvferry|make|pip|pytest) ", fence.text, re.M), (
            f"{fence}: commands that nobody runs"
        )


@pytest.mark.parametrize("page", pages(), ids=page_name)
def test_commands_inside_sentences_exist(page: Path) -> None:
    """A verb and options that `kvferry` has, a target of the Makefile."""
    for span in code_spans(page):
        program, *words = span.split()
        if program == "make" and words:
            check_make(words)
        if program != "kvferry" or not words or not words[0].isalpha():
            continue  # not a command: "kvferry" itself, a context of a digest
        command, rest = command_of(words)
        options = {name for parameter in [*command.params, *app.params] for name in parameter.opts} | {"--help"}
        assert {word for word in rest if word.startswith("-")} <= options, f"{page_name(page)}: {span}"
