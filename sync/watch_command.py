"""The command watch."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click

from kvstore.cli import Place, Settings, Text, common_options, config_folder, note
from kvstore.errors import InputInvalid

TAKE_FOLDER = "sync.take_folder"
"""Where the command line puts what takes in another program's checkpoint folder, in the context's ``meta``."""


@click.command()
@click.option(
    "--push",
    "remotes",
    multiple=True,
    metavar="REMOTE",
    type=Text(),
    help="Push each name that is given or moved here, several times.",
)
@click.option(
    "--ref",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    type=Text(),
    help="With --push: only names like this. Default: all.",
)
@click.option(
    "--inbox", type=Place(), metavar="DIR", help="Take in .kvferry files, and checkpoint folders, that appear in DIR."
)
@click.option("--bundle", metavar="DIR", type=Text(), help="With --inbox: the bundle that checkpoint folders are of.")
@common_options
def watch(
    settings: Settings, remotes: tuple[str, ...], patterns: tuple[str, ...], inbox: Path | None, bundle: str | None
) -> None:
    """Push what is saved here, or take in what arrives, until Ctrl-C. Each step is a line; with --json a JSON object."""
    from . import watch as watching

    if not remotes and inbox is None:
        raise InputInvalid("watch: expected --push REMOTE or --inbox DIR, found neither")
    if inbox is not None and not inbox.is_dir():
        raise InputInvalid(f"--inbox {inbox}: expected a folder, found none. Make it first.")
    stop, tell = threading.Event(), _json if settings.json else _talk
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    scans, folders = [], []
    for remote in remotes:
        pushing = watching.Pushing(settings.store, remote, patterns or ("*",), _sender(settings.store, remote), tell)
        scans.append(pushing.scan)
        folders.append(settings.store / "refs")
    if inbox is not None:
        take_folder = click.get_current_context().meta.get(TAKE_FOLDER)
        scans.append(watching.Inbox(inbox, _taker(settings.store, bundle, take_folder), tell).scan)
        folders.append(inbox)
    note(f"watching {', '.join(map(str, folders))}; Ctrl-C stops")
    watching.run(scans, folders, stop, tell)


def _sender(store: Path, remote: str) -> Any:
    def send(label: str) -> None:
        from kvstore.store import Store

        from .cli import token
        from .pushing import push
        from .remotes import open_remote

        with (
            Store.open(store) as opened,
            open_remote(remote, config=config_folder(), token=token(), create=True) as target,
        ):
            push(opened, target, [label])

    return send


def _taker(store: Path, bundle: str | None, take_folder: Any) -> Any:
    def take(path: Path) -> dict[str, Any] | None:
        from kvstore.store import Store

        from .carry import unmetered
        from .onefile import SUFFIX, import_
        from .onefile_commands import pieces

        if path.is_dir():
            if bundle is None or take_folder is None or not (path / "manifest.json").exists():
                return None
            found: dict[str, Any] = take_folder(store, path, bundle)
            return found
        if path.suffix != SUFFIX:
            return None
        with Store.open(store) as opened, unmetered(0) as advance:
            made = import_(opened, pieces(path), str(path), name=None, force=False, advance=advance)
        return {"name": made.carried.label, "snapshot": made.carried.digest.hex, "tokens": made.carried.snapshot.tokens}

    return take


def _talk(kind: str, what: dict[str, Any]) -> None:
    about = what.get("name") or what.get("path") or "the scan"
    message = f": {what['message']}" if "message" in what else ""
    again = f" Again in {what['again_in']:.0f} s." if "again_in" in what else ""
    click.echo(f"{time.strftime('%H:%M:%S')} {kind} {about}{message}{again}")
    sys.stdout.flush()


def _json(kind: str, what: dict[str, Any]) -> None:
    click.echo(json.dumps({"time": round(time.time(), 3), "event": kind, **what}, ensure_ascii=False))
    sys.stdout.flush()


def commands() -> dict[str, click.Command]:
    """The command by verb."""
    return {"watch": watch}
