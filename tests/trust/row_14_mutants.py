"""Mutants of our own safety code: each passes as long as nothing goes wrong, and each must be caught. So the battery can fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from battery import HERE, Size, Tally
from mutants import MUTANTS, Mutant

TITLE = "mutants of our own safety code, each caught"
REQUIRED = 20
WORKERS = 2
SEEDS = 6
"""How often a row is tried, each time with other attempts of its smallest size."""

ROOT = HERE.parents[1]
COPIED = ("kvstore", "runtime", "sync", "tests", "pyproject.toml")


def run(size: Size, tally: Tally, scratch: Path) -> None:
    for mutant in MUTANTS:
        count = (ROOT / mutant.file).read_text().count(mutant.old)
        assert count == 1, (
            f"{mutant.name}: expected its text once in {mutant.file}, found it {count} times: mend mutants.py"
        )
    trees = [_Tree(scratch / f"tree-{number}") for number in range(WORKERS)]
    idle = threading.Semaphore(WORKERS)
    sound = _Sound(_Tree(scratch / "sound"))
    counted = threading.Lock()

    def one(mutant: Mutant) -> None:
        with idle:
            tree = trees.pop()
            try:
                caught = _caught(tree, mutant, sound)
                error = None
            except Exception as failure:
                caught, error = None, failure
            finally:
                trees.append(tree)
        with counted, tally.attempt(f"mutant: {mutant.name}"):
            if error is not None:
                raise error
            assert caught is not None, f"nobody noticed: {mutant.caught_by}"
            tally.facts[f"caught by {caught}"] = tally.facts.get(f"caught by {caught}", 0) + 1

    chosen = MUTANTS[:: max(1, len(MUTANTS) // size.pick(2, len(MUTANTS), len(MUTANTS)))]
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(one, chosen))


class _Tree:
    """A copy of the project."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, path / name)
            else:
                shutil.copy2(source, path / name)

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        file = self.path / mutant.file
        shutil.copy2(file, self.path / "before")
        try:
            file.write_text(file.read_text().replace(mutant.old, mutant.new))
            yield
        finally:
            shutil.move(self.path / "before", file)

    def passes(self, what: int | str, seed: int) -> bool:
        """Whether a row or a test passes here; 0 is what the operations do undisturbed."""
        trust = self.path / "tests" / "trust"
        if what == 0:
            command = [str(trust / "undisturbed.py")]
        elif isinstance(what, int):
            command = [str(trust / "battery.py"), "--smoke", "--rows", str(what), "--seed", str(seed)]
        else:
            command = ["-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", what]
        env = {**os.environ, "PYTHONPATH": str(self.path), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, *command], cwd=self.path, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )  # fmt: skip
        if isinstance(what, str) and done.returncode not in (0, 1):
            raise AssertionError(f"{what} could not be run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.returncode == 0


class _Sound:
    """The project as it is: what catches a mutant must pass here."""

    def __init__(self, tree: _Tree) -> None:
        self._tree = tree
        self._locks: defaultdict[tuple[int | str, int], threading.Lock] = defaultdict(threading.Lock)
        self._known: dict[tuple[int | str, int], bool] = {}

    def passes(self, what: int | str, seed: int) -> bool:
        with self._locks[what, seed]:
            if (what, seed) not in self._known:
                self._known[what, seed] = self._tree.passes(what, seed)
            return self._known[what, seed]


def _caught(tree: _Tree, mutant: Mutant, sound: _Sound) -> str | None:
    """By what it was caught, None if by nothing."""
    with tree.mutated(mutant):
        assert tree.passes(0, 0), "it does not even work undisturbed, so that it proves nothing"
        for what in mutant.caught_by:
            for seed in range(1, SEEDS + 1 if isinstance(what, int) else 2):
                if not tree.passes(what, seed):
                    assert sound.passes(what, seed), f"{what} (seed {seed}) fails without the mutant, too"
                    return f"row {what}" if isinstance(what, int) else "a test"
    return None
