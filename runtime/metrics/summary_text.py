"""A summary for people, and as the JSON value that `stats metrics --json` prints."""

from __future__ import annotations

from typing import Any

from kvstore.plaintext import WIDTH, labelled, size_text, table

from .spread import Spread
from .summary import Acceptance, Messages, Model, Operations, Summary


def summary_json(found: Summary) -> dict[str, Any]:
    """Everything of it but the drawing."""
    return {
        "lines": found.lines,
        "bytes": found.bytes,
        "records": found.records,
        "damaged": {
            "count": found.damaged,
            "lines": [{"line": number, "found": reason} for number, reason in found.damaged_lines],
        },
        "models": [{"model": name, **_model(model)} for name, model in found.models.items()],
        "drawn": found.drawn_number or None,
    }


def _model(model: Model) -> dict[str, Any]:
    said = model.messages
    return {
        "records": dict(model.kinds),
        "messages": None if not said.count else _messages(said),
        "kv": [
            {
                "op": name,
                "count": one.count,
                "bytes": _spread(one.bytes),
                "seconds": _spread(one.seconds),
                "megabytes_per_second": _spread(one.megabytes_per_second),
                "speculation": _acceptance(one.acceptance),
            }
            for name, one in model.operations.items()
        ],
        "errors": [
            {"phase": phase, "reason": reason, "count": count} for (phase, reason), count in model.errors.most_common()
        ],
    }


def _messages(said: Messages) -> dict[str, Any]:
    per_token = _spread(said.per_token_ms)
    if per_token is not None:
        per_token["p95"] = said.per_token_ms.p95()
    return {
        "count": said.count,
        "finish": dict(said.finish),
        "prompt_tokens": _spread(said.prompt_tokens),
        "generated_tokens": _spread(said.generated_tokens),
        "reuse_share": said.reuse_share(),
        "prefill_seconds": _spread(said.prefill_seconds),
        "ttft_seconds": _spread(said.ttft_seconds),
        "tokens_per_second": _spread(said.tokens_per_second),
        "per_token_ms": per_token,
        "per_step_ms": _spread(said.per_step_ms),
        "speculation": _acceptance(said.acceptance),
    }


def _spread(values: Spread) -> dict[str, float | None] | None:
    return {"median": values.median(), "min": values.least, "max": values.most} if values.count else None


def _acceptance(found: Acceptance) -> dict[str, float | int | None] | None:
    if not found.rounds:
        return None
    return {
        "rounds": found.rounds,
        "fallback_rounds": found.fallback_rounds,
        "drafted_without_pending": found.drafted,
        "accepted_without_pending": found.accepted,
        "acceptance_without_pending": found.without_pending(),
        "drafted_with_pending": found.drafted + found.rounds,
        "accepted_with_pending": found.accepted + found.rounds,
        "acceptance_with_pending": found.with_pending(),
    }


def summary_text(found: Summary, width: int | None) -> str:
    """The same in lines: a paragraph a model, medians with least and most behind them."""
    kinds = [name for model in found.models.values() for name in model.kinds]
    told = ", ".join(f"{sum(m.kinds[kind] for m in found.models.values()):,} {kind}" for kind in dict.fromkeys(kinds))
    damage = f", {found.damaged:,} damaged lines left out" if found.damaged else ""
    parts = [f"{found.records:,} records in {size_text(found.bytes)}{': ' + told if told else ''}{damage}"]
    parts += [_model_text(name, model, width) for name, model in found.models.items()]
    return "\n\n".join(part for part in parts if part)


def _model_text(name: str | None, model: Model, width: int | None) -> str:
    lines = [name or "no model named"]
    if model.messages.count:
        lines.append(labelled(_message_rows(model.messages), width or WIDTH, indent="  "))
    if model.operations:
        rows = [(op, one.count, *_operation(one)) for op, one in model.operations.items()]
        lines.append(_indented(table(rows, ("kv", "count", "bytes", "seconds", "MB/s"))))
        continued = [
            (f"{op}, continued", _acceptance_text(one.acceptance))
            for op, one in model.operations.items()
            if one.acceptance.rounds
        ]
        if continued:
            lines.append(labelled(continued, width or WIDTH, indent="  "))
    if model.errors:
        rows_of_errors = [(reason, phase, count) for (phase, reason), count in model.errors.most_common()]
        lines.append(_indented(table(rows_of_errors, ("error", "phase", "count"))))
    return "\n".join(lines) if len(lines) > 1 else ""


def _message_rows(said: Messages) -> list[tuple[str, str]]:
    finish = ", ".join(f"{count:,} {reason}" for reason, count in said.finish.items())
    rows = [("generations", f"{said.count:,} ({finish})")]
    for label, spread, unit in (
        ("prompt", said.prompt_tokens, "tokens"),
        ("generated", said.generated_tokens, "tokens"),
        ("prefill", said.prefill_seconds, "s"),
        ("first token", said.ttft_seconds, "s"),
        ("speed", said.tokens_per_second, "tokens/s"),
        ("per token", said.per_token_ms, "ms"),
        ("per step", said.per_step_ms, "ms"),
    ):
        if spread.count:
            more = f", 95 % within {_number(said.per_token_ms.p95())}" if spread is said.per_token_ms else ""
            rows.append((label, f"{_range(spread)} {unit}{more}"))
    if (share := said.reuse_share()) is not None:
        rows.append(("reused", f"{share:.1%} of all prompt tokens ({said.reused:,} of {said.prompted:,})"))
    if said.acceptance.rounds:
        rows.append(("speculation", _acceptance_text(said.acceptance)))
    return rows


def _acceptance_text(found: Acceptance) -> str:
    drafts = found.without_pending()
    return (
        f"{found.rounds:,} rounds; accepted {'-' if drafts is None else f'{drafts:.3f}'} of the drafts "
        f"({found.accepted:,} of {found.drafted:,}), {found.with_pending() or 0:.3f} with the pending tokens "
        f"({found.accepted + found.rounds:,} of {found.drafted + found.rounds:,})"
    )


def _operation(one: Operations) -> tuple[str, str, str]:
    size = one.bytes.median()
    return ("-" if size is None else size_text(round(size)), _range(one.seconds), _range(one.megabytes_per_second))


def _range(values: Spread) -> str:
    """``61.2 (58.0 to 93.4)``."""
    if not values.count:
        return "-"
    middle, least, most = (_number(v) for v in (values.median(), values.least, values.most))
    return middle if least == most else f"{middle} ({least} to {most})"


def _number(value: float | None) -> str:
    """Three significant digits, or all of a whole number."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _indented(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())
