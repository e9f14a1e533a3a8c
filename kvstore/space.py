"""The commands about a store's space: du, gc, quota."""

from __future__ import annotations

import sys
from typing import Any

import click

from .cli import Number, Settings, common_options, fail, progress, terminal_width
from .errors import InputInvalid, StoreFull, StoreMissing, WouldDeleteMost
from .plaintext import counted, parse_size, size_text, table
from .shelf import Shelf
from .store import Store


@click.command()
@common_options
def du(settings: Settings) -> None:
    """Say what takes the space, what each snapshot has for itself, and what is left of the quota."""
    from .quota import overview
    from .usage import usage

    try:
        with Store.open(settings.store, create=False) as store:
            found = usage(store)
            value = {**found.value(), "quota": overview(store.shelf, found)}
    except StoreMissing:
        value = {
            "total": 0,
            "parts": {},
            "snapshots": [],
            "unreadable": [],
            "quota": {"bytes": None, "used": 0, "left": None},
        }
    parts = [(name, size_text(count)) for name, count in (*value["parts"].items(), ("total", value["total"]))]
    rows = [[s["name"] or s["snapshot"][:12], size_text(s["own"]), size_text(s["shared"])] for s in value["snapshots"]]
    tables = [table(parts, ("part", "size"), right=("size",))]
    if rows:
        tables.append(table(rows, ("snapshot", "own", "shared"), terminal_width(), right=("own", "shared")))
    if value["quota"]["bytes"] is not None:
        tables.append(_quota_text(value["quota"]))
    settings.emit(value, "\n\n".join(tables))


class Size(click.ParamType[int | str]):
    """Bytes as people write them. ``word``: a word that is taken too, and stands for None."""

    name = "size"

    def __init__(self, word: str | None = None) -> None:
        self._word = word

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == self._word or isinstance(value, int):
            return value  # type: ignore[no-any-return]
        try:
            return parse_size(str(value))
        except InputInvalid as error:
            self.fail(error.message, param, ctx)


@click.command()
@click.option("--dry-run", is_flag=True, help="Print the plan; change nothing.")
@click.option("--keep-days", type=Number(0), help="Keep unnamed snapshots used in the last N days.  [default: 0]")
@click.option("--to", type=Size(), metavar="SIZE",
              help="Delete only as much, the least recently used first, that all files of the store take SIZE (20GB); implies --purge.")  # fmt: skip
@click.option("--purge", is_flag=True, help="Then delete what lies in the trash.")
@click.option("--max-share", type=Number(0, 1), default=0.5, show_default=True,
              help="Ask first if more than this share of the store would be deleted; without a terminal, refuse.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Don't ask.")
@common_options
def gc(
    settings: Settings, dry_run: bool, keep_days: float | None, to: int | None, purge: bool, max_share: float, yes: bool
) -> None:
    """Move what no name needs to the store's trash; --purge deletes it for good and frees the disk.

    What is in the trash can be brought back with `kvferry trash restore`.
    """
    from . import prune
    from .gauge import physical_bytes

    if to is not None and keep_days is not None:
        raise click.UsageError("--to and --keep-days: expected one of them, found both.")
    with Store.open(settings.store, create=False) as store:
        if to is None:
            plan = prune.plan(store, keep_seconds=(keep_days or 0.0) * 86400)
        else:
            purge = True
            plan = prune.eviction(store, max(0, physical_bytes(store.shelf.root) - to))
        if dry_run:
            settings.emit({"dry_run": True, "plan": plan.value()}, str(plan))
            return
        if purge and not yes:
            _confirm(store, plan, max_share)
        with progress("Collecting", max(1, plan.bytes), "bytes") as advance:
            pruned = prune.apply(store, plan, advance)
        freed = 0
        if purge:
            with progress("Deleting", max(1, plan.bytes + plan.trash_bytes), "bytes") as advance:
                freed = prune.purge(store, advance)
        left = physical_bytes(store.shelf.root)
    moved = f"moved {counted(pruned.snapshots, 'snapshot')} and {counted(pruned.objects, 'object')}, {size_text(pruned.bytes)}, to the trash"
    settings.emit(
        {"dry_run": False, "plan": plan.value(), "pruned": pruned.value(), "freed_bytes": freed, "left_bytes": left},
        f"{moved}; deleted {size_text(freed)}" if purge else f"{moved}; `kvferry gc --purge` deletes what is there",
    )
    if to is not None and left > to:
        raise click.exceptions.Exit(fail(_too_much_left(settings, left, to), settings.json))


def _confirm(store: Store, plan: Any, most: float) -> None:
    """Asks at a terminal before more than a share of the store goes. `WouldDeleteMost` where nobody is there, or says no."""
    from . import prune

    try:
        prune.require_share(store, plan, most)
    except WouldDeleteMost as error:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        gone, total = size_text(error.details["bytes"]), size_text(error.details["total"])
        if not click.confirm(f"Delete {gone} of the store's {total} for good?", err=True):
            raise


def _too_much_left(settings: Settings, left: int, to: int) -> StoreFull:
    return StoreFull(
        f"{settings.store}: expected at most {size_text(to)} left, found {size_text(left)}: names and pins keep it, or a process that is at "
        f"work. `kvferry du` lists what each name has; `kvferry rm NAME` lets it go.",
        quota=to,
        used=left,
        needed=0,
    )


@click.command()
@click.argument("size", type=Size("off"), required=False, metavar="[SIZE|off]")
@common_options
def quota(settings: Settings, size: int | str | None) -> None:
    """Show the store's quota, or set it: 20GB, 512MiB, a number of bytes, or off.

    All files of the store together keep below it. A save or pull that needs room deletes the trash, then the least recently used snapshots
    without a name; names and pins stay, and where they leave no room it fails. Setting it deletes nothing yet.
    """
    from .quota import overview, set_quota

    with Shelf.open(settings.store, create=size not in (None, "off")) as shelf:
        if size is not None:
            set_quota(shelf.root, size if isinstance(size, int) else None)
        value = overview(shelf)
    settings.emit(value, _quota_text(value))


def _quota_text(value: dict[str, int | None]) -> str:
    bound, used, left = value["bytes"], value["used"], value["left"]
    if bound is None:
        return f"no quota; {size_text(used or 0)} used"
    over = (used or 0) - bound
    rest = (
        f"{size_text(left or 0)} left"
        if over <= 0
        else f"{size_text(over)} over it: `kvferry gc --to {bound}` deletes cache"
    )
    return f"quota {size_text(bound)}: {size_text(used or 0)} used, {rest}"


def commands() -> dict[str, click.Command]:
    """The commands by verb."""
    return {"du": du, "gc": gc, "quota": quota}
