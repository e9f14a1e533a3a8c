"""The commands that measure: bench speculation."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import click

from kvstore.cli import Settings, common_options, progress

from .bench.workloads import WORKLOADS
from .engine_options import engine_options
from .opening import BundleName, bundle_path


@click.group("bench")
def bench() -> None:
    """Measure on this machine."""


@bench.command()
@click.option(
    "--bundle",
    "given",
    required=True,
    metavar="DIR",
    type=BundleName(),
    help="Bundle folder, or a cached bundle's name.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Processes a condition. Fewer than 3 show that it runs, and no more.",
)
@click.option("-n", "tokens", type=click.IntRange(4), default=40, show_default=True, help="Tokens of a generation.")
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    type=click.Choice(WORKLOADS),
    help="Only this text; may be given again. Default: all.",
)
@engine_options
@common_options
def speculation(
    settings: Settings, given: str, rounds: int, tokens: int, workloads: tuple[str, ...], **engine: Any
) -> None:
    """Generate with speculation and without, and say what it gains or costs.

    Each run is a process of its own, in the order off, on, on, off, …; it generates cold, goes back to the prompt's end, and generates again,
    warm. Medians, with the least and the most. Exit 9 if the tokens differ.
    """
    from .bench import SpeculationDiffers, compare_speculation
    from .bench.telling import comparison_text

    chosen = tuple(name for name in WORKLOADS if not workloads or name in workloads)
    path = bundle_path(given)
    with progress("Measuring", 2 * rounds * len(chosen), "runs") as advance:
        made = compare_speculation(str(path), engine, chosen, rounds=rounds, tokens=tokens, after=lambda: advance(1))
    value = {
        "benchmark": "speculation",
        "bundle": path.name,
        "tokens": tokens,
        "rounds": rounds,
        "workloads": [one.value() for one in made],
        "bar_met": next((one.bar_met for one in made if one.workload == "verbatim"), None),
        "engine": made[0].runs["on"][0]["engine"],
        "machine": {
            "system": platform.system(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
        },
    }
    settings.emit(value, lambda: comparison_text(made))
    other = [one.workload for one in made if not one.same_tokens]
    if other:
        raise SpeculationDiffers(
            f"{', '.join(other)}: expected the same tokens with speculation on and off, found others: these times compare two texts. `kvferry gate` "
            "says where they part.",
            workload=other[0],
        )


def commands() -> dict[str, click.Command]:
    """The group by its verb."""
    return {"bench": bench}
