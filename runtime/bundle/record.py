"""`kvferry.json`: what the builder recorded about a bundle, and checking the files against it."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
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
