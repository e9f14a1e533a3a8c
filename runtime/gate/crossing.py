"""KV saved under each configuration, restored under each other: the rows come back as they were, and the configuration that goes on with them
may choose another token only at a near-tie. Under the same configuration nothing may differ.

Each configuration has one engine that produces and, when that is gone, one that restores: what was loaded for one is never used by the
other, and no two are in memory at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvstore.errors import KVError
from kvstore.store import Store
from runtime.engine import Engine
from runtime.reports import Generation
from runtime.session import Session

from .held import Held, drift, state_difference, token_difference
from .prompts import Prompt
from .report import BOUND, Line, NearTie
from .setup import Configuration, Continuation, Setup, chosen_by, continuation, judged
from .speculating import near_ties


@dataclass(frozen=True, slots=True)
class Saved:
    """What one configuration held when it saved, how it went on, and what it held then."""

    name: str
    at: Held
    went: Continuation
    end: Held


def crossed(setup: Setup, folder: Path, ties: list[NearTie]) -> Iterator[Line]:
    """A line for each prompt and pair of configurations, saved to a store in ``folder``. Near-ties are appended to ``ties``."""
    with Store.open(folder) as store:
        made: dict[tuple[str, str], Saved | KVError] = {}
        for configuration in setup.configurations:
            for prompt, saved in _saved(setup, configuration, store):
                made[configuration.name, prompt.name] = saved
                if isinstance(saved, Saved):
                    ties += near_ties(setup, prompt, configuration.name, saved.went)
        for configuration in setup.configurations:
            engine = configuration.open()
            for prompt in setup.prompts:
                for other in setup.configurations:
                    yield _restored(setup, store, prompt, made[other.name, prompt.name], other, configuration, engine)
            del engine


def _saved(setup: Setup, configuration: Configuration, store: Store) -> Iterator[tuple[Prompt, Saved | KVError]]:
    engine = setup.listening(configuration)
    for prompt in setup.prompts:
        try:
            session = Session.open(setup.bundle, engine, store=store)
            session.feed(prompt.tokens[: setup.size.crossed])
            first = chosen_by(engine)
            name = f"{configuration.name} {prompt.name}"
            session.save(name)
            at = Held.by(session)
            went = continuation(session, engine, setup.size.cross_continued, first)
            yield prompt, Saved(name, at, went, Held.by(session))
        except KVError as error:
            yield prompt, error


def _restored(
    setup: Setup,
    store: Store,
    prompt: Prompt,
    saved: Saved | KVError,
    under: Configuration,
    here: Configuration,
    engine: Engine,
) -> Line:
    line = Line("cross", "exact", None, "", prompt.name, None, "whole", under.name, here.name)
    if under != here:
        line = replace(line, rule="bounded", bound=f"the rows restored are those saved, byte for byte; {BOUND}")
    if isinstance(saved, KVError):
        return replace(line, holds=False, told=f"saving: {type(saved).__name__}: {saved}")

    def compare() -> Line:
        session = Session.open(setup.bundle, engine, store=store, decode_only=True)
        session.restore(saved.name)
        apart, rows = state_difference(saved.at, Held.by(session))
        if apart is not None:
            return replace(line, split=len(saved.at.items), holds=False, told=apart, rows=rows)
        made = session.generate(setup.size.cross_continued)
        compared = replace(line, split=len(saved.at.items), tokens=len(made.tokens))
        return _line(setup, compared, saved, made, Held.by(session))

    return judged(line, compare)


def _line(setup: Setup, line: Line, saved: Saved, made: Generation, end: Held) -> Line:
    found, difference = token_difference(saved.went.made, made, lambda at: saved.went.margin(at, setup.logits))
    start = len(saved.at.items)
    same = len(made.tokens) if difference is None else difference.index
    if line.rule == "exact":
        apart, rows = state_difference(saved.end, end)
        found = found or apart
        told = f"{same} tokens and their KV the same"
        return replace(line, holds=found is None, told=found or told, difference=difference, rows=rows)
    # Of tokens that both have alike, the rows; the last token of a generation has none.
    apart_by = drift(saved.end, end, start, min(start + same, len(saved.end.items), len(end.items)))
    line = replace(line, difference=difference, drift=apart_by)
    if found is None:
        return replace(line, holds=True, told=f"{same} tokens the same")
    near = difference is not None and difference.margin is not None and difference.margin.near_tie
    return replace(line, holds=near, told=found)
