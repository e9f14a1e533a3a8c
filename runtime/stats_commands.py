"""The commands that sum up what was measured: stats metrics, and kvstore's stats store."""

from __future__ import annotations

from pathlib import Path

import click

from kvstore.cli import Place, Settings, common_options, note, terminal_width
from kvstore.errors import InputInvalid
from kvstore.plaintext import WIDTH
from kvstore.stats_commands import stats_store

from .metrics_option import default_file


@click.group("stats")
def stats() -> None:
    """Sum up what was measured."""


stats.add_command(stats_store)


@stats.command()
@click.argument("file", type=Place(), required=False)
@click.option("--svg", type=Place(), metavar="OUT.svg", help="Also draw the time per token there, as an image.")
@click.option(
    "--message",
    type=click.IntRange(1),
    help="Which generation to draw, of those with times of tokens, from 1. Default: the last.",
)
@common_options
def metrics(settings: Settings, file: Path | None, svg: Path | None, message: int | None) -> None:
    """Sum up FILE, a metrics.jsonl that --metrics or the published app wrote, and draw the time per token of one generation.

    FILE is KVFERRY_METRICS where it is not given. Lines that are no records are named, and left out.
    """
    from .metrics.latency_plot import latencies, terminal
    from .metrics.latency_plot import svg as drawn_svg
    from .metrics.summary import summarise
    from .metrics.summary_text import summary_json, summary_text

    path = file or default_file()
    if path is None:
        raise click.UsageError("FILE: expected a metrics file, found none. Name one, or set KVFERRY_METRICS.")
    with path.open("rb") as opened:
        found = summarise(opened, message)
    if found.drawn is None and (svg is not None or message is not None):
        raise InputInvalid(
            f"{path}: expected {'a generation' if message is None else f'generation {message}'} with times of tokens (`perTokenMillis`), found "
            "none. `kvferry generate --metrics` writes one each time."
        )
    shown = None if found.drawn is None else latencies(found.drawn)
    if svg is not None and shown is not None:
        svg.write_text(drawn_svg(shown), encoding="utf-8")
    for number, reason in found.damaged_lines:
        note(f"{path}:{number}: no record, left out: {reason}")
    if found.damaged > len(found.damaged_lines):
        note(f"{path}: {found.damaged - len(found.damaged_lines):,} more lines are no records.")
    width = terminal_width()
    drawing = "" if shown is None else "\n\n" + terminal(shown, max(20, width or WIDTH))
    settings.emit(
        {"path": str(path), **summary_json(found), "svg": None if svg is None else str(svg)},
        lambda: summary_text(found, width) + drawing,
    )


def commands() -> dict[str, click.Command]:
    """The group by its verb."""
    return {"stats": stats}
