"""`kvferry bench speculation` on the tiny bundle, and what it makes of runs that it is given."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from command import Kvferry

from runtime.bench.comparing import Comparison, order
from runtime.bench.one import Run, run, step_ratio
from runtime.bench.telling import comparison_text
from runtime.bench.workloads import WORKLOADS, workload
from runtime.bundle import Bundle
from runtime.portable import PortableEngine
from runtime.speculation import SpeculationStats

WORDS = ("bench", "speculation", "--bundle", "tiny", "-n", "8")


def test_two_processes_give_the_same_tokens_and_kv(kvferry: Kvferry) -> None:
    made = kvferry(*WORDS, "--rounds", "1", "--workload", "chat", "--json")
    assert made.code == 0, made.err
    (one,) = made.json["workloads"]
    assert (one["name"], one["order"], one["generated"]) == ("chat", ["off", "on"], 8)
    assert one["same_tokens"] and one["same_kv"]
    assert made.json["bar_met"] is None and made.json["engine"]["engine"] == "portable"
    for side in ("off", "on"):
        for part in ("cold", "warm"):
            middle, least, most = one[side][part]["processor_s"]
            assert 0 < least == middle == most
    assert one["gain"]["warm"]["processor_s"] == pytest.approx(
        one["off"]["warm"]["processor_s"][0] / one["on"]["warm"]["processor_s"][0], rel=0.02
    )


def test_a_process_that_fails_is_told(kvferry: Kvferry) -> None:
    failed = kvferry(*WORDS, "--rounds", "1", "--workload", "chat", "--engine", "coreml", "--json")
    assert failed.code == 1 and '"error": "RunFailed"' in failed.err and "EngineUnavailable" in failed.err
    assert kvferry("bench", "speculation", "--bundle", "absent").code == 3


def test_conditions_alternate() -> None:
    assert order(4) == ("off", "on", "on", "off", "off", "on", "on", "off")
    assert order(3) == ("off", "on", "on", "off", "off", "on")


def test_the_workloads_are_what_they_are_called() -> None:
    passage, again = workload("verbatim").split("\n\nThe same text again, word for word:\n\n")
    assert passage.startswith(again) and 100 < len(again) < len(passage)
    assert len({workload(name) for name in WORKLOADS}) == 3


def test_one_process_measures_both_parts_from_the_same_place(tiny_bundle: Any) -> None:
    bundle = Bundle.open(tiny_bundle)
    off, on = (run(bundle, PortableEngine(bundle.root), "One two three.", 6, speculate=s) for s in (False, True))
    assert (off.tokens_digest, off.kv_digest, off.generated) == (on.tokens_digest, on.kv_digest, 6)
    assert off.rounds is None and on.rounds == 0
    longer = run(bundle, PortableEngine(bundle.root), "One two three.", 7, speculate=False)
    assert longer.tokens_digest != off.tokens_digest and longer.kv_digest != off.kv_digest


def test_a_step_lasts_from_the_last_token_before_it() -> None:
    # At hand, decode, a round of three tokens, decode, a round of one.
    stats = SpeculationStats(
        rounds=2, fallback_rounds=2, drafted=6, accepted=2,
        step_tokens=(1, 1, 3, 1, 1), step_drafts=(0, 0, 3, 0, 3), corrected=0, unsettled=0, refusal=None,
    )  # fmt: skip
    given = [(0.0, 0.0), (1.0, 2.0), (3.0, 5.0), (3.0, 5.0), (3.0, 5.0), (4.0, 7.0), (6.5, 11.0)]
    assert step_ratio(stats, given) == {"wall_s": 2.25, "processor_s": 1.75}
    without = replace(stats, step_drafts=(0, 0, 2, 0, 2))
    assert step_ratio(without, given) is None


RUN = Run(
    prompt_tokens=9, generated=8, text="x", seconds={p: {"wall_s": 3.0, "processor_s": 2.0} for p in ("cold", "warm")},
    tokens_digest="a", kv_digest="b", rounds=2, fallback_rounds=1, drafted=6, accepted=5, drafted_with_pending=8,
    accepted_with_pending=7, step_ratio={"wall_s": 1.5, "processor_s": 1.6}, engine={},
)  # fmt: skip


def compared(**changed: Any) -> Comparison:
    """Three runs a condition; ``changed``: of those with speculation."""
    on = [asdict(replace(RUN, **{k: v[i] if isinstance(v, list) else v for k, v in changed.items()})) for i in range(3)]
    return Comparison("verbatim", order(3), {"off": [asdict(RUN)] * 3, "on": on})


def times(wall: float, processor: float) -> dict[str, dict[str, float]]:
    return {part: {"wall_s": wall, "processor_s": processor} for part in ("cold", "warm")}


def test_gains_are_of_medians_and_losing_ones_are_told() -> None:
    one = compared(seconds=[times(1.0, 1.0), times(9.0, 1.5), times(2.0, 1.25)])
    value = one.value()
    assert value["gain"]["warm"] == {"wall_s": 1.5, "processor_s": 1.6}
    assert value["on"]["warm"]["wall_s"] == [2.0, 1.0, 9.0]
    assert (value["acceptance"], value["acceptance_with_pending"], value["tokens_per_round"]) == (0.833, 0.875, 3.5)
    assert one.bar_met and "met" in comparison_text([one]) and "loses" not in comparison_text([one])

    assert not compared(seconds=times(2.0, 1.5)).bar_met, "by one of the clocks alone"
    few = {"accepted": 2, "accepted_with_pending": 4}
    assert not compared(seconds=times(1.0, 1.0), **few).bar_met, "at that acceptance the bar says nothing"
    slow = compared(seconds=times(4.0, 4.0))
    assert "×0.75 loses" in comparison_text([slow]) and "not met" in comparison_text([slow])


def test_other_tokens_and_other_kv_are_told_apart() -> None:
    assert compared().same_tokens and compared().same_kv
    assert not compared(tokens_digest=["a", "c", "a"]).same_tokens
    other = compared(kv_digest=["b", "b", "c"])
    assert other.same_tokens and not other.same_kv and "other KV bytes" in comparison_text([other])


def test_times_of_two_texts_are_no_answer(kvferry: Kvferry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.bench.compare_speculation", lambda *_, **__: [compared(tokens_digest="c")])
    told = kvferry(*WORDS, "--json")
    assert told.code == 9 and '"error": "SpeculationDiffers"' in told.err and "verbatim" in told.err
    assert told.json["workloads"][0]["same_tokens"] is False
