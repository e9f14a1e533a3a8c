"""Compiled packages, kept: Core ML loads ``.mlmodelc`` folders, and compiling a package again costs seconds each time.

A compiled folder is found by the name and content of the package it was made from and the system that compiled it. So a changed
package or a new macOS compiles anew, and copies of a bundle share one. The folder is a cache: it may be deleted.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from runtime.bundle.digests import DigestCache
from runtime.bundle.paths import files_below
from runtime.packaging import COMPILED, stem


class CompiledPackages:
    """Below ``folder``: ``<key>/<name>.mlmodelc``. Several processes may use it at once."""

    def __init__(self, folder: Path, digests: DigestCache, system: str) -> None:
        """``system``: whatever makes a compiled package unusable elsewhere; the version of macOS."""
        self._folder = folder
        self._digests = digests
        self._system = system

    def path(self, package: Path, compile: Callable[[Path, Path], None]) -> Path:
        """The compiled form of ``package``: itself where it is compiled already, else made once by ``compile(package, target)``.

        Raises what ``compile`` raises; then nothing is kept.
        """
        if package.suffix == COMPILED:
            return package
        key = self.key(package)
        target = self._folder / key / f"{stem(package.name)}{COMPILED}"
        if target.is_dir():
            return target
        self._folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=self._folder, prefix="tmp-"))
        try:
            compile(package, work / target.name)
            _sync(work)
            try:
                work.rename(self._folder / key)
            except OSError:
                if not target.is_dir():  # else another process was first, with the same content
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return target

    def key(self, package: Path) -> str:
        """Hex: over the system, the package's name, and the name and content of every file of the package."""
        hasher = blake3(derive_key_context="kvferry 2026-11-30 compiled package")
        hasher.update(self._system.encode() + b"\0" + package.name.encode() + b"\0")
        for name in files_below(package, package):
            hasher.update(name.encode() + b"\0" + self._digests.digest(package / name))
        self._digests.save()
        return hasher.hexdigest()


def _sync(root: Path) -> None:
    """fsync of everything below ``root``: a folder that a power cut emptied would be loaded, not compiled again."""
    for path in [*root.rglob("*"), root]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
