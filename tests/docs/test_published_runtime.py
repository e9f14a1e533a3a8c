"""docs/published-runtime.md names tests that exist, and a test for every row that is not marked as later."""

from __future__ import annotations

import ast
import re
from functools import cache

from pages import ROOT

PAGE = ROOT / "docs" / "published-runtime.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith(("| ---", "| the published runtime"))
]


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_named_test_exists() -> None:
    named = [span for _, _, held in ROWS for span in re.findall(r"`([^`]+)`", held)]
    assert len(named) > 25
    assert not [
        span
        for span in named
        if not (ROOT / span.partition("::")[0]).is_file()
        or span.partition("::")[2] not in functions_of(span.partition("::")[0])
    ]


def test_a_row_names_its_tests_or_says_later() -> None:
    assert len(ROWS) > 20 and all(len(row) == 3 for row in ROWS)
    assert not [theirs for theirs, ours, held in ROWS if not held and not ours.startswith("*later*")]
    told = {ours.split(",")[0].split(";")[0].split(":")[0].split(" ")[0] for _, ours, _ in ROWS}
    assert told <= {"the", "**differs**", "*later*", "*later*."}, "a row is the same, differs, or comes later"


def test_names_of_tests_stand_in_the_last_column_only() -> None:
    assert not [row for row in ROWS if "::" in row[0] + row[1]]
