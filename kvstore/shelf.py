"""The folder of a store: `format.json`, objects, records, lock; no index. A folder remote is one of these."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from .disk import below
from .errors import FormatTooNew, FormatTooOld, StoreBusy, StoreCorrupt, StoreMissing
from .files import Pending, Root, close
from .objects import Objects
from .records import Records

FORMAT = 2
FEATURES: tuple[str, ...] = ("planes",)
"""Features that this version knows, beyond format 2 itself. A store lists those that its reader must know."""

_FORMAT_LINE = json.dumps({"format": FORMAT, "features": []})
_RESTORE_FORMAT = (
    "If a kvferry of this version made the store, write that line into it; else give another folder with --store."
)

TURN = 1.0
"""Seconds for which savers wait behind a collector that can't get the lock."""
_DOOR = "format.json"
"""Locked on the way to ``lock`` by savers (shared) and collectors (exclusive). It keeps the order of those who wait; ``lock`` keeps them apart."""

FOLDERS = ("objects", "snapshots", "refs", "tmp", "quarantine", "trash")
DAMAGED = "damaged"
"""Where repair sets aside what is damaged; made when it is needed, and emptied by nobody but its owner."""


class Shelf:
    """A store's files. Use `Shelf.open`; close it, or use it as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.root = Root(path)
        self.objects = Objects(self.root)
        self.records = Records(self.root)

    @classmethod
    def open(cls, path: Path, *, create: bool = True) -> Self:
        """Opens the store at ``path``; makes an empty one where nothing (or an empty folder) is, if ``create``.

        `StoreMissing` (nothing is there, or an empty folder), `StoreCorrupt` (a file, a folder that holds something else, a store
        whose ``format.json`` is lost or not ours), `FormatTooNew`, `OSError`.
        """
        with below(path):
            return cls._open(path, create)

    @classmethod
    def _open(cls, path: Path, create: bool) -> Self:
        if os.path.lexists(path) and not path.is_dir():
            raise StoreCorrupt.at(
                str(path),
                "store: expected a folder, found something else",
                todo="Give another folder with --store.",
                path=str(path),
            )
        if not os.path.lexists(path / "format.json"):
            if path.is_dir():
                _require_unused(path)
            if not create:
                found = "an empty folder" if path.is_dir() else "nothing"
                raise StoreMissing(
                    f"no store at {path}: expected its format.json, found {found}. `kvferry prefill` and `kvferry pull` make a store.",
                    path=str(path),
                )
            _create(path)
        shelf = cls(path)
        try:
            shelf._check_format()
            if create:
                shelf.complete()
        except BaseException:
            shelf.close()
            raise
        return shelf

    def _check_format(self) -> dict[str, Any]:
        """What ``format.json`` says, of a store that this version can open."""
        where = self.path / "format.json"
        try:
            value: Any = json.loads(self.root.read("format.json", 1 << 16))
        except (ValueError, RecursionError) as error:
            raise self._bad_format(f"something else ({error})") from error
        version = value.get("format") if isinstance(value, dict) else None
        if type(version) is not int or version < 1:  # true is no version
            raise self._bad_format(f"{value!r:.100}")
        if version > FORMAT:  # what else stands there is for its own version to judge
            raise FormatTooNew(
                f"{where}: this kvferry reads stores up to format {FORMAT}, found format {version}. "
                f"Nothing was changed; upgrade kvferry to open it.",
                supported=FORMAT,
                found=version,
            )
        if version < FORMAT:
            raise FormatTooOld(
                f"{where}: expected format {FORMAT}, found format {version}, which no release wrote. "
                f"Give another folder with --store and prefill again; nothing was changed.",
                supported=FORMAT,
                found=version,
            )
        features = value.get("features")
        if not isinstance(features, list) or not all(isinstance(f, str) for f in features):
            raise self._bad_format(f"{value!r:.100}")
        unknown = sorted(set(features) - set(FEATURES))
        if unknown:
            raise FormatTooNew(
                f"{where}: this kvferry knows the features {list(FEATURES)}, found {unknown!r:.200}, which a reader must know. "
                f"Nothing was changed; upgrade kvferry to open it.",
                features=unknown,
            )
        assert isinstance(value, dict)
        return value

    def require(self, feature: str) -> None:
        """Sees to it that ``format.json`` lists a feature, durably: to be called before a file that needs it is published.

        An older kvferry that opens the store from now on refuses it and names the feature. Raises as `open` does. Takes the lock of refs,
        so never under that of snapshots.
        """
        if feature in self._check_format()["features"]:
            return
        with below(self.path), self.records.locked_refs():
            value = self._check_format()  # somebody else may have added another
            features = sorted({*value["features"], feature})
            line = json.dumps({**value, "features": features}, ensure_ascii=False)
            self.root.publish([Pending("format.json", [line.encode() + b"\n"])])

    def _bad_format(self, found: str) -> StoreCorrupt:
        where = str(self.path / "format.json")
        return StoreCorrupt.at(where, f"expected {_FORMAT_LINE}, found {found}", todo=_RESTORE_FORMAT, path=where)

    def complete(self) -> None:
        """Puts back empty folders that a copy of the store left out."""
        if not {*FOLDERS, "lock"} <= set(self.root.names("")) or len(self.root.names("objects")) < 16:
            _lay_out(self.root)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Held by a reader while it loads: what a collector moved to ``trash/`` is not deleted meanwhile."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(below(self.path))
            with contextlib.suppress(FileNotFoundError):  # a store that was copied without its empty folders
                stack.enter_context(self.root.lock("trash", exclusive=False))
            yield

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Held from the first dedupe check to the ref: no collector runs meanwhile. Not re-entrant: a collector that waits is let in first."""
        with below(self.path), contextlib.ExitStack() as held:
            with self.root.lock(_DOOR, exclusive=False):
                held.enter_context(self.root.lock("lock", exclusive=False))
            yield

    @contextlib.contextmanager
    def exclusive(self, seconds: float = 30.0) -> Iterator[None]:
        """Held by a collector, in short slices: no saver or puller runs meanwhile.

        Savers whose work overlaps would never leave the lock free. So whoever comes while this waits, waits behind it: `TURN` seconds at a time,
        lest one long save should hold up all others.
        """
        end = time.monotonic() + seconds
        with below(self.path), contextlib.ExitStack() as held:
            while True:
                try:
                    with self.root.lock(_DOOR, exclusive=True, seconds=max(0.0, end - time.monotonic())):
                        turn = max(0.0, min(TURN, end - time.monotonic()))
                        held.enter_context(self.root.lock("lock", exclusive=True, seconds=turn))
                    break
                except StoreBusy:
                    if time.monotonic() >= end:
                        raise
                time.sleep(TURN / 10)
            yield

    def close(self) -> None:
        self.root.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _create(path: Path) -> None:
    """Lays out an empty store; safe to run twice and at once, complete only when ``format.json`` is there."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    root = Root(path)
    try:
        _lay_out(root)
        root.publish([Pending("format.json", [_FORMAT_LINE.encode() + b"\n"])])
    finally:
        root.close()
    for folder in made:  # the entry of every folder just made, in the folder above it
        _sync_folder(folder.parent)


def _require_unused(path: Path) -> None:
    """Raises `StoreCorrupt` unless a folder without ``format.json`` is empty, or what an interrupted `_create` left."""
    ours = {*FOLDERS, DAMAGED, "lock", "format.json", "index.sqlite", "index.sqlite-wal", "index.sqlite-shm"}
    found = sorted(entry.name for entry in path.iterdir())
    if foreign := [name for name in found if name not in ours]:
        raise StoreCorrupt.at(
            str(path),
            f"expected a kvferry store or an empty folder, found {foreign[:5]} and no format.json",
            todo="Nothing was changed; give another folder with --store.",
            path=str(path),
            foreign=foreign[:5],
        )
    if os.path.lexists(path / "format.json"):  # another process has just made it
        return
    used = [f for f in FOLDERS if f not in ("tmp", "objects") and f in found and any((path / f).iterdir())]
    if "objects" in found and any(any(fan.iterdir()) for fan in (path / "objects").iterdir() if fan.is_dir()):
        used.append("objects")
    if used:
        raise StoreCorrupt.at(
            str(path),
            f"format.json: expected {_FORMAT_LINE}, found no such file beside {', '.join(sorted(used))} that are in use",
            todo=_RESTORE_FORMAT,
            path=str(path),
        )


def _lay_out(root: Root) -> None:
    for folder in FOLDERS:
        root.make_folder(folder)
    for fan in "0123456789abcdef":
        root.make_folder(f"objects/{fan}")
    with root.folder("") as fd:
        close(os.open("lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd))
    root.sync("objects")
    root.sync("")


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        close(fd)
