"""The commands push and pull."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from kvstore.cli import Label, Place, Settings, Text, common_options, config_folder, note, note_damaged, progress
from kvstore.errors import Refused
from kvstore.plaintext import size_text

from .carry import Carried, Moved
from .plan import Plan
from .remote import Source, Target
from .vouching import Producers

if TYPE_CHECKING:
    from kvstore.store import Store

_FORCE = "Move the name even if the snapshot it stands for is not continued by the new one."
_VERIFY = "Also read what is there already, and carry again what is damaged."
_SIGNED = click.option(
    "--require-signed",
    is_flag=True,
    help="Only snapshots that a trusted key signed (`kvferry keys`); others are refused, before any KV comes.",
)
_DRY = "Say what would be carried; carry nothing."


@click.command()
@click.argument("remote", type=Text())
@click.argument("names", nargs=-1, required=True, metavar="NAME...", type=Label())
@click.option("--force", is_flag=True, help=_FORCE)
@click.option("--verify", is_flag=True, help=_VERIFY)
@click.option("--codec", type=click.Choice(["as-is", "planes", "raw"]), default="as-is", show_default=True,
              help="How objects travel and are stored there: as here, as planes (smaller), or raw (for a kvferry that knows no planes).")  # fmt: skip
@click.option("--dry-run", is_flag=True, help=_DRY)
@common_options
def push(
    settings: Settings,
    remote: str,
    names: tuple[str, ...],
    force: bool,
    verify: bool,
    codec: Literal["as-is", "planes", "raw"],
    dry_run: bool,
) -> None:
    """Send snapshots to a REMOTE: a folder, made if it isn't there, or a kvferry server."""
    from kvstore.store import Store

    from .folder import Folder, folder_path
    from .pushing import plan_push
    from .pushing import push as send
    from .remotes import is_folder, open_remote

    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Store.open(settings.store, create=False))
        for name in names:
            store.resolve(name)  # a mistyped name must not make an empty remote
        path = folder_path(remote) if is_folder(remote) else None
        if dry_run and path is not None and path.parent.is_dir() and not path.exists():
            # A push would make it: plan against an empty one.
            place = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "empty"
            target: Target = stack.enter_context(Folder.open(place, create=True))
        else:
            target = stack.enter_context(open_remote(remote, config=config_folder(), token=token(), create=not dry_run))
        if dry_run:
            print_plans(settings, remote, plan_push(store, target, names, force=force, verify=verify))
        else:
            meter = functools.partial(progress, "push", unit="bytes")
            chosen = None if codec == "as-is" else codec
            moved = send(store, target, names, force=force, verify=verify, codec=chosen, meter=meter)
            print_moved(settings, remote, moved)


_TRIMMED = click.option("--trimmed", is_flag=True, help="Only what continuing from the end needs.")
_FOR = click.option(
    "--for", "profile", metavar="PROFILE", type=Text(),
    help="Whole or trimmed, as a device needs it: iphone15, iphone17pro, mac, or a JSON file (see `kvferry plan`).",
)  # fmt: skip


@click.command()
@click.argument("remote", type=Text())
@click.argument("names", nargs=-1, required=True, metavar="NAME...", type=Label())
@_TRIMMED
@_FOR
@click.option("--as", "rename", metavar="NEWNAME", type=Label(), help="The name that the snapshot gets here.")
@click.option("--force", is_flag=True, help=_FORCE)
@click.option("--verify", is_flag=True, help=_VERIFY)
@_SIGNED
@click.option("--dry-run", is_flag=True, help=_DRY)
@common_options
def pull(
    settings: Settings,
    remote: str,
    names: tuple[str, ...],
    trimmed: bool,
    profile: str | None,
    rename: str | None,
    force: bool,
    verify: bool,
    require_signed: bool,
    dry_run: bool,
) -> None:
    """Fetch snapshots from a REMOTE: a folder that was pushed to, or a kvferry server."""
    from kvstore.store import Store

    from .remotes import open_remote

    wanted = How(trimmed or _trims(profile), rename, force, verify, dry_run, producers(require_signed))
    with open_remote(remote, config=config_folder(), token=token()) as source, Store.open(settings.store) as store:
        _pull(settings, store, source, remote, names, wanted)


@click.command()
@click.argument("remote", type=Text())
@click.option("--ref", "patterns", multiple=True, metavar="PATTERN", type=Text(),
              help="Only names like this, several times: `*` is any text, `?` a character. Default: all.")  # fmt: skip
