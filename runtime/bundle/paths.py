"""From a name in a bundle's JSON to a path that is inside the bundle, or a refusal."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ..packaging import COMPILED, PACKAGE, folder_names, stem
from .errors import field_error, file_missing

__all__ = [
    "COMPILED",
    "PACKAGE",
    "WEIGHTS_FOLDER",
    "disk_bytes",
    "files_below",
    "folder_of",
    "inside",
    "package_of",
    "stem",
]

MAX_NAME = 1024
WEIGHTS_FOLDER = "weights"


def inside(root: Path, name: str, file: str, field: str) -> Path:
    """The path that ``name`` (relative, with ``/``) has below ``root``; it need not exist.

    ``root`` is resolved already. ``file`` and ``field`` say where the name was read. Raises `BundleFieldError` for an
    absolute name, a ``..``, a backslash, a control character, or a symbolic link that leads out of the bundle.
    """
    parts = name.split("/")
    if (
        not name
        or len(name) > MAX_NAME
        or any(part in ("", ".", "..") for part in parts)
        or any(c in "\\:" or ord(c) < 32 or ord(c) == 127 for c in name)
    ):
        raise field_error(file, field, "a relative file name inside the bundle", f"{name[:80]!r}")
    path = root.joinpath(*parts)
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(root):
        raise field_error(
            file,
            field,
            "a file inside the bundle",
            f"{name[:80]!r}, a link to {real}",
            "Copy the file itself into the bundle",
        )
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # whoever needs the file says what it is for
    except OSError as error:  # a loop of links, a name too long, no permission
        raise field_error(file, field, "a file that can be opened", f"{name[:80]!r} ({error.strerror})") from error
    return path


def package_of(root: Path, name: str, file: str, field: str) -> Path:
    """The folder of the model called ``name``: its compiled folder where there is one, else the package.

    Raises `BundleFileMissing` where there is neither, `BundleFieldError` for a name of another kind.
    """
    if not (names := folder_names(name)):
        raise field_error(file, field, f"a name ending in {PACKAGE} or {COMPILED}", f"{name[:80]!r}")
    inside(root, name, file, field)
    for path in (inside(root, choice, file, field) for choice in names):
        if path.is_dir():
            return path
    raise file_missing(name, f"{file}: {field}")


def folder_of(name: str) -> str | None:
    """The package or compiled folder that the file called ``name`` is in; ``None`` for one that is in none."""
    parts = name.split("/")
    for i, part in enumerate(parts[:-1]):
        if part.endswith((PACKAGE, COMPILED)):
            return "/".join(parts[: i + 1])
    return None


def disk_bytes(root: Path) -> int:
    """Bytes of the files below ``root``; those of a file with several names count once."""
    sizes: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(OSError):  # a link to nothing
                stat = Path(folder, name).stat()
                sizes[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(sizes.values())


def files_below(root: Path, package: Path) -> list[str]:
    """Every file of a package as names relative to ``root``, sorted; hidden files, which Finder leaves, are not its."""
    found: list[str] = []
    for folder, _, names in os.walk(package):
        found += [(Path(folder) / n).relative_to(root).as_posix() for n in names if not n.startswith(".")]
    return sorted(found)
