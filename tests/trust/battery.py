"""The battery: what could go wrong with a store is done to it, many times over, and counted. `make trust` runs it.

    battery.py [--smoke | --nightly] [--rows 1,3] [--json FILE] [--jobs N]

A row is a module ``row_NN_name.py`` beside this file, with

    TITLE = "bit flips over every file type"
    REQUIRED = 2_000            # attempts at CI size; or a sentence ("all sites") where the row itself knows what all of them are
    def run(size: Size, tally: Tally, scratch: Path) -> None: ...

``scratch`` is an empty folder, in memory where there is such a file system, gone afterwards. Each row runs in a process of its own, so
it may replace functions and set limits. What it tries, it tries within `Tally.attempt`: a fault was done to the store, and what was
promised held (``caught``), or not. An attempt ends badly by raising: `Lost` (something that was acknowledged is gone), `WrongBytes`
(other bytes came back without an error), or anything else, an `AssertionError` for instance; the row goes on with the next attempt.
A fault that provably changes nothing (a flipped bit in a byte nobody reads) is marked with `Tally.harmless` inside its attempt.
``facts``: further plain numbers of the row, for its record. Same size and seed, same attempts; a row that needs a program says so
with `need`: missing, the row is skipped on a developer's machine and fails where CI=true.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SHOWN = 20
"""Failures of a row whose story is kept; all are counted."""

for _neighbour in ("kvstore", "sync", ""):  # their `kvmemory`, `ferries`, `optional`
    if (_path := str(HERE.parent / _neighbour)) not in sys.path:
        sys.path.append(_path)


class Lost(AssertionError):
    """Something that had been acknowledged is not there any more."""


class WrongBytes(AssertionError):
    """Bytes came back without an error and are not those that went in."""


class Missing(Exception):
    """A program that the row needs is not here, or the row may not use it."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much a row does: `pick` a figure, draw from ``seed``."""

    name: str = "ci"
    seed: int = 1

    def pick(self, smoke: int, ci: int, nightly: int | None = None) -> int:
        """The figure of this size; ten times that of CI at night unless told otherwise."""
        return {"smoke": smoke, "ci": ci, "nightly": 10 * ci if nightly is None else nightly}[self.name]


@dataclass(slots=True)
class Tally:
    """What a row counted."""

    tried: int = 0
    caught: int = 0
    unused: int = 0
    lost: int = 0
    wrong_bytes: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)
    facts: dict[str, int | float] = field(default_factory=dict)
    _harmless: bool = False

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """One attempt; ``what`` it did is told if it ends badly. Swallows its exceptions, but not the end of the process."""
        self.tried += 1
        self._harmless = False
        try:
            yield
        except Missing:
            self.tried -= 1
            raise
        except Exception as error:
            self.fail(what, error)
        else:
            self.unused += self._harmless
            self.caught += not self._harmless

    def harmless(self) -> None:
        """The attempt that runs is proven to have no effect."""
        self._harmless = True

    def fail(self, what: str, error: BaseException) -> None:
        """Counts a failure that no `attempt` caught, after the row's process or thread told of it."""
        self.lost += isinstance(error, Lost)
        self.wrong_bytes += isinstance(error, WrongBytes)
        self.failed += not isinstance(error, Lost | WrongBytes)
        if len(self.failures) < SHOWN:
            self.failures.append(f"{what}: {''.join(traceback.format_exception(error)).strip()}")

    def add(self, other: dict[str, Any]) -> None:
        """Joins what another process counted, `plain` there."""
        for name in ("tried", "caught", "unused", "lost", "wrong_bytes", "failed"):
            setattr(self, name, getattr(self, name) + other[name])
        self.failures += other["failures"][: SHOWN - len(self.failures)]
        for name, value in other["facts"].items():
            self.facts[name] = self.facts.get(name, 0) + value

    def plain(self) -> dict[str, Any]:
        names = ("tried", "caught", "unused", "lost", "wrong_bytes", "failed", "failures", "facts")
        return {name: getattr(self, name) for name in names}


def need(program: str) -> str:
    """The path of a program; `Missing`."""
    found = shutil.which(program)
    if found is None:
        raise Missing(f"{program} is not installed; .ci/apt installs it on Debian")
    return found


def rows() -> dict[int, str]:
    """The module of each row, by number."""
    return {int(path.stem.split("_")[1]): path.stem for path in sorted(HERE.glob("row_[0-9][0-9]_*.py"))}


@contextmanager
def scratch_folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    usable = memory.is_dir() and os.access(memory, os.W_OK)
    with tempfile.TemporaryDirectory(prefix="kvferry-trust-", dir=memory if usable else None) as path:
        yield Path(path)


