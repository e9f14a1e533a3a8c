"""The form of a refusal: what it is about, what was expected, what was found, what to do next."""

from __future__ import annotations

import re

from kvstore.errors import FormatTooNew, KVError

_TODO = re.compile(
    r"`(kvferry|ls|ulimit) ?[^`]*`|[Uu]pgrade kvferry|[Gg]ive another folder|don't use it|[Gg]ive the .*folder"
)


def assert_told(error: KVError, *words: str) -> None:
    """Its message is whole sentences in the house form, says nothing twice, and contains ``words``."""
    text = str(error)
    about, separator, rest = text.partition(": ")
    assert separator and about, text
    wanted = "this kvferry (reads|knows) .+, found .+" if isinstance(error, FormatTooNew) else "expected .+, found .+"
    assert re.search(wanted, rest, re.DOTALL), text
    _, end, todo = rest.rpartition(", found ")[2].partition(". ")
    assert end and _TODO.search(todo), f"it does not say what to do: {text}"
    assert text.endswith((".", "`")), text
    assert not re.search(r"(\b[0-9a-f]{64})\S*: \S* ?\1: ", text), f"it names its file twice: {text}"
    unquoted = re.sub(r"'[^']*'", "''", text)
    assert not re.search(r"(?<!\.)\.\.(?!\.)|: :| \.(?!\w)", unquoted), f"doubled or lost: {text}"
    for word in words:
        assert word in text, (word, text)
