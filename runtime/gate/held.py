"""What a session holds, copied, so that it can be compared after the session has gone on or is gone; and the comparisons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import numpy as np

from kvstore.items import Item
from kvstore.layout import Layout
from kvstore.snapshot import Receipt
from runtime.reports import Generation, compare
from runtime.session import Session

from .report import Difference, Margin, RowDifference


@dataclass(frozen=True, slots=True)
class Held:
    """Items, pending token, and the bytes of the covered rows: per group, of each layer K then V."""

    layout: Layout
    items: tuple[Item, ...]
    pending: int | None
    covered: tuple[int, ...]
    rows: tuple[tuple[bytes, ...], ...]

    @classmethod
    def by(cls, session: Session) -> Held:
        """A copy of what ``session`` holds now."""
        kv = session.kv
        rows = tuple(
            tuple(bytes(span) for span in kv.spans(group, first, session.position))
            for group, first in enumerate(kv.covered)
        )
        return cls(kv.layout, session.items, session.pending, kv.covered, rows)


def row_difference(expected: Held, found: Held) -> RowDifference | None:
    """The first token whose rows differ, of the tokens that both hold. ``found`` may cover less than ``expected``, never more."""
    end = min(len(expected.items), len(found.items))
    first: RowDifference | None = None
    for g, group in enumerate(found.layout.groups):
        start = found.covered[g]
        width = found.layout.row_bytes(g) // (2 * len(group.layers))
        skip = (start - expected.covered[g]) * width
        for at, (one, other) in enumerate(zip(expected.rows[g], found.rows[g], strict=True)):
            length = max(0, end - start) * width
            if one[skip : skip + length] == other[:length]:
                continue
            differs = np.frombuffer(one, np.uint8, length, skip) != np.frombuffer(other, np.uint8, length)
            token = start + int(differs.reshape(-1, width).any(axis=1).argmax())
            if first is None or token < first.token:
                first = RowDifference(token, group.layers[at // 2], "v" if at % 2 else "k")
    return first


def drift(expected: Held, found: Held, start: int, stop: int) -> float | None:
    """Root mean square of the differences of rows ``[start, stop)`` over that of the expected ones, all layers; None for no rows."""
    over = under = 0.0
    for g, group in enumerate(found.layout.groups):
        width = found.layout.row_bytes(g) // (2 * len(group.layers)) // 2
        for one, other in zip(expected.rows[g], found.rows[g], strict=True):
            parts = []
            for rows, covered in ((one, expected.covered[g]), (other, found.covered[g])):
                array = np.frombuffer(rows, np.float16).reshape(-1, width)
                parts.append(array[start - covered : stop - covered].astype(np.float64))
            over += float(np.square(parts[0] - parts[1]).sum())
            under += float(np.square(parts[0]).sum())
    return sqrt(over / under) if under else None


def state_difference(expected: Held, found: Held) -> tuple[str | None, RowDifference | None]:
    """In what two sessions differ that should hold the same, for people; None if in nothing."""
    if found.items != expected.items:
        return f"expected {len(expected.items)} tokens, found {len(found.items)} or other ones", None
    rows = row_difference(expected, found)
    if rows is not None:
        return f"KV: the {rows.part.upper()} row of token {rows.token} in layer {rows.layer} has other bytes", rows
    if found.pending != expected.pending:
        return f"the pending token: expected {expected.pending}, found {found.pending}", None
    return None, None


def token_difference(
    expected: Generation, found: Generation, margin: Callable[[int], Margin | None]
) -> tuple[str | None, Difference | None]:
    """The first token that differs, also for people, else the finish; ``margin``: of a token of ``expected``, by its index; asked for one only."""
    most = max(len(expected.tokens), len(found.tokens))
    report = compare(Receipt(expected.tokens, most, expected.finish), Receipt(found.tokens, most, found.finish))
    at = report.first_difference
    if report.identical or at is None:
        return None, None
    difference = Difference(at, expected.prompt + at, report.expected, report.found, margin(at))
    if report.expected == report.found:
        return f"the finish: expected {expected.finish}, found {found.finish}", difference
    return told(difference), difference


def told(difference: Difference) -> str:
    """For people."""
    margin = difference.margin
    how = "no logits to judge it by"
    if margin is not None:
        kind = "a near-tie" if margin.near_tie else "no near-tie"
        how = f"margin {margin.margin:.4f} before {margin.second}, {kind}"
    return (
        f"token {difference.index} (position {difference.position}): expected {difference.expected}, found {difference.found} "
        f"({how})"
    )
