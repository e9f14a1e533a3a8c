"""Opens a model by its name in a bundle, however it is packaged."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from runtime.mlpackage.package import Package
from runtime.packaging import COMPILED, folder_names

from .compiled import Compiled

Model: TypeAlias = Package | Compiled


def open_model(root: Path, name: str) -> Model:
    """The model called ``name`` in the folder ``root``: its compiled folder where there is one, else the package.

    Raises ``PackageError``, ``PackageMissing``.
    """
    names = folder_names(name) or (name,)
    folder = next((root / choice for choice in names if (root / choice).is_dir()), root / name)
    return Compiled.open(folder) if folder.suffix == COMPILED else Package.open(folder)
