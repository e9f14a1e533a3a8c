"""Every module that parses what comes from outside is fuzzed, or says here why it isn't; and each parser's valid inputs are valid."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

import battery
import pytest
from parsers import PARSERS
from parsing import Parser, changed

from kvstore.errors import KVError

ROOT = battery.HERE.parents[1]
PARSES = re.compile(r"_?(?:decode|parse|unpack)(?:_\w+)?|read_\w+")
"""Names of functions that turn bytes from outside into values. (`read` and `open` alone are what files and streams have.)"""

EXCUSED: dict[str, str] = {
    "kvstore.files": "reads bytes into buffers",
    "kvstore.keyring": "a key as 64 hex digits",
    "kvstore.waiting": "tells the system what will be read",
    "kvstore.holders": "what the kernel says in /proc/locks",
    "kvstore.mounts": "what the kernel says in /proc/self/mountinfo, and macOS's `mount`",
    "kvstore.objects": "reads bytes into buffers that `kvstore.codec` decodes",
    "kvstore.plaintext": "a size that the user types",
    "kvstore.records": "reads files that `kvstore.codec` decodes",
    "runtime.build.gemma4.parts": "tensors of a folder that `safetensors` opened",
    "runtime.build.packages": "tensors of a source that was opened",
    "runtime.chain": "decode is the model's function here",
    "runtime.opening": "a text, which the tokenizer turns into ids",
    "runtime.plan": "decode is the model's function here",
}
"""Modules with such a function that interprets nothing, or only what this process made."""


NEVER = ("index", "digest cache", "repair")
"""Parsers that refuse nothing: caches are made anew, and repair is there for damage."""


def parsing() -> Iterator[tuple[str, str]]:
    """(module, function) of the shipped packages."""
    for package in ("kvstore", "sync", "runtime"):
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and PARSES.fullmatch(node.name):
                    yield module, node.name


def test_every_module_that_parses_is_fuzzed_or_excused() -> None:
    fuzzed = {module for parser in PARSERS for module in parser.modules}
    found: dict[str, list[str]] = {}
    for module, function in parsing():
        found.setdefault(module, []).append(function)
    assert len(found) > 20
    new = {module: functions for module, functions in found.items() if module not in fuzzed and module not in EXCUSED}
    assert not new, "add a parser to tests/trust/parsers.py, or an excuse here"
    assert not EXCUSED.keys() - found.keys() and not EXCUSED.keys() & fuzzed


def test_every_module_of_a_parser_is_there() -> None:
    for parser in PARSERS:
        for module in parser.modules:
            path = ROOT.joinpath(*module.split("."))
            assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), module


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_what_is_valid_is_read_and_some_of_what_is_changed_refused(parser: Parser, tmp_path: Path) -> None:
    case = parser.prepare(tmp_path)
    for file, data in case.seeds[:: 1 + len(case.seeds) // 6]:
        case.read(file, data)
    refused = 0
    for number in range(5 if parser.name in NEVER else 30):
        file, data = changed(case, random.Random(f"{parser.name} {number}"))
        try:
            case.read(file, data)
        except KVError:
            refused += 1
    assert bool(refused) != (parser.name in NEVER)
