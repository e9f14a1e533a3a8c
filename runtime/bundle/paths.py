"""From a name in a bundle's JSON to a path that is inside the bundle, or a refusal."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import field_error, file_missing

PACKAGE = ".mlpackage"
COMPILED = ".mlmodelc"
MAX_NAME = 1024


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


def package_of(root: Path, name: str, file: str, field: str, *, compiled_first: bool) -> Path:
    """The folder to load for the package called ``name``: itself, or its compiled sibling.

    Core ML loads the compiled folder, other engines read the package: ``compiled_first`` says which one is wanted
    where both exist. Raises `BundleFileMissing` where neither does.
    """
    given = inside(root, name, file, field)
    if name.endswith(COMPILED):
        choices = [given]
    elif name.endswith(PACKAGE):
        sibling = inside(root, name.removesuffix(PACKAGE) + COMPILED, file, field)
        choices = [sibling, given] if compiled_first else [given, sibling]
    else:
        raise field_error(file, field, f"a name ending in {PACKAGE} or {COMPILED}", f"{name[:80]!r}")
    for path in choices:
        if path.is_dir():
            return path
    raise file_missing(name, f"{file}: {field}")


def stem(name: str) -> str:
    """A package's name without its packaging."""
    return name.removesuffix(PACKAGE).removesuffix(COMPILED)


def files_below(root: Path, package: Path) -> list[str]:
    """Every file of a package as names relative to ``root``, sorted; hidden files, which Finder leaves, are not its."""
    found: list[str] = []
    for folder, _, names in os.walk(package):
        found += [(Path(folder) / n).relative_to(root).as_posix() for n in names if not n.startswith(".")]
    return sorted(found)
