"""`kvferry.json`: what the builder recorded about a bundle, and checking the files against it."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .config import OURS
from .digests import DigestCache
from .errors import damaged, field_error, file_missing, other_weights
from .fields import Fields, read_fields, shown
from .paths import COMPILED, PACKAGE, WEIGHTS_FOLDER, inside, stem

RECORD = "kvferry.json"
COMPILED_PROGRAM = "model.mil"
LIMIT = 8 << 20
MAX_FILES = 65536
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Record:
    """``weights``: the canonical weight digest, the same for every packaging; ``heads``: the heads'; hex.

    ``files``: BLAKE3 of each file as hex, by its name relative to the bundle.
    """

    weights: str
    heads: str
    files: dict[str, str]

    def verify(self, root: Path, used: Iterable[str], spare: Container[str], cache: DigestCache) -> None:
        """Hashes every recorded file. ``used`` must be recorded; of the recorded ones only ``spare`` may be absent. Names
        are relative to ``root``.

        Raises `BundleDamaged` for a file with another digest, `BundleFileMissing` for one that is not there,
        `BundleFieldError` for a used one that the record does not cover.
        """
        for name in sorted(set(used) - self.files.keys()):
            fix = f"Rebuild the bundle, or remove {RECORD} to use the bundle without its record"
            raise field_error(RECORD, f"files.{name}", "a digest (the bundle uses this file)", "no such field", fix)
        paths = {name: inside(root, name, RECORD, f"files.{name}") for name in self.files}
        # what is gone is found before gigabytes are hashed
        for name in [name for name, path in paths.items() if not path.is_file()]:
            if name not in spare:
                raise file_missing(name, f"{RECORD}: files")
            del paths[name]
        for name, path in paths.items():
            found = cache.digest(path).hex()
            if found != self.files[name]:
                raise damaged(name, f"BLAKE3 {self.files[name]} ({RECORD})", found)

    def verify_compiled(self, root: Path, copies: Iterable[str], cache: DigestCache) -> None:
        """Compares the weight files of the compiled models ``copies`` with the record's: those of the copy itself where it is recorded, else
        those of the package that it stands for. Programs can't be compared: the compiler writes another one.

        Raises `BundleDamaged` where one differs, is absent, or is in no record: then the record's identity isn't this copy's.
        """
        for copy in copies:
            package, expected = copy, self._weights(copy)
            if not expected:
                package = stem(copy) + PACKAGE
                expected = self._weights(package)
            folder = f"{copy}/{WEIGHTS_FOLDER}"
            found = {name for name in _names(root / folder) if not name.startswith(".")}  # Finder leaves such
            if not expected:
                raise other_weights(copy, package, RECORD, f"the digest of a weight file of {package}", "none")
            for name in sorted(expected.keys() | found):
                file = f"{folder}/{name}"
                wanted = (
                    f"BLAKE3 {expected[name]} ({RECORD}: {package})" if name in expected else f"no place in {RECORD}"
                )
                if name not in expected or name not in found:
                    raise other_weights(copy, package, file, wanted, "such a file" if name in found else "no such file")
                digest = cache.digest(inside(root, file, RECORD, f"files.{package}")).hex()
                if digest != expected[name]:
                    raise other_weights(copy, package, file, wanted, digest)

    def _weights(self, folder: str) -> dict[str, str]:
        """The recorded digests of the weight files below ``folder``, by the files' own names."""
        paths = {PurePosixPath(name): digest for name, digest in self.files.items() if name.startswith(folder + "/")}
        return {path.name: digest for path, digest in paths.items() if path.parent.name == WEIGHTS_FOLDER}

    def covers(self, folder: str) -> bool:
        """Whether the program in the folder of a package or compiled model is recorded."""
        if folder.endswith(COMPILED):
            return f"{folder}/{COMPILED_PROGRAM}" in self.files
        return any(name.startswith(folder + "/") for name in self.files)


def _names(folder: Path) -> list[str]:
    """The files that stand in ``folder`` itself."""
    return [path.name for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []


def read_record(root: Path) -> Record | None:
    """The bundle's record, or None where it has none. Raises `BundleFieldError`."""
    if not (root / RECORD).exists():
        return None
    fields, _ = read_fields(root, RECORD, limit=LIMIT, wanted_by="the builder's record")
    fields.choice("format", (OURS,))
    files = fields.child("files")
    if len(files.values) > MAX_FILES:
        raise fields.error("files", f"at most {MAX_FILES} files", f"{len(files.values)}")
    return Record(_hex(fields, "weights"), _hex(fields, "heads"), {n: _hex(files, n) for n in files.values})


def _hex(fields: Fields, name: str) -> str:
    value = fields.values.get(name)
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        found = shown(value) if name in fields.values else None
        raise fields.error(name, "a BLAKE3 digest, 64 lowercase hex digits", found)
    return value
