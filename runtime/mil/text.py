"""The program text: its tokens, and the line of what is wrong with it.

Tokens are taken a statement at a time by one compiled regular expression. They carry no positions: whoever refuses
one runs the expression again to find its line.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import NoReturn

from runtime.mlpackage.errors import PackageError

STRING = r'"(?:[^"\\\n]|\\.)*+"'
COMMENT = r"//[^\n]*+|/\*(?s:.*?)\*/"
_DIGITS = r"0[xX][0-9a-fA-F]*(?:\.[0-9a-fA-F]*)?(?:[pP][-+]?[0-9]+)?|[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?"
_NUMBER = rf"[-+]?(?:{_DIGITS})|[-+](?:inf(?:inity)?|nan)\b"
# The empty token at the end is what a cursor meets when the statement is over.
_TOKEN = re.compile(rf"(?:\s++|{COMMENT})*+({STRING}|[A-Za-z_]\w*+|{_NUMBER}|->|\S|\Z)", re.ASCII)
LIMIT = 1 << 24
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class Text:
    """A program's text and the name by which refusals call its file."""

    def __init__(self, label: str, text: str) -> None:
        self.label = label
        self.text = text

    def line(self, offset: int) -> int:
        """The line, from 1, of a character."""
        return self.text.count("\n", 0, offset) + 1

    def wrong(self, offset: int, field: str, expected: object, found: object, hint: str = "") -> PackageError:
        """The refusal of what stands at ``offset``, with its line."""
        return PackageError.of(self.label, f"line {self.line(offset)}: {field}", expected, found, hint)


class Cursor:
    """The tokens of ``text`` from ``start`` to ``stop``, read one after the other. ``field`` is what refusals call it."""

    def __init__(self, text: Text, start: int, stop: int, field: str) -> None:
        self.text = text
        self.field = field
        if stop - start > LIMIT:
            raise text.wrong(start, field, f"at most {LIMIT} characters", stop - start)
        self._span = (start, stop)
        self._tokens: list[str] = _TOKEN.findall(text.text, start, stop)
        self.at = 0

    @property
    def next(self) -> str:
        """The token ahead; empty at the end."""
        return self._tokens[self.at]

    @property
    def after_next(self) -> str:
        return self._tokens[self.at + 1] if self.next else ""

    def take(self) -> str:
        """The token ahead, and past it; at the end it stays there."""
        token = self._tokens[self.at]
        if token:
            self.at += 1
        return token

    def skip(self, *tokens: str) -> None:
        """Past ``tokens``, which must be ahead."""
        for token in tokens:
            if self._tokens[self.at] != token:
                self.refuse(repr(token))
            self.at += 1

    def taken(self, token: str) -> bool:
        """Past ``token`` if it is ahead."""
        if self._tokens[self.at] != token:
            return False
        self.at += 1
        return True

    def name(self) -> str:
        """Past a name, and the name."""
        if not _NAME.fullmatch(self.next):
            self.refuse("a name")
        return self.take()

    def end(self) -> None:
        """Refuses anything that is still ahead."""
        if self.next:
            self.refuse("the end of it")

    def wrong(self, expected: object, found: object | None = None, hint: str = "") -> PackageError:
        """The refusal of what stands ahead; ``found``: the token, if not given."""
        if found is None:
            found = repr(self.next[:60]) if self.next else "its end"
        return self.text.wrong(self._offset(), self.field, expected, found, hint)

    def refuse(self, expected: str) -> NoReturn:
        raise self.wrong(expected)

    def _offset(self) -> int:
        found = next(islice(_TOKEN.finditer(self.text.text, *self._span), self.at, None), None)
        return found.start(1) if found else self._span[1]
