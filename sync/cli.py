"""The commands push and pull."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kvstore.cli import Label, Settings, Text, common_options, note_damaged, progress
from kvstore.plaintext import size_text

from .carry import Carried, Moved
from .plan import Plan

_FORCE = "Move the name even if the snapshot it stands for is not continued by the new one."
_VERIFY = "Also read what is there already, and carry again what is damaged."
_DRY = "Say what would be carried; carry nothing."


@click.command()
@click.argument("remote", type=Text())
@click.argument("names", nargs=-1, required=True, metavar="NAME...", type=Label())
@click.option("--force", is_flag=True, help=_FORCE)
@click.option("--verify", is_flag=True, help=_VERIFY)
@click.option("--dry-run", is_flag=True, help=_DRY)
@common_options
def push(settings: Settings, remote: str, names: tuple[str, ...], force: bool, verify: bool, dry_run: bool) -> None:
    """Send snapshots to a REMOTE: a folder, made if it isn't there."""
    from kvstore.store import Store

    from .folder import Folder, folder_path
    from .pushing import plan_push
    from .pushing import push as send

    path = folder_path(remote)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Store.open(settings.store, create=False))
        for name in names:
            store.resolve(name)  # a mistyped name must not make an empty remote
        if dry_run and path.parent.is_dir() and not path.exists():
            # A push would make it: plan against an empty one.
            place = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "empty"
            target = stack.enter_context(Folder.open(place, create=True))
        else:
            target = stack.enter_context(Folder.open(path, create=not dry_run))
        if dry_run:
            _print_plans(settings, remote, plan_push(store, target, names, force=force, verify=verify))
        else:
            meter = functools.partial(progress, "push", unit="bytes")
            _print_moved(settings, remote, send(store, target, names, force=force, verify=verify, meter=meter))


@click.command()
@click.argument("remote", type=Text())
@click.argument("names", nargs=-1, required=True, metavar="NAME...", type=Label())
@click.option("--trimmed", is_flag=True, help="Only what continuing from the end needs.")
@click.option("--as", "rename", metavar="NEWNAME", type=Label(), help="The name that the snapshot gets here.")
@click.option("--force", is_flag=True, help=_FORCE)
@click.option("--verify", is_flag=True, help=_VERIFY)
@click.option("--dry-run", is_flag=True, help=_DRY)
@common_options
def pull(
    settings: Settings,
    remote: str,
    names: tuple[str, ...],
    trimmed: bool,
    rename: str | None,
    force: bool,
    verify: bool,
    dry_run: bool,
) -> None:
    """Fetch snapshots from a REMOTE: a folder that was pushed to."""
    from kvstore.store import Store

    from .folder import Folder, folder_path
    from .pulling import plan_pull
    from .pulling import pull as fetch

    with Folder.open(folder_path(remote)) as source, Store.open(settings.store) as store:
        if dry_run:
            plans = plan_pull(store, source, names, trimmed=trimmed, rename=rename, force=force, verify=verify)
            _print_plans(settings, remote, plans)
        else:
            meter = functools.partial(progress, "pull", unit="bytes")
            targets = [rename] if rename is not None else names
            damaged = [found for name in targets if (found := store.shelf.records.damage(name)) is not None]
            moved = fetch(store, source, names, trimmed=trimmed, rename=rename, force=force, verify=verify, meter=meter)
            for error in damaged:
                note_damaged(error)
            _print_moved(settings, remote, moved)


def _print_plans(settings: Settings, remote: str, plans: Sequence[Plan]) -> None:
    value = {
        "remote": remote,
        "dry_run": True,
        "objects": sum(len(p.move) for p in plans),
        "payload_bytes": sum(p.payload_bytes for p in plans),
        "skipped": sum(p.there for p in plans),
        "snapshots": [
            {
                "name": p.label,
                "snapshot": p.digest.hex,
                "tokens": p.snapshot.tokens,
                "objects": len(p.move),
                "payload_bytes": p.payload_bytes,
                "skipped": p.there,
                "nowhere": p.nowhere,
            }
            for p in plans
        ],
    }
    settings.emit(
        value,
        lambda: "\n".join(
            f"{p.label}: {p.snapshot.tokens:,} tokens; would carry {len(p.move):,} objects, {size_text(p.payload_bytes)}; "
            f"{p.there:,} are there already{_nowhere(p.nowhere)}"
            for p in plans
        ),
    )


def _print_moved(settings: Settings, remote: str, moved: Moved) -> None:
    from kvstore.report import kept

    def row(carried: Carried) -> dict[str, Any]:
        return {
            "name": carried.label,
            "snapshot": carried.digest.hex,
            "tokens": carried.snapshot.tokens,
            "kept": kept(carried.snapshot, carried.coverage),
            "nowhere": carried.nowhere,
        }

    rows = [row(carried) for carried in moved.snapshots]
    value = {
        "remote": remote,
        "objects": moved.objects,
        "payload_bytes": moved.payload_bytes,
        "frame_bytes": moved.frame_bytes,
        "skipped": moved.skipped,
        "resumed": moved.resumed,
        "seconds": round(moved.seconds, 4),
        "snapshots": rows,
    }
    resumed = f", {moved.resumed:,} resumed" if moved.resumed else ""
    settings.emit(
        value,
        lambda: "\n".join(
            [f"{r['name']}: {r['tokens']:,} tokens, {r['kept']}{_nowhere(r['nowhere'])}" for r in rows]
            + [
                f"carried {moved.objects:,} objects, {size_text(moved.payload_bytes)}, in {moved.seconds:.2f} s; "
                f"{moved.skipped:,} were there{resumed}"
            ]
        ),
    )


def _nowhere(count: int) -> str:
    return f"; {count:,} objects of it are on neither side" if count else ""


def commands() -> dict[str, click.Command]:
    """The commands by verb."""
    return {"push": push, "pull": pull}
