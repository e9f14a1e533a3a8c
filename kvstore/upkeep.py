"""The commands that look after a store's files: du, gc, check."""

from __future__ import annotations

import click

from .cli import Settings, common_options, size_text, table
from .errors import StoreMissing


@click.command()
@common_options
def du(settings: Settings) -> None:
    """Say what takes the space, and what removing a name would free."""
    from .prune import usage
    from .store import Store

    try:
        with Store.open(settings.store, create=False) as store:
            value = usage(store).value()
    except StoreMissing:
        value = {"total": 0, "parts": {}, "snapshots": []}
    settings.emit(
        value,
        lambda: "\n".join(
            [f"{name:<12} {size_text(count):>10}" for name, count in value["parts"].items()]
            + [f"{'total':<12} {size_text(value['total']):>10}"]
            + (
                ["", table([[s["name"] or s["snapshot"][:12], size_text(s["own"]), size_text(s["shared"])]
                            for s in value["snapshots"]], ("snapshot", "own", "shared"))]
                if value["snapshots"]
                else []
            )
        ),
    )  # fmt: skip
