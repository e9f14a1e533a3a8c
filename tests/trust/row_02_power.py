"""Power losses: of what was not synced any part is gone, out of order or torn; what was acknowledged is there, and nothing is half there."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import world
from battery import Size, Tally
from crashdisk import Disk, Mark
from recording import Recording
from world import BOOK, GROWN, OPERATIONS, REMOTE, STORE, Operation, State

TITLE = "power losses: what was not synced is dropped, reordered or torn"
REQUIRED = 2_000
WORKERS = 2

Kill = tuple[str, int]
"""Before which call, and the how manieth of it, a step is killed."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Operations one after the other, each from the state that the one before led to. A killed one must lead nowhere: it gives no name."""

    name: str
    steps: tuple[tuple[Operation, Kill | None], ...]

    def states(self) -> list[State]:
        """Before each step, and after the last."""
        states: list[State] = [world.BEFORE]
        for operation, kill in self.steps:
            states.append({**states[-1], **({} if kill else operation.after)})
        return states


def _again(operation: Operation, after: State) -> Operation:
    return Operation(operation.name, operation.run, after)


def _chains() -> list[Scenario]:
    """What one operation leaves unsynced, another must not rely on."""
    save, pull, unnamed = OPERATIONS["save"], OPERATIONS["pull"], OPERATIONS["save unnamed"]
    book = Operation("save unnamed book", world.saving("store", None, BOOK), {}, BOOK)
    chains = [
        Scenario(f"killed before {call} {number}, then {then.name}", ((killed, (call, number)), (then, None)))
        for killed, then in ((book, save), (book, pull))
        for call, number in (("rename", 2), ("rename", 4), ("fsync", 4), ("fsync", 6), ("fsync", 7))
    ]
    named: State = {"store": {**STORE, "new": BOOK}}
    twice = world.saving("store", "new", BOOK)
    gone = _again(Operation("remove new", lambda at: world.removing(at, "new"), {}), {"store": STORE})
    return [
        *chains,
        Scenario(
            "save, remove, collect, save again",
            (
                (save, None),
                (gone, None),
                (_again(OPERATIONS["collect"], {}), None),
                (Operation("save again", twice, named), None),
            ),
        ),
        Scenario(
            "save over, collect, pull",
            (
                (OPERATIONS["save over"], None),
                (OPERATIONS["collect"], None),
                (_again(pull, {"store": {**STORE, "a": GROWN, "book": BOOK}}), None),
            ),
        ),
        Scenario("unnamed, then named", ((unnamed, None), (OPERATIONS["save over"], None))),
        Scenario("push, push grown", ((OPERATIONS["push"], None), (_grown_push(), None))),
    ]


def _grown_push() -> Operation:
    def run(at: Path) -> None:
        world.saving("store", "a", GROWN)(at)
        OPERATIONS["push"].run(at)

    return Operation("push grown", run, {"store": {**STORE, "a": GROWN}, "remote": {**REMOTE, "a": GROWN}})


def scenarios() -> list[Scenario]:
    return [*(Scenario(name, ((operation, None),)) for name, operation in OPERATIONS.items()), *_chains()]


def run(size: Size, tally: Tally, scratch: Path) -> None:
    world.make(scratch / "made")
    disks: list[Disk] = []
    for scenario in scenarios():
        at = world.copied(scratch / "made", scratch / "run")
        with Recording(at) as recording:
            for operation, kill in scenario.steps:
                recording.step(lambda: operation.run(at), kill)  # noqa: B023 - runs at once
        shutil.rmtree(scratch / "noted", ignore_errors=True)
        recording.require_whole(scratch / "noted")
        disks.append(recording.disk)
    tally.facts["scenarios"] = len(disks)
    tally.facts["events"] = sum(len(disk.log) for disk in disks)
    count = size.pick(len(disks) * 2, 2_016)
    jobs = [(number % len(disks), number < len(disks), f"{size.seed} {number}") for number in range(count)]
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("fork")) as pool:
        parts = [jobs[i::WORKERS] for i in range(WORKERS)]
        for part in pool.map(_lost, parts, [disks] * WORKERS, [scratch / f"worker-{i}" for i in range(WORKERS)]):
            tally.add(part)


def _lost(jobs: Sequence[tuple[int, bool, str]], disks: Sequence[Disk], at: Path) -> dict[str, Any]:
    tally = Tally()
    scenarios_ = scenarios()
    for which, first, seed in jobs:
        scenario, disk, chance = scenarios_[which], disks[which], random.Random(seed)
        ends = [number for number, event in enumerate(disk.log, 1) if isinstance(event, Mark)]
        # A third right after a step has returned: then most has been promised. And once right after all of them, with nothing left to chance.
        count = chance.choice(ends) if chance.random() < 0.33 else chance.randrange(len(disk.log) + 1)
        count = ends[-1] if first else count
        with tally.attempt(f"{scenario.name}, power lost after event {count} of {len(disk.log)}, seed {seed!r}"):
            shutil.rmtree(at, ignore_errors=True)
            disk.lose_power(count, at, chance, all_unsynced=first)
            _judge(at, scenario, ends, count)
    return tally.plain()


def _judge(at: Path, scenario: Scenario, ends: Sequence[int], count: int) -> None:
    """``ends``: of each step the length of the log when it had ended."""
    states = scenario.states()
    done = sum(end <= count for end in ends)
    step = max(0, done - 1) if count in ends else done
    operation, kill = scenario.steps[step]
    returned = count in ends and kill is None
    if kill is not None:
        operation = _again(operation, {})
    world.judge(at, operation, returned=returned, before=states[step])
    world.finish(at, operation, before=states[step])
