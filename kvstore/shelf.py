"""The folder of a store: `format.json`, objects, records, lock; no index. A folder remote is one of these."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from .errors import FormatTooNew, StoreCorrupt, StoreMissing
from .files import Pending, Root
from .objects import Objects
from .records import Records

FORMAT = 1
FEATURES: tuple[str, ...] = ()
"""Required features that this version knows, beyond format 1 itself."""

FOLDERS = ("objects", "snapshots", "refs", "tmp", "quarantine", "trash")


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

        `StoreMissing`, `StoreCorrupt` (``format.json`` is not ours, or the folder holds something else), `FormatTooNew`.
        """
        if create and not path.is_file() and not os.path.lexists(path / "format.json"):
            _create(path)
        if not path.is_dir():
            raise StoreMissing(f"no store at {path}. `kvferry prefill` and `kvferry pull` make one.", path=str(path))
        shelf = cls(path)
        try:
            shelf._check_format()
            if create:
                shelf._complete()
        except BaseException:
            shelf.close()
            raise
        return shelf

    def _check_format(self) -> None:
        where = self.path / "format.json"
        try:
            value: Any = json.loads(self.root.read("format.json", 1 << 16))
        except FileNotFoundError:
            raise StoreMissing(
                f"no store at {self.path}: it has no format.json. Give the folder of a kvferry store with --store.",
                path=str(self.path),
            ) from None
        except (ValueError, RecursionError) as error:
            raise StoreCorrupt(
                f'{where}: expected {{"format": {FORMAT}, "features": []}}, found {error}. Write that line into it if '
                f"the folder is a kvferry store.",
                path=str(where),
            ) from error
        match value:
            case {"format": int(version), "features": list(features)} if all(isinstance(f, str) for f in features):
                if version > FORMAT:
                    raise FormatTooNew(
                        f"{where}: this kvferry reads stores up to format {FORMAT}, found format {version}. "
                        f"Nothing was changed; upgrade kvferry to open it.",
                        supported=FORMAT,
                        found=version,
                    )
                unknown = sorted(set(features) - set(FEATURES))
                if unknown:
                    raise FormatTooNew(
                        f"{where}: requires the features {unknown}, which this kvferry does not know. "
                        f"Nothing was changed; upgrade kvferry to open it.",
                        features=unknown,
                    )
                if version == FORMAT:
                    return
        raise StoreCorrupt(f"{where}: expected format {FORMAT} and a list of features, found {value!r:.100}")

    def _complete(self) -> None:
        """Puts back empty folders that a copy of the store left out."""
        if not {*FOLDERS, "lock"} <= set(self.root.names("")) or len(self.root.names("objects")) < 256:
            _lay_out(self.root)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Held by a reader while it loads: what a collector moved to ``trash/`` is not deleted meanwhile."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(FileNotFoundError):  # a store that was copied without its empty folders
                stack.enter_context(self.root.lock("trash", exclusive=False))
            yield

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Held from the first dedupe check to the ref: no collector runs meanwhile."""
        with self.root.lock("lock", exclusive=False):
            yield

    @contextlib.contextmanager
    def exclusive(self, seconds: float = 30.0) -> Iterator[None]:
        """Held by a collector, in short slices: no saver or puller runs meanwhile."""
        with self.root.lock("lock", exclusive=True, seconds=seconds):
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
    ours = {*FOLDERS, "lock", "format.json", "index.sqlite", "index.sqlite-wal", "index.sqlite-shm"}
    foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in ours)
    if foreign:
        raise StoreCorrupt(
            f"{path}: expected a kvferry store or an empty folder, found {foreign[:5]}. Give another folder with --store.",
            path=str(path),
        )
    root = Root(path)
    try:
        _lay_out(root)
        value = {"format": FORMAT, "features": list(FEATURES)}
        root.publish([Pending("format.json", [json.dumps(value).encode() + b"\n"])])
    finally:
        root.close()
    for folder in made:  # the entry of every folder just made, in the folder above it
        _sync_folder(folder.parent)


def _lay_out(root: Root) -> None:
    for folder in FOLDERS:
        root.make_folder(folder)
    for fan in range(256):
        root.make_folder(f"objects/{fan:02x}")
    with root.folder("") as fd:
        os.close(os.open("lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd))
    root.sync("objects")
    root.sync("")


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
