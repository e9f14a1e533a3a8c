"""The whole gate, in order, over temporary stores that are gone afterwards however it ends."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

from .crossing import crossed
from .held import Held
from .measuring import measured
from .report import Line, NearTie, Report, Threshold
from .restoring import restored
from .setup import Continuation, Setup
from .speculating import WAYS, heads, near_ties, plain, speculated


def run_gate(setup: Setup, on_line: Callable[[Line], None] | None = None) -> Report:
    """Every comparison of ``setup``; each line is passed to ``on_line`` as soon as it is there.

    What a comparison raises is a line that does not hold; what the main configuration raises without a store, and errors of the disk, are
    raised.
    """
    started, busy = perf_counter(), processor_seconds()
    lines: list[Line] = []
    ties: list[NearTie] = []
    with tempfile.TemporaryDirectory(prefix="kvferry-gate-") as folder:
        plainly = [plain(setup, prompt) for prompt in setup.prompts]
        threshold = measured(setup, [off for off, _ in plainly]) if setup.verify == "margin" else None
        for line in _lines(setup, Path(folder), ties, plainly, threshold):
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
        processor_seconds=processor_seconds() - busy,
        verify=setup.verify,
        threshold=threshold,
    )


def processor_seconds() -> float:
    """So far, of this process and of those it has waited for."""
    return sum(os.times()[:4])


def _lines(
    setup: Setup,
    folder: Path,
    ties: list[NearTie],
    plainly: list[tuple[Continuation, Held]],
    threshold: Threshold | None,
) -> Iterator[Line]:
    yield from heads(setup)
    for number, prompt in enumerate(setup.prompts):
        off, held = plainly[number]
        ties += near_ties(setup, prompt, setup.main.name, off)
        yield from speculated(setup, prompt, off, held, None if threshold is None else threshold.threshold)
        yield from restored(setup, prompt, off.made.tokens, folder / "whole", folder / "trimmed", elsewhere=number == 0)
    yield from crossed(setup, folder / "cross", ties)


def expected_lines(setup: Setup) -> int:
    """About how many lines there will be, for progress."""
    kinds = sum(2 * len(setup.splits(prompt)) for prompt in setup.prompts)
    return (
        len(setup.bundle.config.lmhead_batched)
        + len(WAYS[setup.verify]) * len(setup.prompts)
        + kinds
        + 1
        + len(setup.prompts) * len(setup.configurations) ** 2
    )
