"""Speculation on against off: processes in the order off, on, on, off, …, so that a machine that slows down hits both alike."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from kvstore.errors import KVError

from .one import CLOCKS, PARTS
from .workloads import workload

CONDITIONS = ("off", "on")
BAR = 1.4
"""Times faster, warm, on text that is copied …"""
ACCEPTANCE = 0.86
"""… at an acceptance, pending tokens included, of at least this."""

Json = dict[str, Any]
"""As `one.Run` prints itself."""


class RunFailed(KVError):
    """A process of the bench ended with an error. ``details``: workload, condition, code."""


class SpeculationDiffers(KVError):
    """Speculation gave other tokens than plain decoding, so its time says nothing. ``details``: workload."""

    exit_code = 9


@dataclass(frozen=True, slots=True)
class Comparison:
    """The runs of one workload by condition, in the order in which they were made; ``order``: that of all of them."""

    workload: str
    order: tuple[str, ...]
    runs: Mapping[str, Sequence[Json]]

    @property
    def same_tokens(self) -> bool:
        return len({run["tokens_digest"] for side in self.runs.values() for run in side}) == 1

    @property
    def same_kv(self) -> bool:
        return len({run["kv_digest"] for side in self.runs.values() for run in side}) == 1

    @property
    def acceptance(self) -> float | None:
        return self._share("accepted", "drafted")

    @property
    def acceptance_with_pending(self) -> float | None:
        return self._share("accepted_with_pending", "drafted_with_pending")

    def gain(self, part: str, clock: str) -> float:
        """Median plain time ÷ median speculated time: below 1 where speculation loses."""
        off, on = (median(run["seconds"][part][clock] for run in self.runs[side]) for side in CONDITIONS)
        return round(float(off / on), 3)

    @property
    def bar_met(self) -> bool:
        """By both clocks; an acceptance below what the bar is for doesn't count as met."""
        return (self.acceptance_with_pending or 0) >= ACCEPTANCE and all(self.gain("warm", c) >= BAR for c in CLOCKS)

    def value(self) -> Json:
        """For --json."""
        on = self.runs["on"][0]
        ratios = [run["step_ratio"] for run in self.runs["on"] if run["step_ratio"] is not None]
        return {
            "name": self.workload,
            "prompt_tokens": on["prompt_tokens"],
            "generated": on["generated"],
            "text": on["text"],
            "order": list(self.order),
            "same_tokens": self.same_tokens,
            "same_kv": self.same_kv,
            "rounds": on["rounds"],
            "fallback_rounds": on["fallback_rounds"],
            "drafted": on["drafted"],
            "accepted": on["accepted"],
            "acceptance": self.acceptance,
            "drafted_with_pending": on["drafted_with_pending"],
            "accepted_with_pending": on["accepted_with_pending"],
            "acceptance_with_pending": self.acceptance_with_pending,
            "tokens_per_round": None if not on["rounds"] else round(on["accepted_with_pending"] / on["rounds"], 3),
            "step_ratio": {c: spread([r[c] for r in ratios]) if ratios else None for c in CLOCKS},
            **{
                side: {
                    part: {c: spread([r["seconds"][part][c] for r in self.runs[side]]) for c in CLOCKS}
                    for part in PARTS
                }
                for side in CONDITIONS
            },
            "gain": {part: {clock: self.gain(part, clock) for clock in CLOCKS} for part in PARTS},
        }

    def _share(self, some: str, all_: str) -> float | None:
        on = self.runs["on"][0]
        return round(on[some] / on[all_], 3) if on[all_] else None


def spread(values: Sequence[float]) -> list[float]:
    """Median, least and most."""
    return [round(float(of(values)), 4) for of in (median, min, max)]


def order(rounds: int) -> tuple[str, ...]:
    """off, on, on, off, …: ``rounds`` of each condition."""
    return tuple(side for i in range(rounds) for side in (CONDITIONS if i % 2 == 0 else CONDITIONS[::-1]))


def compare_speculation(
    bundle: str,
    engine: Mapping[str, Any],
    workloads: Sequence[str],
    *,
    rounds: int,
    tokens: int,
    after: Callable[[], None] = lambda: None,
) -> list[Comparison]:
    """``bundle`` and ``engine`` as --bundle and the engine's options say them; ``rounds``: processes a condition; ``after``: called when one ended.

    Raises `RunFailed`.
    """
    found = []
    for name in workloads:
        runs: dict[str, list[Json]] = {side: [] for side in CONDITIONS}
        for side in order(rounds):
            asked = {"bundle": bundle, "engine": dict(engine), "text": workload(name), "tokens": tokens}
            runs[side].append(_process(name, side, asked | {"speculate": side == "on"}))
            after()
        found.append(Comparison(name, order(rounds), runs))
    return found


def _process(name: str, side: str, asked: Json) -> Json:
    command = [sys.executable, "-m", "runtime.bench.one", json.dumps(asked)]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", check=False)
    if ended.returncode:
        last = (ended.stderr.splitlines() or ["nothing on stderr"])[-1]
        raise RunFailed(
            f"bench, {name}, speculation {side}: expected exit code 0, found {ended.returncode}: {last:.500}",
            workload=name,
            condition=side,
            code=ended.returncode,
        )
    made: Json = json.loads(ended.stdout)
    return made
