"""Sizes and tables as plain text: the one way in which every command writes them."""

from __future__ import annotations

import itertools
import re
import textwrap
import unicodedata
from collections.abc import Collection, Sequence

from .errors import InputInvalid

WIDTH = 80
"""Columns where there is no terminal to ask."""

_LEAST = 16
"""Columns that the first column of a table keeps, however narrow the terminal is."""


def size_text(count: int) -> str:
    """Bytes for people, in powers of ten with three digits: ``196 B``, ``1.15 MB``, ``36.9 MB``, ``555 MB``."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            digits = 0 if unit == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
            return f"{value:.{digits}f} {unit}"
        value /= 1000
    return f"{value:,.2f} TB"


def parse_size(text: str) -> int:
    """Bytes from what people write: ``20GB`` and ``20 gb`` in powers of ten, ``512MiB`` in powers of two, a number alone is bytes. `InputInvalid`."""
    from decimal import Decimal

    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)(i?)(b?)\s*", text, re.IGNORECASE | re.ASCII)
    if found is None or (found[3] and not found[2]):
        raise InputInvalid(f"size: expected one like 20GB, 512MiB or 1000000, found {text!r:.60}.")
    factor = (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " ")
    return int(Decimal(found[1]) * factor)


def counted(count: int, what: str) -> str:
    """``1 name``, ``0 names``, ``1,200 names``: ``what`` in the singular."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def table(
    rows: Sequence[Sequence[object]], header: Sequence[str], width: int | None = None, right: Collection[str] = ()
) -> str:
    """Columns padded to their widest cell; numbers, and the columns headed as in ``right``, to the right.

    ``width``: the terminal's, to fit it: the first column gives way first, then the ends of the lines. None: nothing is cut.
    """
    cells = [[f"{c:,}" if isinstance(c, int) else str(c) for c in row] for row in rows]
    aside = [title in right or all(isinstance(row[i], int) for row in rows) for i, title in enumerate(header)]
    widths = [max(_cells(line[i]) for line in [list(header), *cells]) for i in range(len(header))]
    if width is not None and (over := sum(widths) + 2 * (len(widths) - 1) - width) > 0:
        widths[0] = max(min(_LEAST, widths[0]), widths[0] - over)

    def line(row: Sequence[str]) -> str:
        first, *rest = row
        padded = [_pad(c, w, r) for c, w, r in zip([cut(first, widths[0]), *rest], widths, aside, strict=True)]
        return cut("  ".join(padded).rstrip(), width)

    return "\n".join(line(row) for row in [list(header), *cells])


def labelled(rows: Sequence[tuple[str, str]], width: int = WIDTH, indent: str = "") -> str:
    """A label and its text on each line; a text that is too long goes on below itself."""
    column = max(len(label) for label, _ in rows) + 2
    lines: list[str] = []
    for label, text in rows:
        start = indent + label.ljust(column)
        body = textwrap.wrap(text, max(20, width - len(start)), break_long_words=False, break_on_hyphens=False) or [""]
        lines += [start + body[0], *(" " * len(start) + more for more in body[1:])]
    return "\n".join(line.rstrip() for line in lines)


def short(value: object, most: int = 4) -> str | None:
    """A value of an identity in a few words: digests by their start, lists that are longer than ``most`` by their length; None: absent."""
    match value:
        case None:
            return None
        case bool():
            return "yes" if value else "no"
        case str():
            return value[:12] if len(value) == 64 and not set(value) - set("0123456789abcdef") else value
        case list() | tuple():
            return _short_list(list(value), most)
        case _:
            return str(value)


def _short_list(items: list[object], most: int) -> str:
    if items and all(isinstance(item, str) for item in items):
        runs = [(text, len(list(same))) for text, same in itertools.groupby(items)]
        if len(runs) <= most:
            return ", ".join(f"{count} {short(text)}" if count > 1 else f"{short(text)}" for text, count in runs)
    if len(items) <= most:
        return ", ".join(" ".join(map(str, map(short, i))) if isinstance(i, list) else str(short(i)) for i in items)
    return f"{len(items):,} values"


def cut(text: str, width: int | None) -> str:
    """The text, or as much of its start as fits with an ellipsis behind it."""
    if width is None or _cells(text) <= width:
        return text
    while _cells(text) > width - 1:
        text = text[:-1]
    return text + "…"


def _cells(text: str) -> int:
    """Columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in ("W", "F") else 1 for c in text
    )


def _pad(text: str, width: int, right: bool) -> str:
    space = " " * (width - _cells(text))
    return space + text if right else text + space