@_TRIMMED
@_FOR
@click.option("--force", is_flag=True, help=_FORCE)
@click.option("--verify", is_flag=True, help=_VERIFY)
@_SIGNED
@click.option("--dry-run", is_flag=True, help=_DRY)
@common_options
def mirror(
    settings: Settings,
    remote: str,
    patterns: tuple[str, ...],
    trimmed: bool,
    profile: str | None,
    force: bool,
    verify: bool,
    require_signed: bool,
    dry_run: bool,
) -> None:
    """Fetch every snapshot of a REMOTE, or those whose names are like a PATTERN; run again, only what is new.

    Names that the REMOTE no longer has stay here.
    """
    from fnmatch import fnmatchcase

    from kvstore.store import Store

    from .remotes import open_remote

    wanted = How(trimmed or _trims(profile), None, force, verify, dry_run, producers(require_signed))
    with open_remote(remote, config=config_folder(), token=token()) as source, Store.open(settings.store) as store:
        names = [ref.label for ref in source.refs()]
        chosen = [name for name in names if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)]
        if not chosen and patterns:
            note(f"no name at {source.where} is like {', '.join(patterns)}; it has {', '.join(names[:20]) or 'none'}")
        _pull(settings, store, source, remote, chosen, wanted)


@click.command()
@click.argument("remote", type=Text())
@click.argument("folder", type=Place(), metavar="DIR")
@_TRIMMED
@_FOR
@_SIGNED
@common_options
def clone(
    settings: Settings, remote: str, folder: Path, trimmed: bool, profile: str | None, require_signed: bool
) -> None:
    """Make a new store in DIR with every snapshot of a REMOTE. Interrupted, `kvferry mirror --store DIR` goes on."""
    from kvstore.store import Store

    from .remotes import open_remote

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(
            f"{folder}: expected nothing or an empty folder, found something. `kvferry mirror --store {folder}` brings it up to date."
        )
    wanted = How(trimmed or _trims(profile), None, False, False, False, producers(require_signed))
    with open_remote(remote, config=config_folder(), token=token()) as source, Store.open(folder) as store:
        _pull(settings, store, source, remote, [ref.label for ref in source.refs()], wanted)


@dataclass(frozen=True, slots=True)
class How:
    """How to pull, as the options say."""

    trimmed: bool
    rename: str | None
    force: bool
    verify: bool
    dry_run: bool
    required: Producers | None


def _pull(settings: Settings, store: Store, source: Source, remote: str, names: Sequence[str], how: How) -> None:
    from .pulling import plan_pull
    from .pulling import pull as fetch

    options: dict[str, Any] = {"trimmed": how.trimmed, "rename": how.rename, "force": how.force, "verify": how.verify,
                               "required": how.required}  # fmt: skip
    if how.dry_run:
        print_plans(settings, remote, plan_pull(store, source, names, **options))
        return
    meter = functools.partial(progress, "pull", unit="bytes")
    targets = [how.rename] if how.rename is not None else names
    damaged = [found for name in targets if (found := store.shelf.records.damage(name)) is not None]
    moved = fetch(store, source, names, **options, meter=meter)
    for error in damaged:
        note_damaged(error)
    print_moved(settings, remote, moved)


def producers(required: bool) -> Producers | None:
    """Whom this machine trusts, where that is required."""
    from kvstore.keyring import Keyring

    return Keyring(config_folder()).trusted() if required else None


def _trims(profile: str | None) -> bool:
    """Whether a device of this profile needs only what continuing from the end does."""
    return profile is not None and bool(click.get_current_context().meta[TRIMS](profile))


TRIMS = "sync.trims"
"""Where the command line puts what says that, in the context's ``meta``: sync doesn't know devices."""


def token() -> str | None:
    """``KVFERRY_TOKEN``: for servers by plain HTTP; those that this machine was paired with have theirs."""
    return os.environ.get("KVFERRY_TOKEN") or None


def print_plans(settings: Settings, remote: str, plans: Sequence[Plan]) -> None:
    """What a transfer would carry."""
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


def print_moved(settings: Settings, remote: str, moved: Moved) -> None:
    """What a transfer did."""
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
    planes = (
        f" ({size_text(moved.frame_bytes)} on the way, as planes)" if moved.frame_bytes < moved.payload_bytes else ""
    )
    settings.emit(
        value,
        lambda: "\n".join(
            [f"{r['name']}: {r['tokens']:,} tokens, {r['kept']}{_nowhere(r['nowhere'])}" for r in rows]
            + [
                f"carried {moved.objects:,} objects, {size_text(moved.payload_bytes)}{planes}, in {moved.seconds:.2f} s; "
                f"{moved.skipped:,} were there{resumed}"
            ]
        ),
    )


def _nowhere(count: int) -> str:
    return f"; {count:,} objects of it are on neither side" if count else ""


def commands() -> dict[str, click.Command]:
    """The commands by verb."""
    return {"push": push, "pull": pull, "mirror": mirror, "clone": clone}
