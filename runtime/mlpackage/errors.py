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
        message = f"{file}: {field}: expected {expected}, found {found}; {advice}"
        details: dict[str, Any] = {
            "file": str(file),
            "field": field,
            "expected": str(expected),
            "found": str(found),
        }
        return cls(message, **details)


NAMES = "correct the function's name under corellm in convert_config.json, or build or copy the package again"
"""What to do where a package has no function of a name that was asked for."""


class PackageMissing(KVError, FileNotFoundError):
    """There is no package, or no manifest in it, at the path that was given."""

    exit_code = 3
