"""What a parser is to the fuzzer: valid inputs, ways to change them, and a function that reads the changed ones."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import battery
from mutations import Mutate, some_bytes

for _folder in ("runtime", "formats", "cli"):
    if (_path := str(battery.HERE.parent / _folder)) not in sys.path:
        sys.path.append(_path)


@dataclass(frozen=True)
class Case:
    """One parser, ready. ``seeds``: valid inputs, as (which file, its bytes). ``read``: parses changed bytes of that file; raises a `KVError`,
    or an `AssertionError` where it accepted what it should not have, or does not write the same bytes again. ``ways``: how that file's bytes are
    changed. ``seal``: puts right hashes and lengths around changed bytes, so that what lies behind those checks is reached too."""

    seeds: list[tuple[str, bytes]]
    read: Callable[[str, bytes], None]
    ways: Mapping[str, Mutate] = field(default_factory=dict)
    seal: Callable[[str, bytes], bytes] | None = None


@dataclass(frozen=True)
class Parser:
    """``modules``: whose parsing functions an input of it reaches. ``prepare`` gets an empty folder."""

    name: str
    modules: tuple[str, ...]
    prepare: Callable[[Path], Case]


def changed(case: Case, chance: random.Random) -> tuple[str, bytes]:
    """One changed input: (which file, bytes)."""
    file, data = chance.choice(case.seeds)
    way = case.ways.get(file.rpartition(".")[2], case.ways.get("", some_bytes))
    made = way(data, chance)
    if chance.random() < 0.02:
        made = chance.choice([b"", bytes(len(data)), chance.randbytes(200), chance.choice(case.seeds)[1], data + data])
    if case.seal is not None and chance.random() < 0.6:
        made = case.seal(file, made)
    return file, made


def in_folder(folder: Path, good: Path, read: Callable[[Path], object]) -> Callable[[str, bytes], None]:
    """Reads a copy of the folder ``good`` in which one file is another; the copy is made once."""
    copy = folder / "copy"
    shutil.copytree(good, copy)

    def one(file: str, data: bytes) -> None:
        (copy / file).write_bytes(data)
        try:
            read(copy)
        finally:
            shutil.copyfile(good / file, copy / file)

    return one


def files_in(folder: Path, *patterns: str) -> list[tuple[str, bytes]]:
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    return [(path.relative_to(folder).as_posix(), path.read_bytes()) for path in paths]
