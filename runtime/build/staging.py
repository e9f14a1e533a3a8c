"""The folder a bundle grows in: parts that appear whole, and a note of which are done.

A part is written into ``.part`` and renamed into place after an fsync; only then is it noted in ``.state.json``. So a build that was killed
can be taken up again, and nothing half written is ever mistaken for a part.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvstore.errors import KVError
from runtime.build.digests import TensorDigest
from runtime.build.durable import sync_tree
from runtime.build.errors import BuildInProgress, ToolMissing

_STATE = ".state.json"
_PART = ".part"
_SCRATCH = ".scratch"

Recipe = Mapping[str, Any]


class Staging:
    """A staging folder for the bundle that ``recipe`` (plain JSON values) describes. Keep it open with :func:`staging`."""

    def __init__(self, root: Path, recipe: Recipe) -> None:
        self.root = root
        self._recipe = dict(recipe)
        self._done: dict[str, dict[str, TensorDigest]] = {}
        self._recover()
        self.scratch.mkdir(exist_ok=True)

    @property
    def own(self) -> tuple[str, ...]:
        """The entries that are not the bundle's."""
        return _STATE, _PART, _SCRATCH

    @property
    def scratch(self) -> Path:
        """A folder for whatever is needed while building."""
        return self.root / _SCRATCH

    @property
    def done(self) -> frozenset[str]:
        """The parts that are whole."""
        return frozenset(self._done)

    def digests(self) -> dict[str, TensorDigest]:
        """The tensor digests that all parts so far have noted."""
        return {name: digest for noted in self._done.values() for name, digest in noted.items()}

    def add(self, part: str, write: Callable[[Path], Mapping[str, TensorDigest]]) -> None:
        """Have ``write`` make the part's files in the empty folder it is given, then move them into place and note the part."""
        if part in self._done:
            return
        fresh = self.root / _PART
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        digests = write(fresh)
        sync_tree(fresh)
        for entry in sorted(fresh.iterdir()):
            target = self.root / entry.name
            if target.is_dir():
                shutil.rmtree(target)
            entry.replace(target)
        fresh.rmdir()
        self._done[part] = dict(digests)
        self._note()

    def finish(self) -> None:
        """Drop the bookkeeping; the folder then holds the bundle's files only."""
        shutil.rmtree(self.scratch)
        (self.root / _STATE).unlink()
        self._done = {}  # without the note nobody can take it up again

    def drop(self) -> None:
        """Free everything."""
        shutil.rmtree(self.root, ignore_errors=True)

    def leave(self, error: BaseException) -> None:
        """Free what a later build has no use for: what is half made, and everything if no part is whole. ``error`` gets a note of what is left."""
        if not self._done:
            self.drop()
            return
        for unfinished in (self.scratch, self.root / _PART):
            shutil.rmtree(unfinished, ignore_errors=True)
        error.add_note(
            f"What is finished so far stays in {self.root}: running the same command again goes on from there. "
            "If you don't want to, delete that folder."
        )

    def _recover(self) -> None:
        try:
            state = json.loads((self.root / _STATE).read_bytes())
        except (OSError, ValueError):
            state = None
        if isinstance(state, dict) and state.get("recipe") == self._recipe:
            for part, noted in state["done"].items():
                self._done[part] = {
                    name: TensorDigest(d["dtype"], tuple(d["shape"]), d["content"]) for name, d in noted.items()
                }
            return
        for entry in self.root.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self._note()

    def _note(self) -> None:
        done = {part: {name: asdict(digest) for name, digest in noted.items()} for part, noted in self._done.items()}
        fresh = self.root / f"{_STATE}.new"
        fresh.write_text(json.dumps({"recipe": self._recipe, "done": done}), encoding="utf-8")
        sync_tree(fresh)
        fresh.replace(self.root / _STATE)


@contextmanager
def staging(target: Path, recipe: Recipe) -> Iterator[Staging]:
    """The staging folder beside ``target``, ours alone while open.

    If the block is refused, nothing stays: the same source would be refused again. If it is interrupted, or the disk fails or a tool is missing,
    whole parts stay for the next build, and a note on the exception says where.

    Raises BuildInProgress when another process is building the same target.
    """
    root = target.parent / f".{target.name}.building"
    root.mkdir(parents=True, exist_ok=True)
    handle = os.open(root, os.O_RDONLY)  # a lock on the folder itself leaves no file behind
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BuildInProgress(
                f"{target}: expected nobody building this bundle, found a process that holds {root}. Wait for it, or stop it first.",
                target=str(target),
            ) from error
        stage = Staging(root, recipe)
        try:
            yield stage
        except ToolMissing as error:
            stage.leave(error)
            raise
        except KVError:
            stage.drop()
            raise
        except BaseException as error:
            stage.leave(error)
            raise
    finally:
        os.close(handle)
