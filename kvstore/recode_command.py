"""The command recode."""

from __future__ import annotations

import click

from .cli import Label, Settings, common_options, progress
from .codec import Codec
from .plaintext import counted, size_text
from .store import Store


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME...]", type=Label())
@click.option(
    "--to", required=True, type=click.Choice(["planes", "raw"]), help="planes: smaller. raw: faster to restore."
)
@click.option(
    "--older-than",
    type=click.IntRange(0, 36500),
    metavar="DAYS",
    help="Not what snapshots need that were saved or found in the last DAYS days.",
)
@click.option("--all", "everything", is_flag=True, help="Every object of the store.")
@click.option("--dry-run", is_flag=True, help="Say what would be recoded; change nothing.")
@common_options
def recode(
    settings: Settings, names: tuple[str, ...], to: Codec, older_than: int | None, everything: bool, dry_run: bool
) -> None:
    """Store objects in the other codec, without loss: those of NAMEs, or of the whole store with --all or --older-than.

    May be interrupted, and run again for the rest. Exit 4 if an object is damaged: it is left as it is.
    """
    from . import recode as work

    if not names and not everything and older_than is None:
        raise click.UsageError("expected NAMEs, --older-than or --all, found none of them.")
    if names and everything:
        raise click.UsageError("expected NAMEs or --all, found both.")
    with Store.open(settings.store, create=False) as store:
        plan = work.plan(store, to, names or None, older_seconds=(older_than or 0) * 86400)
        if dry_run:
            settings.emit({"dry_run": True, "plan": plan.value()}, str(plan))
            return
        with progress("Recoding", max(1, plan.content_bytes), "bytes") as advance:
            done = work.apply(store, plan, advance)
    damaged = [*plan.unreadable, *done.damaged]
    lines = [
        f"recoded {counted(done.objects, 'object')} to {to}: {size_text(done.bytes_before)} became {size_text(done.bytes_after)}; "
        f"{plan.there + done.kept:,} stay as they were"
    ]
    if damaged:
        lines.append(
            f"{counted(len(damaged), 'object')} damaged, left alone: `kvferry check` says which, and what brings them back"
        )
    settings.emit({"dry_run": False, "plan": plan.value(), "recoded": done.value()}, "\n".join(lines))
    if damaged:
        raise click.exceptions.Exit(4)


def commands() -> dict[str, click.Command]:
    """The command by verb."""
    return {"recode": recode}
