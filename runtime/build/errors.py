"""What the builder refuses, and how it says so. ``details`` carry file, field, expected and found where there are any."""

from __future__ import annotations

from kvstore.errors import Corrupt, KVError, Missing


class BuildError(KVError):
    """Root of the builder's refusals."""

    exit_code = 7


class ModelUnknown(BuildError, ValueError):
    """A model name that the builder doesn't know."""

    exit_code = 2


class PackingUnsupported(BuildError, ValueError):
    """A form of the weights that this family isn't built in."""

    exit_code = 2


class SourceMissing(BuildError, Missing):
    """The file with the weights isn't there."""

    exit_code = 3


class SourceDamaged(BuildError, Corrupt):
    """The weights' file is not the file it should be: cut short, out of bounds, or of another SHA-256."""

    exit_code = 4


class SourceFieldError(BuildError, ValueError):
    """A field or tensor of the weights' file that is missing, or not what the builder can convert."""


class ArchitectureUnsupported(SourceFieldError):
    """A weights' file of an architecture that has no graph here."""


class TargetExists(BuildError, FileExistsError):
    """The target folder holds something other than the bundle that would be built."""


class BuildInProgress(BuildError):
    """Another process is building the same target."""


class DiskFull(BuildError):
    """Less room on the target's disk than the build needs. ``details``: needed and free bytes."""


class ToolMissing(BuildError, ImportError):
    """An optional package that only building needs is not installed."""

    exit_code = 3


def field_error(
    file: object, field: str, expected: str, found: object, fix: str, kind: type[SourceFieldError] = SourceFieldError
) -> SourceFieldError:
    """``expected`` is a phrase, ``found`` the value itself (None is an absent field), ``fix`` what to do."""
    shown = "no such field" if found is None else f"{found!r:.80}"
    return kind(
        f"{file}: {field}: expected {expected}, found {shown}. {fix}.",
        file=str(file),
        field=field,
        expected=expected,
        found=shown,
    )


def not_finite(tensor: str, largest: float) -> SourceFieldError:
    """``largest`` magnitude of the tensor, which may be NaN."""
    return field_error("the weights", tensor, "numbers that fp16 can hold (up to 65504)", largest, "Give another file")


def tool_missing(error: ModuleNotFoundError, wanted_by: str, extra: str) -> ToolMissing:
    """``wanted_by`` begins the sentence: what needs the package. ``extra`` is the extra of ours that brings it."""
    return ToolMissing(
        f"{wanted_by} needs {error.name}: expected the package installed, found none. Run: pip install 'kvferry[{extra}]'.",
        package=error.name,
    )
