"""A small store with every kind of file, harmed a file at a time; and what must hold then, whoever reads it.

What a name needs is known here file by file: a harmed file must be named by `check`, must stop exactly the names that need it with an
error of ours, and must leave every other name's bytes as they were saved. The index is a cache: harming it may make a search find less,
never anything wrong, and a check makes it anew.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from battery import Lost, WrongBytes
from kvmemory import HEAD, Memory, carry, files, find, object_file, save
from narrow import Narrow

from kvstore import Store, recode
from kvstore.check import Report, check
from kvstore.digest import label_file
from kvstore.errors import KVError
from kvstore.snapshot import Receipt, whole

LONG = [(5 * i) % 97 for i in range(330)]
"""Trimmed, it lacks blocks of the windowed group."""
SAVED: dict[str, list[int]] = {
    "a": [(3 * i) % 90 for i in range(150)],
    "a longer": [*((3 * i) % 90 for i in range(140)), *range(500, 560)],
    "b": list(range(200, 280)),
    "c": list(range(1000, 1128)),
    "trimmed": LONG,
    "cold": [8000, *range(7, 150)],
}
"""What each name stands for; two share their first blocks. The objects of ``cold`` are kept as planes."""
COLD = SAVED["cold"][0]
INDEX = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm")

CODEC, PLANES = 11, 1
"""Where in an object's header its codec stands, and which one planes are (docs/format.md)."""

Needs = Mapping[str, frozenset[str]]


def rows_of(items: Sequence[int]) -> Memory:
    """The rows that are saved with ``items``: bytes without any order, or where the first token says so such as planes make smaller. Only to read."""
    return _rows_of(tuple(items))


@lru_cache(1024)
def _rows_of(items: tuple[int, ...]) -> Memory:
    return Narrow.causal(items) if items[0] == COLD else Memory.causal(items)


def fill(path: Path) -> Needs:
    """Makes the store. Returns, per name, the paths of all files that it needs."""
    needs: dict[str, frozenset[str]] = {}
    with Store.open(path.with_name(f"{path.name}-source")) as source, Store.open(path) as store:
        for name, items in SAVED.items():
            if name == "trimmed":
                carry(source, store, save(source, items, pending=4, head=HEAD).digest)
                made = find(source, [*items, 1])
                store.shelf.records.move_ref(name, None, made.digest)
                digest, snapshot = made.digest, made.snapshot
            else:
                ready: dict[str, Any] = {"pending": 8, "head": HEAD, "receipt": Receipt((8, 9), 2, "cap")}
                made = save(store, items, name=name, rows=rows_of(items), **ready)
                digest, snapshot = made.digest, made.snapshot
            coverage = store.shelf.records.coverage(digest, snapshot)
            assert name == "trimmed" or coverage == whole(digest, snapshot)
            read = {
                str(object_file(path, snapshot.blocks[b][g]).relative_to(path))
                for g in range(len(snapshot.layout.groups))
                for b in coverage.blocks(g)
            }
            records = (f"refs/{label_file(name)}", f"snapshots/{digest}", f"snapshots/{digest}.cov")
            needs[name] = frozenset(read.union(records))
        save(store, list(range(3000, 3070)))  # nobody's
        assert recode.apply(store, recode.plan(store, "planes", ["cold"])).objects
    shutil.rmtree(path.with_name(f"{path.name}-source"))
    return needs


