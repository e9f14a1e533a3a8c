"""The commands that look after a store's files: du, gc, check."""

from __future__ import annotations

import math
from typing import Any

import click

from .cli import Settings, common_options, progress, terminal_width
from .errors import StoreMissing
from .plaintext import counted, size_text, table
from .store import Store


@click.command()
@common_options
def du(settings: Settings) -> None:
    """Say what takes the space, and what each snapshot has for itself."""
    from .usage import usage

    try:
        with Store.open(settings.store, create=False) as store:
            value = usage(store).value()
    except StoreMissing:
        value = {"total": 0, "parts": {}, "snapshots": [], "unreadable": []}
    parts = [(name, size_text(count)) for name, count in (*value["parts"].items(), ("total", value["total"]))]
    rows = [[s["name"] or s["snapshot"][:12], size_text(s["own"]), size_text(s["shared"])] for s in value["snapshots"]]
    tables = [table(parts, ("part", "size"), right=("size",))]
    if rows:
        tables.append(table(rows, ("snapshot", "own", "shared"), terminal_width(), right=("own", "shared")))
    settings.emit(value, "\n\n".join(tables))


class _Days(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        days = super().convert(value, param, ctx)
        if not math.isfinite(days):
            self.fail(f"{value} is not a number of days.", param, ctx)
        return days


@click.command()
@click.option("--dry-run", is_flag=True, help="Print the plan; change nothing.")
@click.option("--keep-days", type=_Days(0), default=0.0, show_default=True,
              help="Keep unnamed snapshots used in the last N days.")  # fmt: skip
@click.option("--purge", is_flag=True, help="Then delete what lies in the trash.")
@common_options
def gc(settings: Settings, dry_run: bool, keep_days: float, purge: bool) -> None:
    """Move what no name needs to the store's trash; --purge deletes it for good and frees the disk."""
    from . import prune

    with Store.open(settings.store, create=False) as store:
        plan = prune.plan(store, keep_seconds=keep_days * 86400)
        if dry_run:
            settings.emit({"dry_run": True, "plan": plan.value()}, str(plan))
            return
        with progress("Collecting", max(1, plan.bytes), "bytes") as advance:
            pruned = prune.apply(store, plan, advance)
        freed = 0
        if purge:
            with progress("Deleting", max(1, plan.bytes + plan.trash_bytes), "bytes") as advance:
                freed = prune.purge(store, advance)
    moved = f"moved {counted(pruned.snapshots, 'snapshot')} and {counted(pruned.objects, 'object')}, {size_text(pruned.bytes)}, to the trash"
    settings.emit(
        {"dry_run": False, "plan": plan.value(), "pruned": pruned.value(), "freed_bytes": freed},
        f"{moved}; deleted {size_text(freed)}" if purge else f"{moved}; `kvferry gc --purge` deletes what is there",
    )


@click.command()
@click.option("--quick", is_flag=True, help="Presence and size of objects only, not their content.")
@common_options
def check(settings: Settings, quick: bool) -> None:
    """Verify every file of the store; exit 4 if something is damaged or absent."""
    from .check import check as examine

    with Store.open(settings.store, create=False) as store:
        total = max(1, sum(store.shelf.objects.size(name) or 0 for name in store.shelf.objects.names()))
        with progress("Checking", total, "bytes") as advance:
            report = examine(store, quick=quick, progress=advance)
    settings.emit(report.value(), str(report))
    if not report.ok:
        raise click.exceptions.Exit(4)


def commands() -> dict[str, click.Command]:
    """The upkeep commands by verb."""
    return {"du": du, "gc": gc, "check": check}
