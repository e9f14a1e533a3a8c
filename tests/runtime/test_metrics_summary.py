"""Summing up: order statistics in bounded memory, acceptance counted both ways, damaged lines named."""

from __future__ import annotations

import io
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metrics_lines import APPS, ERROR, KV, MESSAGE, STEPPED, line

from runtime.metrics import summary
from runtime.metrics.spread import Spread
from runtime.metrics.summary import summarise
from runtime.metrics.summary_text import summary_json, summary_text


def summed(*lines: bytes) -> summary.Summary:
    return summarise(io.BytesIO(b"".join(lines)))


@given(st.lists(st.floats(0, 1e9), min_size=1))
def test_a_spread_has_the_true_order_statistics_at_four_digits(values: list[float]) -> None:
    spread = Spread()
    for value in values:
        spread.add(value)
    ordered = [0.0 if value < 1e-9 else float(f"{value:.4g}") for value in sorted(values)]
    assert (spread.least, spread.most, spread.count) == (min(values), max(values), len(values))
    assert spread.median() == ordered[len(ordered) // 2]
    at = -(-len(ordered) * 95 // 100) - 1
    assert spread.p95() == ordered[at]
    assert sum(value <= ordered[at] for value in ordered) >= 0.95 * len(ordered)


def test_a_spread_keeps_no_more_than_there_are_numbers_of_four_digits() -> None:
    spread = Spread()
    for i in range(60_000):
        spread.add(10 + i / 1000)
    assert spread.distinct == 6_001  # 10.00 to 70.00
    assert Spread().median() is Spread().p95() is None
    for huge in (1e300, -1e300, 1e-300):
        spread.add(huge)
    assert (spread.most, spread.least, spread.at(spread.count - 1)) == (1e300, -1e300, 1e12)


def test_acceptance_both_ways_whichever_way_a_record_counts() -> None:
    for value in (MESSAGE, KV):
        model = summed(line(value)).models["gemma-4-e2b"]
        found = model.messages.acceptance if value is MESSAGE else model.operations["restore"].acceptance
        assert (found.rounds, found.drafted, found.accepted) == (5, 35, 26)
        assert found.without_pending() == 26 / 35 and found.with_pending() == 0.775


def test_the_apps_file() -> None:
    found = summed(*map(line, [*APPS, MESSAGE, {**MESSAGE, "ttftSeconds": 2.5, "reusedTokens": 0}]))
    value = summary_json(found)
    assert (value["records"], value["damaged"]["count"], value["drawn"]) == (8, 0, 3)
    named = {model["model"]: model for model in value["models"]}
    assert named[None]["records"] == {"session": 1, "live-cycle": 1, "agent-tool": 1}
    model = named["gemma-4-e2b"]
    assert model["records"] == {"message": 3, "kv": 1, "error": 1}
    messages = model["messages"]
    assert messages["per_token_ms"] == {"median": 64, "min": 0.02, "max": 93.25, "p95": 93.25}
    assert messages["ttft_seconds"] == {"median": 1.28, "min": 1.28, "max": 2.5}
    assert messages["reuse_share"] == 620 / 969
    assert messages["finish"] == {"eos": 3}
    assert model["kv"][0]["megabytes_per_second"] == {"median": 130.8, "min": 6.54 / 0.05, "max": 6.54 / 0.05}
    assert model["errors"] == [{"phase": "prefill", "reason": "contextOverflow", "count": 1}]
    text = summary_text(found, 80)
    assert max(map(len, text.splitlines()[1:])) <= 80
    text = " ".join(text.split())
    assert "accepted 0.743 of the drafts (78 of 105), 0.775 with the pending" in text
    assert "95 % within 93.2" in text and "64.0% of all prompt tokens" in text


def test_a_step_of_several_tokens_is_one() -> None:
    messages = summed(line(STEPPED)).models["gemma-4-e2b"].messages
    assert (messages.per_token_ms.count, messages.per_step_ms.count) == (7, 3)
    assert (messages.per_step_ms.least, messages.per_step_ms.most) == (62.0, 90.0 + 0.1 + 0.1 + 0.1)
    wrong = {**STEPPED, "kvferry": {"specStepTokens": [1, 4], "specStepDrafts": [0, 3]}}
    assert summed(line(wrong)).models["gemma-4-e2b"].messages.per_step_ms.count == 0


def test_damaged_lines_are_named_and_the_rest_is_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "LONGEST", 2000)
    found = summed(line(MESSAGE), b"{broken\n", b"\n", line(ERROR), b"x" * 9000 + b"\n", line(KV), line(KV)[:-30])
    assert (found.lines, found.records, found.damaged) == (7, 3, 3)
    assert [number for number, _ in found.damaged_lines] == [2, 5, 7]
    assert "at most 2,000 bytes" in found.damaged_lines[1][1]
    many = summed(*[b"?\n"] * 500)
    assert (many.damaged, len(many.damaged_lines)) == (500, summary.NAMED)


def test_no_more_models_and_reasons_are_told_apart_than_a_person_reads() -> None:
    found = summed(*(line({**ERROR, "modelID": f"m{i}", "errorReason": f"r{i}"}) for i in range(300)))
    assert len(found.models) == summary.MODELS + 1
    assert found.models[summary.OTHERS].kinds["error"] == 300 - summary.MODELS
    reasons = summed(*(line({**ERROR, "errorReason": f"r{i}"}) for i in range(300))).models["gemma-4-e2b"].errors
    assert len(reasons) == summary.MODELS + 1 and sum(reasons.values()) == 300


class Endless(io.RawIOBase):
    """A file of many lines that is nowhere as a whole."""

    def __init__(self, count: int) -> None:
        self._random = random.Random(1)
        self._left = count
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest and self._left:
            self._left -= 1
            self._rest = line({**MESSAGE, "perTokenMillis": [self._random.randint(50, 99) + 0.25 for _ in range(500)]})
        part, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def test_memory_does_not_grow_with_the_file() -> None:
    peaks = []
    for count in (10, 60):
        tracemalloc.start()
        found = summarise(io.BufferedReader(Endless(count)))  # type: ignore[arg-type]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found.records == count and found.bytes > count * 4000
    assert peaks[1] < peaks[0] + 100_000, "500 kB more of lines"
