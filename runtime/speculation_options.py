"""The options that say whether and how to speculate, what they mean, and the statistics as --json gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from kvstore.cli import Number
from kvstore.errors import InputInvalid

from .bundle import BundleConfig
from .speculation import Asked, Choice, Speculation, SpeculationStats, Verify, choose

_F = TypeVar("_F", bound=Callable[..., Any])


def speculation_options(command: _F) -> _F:
    """--speculate and its neighbours; `chosen` takes them by the same names."""
    options = [
        click.option(
            "--speculate",
            type=click.Choice(["auto", "on", "off"]),
            default="auto",
            show_default=True,
            help="Guess tokens from the text so far and verify up to four at once: the same tokens, sooner where text repeats itself. auto: "
            "where the bundle can; not with --decode-only, unless --allow-verify.",
        ),
        click.option(
            "--verify",
            type=click.Choice(["trust", "recheck", "margin"]),
            default="trust",
            show_default=True,
            help="Whose word counts: the batched head's, after a check; the sequential head's about every token too; or plain decode's where "
            "the two best logits are at most --threshold apart.",
        ),
        click.option("--threshold", type=Number(0), help="Logits, for --verify margin."),
        click.option(
            "--allow-verify", is_flag=True, help="With --decode-only: what verifies may be loaded besides decode."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def chosen(
    config: BundleConfig,
    *,
    decode_only: bool,
    speculate: Asked,
    verify: Verify,
    threshold: float | None,
    allow_verify: bool,
    device: Choice | None = None,
) -> tuple[Speculation | None, Choice]:
    """How to speculate, None: not at all; and why. ``device`` as in `speculation.choose`. Where "auto" decided, a batched head that fails its
    check is not an error: decoding goes on without it."""
    if allow_verify and not decode_only:
        raise InputInvalid(
            "--allow-verify: expected with --decode-only, which it makes an exception to, found alone. Leave it out."
        )
    if threshold is not None and verify != "margin":
        raise InputInvalid(f"--threshold: expected with --verify margin, found with --verify {verify}. Leave it out.")
    choice = choose(speculate, config, decode_only=decode_only, allow_verify=allow_verify, device=device)
    if not choice.on:
        return None, choice
    return Speculation(verify, threshold, "decode" if speculate == "auto" else "raise"), choice


def as_json(stats: SpeculationStats | None, how: Speculation | None, choice: Choice) -> dict[str, Any]:
    """The object ``speculation`` of an answer."""
    told: dict[str, Any] = {"on": choice.on, "reason": choice.reason}
    if stats is None or how is None:
        return told
    return told | {
        "verify": how.verify,
        "threshold": how.threshold,
        "rounds": stats.rounds,
        "fallback_rounds": stats.fallback_rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance": stats.acceptance,
        "drafted_with_pending": stats.drafted_with_pending,
        "accepted_with_pending": stats.accepted_with_pending,
        "acceptance_with_pending": stats.acceptance_with_pending,
        "step_tokens": list(stats.step_tokens),
        "step_drafts": list(stats.step_drafts),
        "corrected": stats.corrected,
        "unsettled": stats.unsettled,
        "refusal": stats.refusal,
    }
