"""The comparisons as a table for people; conditions where speculation loses stand there like the others."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.plaintext import table

from .comparing import ACCEPTANCE, BAR, Comparison
from .one import PARTS


def comparison_text(comparisons: Sequence[Comparison]) -> str:
    """Two rows a workload: cold and warm."""
    rows = []
    for one in comparisons:
        value = one.value()
        for part in PARTS:
            ratio = value["step_ratio"]["wall_s"]
            rows.append(
                (
                    one.workload,
                    part,
                    _spread(value["off"][part]["wall_s"]),
                    _spread(value["on"][part]["wall_s"]),
                    f"×{one.gain(part, 'wall_s'):.2f}" + ("" if one.gain(part, "wall_s") >= 1 else " loses"),
                    f"×{one.gain(part, 'processor_s'):.2f}",
                    f"{value['rounds']}",
                    _share(one.acceptance),
                    _share(one.acceptance_with_pending),
                    "–" if ratio is None else f"{ratio[0]:.2f}",
                )
            )
    header = (
        "text", "part", "off, seconds", "on, seconds", "gain", "gain, CPU", "rounds", "accepted", "with pending", "width 4 ÷ decode",
    )  # fmt: skip
    parts = [table(rows, header)]
    for one in comparisons:
        if one.workload == "verbatim":
            met = "met" if one.bar_met else "not met"
            parts.append(f"at least ×{BAR} warm on verbatim text at acceptance {ACCEPTANCE} (with pending): {met}")
        if one.same_tokens and not one.same_kv:
            parts.append(f"{one.workload}: the same tokens, other KV bytes")
    return "\n".join(parts)


def _spread(value: Sequence[float]) -> str:
    return f"{value[0]:.2f} ({value[1]:.2f}–{value[2]:.2f})"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
