"""Every call into the operating system fails once, in every way; the index's too, which SQLite makes. A clear error or success, nothing lost."""

from __future__ import annotations

import errno
import gc
import os
import random
import sqlite3
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import traced
import world
from battery import Missing, Size, Tally
from failing import SHORT, TRANSFERS, Site, watching

TITLE = "every site of a system call: EIO, ENOSPC, EACCES, EMFILE, short reads and writes"
REQUIRED = "all sites"
WORKERS = 2
ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EMFILE)
SQLITE_CALLS = ("pread64", "pwrite64", "fdatasync", "ftruncate")
"""What SQLite does to files and Python does not."""

Fault = tuple[str, str, int, int]
"""An operation, a call, the how manieth of it, and how it fails."""


def run(size: Size, tally: Tally, scratch: Path) -> None:
    world.make(scratch / "made")
    faults = _faults(scratch, size, tally)
    chance = random.Random(size.seed)
    chance.shuffle(faults)
    if size.name == "smoke":  # each call in each way once
        faults = list({(call, error): (name, call, number, error) for name, call, number, error in faults}.values())
    _share(faults, _failing, tally, scratch)
    try:
        below = _below(scratch)
    except Missing:
        if os.environ.get("CI") == "true":
            raise
        tally.facts["sqlite"] = 0  # no strace here: these are left out
        return
    chosen = chance.sample(below, min(len(below), size.pick(10, 300, len(below))))
    tally.facts["sqlite"] = len(chosen)
    _share(chosen, _failing_below, tally, scratch)


def _share(faults: Sequence[Fault], work: Any, tally: Tally, scratch: Path) -> None:
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("fork")) as pool:
        parts = [faults[i::WORKERS] for i in range(WORKERS)]
        for part in pool.map(work, parts, [scratch / f"worker-{i}" for i in range(WORKERS)], [scratch] * WORKERS):
            tally.add(part)


def _faults(scratch: Path, size: Size, tally: Tally) -> list[Fault]:
    """One call of every site, in one of the operations that come there; at night every call of every operation."""
    chance = random.Random(size.seed)
    calls: list[tuple[str, Site, str, int]] = []
    for name, operation in world.OPERATIONS.items():
        at = world.copied(scratch / "made", scratch / "counted")
        with watching(note=True) as watch:
            operation.run(at)
        calls += [(name, *call) for call in watch.sites]
    tally.facts["sites"], tally.facts["calls"] = len({site for _, site, _, _ in calls}), len(calls)
    if size.name != "nightly":
        chance.shuffle(calls)
        calls = list({site: (name, site, call, number) for name, site, call, number in calls}.values())
    return [
        (name, call, number, error)
        for name, _, call, number in calls
        for error in (*ERRORS, *((SHORT,) if call in TRANSFERS else ()))
    ]


def _failing(faults: Sequence[Fault], folder: Path, scratch: Path) -> dict[str, Any]:
    tally = Tally()
    for name, call, number, error in faults:
        operation = world.OPERATIONS[name]
        kind = "half" if error == SHORT else errno.errorcode[error]
        with tally.attempt(f"{name}, {call} number {number}: {kind}"):
            at = world.copied(scratch / "made", folder)
            raised: str | None = None
            before = _descriptors()
            with watching((call, number, error)) as watch:
                try:
                    operation.run(at)
                except Exception as caught:  # kept as text: it holds on to what its frames held
                    raised = "" if traced.is_clear(caught) else "".join(traceback.format_exception(caught))
            assert watch.failed, "it did not come to that call"
            assert not watch.sins, watch.sins
            assert not raised, f"no clear error: {raised}"
            assert error != SHORT or raised is None, (
                "half of what was asked for is no error: the rest is to be asked for"
            )
            gc.collect()
            assert _descriptors() == before, "a descriptor was left open, perhaps with a lock"
            world.judge(at, operation, returned=raised is None)
            world.finish(at, operation)
    return tally.plain()


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else 0


def _below(scratch: Path) -> list[Fault]:
    """The calls that SQLite makes for the index."""
    return list(_counted(scratch))


def _counted(scratch: Path) -> Iterator[Fault]:
    for name, operation in world.OPERATIONS.items():
        at = world.copied(scratch / "made", scratch / "counted")
        counts = traced.calls(lambda: operation.run(at))  # noqa: B023 - runs at once
        for call in SQLITE_CALLS:
            for number in range(1, counts[call] + 1):
                yield from ((name, call, number, error) for error in (errno.EIO, errno.ENOSPC))


def _failing_below(faults: Sequence[Fault], folder: Path, scratch: Path) -> dict[str, Any]:
    tally = Tally()
    for name, call, number, error in faults:
        operation, kind = world.OPERATIONS[name], errno.errorcode[error]
        with tally.attempt(f"{name}, {call} number {number} below SQLite {sqlite3.sqlite_version}: {kind}"):
            at = world.copied(scratch / "made", folder)
            ended = traced.run(lambda: operation.run(at), "-e", f"inject={call}:error={kind}:when={number}")  # noqa: B023
            assert not ended.killed
            assert ended.returned or ended.clear, f"no clear error: {ended.raised}"
            world.judge(at, operation, returned=ended.returned)
            world.finish(at, operation)
    return tally.plain()
