"""One verb with two forms, each a command of another package: which one is meant shows in an argument."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import click


def joined(
    first: click.Command, second: click.Command, argument: str, metavar: str, is_first: Callable[[str], bool], hint: str
) -> click.Command:
    """A command with the options of both, that runs ``first`` where ``is_first`` says so of ``argument``'s text, else ``second``.

    ``hint``: how the first form is meant instead. What only the other form takes is refused with the form that it is for; what the chosen form requires is asked for.
    """
    names = {p.name for p in first.params}
    # Copies: the two commands stay what they are.
    both = [copy(p) for p in (*first.params, *(p for p in second.params if p.name not in names))]
    required = {id(p) for p in both if p.required and isinstance(p, click.Option)}
    for param in both:
        if id(param) in required:
            param.required = False  # asked for below, of its own form only
        if param.name == argument and isinstance(param, click.Argument):
            param.metavar = metavar

    def run(**given: Any) -> None:
        context = click.get_current_context()
        chosen, other = (first, second) if is_first(str(given[argument])) else (second, first)
        own = {p.name: p for p in chosen.params}
        for param in other.params:
            told = (
                param.name is not None
                and context.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE
            )
            if told and param.name not in own:
                raise click.UsageError(
                    f"{param.opts[0]} is for another form of `{context.command_path}`: see --help.", context
                )
        for param in both:
            if id(param) in required and param.name in own and given[param.name] is None:
                raise click.UsageError(
                    f"{metavar}: expected {param.opts[0]} for this form, found none. {hint}", context
                )
        context.invoke(chosen, **{name: value for name, value in given.items() if name in own})

    text = f"{first.help}\n\n{second.help}"
    return click.Command(first.name, callback=run, params=both, help=text)
