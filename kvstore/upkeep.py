"""The command that verifies and repairs a store's files: check."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from .cli import Settings, common_options, progress
from .inventory import FULL, QUICK, Level
from .store import Store

if TYPE_CHECKING:
    from .check_report import Report

REPAIRED_WITH_LOSSES = 11
"""Exit code: nothing is damaged any more, and some name lost something."""
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


class Share(click.ParamType[float]):
    """A share of the objects: ``10%``, or ``10``, of the bytes. From above 0 to 1."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?) *%?", str(value))
        if found is None or not 0 < float(found[1]) <= 100:
            self.fail(f"expected a share above 0% and up to 100%, as 10%, found {value!r}.", param, ctx)
        return float(found[1]) / 100


class Duration(click.ParamType[float]):
    """A time: ``30``, ``30s``, ``5m``, ``2h``. In seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)([smh]?)", str(value))
        if found is None:
            self.fail(f"expected a time as 30s, 5m or 2h, found {value!r}.", param, ctx)
        return float(found[1]) * _SECONDS[found[2]]


@click.command()
@click.option("--quick", is_flag=True, help="Presence and size of objects only, not their content.")
@click.option(
    "--sample",
    type=Share(),
    metavar="N%",
    help="Read objects of N% of the bytes, those first that no check has read for longest.",
)
@click.option("--full", is_flag=True, help="Read every object. This is what happens without these three.")
@click.option("--max-duration", type=Duration(), metavar="TIME",
              help="Read objects for at most so long (30s, 5m, 2h); the next check goes on where this one stops.")  # fmt: skip
@click.option("--repair", is_flag=True, help="Set aside what is damaged, and promise only what is here.")
@click.option("--dry-run", is_flag=True, help="With --repair: print what would be done; change nothing.")
@common_options
def check(
    settings: Settings,
    quick: bool,
    sample: float | None,
    full: bool,
    max_duration: float | None,
    repair: bool,
    dry_run: bool,
) -> None:
    """Verify every file of the store; exit 4 if something is damaged or absent.

    With --repair: exit 0 if nothing a name needs is lost, 11 if something is (it says what, and the command that gets it back), 4 if damage
    remains. Nothing is deleted: what is damaged goes to the store's folder damaged/.
    """
    if quick + full + (sample is not None) > 1:
        raise click.UsageError("--quick, --sample and --full exclude each other.")
    if dry_run and not repair:
        raise click.UsageError("--dry-run goes with --repair.")
    if quick and max_duration is not None:
        raise click.UsageError("--quick reads no objects: --max-duration goes with --sample and --full.")
    level = QUICK if quick else Level(FULL.share if sample is None else sample, max_duration)
    with Store.open(settings.store, create=False) as store:
        report = _examined(store, level)
        if not repair:
            settings.emit(report.value(), str(report))
            code = 0 if report.ok else 4
        else:
            code = _repaired(settings, store, report, dry_run)
    if code:
        raise click.exceptions.Exit(code)


def _examined(store: Store, level: Level) -> Report:
    from .check import check as examine

    with ExitStack() as stack:
        shown: list[Any] = []

        def begin(total: int) -> None:
            shown.append(stack.enter_context(progress("Checking", max(1, total), "bytes")))

        return examine(store, level, begin=begin, progress=lambda count: shown[0](count))


def _repaired(settings: Settings, store: Store, report: Report, dry_run: bool) -> int:
    """Prints what is or would be repaired; returns the exit code."""
    from . import repair
    from .check import check as examine

    if dry_run:
        plan = repair.plan(report)
        value = {"dry_run": True, "actions": [{"path": action.path, "done": action.done} for action in plan]}
        lines = [f"{action.path}: {action.done}" for action in plan] or ["nothing to repair"]
        settings.emit({**report.value(), "repair": value}, "\n".join([str(report), *lines]))
        return 0 if report.ok else 4
    done = repair.apply(store, report)
    after = examine(store, QUICK)
    value = {"dry_run": False, **done.value(), "left": [problem.path for problem in after.problems]}
    left = [f"still damaged: {problem.path}: {problem.found} {problem.todo}".rstrip() for problem in after.problems]
    text = [str(report), str(done) or "nothing was repaired", *left] if report.problems else [str(report)]
    settings.emit({**report.value(), "repair": value}, "\n".join(text))
    return 4 if left else REPAIRED_WITH_LOSSES if done.lost else 0


def commands() -> dict[str, click.Command]:
    """The upkeep commands by verb."""
    return {"check": check}
