"""The command that sums up what a store was asked and what it holds: stats store."""

from __future__ import annotations

import click

from .cli import Settings, common_options, terminal_width


@click.command("store")
@common_options
def stats_store(settings: Settings) -> None:
    """Say how often the store had something of a prompt, how many tokens were reused, and what sharing saves.

    Counted are the questions of `prefill`, `generate` and `chat`, and of programs that use the store; not those of `find`, and not
    restoring by name. The counts lie in the index: they begin anew when that is made anew.
    """
    from .stats import stats_text, store_stats
    from .store import Store

    with Store.open(settings.store, create=False) as store:
        value = store_stats(store).value()
    settings.emit(value, lambda: stats_text(value, terminal_width()))
