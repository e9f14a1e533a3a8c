"""BLAKE3 digests of bundle files, remembered by what the file system says about each file.

A bundle holds gigabytes and is opened for every command. A digest is taken from the cache only for a file whose path,
size, modification time, change time (nanoseconds) and inode are all as they were when it was hashed.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvstore.jsonfile import JsonInvalid, read_object

VERSION = 2
LIMIT = 16 << 20
MAX_FILES = 4096
# A file written again within the clock's grain after it was hashed would keep its times: such a young file is hashed,
# but not remembered.
SETTLED_NS = 100_000_000

Key = tuple[int, int, int, int]
"""Size in bytes, mtime and ctime in nanoseconds, inode."""


def file_key(path: Path) -> Key:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def hash_file(path: Path) -> bytes:
    """The BLAKE3 of a file's bytes, 32 bytes; uses the machine's cores."""
    hasher = blake3(max_threads=blake3.AUTO)
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(4 << 20))
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    return hasher.digest()


@dataclass
class DigestCache:
    """Digests of files by path, and of derived content by the digests it derives from.

    ``file`` None: nothing is remembered beyond this object. Not for two threads at once. The cache is advice: a file
    that cannot be read or parsed counts as empty and is written anew.
    """

    file: Path | None
    _files: dict[str, tuple[Key, bytes]] = field(default_factory=dict)
    _derived: dict[str, bytes] = field(default_factory=dict)
    _dirty: bool = False

    @classmethod
    def open(cls, file: Path | None) -> DigestCache:
        cache = cls(file)
        if file is not None:
            cache._files, cache._derived = _read(file)
        return cache

    def digest(self, path: Path) -> bytes:
        """The BLAKE3 of the file at ``path`` (absolute), 32 bytes, from the cache if the file is untouched."""
        name = str(path)
        key = file_key(path)
        known = self._files.get(name)
        if known is not None and known[0] == key:
            return known[1]
        started = time.time_ns()
        value = hash_file(path)
        if file_key(path) == key and max(key[1], key[2]) < started - SETTLED_NS:
            self._files.pop(name, None)
            self._files[name] = (key, value)
            self._dirty = True
        return value

    def derived(self, name: str, make: Callable[[], bytes]) -> bytes:
        """What ``make`` gives (32 bytes), remembered under ``name``; that names all the content it is made of."""
        if name not in self._derived:
            self._derived[name] = make()
            self._dirty = True
        return self._derived[name]

    def save(self) -> None:
        """Writes what is new, merged with what others wrote meanwhile; a folder that cannot be written is let be."""
        if self.file is None or not self._dirty:
            return
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with _alone(self.file):
                files, derived = _read(self.file)
                for name in self._files:
                    files.pop(name, None)
                _write(self.file, {**files, **self._files}, {**derived, **self._derived})
            self._dirty = False


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Holds the lock beside ``file``, which the kernel frees with the process; two writers then both keep theirs."""
    import fcntl

    handle = os.open(file.with_name(file.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _read(file: Path) -> tuple[dict[str, tuple[Key, bytes]], dict[str, bytes]]:
    empty: tuple[dict[str, tuple[Key, bytes]], dict[str, bytes]] = ({}, {})
    try:
        value, _ = read_object(file, limit=LIMIT)
        if value.get("version") != VERSION or value.pop("check", None) != _check(value):
            return empty
        files: dict[str, tuple[Key, bytes]] = {}
        for name, (size, mtime, ctime, inode, digest) in value["files"].items():
            if not all(type(v) is int for v in (size, mtime, ctime, inode)):
                return empty
            files[name] = (size, mtime, ctime, inode), _digest(digest)
        return files, {name: _digest(digest) for name, digest in value["derived"].items()}
    except (OSError, JsonInvalid, ValueError, TypeError, KeyError, AttributeError):
        return empty


def _check(value: dict[str, Any]) -> str:
    """What shows that nothing in the cache was changed since: a wrong digest here would be another model's identity."""
    return blake3(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _digest(text: str) -> bytes:
    raw = bytes.fromhex(text)
    if len(raw) != 32:
        raise ValueError(f"a digest is 32 bytes, found {len(raw)}")
    return raw


def _write(file: Path, files: dict[str, tuple[Key, bytes]], derived: dict[str, bytes]) -> None:
    """Replaces ``file`` whole; the most recent ``MAX_FILES`` entries stay."""
    value: dict[str, Any] = {
        "version": VERSION,
        "files": {name: [*key, digest.hex()] for name, (key, digest) in list(files.items())[-MAX_FILES:]},
        "derived": {name: digest.hex() for name, digest in list(derived.items())[-MAX_FILES:]},
    }
    handle, made = tempfile.mkstemp(dir=file.parent, prefix=file.name + ".")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump({**value, "check": _check(value)}, out)
            out.flush()
            os.fsync(out.fileno())
        Path(made).replace(file)
    except BaseException:
        Path(made).unlink(missing_ok=True)
        raise
