"""A report for people: one row for the comparisons of a kind, then each line that does not hold, then the near-ties."""

from __future__ import annotations

from kvstore.plaintext import labelled, table

from .report import BOUND, NEAR_TIE, Line, Report, Threshold

_WORDS = {
    "heads": "batched head = sequential",
    "speculation": "speculation on = off",
    "restore": "restored = uninterrupted",
    "receipt": "receipt is true",
    "process": "in another process",
    "cross": "saved → restored",
}

_MOST = 20
"""Near-ties that are listed for people, the closest first; --json has all."""


def report_text(report: Report, width: int) -> str:
    """``width``: columns to fill."""
    held = sum(line.holds is True for line in report.lines)
    empty = sum(line.holds is None for line in report.lines)
    total = len(report.lines) - empty
    head = f"{report.bundle}: {'all' if report.ok else 'NOT all'} holds: {held:,} of {total:,} comparisons"
    head += f", {empty} with nothing to compare, in {report.seconds:.0f} s"
    engine = ", ".join(report.engine.get(k, "") for k in ("engine", "compute", "compute_units") if report.engine.get(k))
    about = [("bundle", report.path), ("engine", engine), ("configurations", ", ".join(report.configurations))]
    about += [
        (f"prompt {name}", f"{tokens:,} tokens" + (f" of {given:,} (cut to fit)" if given > tokens else ""))
        for name, tokens, given, _ in report.prompts
    ]
    parts = [head, labelled(about, width, "  "), "", table(_rows(report), ("what", "prompt", "rule", "holds", "of"))]
    if report.threshold is not None:
        parts += ["", _threshold(report.threshold)]
    if any(line.rule == "bounded" for line in report.lines):
        parts += ["", f"exact: tokens, finish and KV bytes. bounded: {BOUND}."]
    if report.failed:
        parts += ["", "does not hold:", labelled([(_name(line), line.told) for line in report.failed], width, "  ")]
    differ = [line for line in report.lines if line.holds and line.difference is not None]
    if differ:
        parts += ["", "differs within its bound:", labelled([(_name(x), x.told) for x in differ], width, "  ")]
    parts += ["", _near_ties(report)]
    return "\n".join(parts)


def _threshold(found: Threshold) -> str:
    flips = (
        f"{found.flips} chose another token, at a margin of at most {found.flip:.4f}"
        if found.flips
        else "none chose another token"
    )
    return (
        f"near-ties of width-4 steps: of {found.rows:,} rows {flips}; the margins of the others moved by at most {found.move:.4f}.\n"
        f"measured threshold, in logits: {found.threshold} (--verify margin --threshold {found.threshold})"
    )


def _rows(report: Report) -> list[tuple[object, ...]]:
    grouped: dict[tuple[str, str, str], list[Line]] = {}
    for line in report.lines:
        grouped.setdefault((_kind(line), line.prompt or "", line.rule), []).append(line)
    rows: list[tuple[object, ...]] = []
    for (kind, prompt, rule), lines in grouped.items():
        compared = [line for line in lines if line.holds is not None]
        rows.append((kind, prompt, rule, sum(line.holds is True for line in compared), len(compared)))
    return rows


def _kind(line: Line) -> str:
    word = _WORDS[line.check]
    if line.check == "cross":
        return f"{line.saved_under} → {line.restored_under}"
    return f"{word}, {line.kind}" if line.check in ("restore", "receipt") else word


def _name(line: Line) -> str:
    parts = [_kind(line), line.prompt or ""]
    if line.split is not None:
        parts.append(f"at {line.split:,}")
    if line.speculation is not None:
        parts.append(f"{line.speculation.drafts} drafts, {line.speculation.verify}")
    return ", ".join(filter(None, parts))


def _near_ties(report: Report) -> str:
    if not report.margins:
        return "near-ties: not known; the head's logits can't be recomputed"
    ties = sorted(report.near_ties, key=lambda tie: tie.margin.margin)
    title = f"near-ties (margin of at most {NEAR_TIE} logits): {len(ties)}"
    if not ties:
        return title
    title += f", the closest {_MOST}:" if len(ties) > _MOST else ":"
    rows = [
        (t.prompt, t.configuration, t.position, t.margin.best, t.margin.second, f"{t.margin.margin:.4f}")
        for t in ties[:_MOST]
    ]
    return f"{title}\n" + table(
        rows, ("prompt", "configuration", "position", "best", "second", "margin"), None, ("margin",)
    )
