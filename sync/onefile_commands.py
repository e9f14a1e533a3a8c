"""The commands about one-file snapshots: export and import. `kvstore.__main__` joins them with those about checkpoint folders."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import click

from kvstore.cli import Label, Place, Settings, common_options, progress
from kvstore.errors import InputInvalid, SnapshotMissing
from kvstore.plaintext import size_text

from .frames import Buffer

_PIECE = 1 << 20


@click.command("export")
@click.argument("name", type=Label())
@click.argument("folder", type=Place(), metavar="FILE.kvferry")
@click.option("--trimmed", is_flag=True, help="FILE.kvferry: only what continuing from the end needs.")
@click.option("--force", is_flag=True, help="FILE.kvferry: replace a file that is there.")
@common_options
def export(settings: Settings, name: str, folder: Path, trimmed: bool, force: bool) -> None:
    """Write the snapshot NAME to one file, FILE.kvferry, for `kvferry import` anywhere; `-` is stdout."""
    from kvstore.report import kept
    from kvstore.store import Store

    from .onefile import export as streamed
    from .onefile import plan_export, write

    started = perf_counter()
    with Store.open(settings.store, create=False) as store:
        plan = plan_export(store, name, trimmed=trimmed)
        with progress("Exporting", plan.bytes, "bytes") as advance:
            if str(folder) == "-":
                for piece in streamed(store, plan, advance):
                    sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()
            else:
                write(folder, streamed(store, plan, advance), force=force)
    value = {
        "name": plan.label,
        "snapshot": plan.digest.hex,
        "path": str(folder.absolute()),
        "format": "kvferry",
        "tokens": plan.snapshot.tokens,
        "kept": kept(plan.snapshot, plan.coverage),
        "objects": plan.objects,
        "bytes": plan.bytes,
        "seconds": round(perf_counter() - started, 4),
    }
    told = f"{name}: {plan.snapshot.tokens:,} tokens, {value['kept']}, {size_text(plan.bytes)}, written to {folder}"
    if str(folder) != "-":
        settings.emit(value, told)
    elif settings.json:  # stdout is the file
        click.echo(json.dumps(value, ensure_ascii=False), err=True)


@click.command("import")
@click.argument("folder", type=Place(), metavar="FILE.kvferry")
@click.option(
    "--name",
    type=Label(),
    help="Name of the snapshot. Default: the one it was exported with; of a folder, the folder's.",
)
@click.option(
    "--force", is_flag=True, help="FILE.kvferry: move the name even if what it stands for is not continued by this."
)
@click.option("--require-signed", is_flag=True, help="FILE.kvferry: only what a trusted key signed (`kvferry keys`).")
@common_options
def import_(settings: Settings, folder: Path, name: str | None, force: bool, require_signed: bool) -> None:
    """Take in a snapshot from one file, FILE.kvferry; `-` is stdin."""
    from kvstore.report import kept
    from kvstore.store import Store

    from .cli import producers
    from .onefile import import_ as take

    started = perf_counter()
    total = 0 if str(folder) == "-" else _size(folder)
    with Store.open(settings.store) as store, progress("Importing", max(1, total), "bytes") as advance:
        made = take(
            store,
            pieces(folder),
            str(folder),
            name=name,
            force=force,
            advance=advance,
            required=producers(require_signed),
        )
    carried = made.carried
    value = {
        "name": carried.label,
        "snapshot": carried.digest.hex,
        "path": str(folder.absolute()),
        "format": "kvferry",
        "tokens": carried.snapshot.tokens,
        "kept": kept(carried.snapshot, carried.coverage),
        "objects": made.objects,
        "written_objects": made.landed,
        "bytes": made.bytes,
        "seconds": round(perf_counter() - started, 4),
    }
    settings.emit(
        value,
        f"{carried.label}: {carried.snapshot.tokens:,} tokens, {value['kept']}, {size_text(made.bytes)} read, {made.landed:,} of {made.objects:,} objects new",
    )


def _size(path: Path) -> int:
    """Bytes of a file. `SnapshotMissing` where there is none, `InputInvalid` where it is no file."""
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise SnapshotMissing(
            f"{path}: expected a file that `kvferry export` wrote, found none.", path=str(path)
        ) from error
    if not stat.S_ISREG(found.st_mode):
        raise InputInvalid(f"{path}: expected a file that `kvferry export` wrote, found a folder or something else.")
    return found.st_size


def pieces(path: Path) -> Iterator[Buffer]:
    """A file's bytes, each piece valid until the next is asked for."""
    view = memoryview(bytearray(_PIECE))
    fd = sys.stdin.fileno() if str(path) == "-" else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while count := os.readv(fd, [view]):
            yield view[:count]
    finally:
        if str(path) != "-":
            os.close(fd)


def commands() -> dict[str, click.Command]:
    """These commands by verb."""
    return {c.name or "": c for c in (export, import_)}
