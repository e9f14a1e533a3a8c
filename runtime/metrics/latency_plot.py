"""Time per token of one generation, drawn: as blocks for a terminal, and as an SVG.

Tokens of one round of speculation arrive together: the first shows the round's time, the others nothing. Both drawings mark rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from kvstore.plaintext import cut

from .records import Record

BLOCKS = " ▁▂▃▄▅▆▇█"
ROWS = 8
"""Lines of the terminal's drawing."""
CLIP = 2
"""A bar that is more than so many times the 95th percentile is cut off and marked: one slow token must not flatten the others."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """``millis`` of each token; ``rounds``: runs [start, stop) of tokens that one round gave; None where the record doesn't say."""

    title: str
    millis: tuple[float, ...]
    rounds: tuple[tuple[int, int], ...] | None

    @property
    def top(self) -> float:
        """Where the drawing ends, in milliseconds; above 0."""
        ordered = sorted(self.millis)
        usual = ordered[-(-len(ordered) * 95 // 100) - 1]
        return max(min(ordered[-1], CLIP * usual) if usual > 0 else ordered[-1], 1e-3)


def latencies(record: Record) -> Latencies:
    """Of a record with times of tokens. Steps that don't fit its tokens are taken for unknown."""
    assert record.per_token_millis
    model = record.model_id or "unknown model"
    title = f"{model}, {record.timestamp}: milliseconds per token, {len(record.per_token_millis):,} tokens"
    return Latencies(title, tuple(record.per_token_millis), _rounds(record))


def _rounds(record: Record) -> tuple[tuple[int, int], ...] | None:
    ours, count = record.kvferry, len(record.per_token_millis or ())
    if record.spec_enabled is False or (ours is not None and record.spec_rounds == 0):
        return ()
    if ours is None or ours.spec_step_tokens is None or ours.spec_step_drafts is None:
        return None
    found, at = [], 0
    if len(ours.spec_step_tokens) != len(ours.spec_step_drafts) or sum(ours.spec_step_tokens) != count:
        return None
    for tokens, drafts in zip(ours.spec_step_tokens, ours.spec_step_drafts, strict=True):
        if drafts:
            found.append((at, at + tokens))
        at += tokens
    return tuple(found)


def terminal(shown: Latencies, width: int) -> str:
    """Lines of at most ``width`` columns, 20 or more. With more tokens than columns, a column is the slowest of several."""
    label = f"{shown.top:.3g}" if shown.top < 10 else f"{shown.top:.0f}"
    scale = len(label)
    columns = max(1, width - scale - 2)
    each = -(-len(shown.millis) // columns)
    bars = [max(shown.millis[i : i + each]) for i in range(0, len(shown.millis), each)]
    steps = ROWS * (len(BLOCKS) - 1)
    heights = [min(steps, max(0, round(bar / shown.top * steps))) for bar in bars]
    lines = [cut(shown.title, width)]
    for row in reversed(range(ROWS)):
        left = label if row == ROWS - 1 else "0" if row == 0 else ""
        cells = (min(8, max(0, height - 8 * row)) for height in heights)
        lines.append(f"{left.rjust(scale)} ┤" + "".join(BLOCKS[cell] for cell in cells))
    marks = _marks(shown, each, len(bars))
    lines += [" " * (scale + 2) + marks] if marks.strip() else []
    if any(bar > shown.top for bar in bars):
        lines[1] = lines[1][: scale + 2] + "".join(
            "▲" if bar > shown.top else c for bar, c in zip(bars, lines[1][scale + 2 :], strict=True)
        )
    return "\n".join(line.rstrip() for line in [*lines, cut(_legend(shown, each, bars), width)])


def _legend(shown: Latencies, each: int, bars: Sequence[float]) -> str:
    told = [f"a column is the slowest of {each} tokens"] if each > 1 else []
    if shown.rounds is None:
        told.append("rounds of speculation: not recorded")
    else:
        told.append(f"^- round of speculation ({len(shown.rounds):,})" if shown.rounds else "no rounds of speculation")
    if max(bars) > shown.top:
        told.append(f"▲ cut off, up to {max(bars):,.0f} ms")
    return "; ".join(told)


def _marks(shown: Latencies, each: int, columns: int) -> str:
    """``^`` where a round begins in a column, ``-`` where it goes on."""
    marks = [" "] * columns
    for start, stop in shown.rounds or ():
        for column in range(start // each, (stop - 1) // each + 1):
            marks[column] = "^" if column == start // each else "-" if marks[column] == " " else marks[column]
    return "".join(marks)


WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 960, 320, 64, 40, 56
"""Of the SVG and its margins, in its own units."""


def svg(shown: Latencies) -> str:
    """One bar a token, rounds as bands behind them, bars that are cut off in red; complete XML with no style from elsewhere."""
    inner_width, inner_height = WIDTH - LEFT - 16, HEIGHT - TOP - BOTTOM
    step = inner_width / len(shown.millis)
    base = TOP + inner_height

    def x(token: int) -> str:
        return f"{LEFT + token * step:.2f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(_printable(shown.title))}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(_printable(shown.title))}</text>',
    ]
    for i, (start, stop) in enumerate(shown.rounds or ()):
        band = "#ffe0a3" if i % 2 else "#ffcf70"  # so that neighbours are told apart
        parts.append(
            f'<rect class="round" x="{x(start)}" y="{TOP}" width="{(stop - start) * step:.2f}" height="{inner_height}" fill="{band}"/>'
        )
    for i in range(5):
        y = base - inner_height * i / 4
        value = shown.top * i / 4
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 16}" y1="{y:.1f}" y2="{y:.1f}" stroke="#cccccc" stroke-width="0.5"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        )
    for i, value in enumerate(shown.millis):
        height = inner_height * min(1.0, max(0.0, value) / shown.top)
        colour = "#c0392b" if value > shown.top else "#2c6fbb"
        parts.append(
            f'<rect class="token" x="{x(i)}" y="{base - height:.2f}" width="{max(step * 0.9, 0.2):.2f}" height="{height:.2f}" fill="{colour}">'
            f"<title>token {i}: {value:.3f} ms</title></rect>"
        )
    last = len(shown.millis) - 1
    parts += [
        f'<text x="{LEFT}" y="{base + 18}">0</text>',
        f'<text x="{WIDTH - 16}" y="{base + 18}" text-anchor="end">{last:,}</text>',
        f'<text x="{LEFT}" y="{HEIGHT - 14}">{escape(_told(shown))}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _told(shown: Latencies) -> str:
    told = ["milliseconds by token"]
    if shown.rounds is None:
        told.append("rounds of speculation: not recorded")
    elif shown.rounds:
        told.append(f"yellow: {len(shown.rounds):,} rounds of speculation")
    if max(shown.millis) > shown.top:
        told.append(f"red: cut off, up to {max(shown.millis):,.0f} ms")
    return "; ".join(told)


def _printable(text: str) -> str:
    """Without the characters that XML 1.0 has no way to write."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
