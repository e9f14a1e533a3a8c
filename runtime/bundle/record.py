"""`kvferry.json`: what the builder recorded about a bundle, and checking the files against it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .config import OURS
from .digests import DigestCache
from .errors import damaged, field_error, file_missing
from .fields import Fields, read_fields, shown
from .paths import inside

RECORD = "kvferry.json"
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

    def verify(self, root: Path, used: Iterable[str], packages: Iterable[str], cache: DigestCache) -> None:
        """Hashes every recorded file that is there. The bundle needs the files ``used``, and every recorded file below
        the folders ``packages``; names are relative to ``root``.

        Raises `BundleDamaged` for a file with another digest, `BundleFileMissing` for a needed one that is not there,
        `BundleFieldError` for a needed one that the record does not cover.
        """
        needed = set(used)
        for package in packages:
            needed.update(name for name in self.files if name.startswith(package + "/"))
        for name in sorted(needed - self.files.keys()):
            fix = f"Rebuild the bundle, or remove {RECORD} to use the bundle without its record"
            raise field_error(RECORD, f"files.{name}", "a digest (the bundle uses this file)", "no such field", fix)
        for name, expected in self.files.items():
            path = inside(root, name, RECORD, f"files.{name}")
            try:
                found = cache.digest(path).hex()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
                if name in needed:
                    raise file_missing(name, f"{RECORD}: files") from error
                continue
            if found != expected:
                raise damaged(name, f"BLAKE3 {expected} ({RECORD})", found)

    def covers(self, package: str) -> bool:
        """Whether any file below the package's folder is recorded."""
        return any(name.startswith(package + "/") for name in self.files)


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
