"""Typed reading of one JSON object's fields: what is there is checked, what is not asked for is ignored."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvstore.jsonfile import JsonInvalid, read_object, type_name

from .errors import BundleFieldError, field_error, file_missing

T = TypeVar("T")
MAX_TEXT = 65536
_WIDTH = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class Fields:
    """An object of a bundle's JSON, with the file and the dotted place it stands at for the errors.

    Every reader raises `BundleFieldError`. An optional reader takes ``null`` for absent, as the published app does,
    and refuses another type, which the app lets pass for its default.
    """

    file: str
    values: Mapping[str, object]
    at: str = ""

    def place(self, name: str) -> str:
        return f"{self.at}.{name}" if self.at else name

    def error(self, name: str, expected: str, found: str | None = None) -> BundleFieldError:
        """``found`` defaults to the field as it stands."""
        text = found if found is not None else shown(self.values[name]) if name in self.values else "no such field"
        return field_error(self.file, self.place(name), expected, text)

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def child(self, name: str) -> Fields:
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(self.file, value, self.place(name))

    def optional_child(self, name: str) -> Fields | None:
        return self.child(name) if self.has(name) else None

    def text(self, name: str) -> str:
        return self._text(name, "a non-empty string", 1)

    def optional_text(self, name: str) -> str | None:
        """May be empty: a prompt part often is."""
        return self._text(name, "a string", 0) if self.has(name) else None

    def _text(self, name: str, expected: str, least: int) -> str:
        value = self.values.get(name)
        if not isinstance(value, str) or not least <= len(value) <= MAX_TEXT:
            raise self.error(name, expected)
        return value

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        value = self.values.get(name)
        if not isinstance(value, str) or value not in allowed:
            raise self.error(name, " or ".join(repr(a) for a in allowed))
        return value

    def integer(self, name: str, low: int, high: int) -> int:
        value = self.values.get(name)
        if type(value) is not int or not low <= value <= high:
            raise self.error(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float) -> float:
        """A double; an integer counts as the double of its value."""
        value = self.values.get(name)
        if (type(value) is not int and type(value) is not float) or not low <= float(value) <= high:
            raise self.error(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def array(self, name: str, most: int) -> list[object]:
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) > most:
            raise self.error(name, f"an array of at most {most} entries")
        return value

    def each(self, name: str, most: int, expected: str, read: Callable[[object], T | None]) -> tuple[T, ...]:
        """The array's entries through ``read``, which answers None for one that is not ``expected``."""
        return tuple(self._entries(name, self.array(name, most), expected, read))

    def _entries(
        self, name: str, items: list[object], expected: str, read: Callable[[object], T | None]
    ) -> Iterator[T]:
        for i, item in enumerate(items):
            value = read(item)
            if value is None:
                raise self.error(f"{name}[{i}]", expected, shown(item))
            yield value

    def integers(self, name: str, most: int, low: int, high: int) -> tuple[int, ...]:
        return self.each(name, most, f"an integer from {low} to {high}", lambda v: as_integer(v, low, high))

    def numbers(self, name: str, most: int) -> tuple[float, ...]:
        """Finite doubles, not below zero."""
        return self.each(name, most, "a finite number, 0 or more", as_positive_double)

    def by_width(self, name: str) -> dict[int, str]:
        """An object whose keys are widths in tokens (``"512"``); other keys are ignored as unknown."""
        made: dict[int, str] = {}
        inner = self.child(name)
        for key in inner.values:
            if _WIDTH.fullmatch(key):
                if len(key) > 7 or str(int(key)) != key or int(key) < 1:
                    raise inner.error(key, "a width in tokens written without leading zeros", f"the key {key[:20]!r}")
                made[int(key)] = inner.text(key)
        return made


def read_fields(root: Path, name: str, *, limit: int, wanted_by: str) -> tuple[Fields, bytes]:
    """The object in the bundle's file ``name``, at most ``limit`` bytes, and the file's bytes.

    Raises `BundleFieldError`, and `BundleFileMissing`, which quotes ``wanted_by``.
    """
    try:
        value, data = read_object(root / name, limit=limit)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise file_missing(name, wanted_by) from error
    except IsADirectoryError as error:
        raise field_error(name, "the file", "a JSON file", "a folder") from error
    except JsonInvalid as error:
        raise field_error(name, error.field, error.expected, error.found) from error
    return Fields(name, value), data


def as_integer(value: object, low: int, high: int) -> int | None:
    return value if type(value) is int and low <= value <= high else None


def as_positive_double(value: object) -> float | None:
    if type(value) is not int and type(value) is not float:
        return None
    return float(value) if value >= 0 and math.isfinite(value) else None


def shown(value: object) -> str:
    """A value for an error message: the value itself when short, else its type."""
    if value is None:
        return "null"
    text = repr(value)
    return text if len(text) <= 60 else f"{type_name(value)} ({text[:57]}...)"