class Scene:
    """The store at ``path``, and its bytes as they should be. ``live``: with its index as a process that was killed left it, half of it in the log."""

    def __init__(self, path: Path, *, live: bool = False) -> None:
        made = path.with_name(f"{path.name}-made")
        self.path, self.needs = path, fill(made)
        with Store.open(made) as store:
            save(store, list(range(4000, 4100)))  # for the log
            if live:
                shutil.copytree(made, path)
        if not live:
            shutil.copytree(made, path)
        shutil.rmtree(made)
        self.kinds = {kind: sorted(found) for kind, found in self._by_kind().items()}
        self._good = {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
        self._when = {str(p.relative_to(path)): p.stat().st_mtime_ns for p in path.rglob("*") if p.is_dir()}

    def _by_kind(self) -> dict[str, list[str]]:
        kinds: dict[str, list[str]] = {"lock": ["lock"], "format": ["format.json"]}
        kinds["index"] = [name for name in INDEX if (self.path / name).exists()]
        for name in files(self.path):
            folder = name.partition("/")[0]
            kind = {"objects": "object", "refs": "ref"}.get(folder, "coverage" if name.endswith(".cov") else "manifest")
            if kind == "object" and (self.path / name).read_bytes()[CODEC] == PLANES:
                kind = "planes"
            if folder in ("objects", "refs", "snapshots"):
                kinds.setdefault(kind, []).append(name)
        return kinds

    def good(self, name: str) -> bytes:
        return self._good[name]

    @contextmanager
    def with_files(self, changed: Mapping[str, bytes]) -> Iterator[None]:
        """The store with other bytes in some files; afterwards it is as it was, whatever was done to it."""
        for name, data in changed.items():
            (self.path / name).write_bytes(data)
        self._restore_times()
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        for folder, folders, names in os.walk(self.path, topdown=False):
            at = Path(folder)
            for name in names:
                if str((at / name).relative_to(self.path)) not in self._good:
                    (at / name).unlink()
            for name in folders:
                if str((at / name).relative_to(self.path)) not in self._when:
                    (at / name).rmdir()
        for name, data in self._good.items():
            place = self.path / name
            if not place.is_file() or place.stat().st_size != len(data) or place.read_bytes() != data:
                place.parent.mkdir(exist_ok=True)
                place.write_bytes(data)

    def _restore_times(self) -> None:
        """The index tells by a folder's time whether it is behind: that must not be what finds the harm."""
        for name, when in self._when.items():
            os.utime(self.path / name, ns=(when, when))


class Seen:
    """How a harmed store was read: which names were refused, what a check said, how much a search found."""

    def __init__(self, path: Path, *, check_again: bool = True) -> None:
        self.path = path
        self.refused: dict[str, KVError] = {}
        self.less = 0
        self.opened: KVError | None = None
        self.report: Report | None = None
        try:
            store = Store.open(path)
        except KVError as error:
            self.opened = told(error)
            return
        with store:
            self._read(store)
            self._search(store, full=False)
            if not check_again:
                return
            self.report = check(store)
        with Store.open(path) as store:
            self._search(store, full=self.report.ok)

    def _read(self, store: Store) -> None:
        for name, items in SAVED.items():
            try:
                match = store.match(name, head=HEAD)
                rows = Memory(match.snapshot.layout, match.n)
                store.load(match, rows)
            except KVError as error:
                self.refused[name] = told(error)
                continue
            if match.n != len(items):
                raise WrongBytes(f"{name}: {match.n} tokens instead of {len(items)}, and no error")
            same(rows, match, items)

    def _search(self, store: Store, *, full: bool) -> None:
        for name, items in SAVED.items():
            asked = [*items, 77777]
            try:
                match = find(store, asked)
                if match is not None:
                    rows = Memory(match.snapshot.layout, match.n)
                    store.load(match, rows)
            except KVError as error:
                if full:
                    raise Lost(f"search for {name!r} after the check: {error}") from error
                told(error)
                continue
            if match is not None:
                same(rows, match, asked)
            if match is None or match.n < len(items):
                self.less += 1
                if full:
                    found = "nothing" if match is None else f"{match.n} tokens"
                    raise Lost(f"search for {name!r} after the check: found {found} of {len(items)} tokens")


def same(rows: Memory, match: Any, items: list[int]) -> None:
    """`WrongBytes` unless ``rows`` are those of the first tokens of ``items`` that the match says."""
    if list(match.snapshot.items[: match.n]) != items[: match.n]:
        raise WrongBytes(f"other tokens' KV: {match.snapshot.items[: match.n]!r:.80}")
    want = rows_of(items[: match.n])
    for group, (first, last) in enumerate(match.runs):
        if last != match.n or rows.rows(group, first, last) != want.rows(group, first, last):
            raise WrongBytes(f"group {group}, rows {first} to {last}")


def told(error: KVError) -> KVError:
    """An error that a person can use; `AssertionError` otherwise."""
    text = str(error)
    assert type(error) is not KVError and 20 < len(text) < 2000 and "Traceback" not in text, repr(error)
    return error


def judge(scene: Scene, changed: Mapping[str, bytes]) -> str:
    """Reads the store with ``changed`` files, and says how that ended: ``found`` or ``same`` (nothing of it matters). Raises otherwise."""
    with scene.with_files(changed):
        seen = Seen(scene.path)
    names = set(changed)
    if "format.json" in names:
        return _judge_format(changed["format.json"], scene.good("format.json"), seen)
    assert seen.opened is None, seen.opened
    assert seen.report is not None
    hurt = {name for name, needed in scene.needs.items() if needed & names}
    if silent := hurt - seen.refused.keys():
        raise WrongBytes(f"read without an error though harmed: {sorted(silent)}")
    if disturbed := seen.refused.keys() - hurt:
        raise Lost(f"not harmed, and refused: {sorted(disturbed)}: {seen.refused[min(disturbed)]}")
    files = names - {"lock", *INDEX}
    if unnamed := files - {problem.path for problem in seen.report.problems}:
        raise AssertionError(f"check does not name {sorted(unnamed)}: {seen.report}")
    if not files:
        assert seen.report.ok, seen.report
        return "found" if seen.less or seen.report.notes else "same"
    return "found"


def _judge_format(harmed: bytes, good: bytes, seen: Seen) -> str:
    try:
        equal = json.loads(harmed) == json.loads(good)
    except (ValueError, RecursionError):
        equal = False
    if not equal:
        assert seen.opened is not None, "format.json says something else, and the store was opened"
        return "found"
    assert seen.opened is None and seen.report is not None and seen.report.ok, seen.opened
    assert not seen.refused, seen.refused
    return "same"
