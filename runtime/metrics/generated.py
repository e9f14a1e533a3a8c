"""What a generation is in a record: its tokens' times, and its speculation counted as the app counts it and as ours does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.speculation import SpeculationStats

from .records import Ours


def per_token(seconds: Sequence[float]) -> dict[str, Any]:
    """The five fields about each token, the median being the upper one, as the app takes it; none without tokens."""
    if not seconds:
        return {}
    millis = [round(1e3 * s, 3) for s in seconds]
    ordered = sorted(millis)
    return {
        "per_token_millis": millis,
        "per_token_min_ms": ordered[0],
        "per_token_median_ms": ordered[len(ordered) // 2],
        "per_token_mean_ms": sum(millis) / len(millis),
        "per_token_max_ms": ordered[-1],
    }


def spec_fields(stats: SpeculationStats | None) -> dict[str, Any]:
    """The published fields of a message: drafted and accepted include the pending token of every round."""
    if stats is None:
        return {}
    return {
        "spec_rounds": stats.rounds,
        "spec_fallback_rounds": stats.fallback_rounds,
        "spec_drafted": stats.drafted_with_pending,
        "spec_accepted": stats.accepted_with_pending,
        "spec_acceptance_rate": stats.acceptance_with_pending,
    }


def spec_of(stats: SpeculationStats | None) -> Ours | None:
    """Ours of them: both counts, named for what they count, and what each step gave."""
    if stats is None:
        return None
    return Ours(
        spec_step_tokens=list(stats.step_tokens),
        spec_step_drafts=list(stats.step_drafts),
        spec_drafted_with_pending=stats.drafted_with_pending,
        spec_accepted_with_pending=stats.accepted_with_pending,
        spec_drafted_without_pending=stats.drafted,
        spec_accepted_without_pending=stats.accepted,
    )
