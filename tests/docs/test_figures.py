"""Every measured figure in README.md and docs/ is what its committed record says; the convention is in quoted.py.

Design notes tell of decisions at their time, and docs/cli.md is made from the commands: neither is looked at.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pages import ROOT, page_name, pages
from quoted import COMMENT, Quote, blocks, looked_up, quotes, unbound

PAGES = [page for page in pages() if page.parent.name != "design" and page.name != "cli.md"]

TEXT = """\
# Speed

Record: `benchmarks/results/x.json`.

| what | ms | ratio |
| --- | --- | --- |
| this, 36.9 MB | 23.71 | |
| that | 1.2e-3 | 0.564, bar 0.55 |

<!-- figures
benchmarks/results/x.json
bytes 36.9 MB
{a,b/0}/ms 23.71 1.2e-3
ratio 0.564
given 0.55: the bar
-->
"""
RECORD = {"bytes": 36_864_000, "a": {"ms": 23.7096}, "b": [{"ms": 0.00124}], "ratio": 0.5637}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_figure_is_quoted_from_a_committed_record(page: Path) -> None:
    for block in blocks(page.read_text("utf-8")):
        where = f"{page_name(page)}, from line {block.line}"
        missing, free = unbound(block)
        assert not missing, f"{where}: the text doesn't have, in this order, {[str(b.quote) for b in missing]}"
        assert not free, (
            f"{where}: {[str(quote) for quote in free]}: whose figures are these? Name their record, or whose they are, as tests/docs/quoted.py says"
        )
        for bound in block.bounds:
            assert bound.record in block.section, f"{where}: the section doesn't name {bound.record}"
            value = looked_up(json.loads((ROOT / bound.record).read_text("utf-8")), _inside(bound.record, bound.path))
            assert bound.quote.is_of(value), (
                f"{where}: {bound.record}: {bound.path} is {value}, quoted as {bound.quote}"
            )


def _inside(record: str, path: str) -> str:
    """Records of checks keep them under one key."""
    return f"figures/{path}" if "/checks/" in record else path


def test_records_are_quoted_somewhere() -> None:
    """A comment that nobody reads would hold nothing."""
    quoted = {b.record for page in PAGES for block in blocks(page.read_text("utf-8")) for b in block.bounds}
    assert len(quoted) >= 10
    assert sum(len(COMMENT.findall(page.read_text("utf-8"))) for page in PAGES) >= 10


def problems(text: str, record: dict[str, object]) -> list[str]:
    found = []
    for block in blocks(text):
        missing, free = unbound(block)
        found += [f"missing {b.quote}" for b in missing] + [f"free {quote}" for quote in free]
        found += [f"wrong {b.quote}" for b in block.bounds if not b.quote.is_of(looked_up(record, b.path))]
    return found


def test_the_convention_itself() -> None:
    assert problems(TEXT, RECORD) == []


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("| 23.71 |", "| 23.72 |", ["missing 23.71", "free 23.72"]),
        ("ms 23.71 1.2e-3", "ms 23.72 1.2e-3", None),
        ("| 1.2e-3 | 0.564,", "| 0.564 | 1.2e-3,", ["missing 0.564", "free 0.564"]),
        ("0.564, bar", "0.565, bar", ["missing 0.564", "free 0.565"]),
        ("bar 0.55", "bar 0.56", ["free 0.56"]),
        ("given 0.55: the bar\n", "", ["free 0.55"]),
        ("ratio 0.564\n", "", ["free 0.564"]),
        ("-->", "-->\n\nIt took 3.5 ms.\n", ["free 3.5 ms"]),
        ("-->", "-->\n\nTwice as fast: 7 %.\n\n| 8.25 |\n", ["free 7 %", "free 8.25"]),
    ],
)
def test_a_changed_quote_fails(before: str, after: str, found: list[str] | None) -> None:
    told = problems(TEXT.replace(before, after), RECORD)
    assert told and (found is None or all(one in told for one in found)), told


@pytest.mark.parametrize("changed", [{"ratio": 0.5646}, {"bytes": 36_960_000}, {"b": [{"ms": 0.00126}]}])
def test_a_changed_record_fails(changed: dict[str, object]) -> None:
    assert len(problems(TEXT, {**RECORD, **changed})) == 1


def test_what_counts_as_a_number() -> None:
    assert quotes("v1.2, 0.32.2, 0.93–1.34 of 26 ms, 2e-3, x3, 1,200 s, (99.9 %) 12 MiB, 2026-11-30 3-fold") == [
        Quote("0.93"),
        Quote("1.34"),
        Quote("26", "ms"),
        Quote("2e-3"),
        Quote("1,200", "s"),
        Quote("99.9", "%"),
        Quote("12", "MiB"),
    ]
