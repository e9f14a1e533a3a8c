"""The whole gate, in order, over temporary stores that are gone afterwards however it ends."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

from .crossing import crossed
from .report import Line, NearTie, Report
from .restoring import restored
from .setup import Setup
from .speculating import heads, near_ties, plain, speculated


def run_gate(setup: Setup, on_line: Callable[[Line], None] | None = None) -> Report:
    """Every comparison of ``setup``; each line is passed to ``on_line`` as soon as it is there.

    What a comparison raises is a line that does not hold; what the main configuration raises without a store, and errors of the disk, are
    raised.
    """
    started = perf_counter()
    lines: list[Line] = []
    ties: list[NearTie] = []
    with tempfile.TemporaryDirectory(prefix="kvferry-gate-") as folder:
        for line in _lines(setup, Path(folder), ties):
            lines.append(line)
            if on_line is not None:
                on_line(line)
    return Report(
        bundle=setup.bundle.config.name,
        path=str(setup.bundle.root),
        identity=setup.bundle.identity().digest.hex,
        size=setup.size.name,
        engine=setup.main.open().describe(),
        configurations=tuple(configuration.name for configuration in setup.configurations),
        prompts=tuple((p.name, len(p.tokens), p.given, setup.splits(p)) for p in setup.prompts),
        lines=tuple(lines),
        # A short prompt is continued from the same place twice: as a prompt, and in the matrix.
        near_ties=tuple(dict.fromkeys(ties)),
        margins=setup.logits.refusal is None,
        seconds=perf_counter() - started,
    )


def _lines(setup: Setup, folder: Path, ties: list[NearTie]) -> Iterator[Line]:
    yield from heads(setup)
    for number, prompt in enumerate(setup.prompts):
        off, held = plain(setup, prompt)
        ties += near_ties(setup, prompt, setup.main.name, off)
        yield from speculated(setup, prompt, off, held)
        yield from restored(setup, prompt, off.made.tokens, folder / "whole", folder / "trimmed", elsewhere=number == 0)
    yield from crossed(setup, folder / "cross", ties)


def expected_lines(setup: Setup) -> int:
    """About how many lines there will be, for progress."""
    kinds = sum(2 * len(setup.splits(prompt)) for prompt in setup.prompts)
    return (
        len(setup.bundle.config.lmhead_batched)
        + 3 * len(setup.prompts)
        + kinds
        + 1
        + len(setup.prompts) * len(setup.configurations) ** 2
    )
