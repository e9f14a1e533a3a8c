"""Refusals of the package reader: absent, or not as it should be. Either way a caller needs another package."""

from __future__ import annotations

from typing import Any

from kvstore.errors import KVError


class PackageError(KVError):
    """A ``.mlpackage`` that can't be read as written. ``details`` carry file, field, expected and found."""

    exit_code = 4

    @classmethod
    def of(cls, file: object, field: str, expected: object, found: object, hint: str = "") -> PackageError:
        """The refusal of one ``field`` of ``file``; ``hint`` says what to do beyond building it again."""
        advice = hint or "build or copy the package again"
        field, told, seen = _bounded(field), _bounded(expected), _bounded(found)
        message = f"{file}: {field}: expected {told}, found {seen}; {advice}"
        details: dict[str, Any] = {"file": str(file), "field": field, "expected": told, "found": seen}
        return cls(message, **details)


LONGEST = 1000
"""Characters of each part of a message: what stands in a file may be as long as the file."""


def _bounded(part: object) -> str:
    text = str(part)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


NAMES = "correct the function's name under corellm in convert_config.json, or build or copy the package again"
"""What to do where a package has no function of a name that was asked for."""


class PackageMissing(KVError, FileNotFoundError):
    """There is no package, or no manifest in it, at the path that was given."""

    exit_code = 3
