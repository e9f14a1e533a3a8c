"""The weight files beside a program, found by the names that the program gives them."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from runtime.mlpackage.blob import WeightFile
from runtime.mlpackage.errors import PackageError
from runtime.mlpackage.ir import Blob

_MODEL_PREFIX = "@model_path/"


def file_label(folder: Path, file: Path) -> str:
    """How messages call a file of the package or compiled model ``folder``."""
    return f"{folder.name}/{file.relative_to(folder).as_posix()}"


def file_below(folder: Path, name: str) -> Path | None:
    """The file called ``name`` (with ``/``) below ``folder``; ``None`` where there is none, or the name leads out."""
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts:
        return None
    path = folder / relative
    try:
        return path if path.is_file() else None
    except OSError:  # a loop of links, a part of the name too long: no file can be opened there
        return None


class Weights:
    """Maps each weight file when it is first read, and holds it until dropped. One thread at a time."""

    def __init__(self, folder: Path, program: Path) -> None:
        """``program``: the file in ``folder`` that names the weights; names count from where it is."""
        self._folder = folder
        self._program = program
        self._files: dict[str, WeightFile] = {}

    def view(self, blob: Blob) -> NDArray[np.generic]:
        """The stored elements of ``blob``, shaped, not dequantised. Raises ``PackageError``."""
        file = self._files.get(blob.file)
        if file is None:
            path = self._path(blob.file)
            label = file_label(self._folder, path)
            try:
                file = self._files[blob.file] = WeightFile(path, label)
            except OSError as error:
                raise PackageError.of(label, "content", "a file that can be mapped", error.strerror) from error
        return file.view(blob.offset, blob.spec)

    def _path(self, name: str) -> Path:
        label = file_label(self._folder, self._program)
        if not name.startswith(_MODEL_PREFIX):
            raise PackageError.of(label, "weight file", f"a path below {_MODEL_PREFIX}", name[:80])
        path = file_below(self._program.parent, name.removeprefix(_MODEL_PREFIX))
        if path is None:
            raise PackageError.of(label, "weight file", f"a file below {_MODEL_PREFIX}", f"no {name[:80]}")
        return path