def run_row(number: int, size: Size) -> dict[str, Any]:
    """Runs a row in this process; its line of the report."""
    module = importlib.import_module(rows()[number])
    tally, skipped, began = Tally(), None, time.monotonic()
    run: Callable[[Size, Tally, Path], None] = module.run
    with scratch_folder() as scratch:
        try:
            run(size, tally, scratch)
        except Missing as error:
            skipped = str(error)
        except Exception as error:
            tally.fail("the row itself", error)
    return judged(number, module.TITLE, module.REQUIRED, size, tally, skipped, time.monotonic() - began)


def judged(
    number: int, title: str, required: int | str, size: Size, tally: Tally, skipped: str | None, seconds: float
) -> dict[str, Any]:
    """A row's line: it is ok when it tried what it must, every attempt was caught or unused, and nothing was lost."""
    enough = tally.tried >= required if isinstance(required, int) and size.name != "smoke" else tally.tried > 0
    bad = tally.lost or tally.wrong_bytes or tally.failed or tally.caught + tally.unused < tally.tried
    excused = skipped is not None and os.environ.get("CI") != "true"
    return {
        "row": number,
        "title": title,
        "required": required,
        **tally.plain(),
        "seconds": round(seconds, 1),
        "skipped": skipped,
        "ok": excused if skipped is not None else bool(enough and not bad),
    }


def run_apart(number: int, size: Size) -> dict[str, Any]:
    """Runs a row in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--row", str(number), "--size", size.name]
    began = time.monotonic()
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        done = subprocess.run(
            [*command, "--seed", str(size.seed), "--json", file.name], stdout=subprocess.DEVNULL, check=False
        )
        written = file.read()
    if done.returncode == 0 and written:
        line: dict[str, Any] = json.loads(written)
        return line
    tally = Tally()
    tally.fail("the row's process", RuntimeError(f"ended with {done.returncode} and without a result"))
    return judged(number, rows()[number], 0, size, tally, None, time.monotonic() - began)


def report(size: Size, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The whole record. ``rows`` by number."""
    names = ("tried", "caught", "unused", "lost", "wrong_bytes", "failed", "seconds")
    return {
        "size": size.name,
        "seed": size.seed,
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "rows": {str(line["row"]): line for line in lines},
        **{name: round(sum(line[name] for line in lines), 1) for name in names},
        "skipped": [line["row"] for line in lines if line["skipped"] is not None],
        "ok": all(line["ok"] for line in lines),
    }


def row_text(line: dict[str, Any]) -> str:
    counts = f"tried {line['tried']}, caught {line['caught']}, unused {line['unused']}"
    ended = f"lost {line['lost']}, wrong bytes {line['wrong_bytes']}, failed {line['failed']}"
    verdict = "ok" if line["ok"] else "NOT OK"
    if line["skipped"] is not None:
        verdict += f", skipped: {line['skipped']}"
    return f"row {line['row']:2} {line['title']}: {counts}, {ended}; {line['seconds']} s; {verdict}"


def summary(record: dict[str, Any]) -> str:
    """The last line."""
    counts = (
        f"{len(record['rows'])} rows, {record['tried']} tried, {record['caught']} caught, {record['unused']} unused"
    )
    ended = f"{record['lost']} lost, {record['wrong_bytes']} wrong bytes, {record['failed']} failed"
    skipped = f", {len(record['skipped'])} skipped" if record["skipped"] else ""
    return f"trust ({record['size']}): {'ok' if record['ok'] else 'NOT OK'}: {counts}, {ended}{skipped}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--smoke", dest="size", action="store_const", const="smoke", help="a few seconds a row")
    sizes.add_argument(
        "--nightly", dest="size", action="store_const", const="nightly", help="the same with more rounds"
    )
    sizes.add_argument("--size", choices=("smoke", "ci", "nightly"), help=argparse.SUPPRESS)
    parser.add_argument("--rows", default="", help="numbers, with commas; all by default")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="rows at once")
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    size = Size(options.size or "ci", options.seed)
    if options.row is not None:
        options.json.write_text(json.dumps(run_row(options.row, size)))
        return 0
    chosen = [int(number) for number in options.rows.split(",") if number] or list(rows())
    lines = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for line in pool.map(lambda number: run_apart(number, size), chosen):
            print(row_text(line), *line["failures"], sep="\n    ", flush=True)
            lines.append(line)
    record = report(size, lines)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(summary(record))
    return 0 if record["ok"] else 1


if __name__ == "__main__":
    # A row imports this module by its name: there must not be a second one with other classes.
    sys.exit(importlib.import_module("battery").main(sys.argv[1:]))
