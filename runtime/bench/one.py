"""One process of the bench: a prompt continued under one condition, cold and then warm, timed. `python -m runtime.bench.one` runs it.

*Cold* is the first generation: it loads decode, the heads and, with speculation, what verifies, and checks the batched head. Then the session
goes back to the prompt's end and generates again, *warm*. The prompt is fed before either, so that no feeding is timed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter, process_time
from typing import Any

from runtime.bundle import Bundle
from runtime.engine import Engine
from runtime.session import Session
from runtime.speculation import Speculation, SpeculationStats

PARTS = ("cold", "warm")
CLOCKS = ("wall_s", "processor_s")

Clocks = tuple[float, float]
"""By `CLOCKS`, seconds."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one process measured. ``seconds``: by part and clock, of a whole generation. ``step_ratio``: by clock, what a step with three drafts costs,
    in steps of decode, warm; None where there was none of either. Counts are of the warm generation, None without speculation.
    ``tokens_digest``, ``kv_digest``: of what was generated and of all KV then."""

    prompt_tokens: int
    generated: int
    text: str
    seconds: Mapping[str, Mapping[str, float]]
    tokens_digest: str
    kv_digest: str
    rounds: int | None
    fallback_rounds: int | None
    drafted: int | None
    accepted: int | None
    drafted_with_pending: int | None
    accepted_with_pending: int | None
    step_ratio: Mapping[str, float] | None
    engine: Mapping[str, str]


def now() -> Clocks:
    return perf_counter(), process_time()


def run(bundle: Bundle, engine: Engine, text: str, tokens: int, *, speculate: bool) -> Run:
    """``tokens``: to generate, each time."""
    session = Session.open(bundle, engine)
    ids = bundle.tokenizer.encode(text)
    session.feed(ids[:-1])
    how = Speculation() if speculate else None
    seconds: dict[str, dict[str, float]] = {}
    for part in PARTS:
        # The prompt's last token is decoded each time, so that both parts begin alike.
        session.rollback(len(ids) - 1)
        session.feed(ids[-1:])
        given: list[Clocks] = []
        began = now()
        made = session.generate(tokens, _timing(given), speculate=how)
        ended = now()
        seconds[part] = {clock: ended[i] - began[i] for i, clock in enumerate(CLOCKS)}
    kv = hashlib.sha256()
    for group in range(len(session.kv.covered)):
        for span in session.kv.spans(group, 0, session.position):
            kv.update(span)
    stats = made.speculation
    return Run(
        prompt_tokens=len(ids),
        generated=len(made.tokens),
        text=bundle.tokenizer.decode(made.tokens),
        seconds=seconds,
        tokens_digest=hashlib.sha256(repr(made.tokens).encode()).hexdigest(),
        kv_digest=kv.hexdigest(),
        rounds=None if stats is None else stats.rounds,
        fallback_rounds=None if stats is None else stats.fallback_rounds,
        drafted=None if stats is None else stats.drafted,
        accepted=None if stats is None else stats.accepted,
        drafted_with_pending=None if stats is None else stats.drafted_with_pending,
        accepted_with_pending=None if stats is None else stats.accepted_with_pending,
        step_ratio=None if stats is None else step_ratio(stats, given),
        engine=dict(engine.describe()),
    )


def _timing(given: list[Clocks]) -> Callable[[int], None]:
    return lambda _: given.append(now())


def step_ratio(stats: SpeculationStats, given: list[Clocks]) -> dict[str, float] | None:
    """``given``: when each token was given. A step lasts from the last token of the one before to its own first."""
    steps: dict[int, list[Clocks]] = {}
    at = 0
    for tokens, drafts in zip(stats.step_tokens, stats.step_drafts, strict=True):
        if at and tokens:
            before, first = given[at - 1], given[at]
            steps.setdefault(drafts, []).append((first[0] - before[0], first[1] - before[1]))
        at += tokens
    if 0 not in steps or 3 not in steps:
        return None
    return {
        clock: median(step[i] for step in steps[3]) / median(step[i] for step in steps[0])
        for i, clock in enumerate(CLOCKS)
    }


def main(asked: str) -> None:
    """``asked``: JSON of bundle, engine (as `open_engine` takes it), text, tokens and speculate."""
    from runtime.engine_options import open_engine
    from runtime.opening import open_bundle

    given: dict[str, Any] = json.loads(asked)
    bundle = open_bundle(given["bundle"])
    made = run(
        bundle, open_engine(bundle, **given["engine"]), given["text"], given["tokens"], speculate=given["speculate"]
    )
    print(json.dumps(asdict(made), ensure_ascii=False))


if __name__ == "__main__":
    main(sys.argv[1])
