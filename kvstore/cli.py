"""What every command shares (settings, errors, progress), and the commands that need the store alone.

A command parses, makes one library call, and prints: data to stdout, talk to stderr.
"""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import click

from .errors import InputInvalid, KVError, RefCorrupt, StoreMissing
from .plaintext import WIDTH

_STORE_HELP = "Store folder. [env KVFERRY_STORE; default: the user's data folder]"
_JSON_HELP = "Print one JSON value."
NOTE_SECONDS = 10.0
"""How often work says how far it is where stderr is no terminal: a log shows that it goes on."""


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


def config_folder() -> Path:
    """``KVFERRY_CONFIG`` or the user's settings folder: the servers that this machine knows, and what its own server needs."""
    if given := os.environ.get("KVFERRY_CONFIG"):
        return Path(given).expanduser()
    import platformdirs

    return Path(platformdirs.user_config_dir("kvferry", appauthor=False))


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None where it is a pipe or a file, whose reader gets everything."""
    if not sys.stdout.isatty():
        return None
    from shutil import get_terminal_size

    return get_terminal_size((WIDTH, 24)).columns


class Place(click.Path):
    """A path. An empty one, which a script gives with an unset variable, is not the current folder."""

    def __init__(self, *, exists: bool = False, file_okay: bool = True) -> None:
        super().__init__(exists=exists, file_okay=file_okay, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("expected a path, found an empty string.", param, ctx)
        return super().convert(value, param, ctx)


class Text(click.types.StringParamType):
    """A string that isn't empty."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "":
            self.fail("expected some text, found an empty string.", param, ctx)
        return str(value)


class Number(click.FloatRange):
    """A number in a range; infinity and NaN, which compare as nobody expects, are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


class Label(click.types.StringParamType):
    """The name of a snapshot, checked before any work is done for it; the shell completes it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from .records import check_label

        check_label(str(value))
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        from click.shell_completion import CompletionItem

        from .shelf import Shelf

        given = ctx.params.get("store_") or ctx.find_root().params.get("store")
        try:
            with Shelf.open(given or default_store(), create=False) as shelf:
                labels = sorted(ref.label for ref in shelf.records.readable_refs())
        except (KVError, OSError):
            return []  # pressing Tab is no place for an error
        return [CompletionItem(label) for label in labels if label.startswith(incomplete)]


def common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds --store and --json behind the verb (they win over those before it) and passes `Settings` first."""

    @click.option("--store", "store_", type=Place(), help=_STORE_HELP)
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
    """Yields ``advance(amount)``. A bar on stderr if it is a terminal and the work takes over a second; else a line now and then."""
    if not sys.stderr.isatty():
        yield _lines(title, total, unit)
        return
    start, done, bar, task = time.monotonic(), 0.0, None, None

    def advance(amount: float) -> None:
        nonlocal done, bar, task
        done += amount
        if bar is None and time.monotonic() - start > 1.0:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            bar = Progress(
                TextColumn("{task.description}", markup=False),
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


def _lines(title: str, total: float, unit: str) -> Callable[[float], None]:
    done, told = 0.0, time.monotonic()

    def advance(amount: float) -> None:
        nonlocal done, told
        done += amount
        if time.monotonic() - told >= NOTE_SECONDS and done < total:
            told = time.monotonic()
            note(f"{title} {done:,.0f} of {total:,.0f} {unit}".rstrip())

    return advance


@contextmanager
def _still(title: str) -> Iterator[None]:
    started, over = time.monotonic(), threading.Event()

    def tell() -> None:
        while not over.wait(NOTE_SECONDS):
            note(f"{title}, {time.monotonic() - started:.0f} s so far")

    thread = threading.Thread(target=tell, name=title, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def waiting(title: str) -> Iterator[None]:
    """Something that moves, and the time, on stderr if it is a terminal, else a line now and then: for work that can't say how far it is."""
    if not sys.stderr.isatty():
        with _still(title):
            yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        shown.add_task(title, total=None)
        yield


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """SIGTERM and SIGHUP end what runs inside as Ctrl-C does: temporary files and processes of ours go with it."""

    def end(number: int, _: FrameType | None) -> None:
        for one in taken:
            signal.signal(one, signal.SIG_IGN)
        raise click.exceptions.Exit(128 + number)

    taken = {s: h for s in (signal.SIGTERM, signal.SIGHUP) if (h := signal.getsignal(s)) is not signal.SIG_IGN}
    for one in taken:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one, before in taken.items():
            signal.signal(one, before)


