"""The documents: README.md and docs/, their fenced blocks, and the words that they set as code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


def pages() -> list[Path]:
    """README.md and every page below docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Fence:
    """A fenced block. ``line``: where its opening stands; ``language``: the word behind the backquotes."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{page_name(self.page)}:{self.line}"


def fences(page: Path) -> Iterator[Fence]:
    opened: tuple[int, str] | None = None
    body: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("```"):
            body.append(line)
        elif opened is None:
            opened, body = (number, line[3:].strip()), []
        else:
            assert line == "```", f"{page_name(page)}:{number}: a block inside a block"
            yield Fence(page, *opened, "\n".join(body) + "\n")
            opened = None
    assert opened is None, f"{page_name(page)}: the block of line {opened} does not end"


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def code_spans(page: Path) -> list[str]:
    """What stands between single backquotes outside of fenced blocks."""
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(page))]
