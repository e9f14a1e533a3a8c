"""What every command shares (settings, errors, progress), and the commands that need the store alone.

A command parses, makes one library call, and prints: data to stdout, talk to stderr.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from .errors import InputInvalid, KVError, SnapshotMissing, StoreMissing

_STORE_HELP = "Store folder. [env KVFERRY_STORE; default: the user's data folder]"
_JSON_HELP = "Print one JSON value."


@dataclass(frozen=True, slots=True)
class Settings:
    """What the options before or after the verb say."""

    store: Path
    json: bool = False

    def emit(self, value: Any, text: str | Callable[[], str]) -> None:
        """Prints ``value`` as JSON with --json, else ``text``."""
        if self.json:
            click.echo(json.dumps(value, ensure_ascii=False, indent=2))
        else:
            shown = text if isinstance(text, str) else text()
            if shown:
                click.echo(shown)


def default_store() -> Path:
    """``KVFERRY_STORE`` or the user's data folder."""
    if given := os.environ.get("KVFERRY_STORE"):
        return Path(given).expanduser()
    import platformdirs

    return Path(platformdirs.user_data_dir("kvferry", appauthor=False)) / "store"


def cache_folder() -> Path:
    """``KVFERRY_CACHE`` or the user's cache folder: bundles and digests that can be made again."""
    if given := os.environ.get("KVFERRY_CACHE"):
        return Path(given).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("kvferry", appauthor=False))


def common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds --store and --json behind the verb (they win over those before it) and passes `Settings` first."""

    @click.option("--store", "store_", type=click.Path(path_type=Path), help=_STORE_HELP)
    @click.option("--json", "json_", is_flag=True, help=_JSON_HELP)
    @click.pass_context
    @functools.wraps(command)
    def wrapped(ctx: click.Context, /, *args: Any, **kwargs: Any) -> None:
        settings: Settings = ctx.obj
        store, as_json = kwargs.pop("store_"), kwargs.pop("json_")
        settings = replace(settings, store=store or settings.store, json=as_json or settings.json)
        ctx.invoke(command, settings, *args, **kwargs)

    return wrapped


@contextmanager
def progress(title: str, total: float, unit: str = "") -> Iterator[Callable[[float], None]]:
    """Yields ``advance(amount)``. A bar on stderr if it is a terminal and the work takes over a second."""
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    start, done, bar, task = time.monotonic(), 0.0, None, None

    def advance(amount: float) -> None:
        nonlocal done, bar, task
        done += amount
        if bar is None and time.monotonic() - start > 1.0:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            bar = Progress(
                TextColumn(title),
                BarColumn(),
                TextColumn("{task.completed:,.0f}/{task.total:,.0f} " + unit),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            bar.start()
            task = bar.add_task(title, total=total)
        if bar is not None and task is not None:
            bar.update(task, completed=done)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """Columns padded to their widest cell; numbers to the right."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max(len(r[i]) for r in [list(header), *cells]) for i in range(len(header))]
    right = [all(isinstance(row[i], int | float) for row in rows) and bool(rows) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join(line(row) for row in [list(header), *cells])


def size_text(count: int) -> str:
    """Bytes for people: ``36.9 MB`` (powers of ten)."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} GB"


def fail(error: KVError, as_json: bool) -> int:
    """Says what went wrong on stderr, as JSON with --json; returns the exit code."""
    if as_json:
        value = {"error": type(error).__name__, "message": error.message, "details": dict(error.details)}
        click.echo(json.dumps(value, ensure_ascii=False, default=str), err=True)
    else:
        click.echo(f"kvferry: {type(error).__name__}: {error.message}", err=True)
    return error.exit_code


@click.command()
@common_options
def ls(settings: Settings) -> None:
    """List the named snapshots of the store."""
    from .report import listing
    from .shelf import Shelf

    try:
        with Shelf.open(settings.store, create=False) as shelf:
            rows, damage = listing(shelf)
    except StoreMissing:
        rows, damage = [], []
    columns = ("name", "tokens", "kept", "bytes", "model", "updated", "snapshot")
    settings.emit(
        rows,
        lambda: (
            table([[r["name"], r["tokens"], r["kept"], r["bytes"], r["model"], r["updated"], r["snapshot"][:12]]
                   for r in rows], columns)
            if rows
            else ""
        ),
    )  # fmt: skip
    for error in damage:
        fail(error, settings.json)
    if damage:
        raise click.exceptions.Exit(damage[0].exit_code)


@click.command()
@click.argument("name")
@common_options
def show(settings: Settings, name: str) -> None:
    """Show one snapshot: tokens, identity, who computed it, what of it is here."""
    from .report import describe
    from .store import Store

    with Store.open(settings.store, create=False) as store:
        value = describe(store, name)
    settings.emit(value, lambda: "\n".join(f"{k:<12} {_plain(v)}" for k, v in value.items()))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@click.command()
@click.argument("name")
@click.argument("to")
@common_options
def rename(settings: Settings, name: str, to: str) -> None:
    """Give a snapshot another name."""
    from .shelf import Shelf

    with Shelf.open(settings.store, create=False) as shelf:
        ref = shelf.records.rename_ref(name, to)
    settings.emit({"name": ref.label, "snapshot": ref.snapshot.hex}, f"{name} is now {ref.label}")


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@common_options
def rm(settings: Settings, names: tuple[str, ...]) -> None:
    """Remove names. The KV becomes cache until `kvferry gc` collects it."""
    from .shelf import Shelf

    with Shelf.open(settings.store, create=False) as shelf:
        found = {name: shelf.records.ref(name) for name in names}
        missing = [name for name, ref in found.items() if ref is None]
        if missing:
            raise SnapshotMissing(
                f"no snapshot named {missing[0]!r} in {settings.store}; nothing was removed. `kvferry ls` lists them.",
                label=missing[0],
            )
        removed = []
        for name, ref in found.items():
            if ref is not None:
                shelf.records.move_ref(name, ref.snapshot, None)
                removed.append({"name": ref.label, "snapshot": ref.snapshot.hex})
    settings.emit({"removed": removed}, "\n".join(f"removed {r['name']} ({r['snapshot'][:12]})" for r in removed))


@click.command()
@common_options
def doctor(settings: Settings) -> None:
    """Say whether this installation is sound, and what is missing for what."""
    from .doctor import examine

    findings = examine(settings.store, cache_folder())
    mark = {"ok": "ok  ", "note": "note", "bad": "BAD "}
    settings.emit(
        {"ok": all(f["state"] != "bad" for f in findings), "findings": findings},
        lambda: "\n".join(f"{mark[f['state']]}  {f['what']}: {f['found']}" for f in findings),
    )
    if any(f["state"] == "bad" for f in findings):
        raise click.exceptions.Exit(1)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a completion script: eval "$(kvferry completion bash)"."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    root = click.get_current_context().find_root().command
    if kind is None:
        raise InputInvalid(f"shell: expected bash, zsh or fish, found {shell}")
    click.echo(kind(root, {}, "kvferry", "_KVFERRY_COMPLETE").source())


def commands() -> dict[str, click.Command]:
    """The store's own commands by verb."""
    return {c.name or "": c for c in (ls, show, rename, rm, doctor, completion)}
