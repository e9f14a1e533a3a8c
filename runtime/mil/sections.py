"""Where a program's functions and their statements begin and end: one pass over the text, looking at brackets only.

So a function that nobody asks for is never taken apart, and what is cut off or unbalanced is refused on opening.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from .text import COMMENT, STRING, Cursor, Text

_MARK = re.compile(rf'{STRING}|{COMMENT}|[()\[\]{{}};]|"|/\*')
_CLOSES = {")": "(", "]": "[", "}": "{"}
DEPTH_LIMIT = 32
_FUNCTION_LIMIT = 4096

Mark: TypeAlias = tuple[str, int, int]
"""A bracket or semicolon outside of strings and comments, its offset, and how many brackets are open after it."""


@dataclass(frozen=True, slots=True)
class Section:
    """One function of the text. Offsets: its head from ``head`` to ``body``; statements end at ``ends``, the first
    begins at ``body`` and each other one after the one before; what it returns stands from ``tail`` to ``end``."""

    head: int
    body: int
    ends: tuple[int, ...]
    tail: int
    end: int


def split(text: Text) -> tuple[Section, ...]:
    """The functions of a program, in the text's order. Raises ``PackageError``."""
    marks = _marks(text)
    opened = _until(text, marks, "{", "the program", 0)
    header = Cursor(text, 0, opened, "the program")
    header.skip("program", "(")
    if not header.next.startswith("1."):
        header.refuse("a version 1.x")
    header.take()
    header.skip(")")
    if header.next not in ("", "["):
        header.refuse("'{'")
    sections: list[Section] = []
    head = opened + 1
    for mark, at, _ in marks:
        if mark == "}":
            break
        if mark != "(":
            raise text.wrong(at, "a function", "'(' and its inputs", repr(mark))
        if len(sections) == _FUNCTION_LIMIT:
            raise text.wrong(at, "the program", f"at most {_FUNCTION_LIMIT} functions", "more")
        sections.append(_function(text, marks, head))
        head = sections[-1].end + 1
    else:
        raise text.wrong(len(text.text), "the program", "'}'", "the end of the file")
    Cursor(text, head, at, "the program").end()
    for mark, after, _ in marks:
        raise text.wrong(after, "after the program", "the end of the file", repr(mark))
    Cursor(text, at + 1, len(text.text), "after the program").end()
    return tuple(sections)


def _function(text: Text, marks: Iterator[Mark], head: int) -> Section:
    """The function whose first bracket was the last mark. One bracket is open around it, two are inside it."""
    body = _until(text, marks, "{", "a function", 1) + 1
    ends: list[int] = []
    before = body
    for mark, at, depth in marks:
        if mark == ";" and depth == 2:
            ends.append(at)
            before = at + 1
        elif mark == "}" and depth == 1:
            Cursor(text, before, at, "after the last statement").end()
            end = _until(text, marks, ";", "what a function returns", 1)
            return Section(head, body, tuple(ends), at + 1, end)
    raise text.wrong(len(text.text), "a function", "'}'", "the end of the file")


def _until(text: Text, marks: Iterator[Mark], wanted: str, field: str, around: int) -> int:
    """Where the next ``wanted`` stands that no bracket but the outermost ``around`` ones encloses."""
    for mark, at, depth in marks:
        if mark == wanted and depth == around + (wanted == "{"):
            return at
        if depth < around:
            raise text.wrong(at, field, repr(wanted), repr(mark))
    raise text.wrong(len(text.text), field, repr(wanted), "the end of the file")


def _marks(text: Text) -> Iterator[Mark]:
    """Every mark. Raises ``PackageError`` for brackets that don't match, and strings and comments without an end."""
    opened: list[str] = []
    for found in _MARK.finditer(text.text):
        mark = found[0]
        if mark in "([{":
            if len(opened) == DEPTH_LIMIT:
                raise text.wrong(found.start(), "nesting", f"at most {DEPTH_LIMIT} brackets open", "more")
            opened.append(mark)
        elif mark in _CLOSES:
            before = opened.pop() if opened else None
            if before != _CLOSES[mark]:
                expected = f"{_CLOSES[mark]!r} open before it"
                raise text.wrong(found.start(), f"bracket {mark!r}", expected, repr(before) if before else "none")
        elif mark in ('"', "/*"):
            what = "string" if mark == '"' else "comment"
            raise text.wrong(
                found.start(), what, "its end", "the end of the line" if mark == '"' else "the end of the file"
            )
        elif mark != ";":
            continue
        yield mark, found.start(), len(opened)
