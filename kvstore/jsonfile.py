"""Reads a JSON object from a file so that every reader of the file sees the same thing, or refuses.

JSON leaves open what a repeated key, ``NaN``, a number of ten thousand digits or half a surrogate pair mean. Here
each of them is an error, because a file that two readers understand differently says nothing.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NoReturn

from .errors import KVError

MAX_INT = 2**63 - 1
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonInvalid(KVError):
    """A file that is not one well-defined JSON object. ``field`` names the key or place, never a byte offset alone."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message, **details)
        self.file: str = details.get("file", "")
        self.field: str = details.get("field", "")
        self.expected: str = details.get("expected", "")
        self.found: str = details.get("found", "")


def read_object(path: Path, *, limit: int, largest: int = MAX_INT) -> tuple[dict[str, Any], bytes]:
    """The object in ``path`` and the bytes it was parsed from; ``limit``: the largest size accepted, in bytes.

    Raises `JsonInvalid` for anything but one object in UTF-8 with distinct keys, finite numbers and integers of
    magnitude ``largest`` at most (64 bits), and lets `OSError` through.
    """
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        _refuse(path.name, "the file", f"at most {limit} bytes", "a larger file")
    return parse_object(data, path.name, largest=largest), data


def parse_object(data: bytes, file: str, *, largest: int = MAX_INT) -> dict[str, Any]:
    """The object in ``data``; ``file`` is what errors call it. Raises `JsonInvalid`."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            seen: set[str] = set()
            for key, _ in items:
                if key in seen:
                    _refuse(file, key, "each key at most once", "the key twice in one object")
                seen.add(key)
        return made

    def constant(text: str) -> NoReturn:
        _refuse(file, "a number", "a finite number", text)

    def integer(text: str) -> int:
        if len(text) <= 64 and abs(value := int(text)) <= largest:
            return value
        _refuse(
            file,
            "a number",
            f"an integer of at most {largest.bit_length() + 1} bits",
            f"{text[:24]}... ({len(text)} characters)",
        )

    def real(text: str) -> float:
        value = float(text) if len(text) <= 400 else math.inf
        if not math.isfinite(value):
            _refuse(file, "a number", "a number that fits a double", text[:40])
        return value

    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(file, f"byte {error.start}", "UTF-8", f"byte 0x{data[error.start]:02x}", error)
    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_int=integer, parse_float=real)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        _refuse(file, place, "JSON", error.msg[:1].lower() + error.msg[1:], error)
    except RecursionError as error:
        _refuse(file, "the file", "JSON nested a few levels deep", "nesting deeper than can be read", error)
    if not isinstance(value, dict):
        _refuse(file, "the file", "a JSON object", type_name(value))
    if _SURROGATE.search(text) and (lone := _lone_surrogate(value)) is not None:
        _refuse(file, ascii(lone)[1:-1][:60], "whole Unicode characters", "half a surrogate pair")
    return value


def type_name(value: object) -> str:
    """What JSON calls a parsed value's type."""
    if value is None:
        return "null"
    names: dict[type, str] = {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
    return names.get(type(value), "an array" if isinstance(value, list) else "an object")


def _lone_surrogate(value: object) -> str | None:
    """A string somewhere in ``value`` that holds half a surrogate pair; only an escape can write one."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting.extend(item.keys())
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, str) and any("\ud800" <= c <= "\udfff" for c in item):
            return item
    return None


def _refuse(file: str, field: str, expected: str, found: str, cause: Exception | None = None) -> NoReturn:
    raise JsonInvalid(
        f"{file}: {field[:200]}: expected {expected}, found {found}. Take the file from its source again.",
        file=file,
        field=field[:200],
        expected=expected,
        found=found,
    ) from cause
