"""What can be wrong with a bundle. Each error names the file, what was expected, what was found, and what to do."""

from __future__ import annotations

from typing import Any

from kvstore.errors import Corrupt, KVError

_AGAIN = "Take the bundle from its source again, or rebuild it"


class BundleError(KVError):
    """Root of the errors about a bundle's folder."""

    exit_code = 4


class BundleFieldError(BundleError):
    """A field of a bundle's JSON that is missing, of another type, out of range, or contradicts another field.

    ``field`` is dotted (``hostio.inv_slide[3]``); ``file`` is relative to the bundle.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message, **details)
        self.file: str = details.get("file", "")
        self.field: str = details.get("field", "")
        self.expected: str = details.get("expected", "")
        self.found: str = details.get("found", "")


class BundleFileMissing(BundleError):
    """A file or package that the bundle's JSON names is not in the folder."""

    exit_code = 3

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message, **details)
        self.file: str = details.get("file", "")


class BundleDamaged(BundleError, Corrupt):
    """A file's bytes are not those that `kvferry.json` or the bundle's own sizes promise."""

    exit_code = 4

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message, **details)
        self.file: str = details.get("file", "")
        self.expected: str = details.get("expected", "")

    @property
    def found(self) -> str:
        """The digest or size that was found."""
        return str(self.details.get("found", ""))


class TokenOutOfRange(BundleError, IndexError):
    """A token id that the embedding has no row for."""

    exit_code = 7


def field_error(file: str, field: str, expected: str, found: str, fix: str = _AGAIN) -> BundleFieldError:
    """``expected`` and ``found`` are phrases; ``fix`` is what to do, a sentence without its full stop."""
    return BundleFieldError(
        f"{file}: {field}: expected {expected}, found {found}. {fix}.",
        file=file,
        field=field,
        expected=expected,
        found=found,
    )


def file_missing(file: str, wanted_by: str) -> BundleFileMissing:
    """``wanted_by``: the file and field that name it, or what it is."""
    return BundleFileMissing(
        f"{file}: expected this file ({wanted_by}), found none. Copy it into the bundle, or make the bundle again with "
        "`kvferry bundle build`.",
        file=file,
    )


def other_weights(copy: str, package: str, file: str, expected: str, found: str) -> BundleDamaged:
    """The compiled model ``copy`` has in ``file`` other weights than the record's of ``package``; names are relative to the bundle."""
    return BundleDamaged(
        f"{copy} is not {package}, compiled: expected {file} with {expected}, found {found}. "
        f"Remove {copy}, so that {package} is used, or compile it again from {package}.",
        package=package,
        file=file,
        expected=expected,
        found=found,
    )


def damaged(file: str, expected: str, found: str, fix: str = _AGAIN) -> BundleDamaged:
    """Digests or sizes as phrases."""
    return BundleDamaged(
        f"{file} is damaged: expected {expected}, found {found}. {fix}.", file=file, expected=expected, found=found
    )
