"""--metrics of the verbs that run a model or carry KV: where records of what they measured go."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvstore.cli import Place, note


def default_file() -> Path | None:
    """``KVFERRY_METRICS``; None: nothing is recorded."""
    given = os.environ.get("KVFERRY_METRICS")
    return Path(given).expanduser() if given else None


def metrics_option(command: Callable[..., None]) -> Callable[..., None]:
    """Adds --metrics, and passes the verb its ``journal``. An error that leaves the verb is recorded with the phase it was in."""

    @click.option(
        "--metrics",
        type=Place(),
        metavar="FILE",
        help="Append what was measured to FILE, as lines of JSON; never any text. [env KVFERRY_METRICS]",
    )
    @functools.wraps(command)
    def wrapped(*args: Any, metrics: Path | None, **kwargs: Any) -> None:
        from .metrics.journal import Journal

        verb = click.get_current_context().info_name or ""
        with Journal.at(metrics or default_file(), verb, note) as journal:
            try:
                command(*args, journal=journal, **kwargs)
            except (click.ClickException, click.exceptions.Exit):
                raise  # about the command line, not about what it ran
            except BaseException as error:
                journal.failed(error)
                raise

    return wrapped