def note(text: str) -> None:
    """One line of talk on stderr."""
    click.echo(f"kvferry: {text}", err=True)


def note_damaged(error: RefCorrupt) -> None:
    """Says that a name was damaged, and has been given anew."""
    note(f"{error.details['what']} was damaged, and is given anew. {error.found}")


def fail(error: KVError, as_json: bool) -> int:
    """Says what went wrong on stderr, as JSON with --json; returns the exit code."""
    say_error(type(error).__name__, error.message, dict(error.details), as_json)
    return error.exit_code


def say_error(kind: str, message: str, details: dict[str, Any], as_json: bool) -> None:
    """The one form of an error on stderr: ``kvferry: KIND: MESSAGE``, or with --json a line that is a JSON object."""
    if as_json:
        value = {"error": kind, "message": message, "details": details}
        click.echo(json.dumps(value, ensure_ascii=False, default=str), err=True)
    else:
        note(f"{kind}: {message}")


@click.command()
@common_options
def ls(settings: Settings) -> None:
    """List the named snapshots of the store."""
    from .report import listing, listing_text
    from .shelf import Shelf

    try:
        with Shelf.open(settings.store, create=False) as shelf:
            rows, damage = listing(shelf)
    except StoreMissing:
        rows, damage = [], []
    settings.emit(rows, lambda: listing_text(rows, terminal_width()))
    for error in damage:
        fail(error, settings.json)
    if damage:
        raise click.exceptions.Exit(damage[0].exit_code)


@click.command()
@click.argument("name", type=Label())
@common_options
def show(settings: Settings, name: str) -> None:
    """Show one snapshot: tokens, identity, who computed it and who signed it, what of it is here."""
    from .keyring import Keyring
    from .report import describe, description_text
    from .store import Store

    with Store.open(settings.store, create=False) as store:
        value = describe(store, name, Keyring(config_folder()).trusted())
    settings.emit(value, lambda: description_text(value, terminal_width() or WIDTH))


@click.command()
@click.argument("name", type=Label())
@click.argument("to", type=Label())
@common_options
def rename(settings: Settings, name: str, to: str) -> None:
    """Give a snapshot another name."""
    from .shelf import Shelf

    with Shelf.open(settings.store, create=False) as shelf:
        damage = shelf.records.damage(to)
        ref = shelf.records.rename_ref(name, to)
    if damage is not None:
        note_damaged(damage)
    settings.emit({"name": ref.label, "snapshot": ref.snapshot.hex}, f"{name} is now {ref.label}")


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", type=Label())
@common_options
def rm(settings: Settings, names: tuple[str, ...]) -> None:
    """Remove names. The KV becomes cache until `kvferry gc` collects it.

    A damaged name whose text nobody knows any more goes by its file, refs/..., as `check` and `ls` give it.
    """
    from .shelf import Shelf

    with Shelf.open(settings.store, create=False) as shelf:
        gone = shelf.records.remove(names)
    removed = [{"name": name, "snapshot": None if digest is None else digest.hex} for name, digest in gone]
    told = [f"removed {name} ({'it was damaged' if digest is None else digest.hex[:12]})" for name, digest in gone]
    settings.emit({"removed": removed}, "\n".join(told))


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
    """Print a script that completes verbs, options and names of snapshots. Put the line for your shell into its start-up file:

    \b
      ~/.bashrc                   eval "$(kvferry completion bash)"
      ~/.zshrc                    eval "$(kvferry completion zsh)"
      ~/.config/fish/config.fish  kvferry completion fish | source
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    root = click.get_current_context().find_root().command
    if kind is None:
        raise InputInvalid(f"shell: expected bash, zsh or fish, found {shell}")
    click.echo(kind(root, {}, "kvferry", "_KVFERRY_COMPLETE").source())


def commands() -> dict[str, click.Command]:
    """The store's own commands by verb."""
    return {c.name or "": c for c in (ls, show, rename, rm, doctor, completion)}
