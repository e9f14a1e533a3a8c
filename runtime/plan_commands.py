"""The command that says what a device can do with a model's context, before anything is carried to it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from kvstore.cli import Place, Settings, Text, common_options, note, terminal_width
from kvstore.plaintext import WIDTH, labelled, size_text, table

from .opening import BundleName, open_bundle

if TYPE_CHECKING:
    from .plan import HeadUnits, Outcome, Plan, Way
    from .plan_sizes import ModelSizes
    from .profile import Profile

_LEDGERS = ("footprint", "wired", "mapped")


@click.command()
@click.option("--bundle", "folder", metavar="DIR", type=BundleName(), help="Bundle folder, or a cached bundle's name.")
@click.option(
    "--config",
    type=Place(exists=True),
    help="Instead: the config.json of a Gemma 4 model, of which no weights are needed.",
)
@click.option(
    "--weights", type=click.Choice(["pal6", "int8", "fp16"]), help="--config: form of the chunks' weights (pal6)."
)
@click.option(
    "--verify-head",
    type=click.Choice(["same", "pal6"]),
    help="--config: weights of the verification head (pal6, as published).",
)
@click.option("--sidecars", type=click.Choice(["int8", "fp16"]), help="--config: form of the embedding tables (int8).")
@click.option(
    "--profile",
    "given",
    metavar="DEVICE",
    required=True,
    type=Text(),
    help="iphone15, iphone17pro, mac, or a JSON file as --show-profile prints it.",
)
@click.option("--context", type=click.IntRange(1), help="Tokens of the context.")
@click.option("--trimmed", is_flag=True, help="Carry only what continuing from the end needs.")
@click.option(
    "--way", type=click.Choice(["restore", "prefill"]), help="Refuse unless this fits. Default: unless restoring fits."
)
@click.option(
    "--speculation/--no-speculation",
    default=None,
    help="Refuse unless it fits with speculation (--no-speculation: without). Default: as the profile has it.",
)
@click.option(
    "--verify-head-units",
    "units",
    type=click.Choice(["cpu", "ane"]),
    default="cpu",
    show_default=True,
    help="What the batched head runs on.",
)
@click.option(
    "--explain", is_flag=True, help="Also every line of the ledgers, and where every number of the profile comes from."
)
@click.option("--show-profile", is_flag=True, help="Print the profile as a file to change, and nothing else.")
@common_options
def plan(
    settings: Settings,
    folder: str | None,
    config: Path | None,
    weights: Literal["pal6", "int8", "fp16"] | None,
    verify_head: Literal["same", "pal6"] | None,
    sidecars: Literal["int8", "fp16"] | None,
    given: str,
    context: int | None,
    trimmed: bool,
    way: Way | None,
    speculation: bool | None,
    units: HeadUnits,
    explain: bool,
    show_profile: bool,
) -> None:
    """Say what a device can do with a context: what is resident, whether it is killed for it, how long it takes.

    Exit 7 (`WouldBeKilled`) where the way that is asked for does not fit. Most numbers of a profile are assumptions: --explain says which.
    """
    from .plan import make_plan
    from .profile import profile_of

    profile = profile_of(given)
    if show_profile:
        click.echo(json.dumps(profile.document(), indent=2, ensure_ascii=False))
        return
    if (folder is None) == (config is None):
        raise click.UsageError("Give --bundle DIR or --config FILE.")
    if context is None:
        raise click.UsageError("Give --context N, the tokens that are to be continued.")
    if config is None:
        if weights or verify_head or sidecars:
            raise click.UsageError("--weights, --verify-head and --sidecars are for --config: a bundle has its own.")
        sizes = _sizes(folder or "")
    else:
        sizes = _config_sizes(config, weights or "pal6", verify_head or "pal6", sidecars or "int8")
    made = make_plan(sizes, profile, context, trimmed=trimmed, head_units=units)
    settings.emit(_value(made), lambda: _text(made, explain))
    asked = made.require(way or "restore", made.speculation if speculation is None else speculation)
    if asked.reread_seconds is not None:
        note(f"it fits, but the batched head is read again every round: {asked.reread_seconds:.1f} s.")


def _sizes(folder: str) -> ModelSizes:
    from .plan_sizes import bundle_sizes

    return bundle_sizes(open_bundle(folder))


def _config_sizes(
    file: Path,
    weights: Literal["pal6", "int8", "fp16"],
    verify_head: Literal["same", "pal6"],
    sidecars: Literal["int8", "fp16"],
) -> ModelSizes:
    from .build.gemma4.model import Packing
    from .build.gemma4.sizes import config_sizes

    return config_sizes(file, Packing(weights, verify_head, sidecars))


def _value(made: Plan) -> dict[str, Any]:
    """For ``--json``."""
    profile = made.profile
    return {
        "model": made.model,
        "context_tokens": made.tokens,
        "trimmed": made.trimmed,
        "limit_bytes": profile.limit_bytes,
        "speculation_default": made.speculation,
        "ways": [_outcome(outcome) for outcome in made.outcomes],
        "kv_bytes_per_token": made.kv_bytes_per_token,
        "whole_bytes": made.whole_bytes,
        "trimmed_bytes": made.trimmed_bytes,
        "tables_bytes": made.tables_bytes,
        "download_seconds": made.download_seconds,
        "restore_seconds": made.restore_seconds,
        "feed_seconds": made.feed_seconds,
        "break_even_tokens": made.break_even_tokens,
        "profile": profile.name,
        "figures": {name: dataclasses.asdict(figure) for name, figure in profile.figures().items()},
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    ledgers = outcome.ledgers
    return {
        "way": outcome.way,
        "speculation": outcome.speculation,
        "verdict": outcome.verdict,
        "functions": list(outcome.functions),
        "footprint_bytes": ledgers.footprint_bytes,
        "wired_bytes": ledgers.wired_bytes,
        "mapped_bytes": ledgers.mapped_bytes,
        "bytes": ledgers.bytes,
        "reread_seconds": outcome.reread_seconds,
        "ledgers": [
            {"ledger": name, "name": entry.name, "bytes": entry.bytes}
            for name in _LEDGERS
            for entry in getattr(ledgers, name)
        ],
    }


def _text(made: Plan, explain: bool) -> str:
    """For people."""
    from .plan import told_way

    width = terminal_width()
    profile = made.profile
    parts = [
        f"{made.model}: {made.tokens:,} tokens on {profile.name}: at most {size_text(profile.limit_bytes)} in all "
        f"({profile.limit_share.value:g} of {size_text(int(profile.physical_bytes.value))}: {profile.limit_share.source})",
        outcome_table(made, width),
        labelled(_facts(made), width or WIDTH),
    ]
    if explain:
        resident = [(told_way(outcome), ", ".join(outcome.functions)) for outcome in made.outcomes]
        parts += [labelled(resident, width or WIDTH), _entries(made, width), _figures(profile, width)]
    return "\n\n".join(parts)


def outcome_table(made: Plan, width: int | None) -> str:
    """The outcomes, a line each."""
    from .plan import told_way

    rows = [
        (
            told_way(outcome),
            len(outcome.functions),
            *(size_text(getattr(outcome.ledgers, f"{name}_bytes")) for name in _LEDGERS),
            size_text(outcome.ledgers.bytes),
            outcome.verdict,
        )
        for outcome in made.outcomes
    ]
    sizes = (*_LEDGERS, "in all")
    return table(rows, ("way", "functions", *sizes, "verdict"), width, right=sizes)


def _facts(made: Plan) -> list[tuple[str, str]]:
    carried = "trimmed" if made.trimmed else "whole"
    even = "never" if made.break_even_tokens is None else f"from a length of {made.break_even_tokens:,} on"
    profile = made.profile
    least = size_text(int(profile.speculation_from_bytes.value))
    return [
        ("KV", f"{size_text(made.whole_bytes)} whole, {size_text(made.trimmed_bytes)} trimmed"),
        ("download", f"{made.download_seconds:.2f} s ({carried})"),
        ("restore", f"{made.restore_seconds:.2f} s ({carried})"),
        ("feed instead", f"{made.feed_seconds:.1f} s through decode; carrying is faster {even}"),
        ("tables", f"{size_text(made.tables_bytes)} mapped, of which only rows that are read come into memory"),
        ("speculation", f"{'on' if made.speculation else 'off'} by default (with a batched head, from {least} of memory on)"),
    ]  # fmt: skip


def _entries(made: Plan, width: int | None) -> str:
    from .plan import told_way

    rows = [
        (told_way(outcome), ledger, entry.name, size_text(entry.bytes))
        for outcome in made.outcomes
        for ledger in _LEDGERS
        for entry in getattr(outcome.ledgers, ledger)
        if entry.bytes
    ]
    return table(rows, ("way", "ledger", "line", "size"), width, right=("size",))


def _figures(profile: Profile, width: int | None) -> str:
    rows = [(name, f"{f.value:,}", f.source, f.why) for name, f in profile.figures().items()]
    return table(rows, ("profile", "value", "source", "why"), width, right=("value",))


def commands() -> dict[str, click.Command]:
    """By verb."""
    return {"plan": plan}
