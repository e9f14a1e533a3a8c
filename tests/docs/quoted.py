"""Figures in the documents, and the records that they are quoted from.

Below a table or a paragraph with measured figures stands a comment that nobody sees rendered:

    <!-- figures
    benchmarks/results/restore.json
    times/floor/median_ms 23.71
    times/{whole,trimmed}/median_ms 30.16 13.37
    bytes 36.9 MB
    given 1.3 0.55: the bars
    -->

A line is a path in the record named above it and what the text quotes of it, in the order in which the text has them; braces stand for several
paths. ``given``: numbers that nobody measured here, and whose they are. A comment speaks for the text between the heading or comment before it and
itself. The record's file is named in its section, for the reader.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SCALES = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "MiB": 2**20, "%": 0.01}
TIMES = r"ms|s|seconds?|minutes?|hours?|tok/s|tokens/s|MB/s|GB/s"
UNIT = rf"{TIMES}|kB|MB|GB|%|×"
"""Behind a number they make it a figure. Limits and other people's are in MiB here."""

NUMBER = re.compile(
    rf"(?<![\w.,/-])((?:\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)(?:\.\d+)?(?:e-?\d+)?)(?![\d.]*\d)(?: ?({UNIT}|MiB)(?![\w]))?(?!-?\w)"
)
COMMENT = re.compile(r"<!-- figures\n(.*?)\n-->", re.S)


@dataclass(frozen=True)
class Quote:
    """``text``: the number as it stands there; ``unit``: what follows it, or nothing."""

    text: str
    unit: str = ""

    @property
    def number(self) -> float:
        return float(self.text.replace(",", ""))

    def is_of(self, value: float) -> bool:
        """Whether ``value``, in its own unit, rounds to what is quoted."""
        mantissa, _, exponent = self.text.replace(",", "").partition("e")
        last = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        return abs(value / SCALES.get(self.unit, 1) - self.number) <= last * 0.500001

    def __str__(self) -> str:
        return f"{self.text} {self.unit}".strip()


@dataclass(frozen=True)
class Bound:
    """A quote and where its value stands."""

    record: str
    path: str
    quote: Quote


@dataclass
class Block:
    """A piece of a page. ``section``: the whole text between two headings that it is in; ``explained``: it has a comment."""

    text: str
    line: int
    section: str
    explained: bool = False
    bounds: list[Bound] = field(default_factory=list)
    given: list[Quote] = field(default_factory=list)


def quotes(text: str) -> list[Quote]:
    return [Quote(number, unit or "") for number, unit in NUMBER.findall(text)]


def blocks(page: str) -> Iterator[Block]:
    """The pieces of a page's text, in order. Fenced blocks and code are no text; a table's cells are."""
    page = re.sub(r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), page, flags=re.M | re.S)
    line = 1
    for section in re.split(r"(?m)^(?=#+ )", page):
        rest = section
        while found := COMMENT.search(rest):
            block = Block(visible(rest[: found.start()]), line, visible(section), True)
            _fill(block, found[1])
            yield block
            line += rest[: found.end()].count("\n")
            rest = rest[found.end() :]
        yield Block(visible(rest), line, visible(section))
        line += rest.count("\n")


def visible(text: str) -> str:
    """Without comments, addresses of links and code, but with files that code names. And without tables that a test makes anew from the code
    (``<!-- table: NAME -->`` above them): nobody measured those."""
    text = re.sub(r"<!-- table: \w+ -->\n(?:\|.*\n)+", "", text)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return re.sub(r"`([^`]*)`", lambda m: m[0] if m[1].endswith(".json") else "`code`", text)


def _fill(block: Block, comment: str) -> None:
    record = ""
    for line in comment.splitlines():
        words = line.strip()
        if words.startswith("given "):
            numbers, colon, whose = words.removeprefix("given ").partition(":")
            assert colon and whose.strip(), f"expected whose numbers these are behind a colon, found {words!r}"
            block.given += quotes(numbers)
        elif words.endswith(".json"):
            record = words
        else:
            path, _, said = words.partition(" ")
            paths = list(_expanded(path))
            found = quotes(said)
            assert record, f"expected a record's file before {words!r}"
            assert len(paths) == len(found), f"expected as many numbers as paths, found {words!r}"
            block.bounds += [Bound(record, one, quote) for one, quote in zip(paths, found, strict=True)]


def _expanded(path: str) -> Iterator[str]:
    parts = re.split(r"\{([^}]*)\}", path)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    return map("".join, itertools.product(*choices))


def looked_up(record: Any, path: str) -> float:
    """The number at ``a/b/0/c``."""
    for key in path.split("/"):
        here = dict(enumerate(record)) if isinstance(record, list) else record
        assert isinstance(here, dict), f"{path}: {key} stands in a number"
        at = int(key) if isinstance(record, list) else key
        assert at in here, f"{path}: expected one of {list(here)}, found {key}"
        record = here[at]
    assert isinstance(record, int | float), f"{path} is no number"
    return float(record)


def unbound(block: Block) -> tuple[list[Bound], list[Quote]]:
    """(bound quotes that the text doesn't have there, figures of the text that are neither bound nor given)."""
    left = quotes(block.text)
    missing, free = [], []
    for bound in block.bounds:
        if bound.quote in left:
            at = left.index(bound.quote)
            free += left[:at]
            left = left[at + 1 :]
        else:
            missing.append(bound)
    cells = {cell.strip() for line in block.text.splitlines() if line.startswith("|") for cell in line.split("|")}
    return missing, [
        quote
        for quote in free + left
        if quote not in block.given
        and (
            quote.unit not in ("", "MiB")
            or (re.search(r"[.e]", quote.text) and (block.explained or quote.text in cells))
        )
    ]
