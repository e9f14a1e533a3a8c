"""kill -9 at system calls of every operation that changes a store; then everything is reopened and compared, and the operation run again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import traced
import world
from battery import Size, Tally

TITLE = "kill -9 at system calls, then reopen and check"
REQUIRED = 400
WORKERS = 2

Point = tuple[str, str, int]
"""An operation, a system call, and the how manieth of them the process does not get past."""


def run(size: Size, tally: Tally, scratch: Path) -> None:
    world.make(scratch / "made")
    points: list[Point] = []
    for name, operation in world.OPERATIONS.items():
        at = world.copied(scratch / "made", scratch / "counted")
        for call, count in sorted(traced.calls(lambda: operation.run(at)).items()):  # noqa: B023 - runs at once
            points += [(name, call, number) for number in range(1, count + 1)]
    chosen = _spread(points, size.pick(24, 420, len(points)), random.Random(size.seed))
    tally.facts["points"] = len(points)
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("fork")) as pool:
        parts = [chosen[i::WORKERS] for i in range(WORKERS)]
        for part in pool.map(_killed, parts, [scratch / f"worker-{i}" for i in range(WORKERS)], [scratch] * WORKERS):
            tally.add(part)
    assert tally.facts["killed"] >= 0.9 * tally.tried, "most processes ended before they came to the call"


def _spread(points: Sequence[Point], count: int, chance: random.Random) -> list[Point]:
    """Every operation and call at least once where ``count`` allows it, the rest by chance."""
    left = list(points)
    chance.shuffle(left)
    first: dict[tuple[str, str], Point] = {}
    for point in left:
        first.setdefault(point[:2], point)
    rest = [point for point in left if first[point[:2]] != point]
    return sorted([*first.values(), *rest][:count] if count >= len(first) else left[:count])


def _killed(points: Sequence[Point], folder: Path, scratch: Path) -> dict[str, Any]:
    tally = Tally(facts={"killed": 0})
    for name, call, number in points:
        operation = world.OPERATIONS[name]
        with tally.attempt(f"{name}, killed at {call} number {number}"):
            at = world.copied(scratch / "made", folder)
            ended = traced.run(lambda: operation.run(at), "-e", f"inject={call}:signal=SIGKILL:when={number}")  # noqa: B023
            assert ended.killed or ended.returned, ended.raised
            tally.facts["killed"] += ended.killed
            world.judge(at, operation, returned=ended.returned)
            world.finish(at, operation)
    return tally.plain()
