"""What the write-up tells of its phones follows from E2B's sizes and the profiles; and what changes an outcome is a number of the profile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gemma4_e2b import E2B

from kvstore.errors import Refused
from runtime.build import Packing
from runtime.build.gemma4.config import read_config
from runtime.build.gemma4.sizes import gemma4_sizes
from runtime.decoding import ContextOverflow
from runtime.plan import Outcome, Plan, WouldBeKilled, kv_bytes, make_plan
from runtime.plan_sizes import FunctionSize, ModelSizes
from runtime.profile import GIB, IPHONE15, IPHONE17PRO, MAC, MIB, PROFILES, Figure, Profile

SPEC = read_config(E2B, "e2b")
PUBLISHED = gemma4_sizes(SPEC, Packing(verify_head="pal6"))
INT8_HEAD = gemma4_sizes(SPEC, Packing(verify_head="same"))
LONG, SHORT = 1500, 30
CHUNKS = ("chunk_0.mlpackage", "chunk_1.mlpackage", "chunk_2.mlpackage")


def with_value(profile: Profile, **values: float) -> Profile:
    """The profile with other numbers."""
    return replace(profile, **{name: Figure(value, "assumption", "") for name, value in values.items()})


def verdicts(plan: Plan) -> dict[tuple[str, bool], str]:
    return {(o.way, o.speculation): o.verdict for o in plan.outcomes}


# The write-up


def test_6_gb_a_long_prompt_is_killed_in_prefill_and_restored_safely() -> None:
    plan = make_plan(PUBLISHED, IPHONE15, LONG)
    with pytest.raises(WouldBeKilled) as refused:
        plan.require("prefill", False)
    assert refused.value.exit_code == 7
    assert refused.value.details["expected"] == 3 * GIB < refused.value.details["found"]
    assert "restore" in str(refused.value)
    restored = plan.require("restore", False)
    assert restored.verdict == "fits"
    assert restored.functions == (*(f"{chunk}:decode" for chunk in CHUNKS), "lmhead.mlpackage")
    assert not plan.speculation, "off by default below 7 GiB"


def test_12_gb_both_fit() -> None:
    plan = make_plan(PUBLISHED, IPHONE17PRO, LONG)
    assert set(verdicts(plan).values()) == {"fits"}
    assert plan.speculation
    every = plan.require("prefill", True)
    names = {name.partition(":")[2] for name in every.functions if ":" in name}
    assert names == {"decode", "prefill_512", "prefill_256", "prefill_32", "prefill_8", "prefill_4"}
    assert every.functions[-2:] == ("lmhead.mlpackage", "lmhead_v4.mlpackage")


def in_all(outcome: Outcome) -> float:
    return outcome.ledgers.bytes / GIB


def test_a_short_chat_takes_about_2_gib_and_3_and_more_with_wide_prefill_resident() -> None:
    chat = make_plan(PUBLISHED, IPHONE15, SHORT).outcome("prefill", False)
    assert {name.partition(":")[2] for name in chat.functions} == {"decode", "prefill_8", "prefill_4", ""}
    assert in_all(chat) == pytest.approx(2.0, abs=0.15) and chat.verdict == "fits"
    assert 1.5 <= chat.ledgers.wired_bytes / GIB <= 1.7
    for tokens in (256, 512, LONG):
        assert in_all(make_plan(PUBLISHED, IPHONE17PRO, tokens).outcome("prefill", False)) > 3.0


def test_the_footprint_is_between_260_and_500_mib() -> None:
    for profile in (IPHONE15, IPHONE17PRO):
        for tokens in (SHORT, 300, LONG, 2047):
            for outcome in make_plan(PUBLISHED, profile, tokens).outcomes:
                assert 260 <= outcome.ledgers.footprint_bytes / MIB <= 500


def test_the_int8_head_stalls_on_the_cpu_of_6_gb_and_is_killed_on_its_neural_engine() -> None:
    on_cpu = make_plan(INT8_HEAD, IPHONE15, LONG).require("restore", True)
    assert on_cpu.verdict == "stalls" and on_cpu.reread_seconds == pytest.approx(3.1, abs=0.1)
    head = [entry for entry in on_cpu.ledgers.mapped if "lmhead_v4" in entry.name]
    assert [round(entry.bytes / MIB) for entry in head] == [385]
    on_ane = make_plan(INT8_HEAD, IPHONE15, LONG, head_units="ane")
    assert on_ane.outcome("restore", True).verdict == "killed"
    assert on_ane.outcome("restore", False).verdict == "fits", "without its head it decodes"
    small = make_plan(PUBLISHED, IPHONE15, LONG).require("restore", True)
    assert small.verdict == "fits" and small.reread_seconds is None
    assert make_plan(INT8_HEAD, IPHONE17PRO, LONG).outcome("restore", True).verdict == "fits"


# Outcomes follow from numbers


@pytest.mark.parametrize(
    ("values", "prefill", "restore"),
    [
        ({}, "killed", "fits"),
        ({"limit_share": 0.9}, "fits", "fits"),
        ({"limit_share": 0.3}, "killed", "killed"),
        ({"wide_copies": 0.0}, "fits", "fits"),
        ({"wide_from_tokens": 1000}, "fits", "fits"),
        ({"wide_from_tokens": 1000, "narrow_copies": 0.2}, "killed", "fits"),
        ({"app_bytes": 2 * GIB}, "killed", "killed"),
        ({"wired_per_stored": 2.0}, "killed", "killed"),
        ({"physical_bytes": 12 * GIB}, "fits", "fits"),
        ({"wide_copies": 0.0, "working_share": 100.0}, "killed", "fits"),
    ],
)
def test_each_number_can_change_the_verdict(values: dict[str, float], prefill: str, restore: str) -> None:
    found = verdicts(make_plan(PUBLISHED, with_value(IPHONE15, **values), LONG))
    assert (found["prefill", False], found["restore", False]) == (prefill, restore)


def test_pages_of_tables_count_as_far_as_they_are_touched() -> None:
    small, large = (with_value(IPHONE15, page_bytes=page) for page in (4096, 1 << 20))
    few, many = (make_plan(PUBLISHED, p, LONG).outcome("restore", False).ledgers.mapped_bytes for p in (small, large))
    assert few < many <= make_plan(PUBLISHED, large, LONG).tables_bytes + 4 * (1 << 20)


def test_the_ledgers_are_sums_of_their_lines() -> None:
    plan = make_plan(PUBLISHED, MAC, LONG)
    for outcome in plan.outcomes:
        ledgers = outcome.ledgers
        lines = [entry for ledger in (ledgers.footprint, ledgers.wired, ledgers.mapped) for entry in ledger]
        assert sum(entry.bytes for entry in lines) == ledgers.bytes
        assert all(entry.bytes >= 0 for entry in lines)
    wired = plan.outcome("prefill", False).ledgers.wired
    chunks = sum(PUBLISHED.functions[chunk, "decode"].weights for chunk in CHUNKS)
    assert [entry.bytes for entry in wired if "512" in entry.name or "256" in entry.name] == [chunks, chunks]


# Times and bytes


def test_bytes_to_carry_whole_and_trimmed() -> None:
    layout = PUBLISHED.layout
    assert kv_bytes(layout, LONG, trimmed=False) == LONG * 18_432
    # 3 full layers keep all; 12 sliding ones from block (1500 - 512) // 64 = 15 on, so 1500 - 960 = 540 rows
    assert kv_bytes(layout, LONG, trimmed=True) == LONG * 3 * 2 * 512 * 2 + 540 * 12 * 2 * 256 * 2
    assert kv_bytes(layout, 300, trimmed=True) == 300 * 18_432, "within one window there is nothing to trim"


def test_restoring_against_feeding() -> None:
    plan = make_plan(PUBLISHED, IPHONE15, LONG)
    assert plan.feed_seconds == pytest.approx(LONG * 0.090, rel=0.001), "E2B itself is what the 90 ms are of"
    assert plan.restore_seconds == pytest.approx(0.05 + LONG * 18_432 / 130e6)
    assert plan.download_seconds == pytest.approx(LONG * 18_432 / 10e6)
    trimmed = make_plan(PUBLISHED, IPHONE15, LONG, trimmed=True)
    assert trimmed.restore_seconds < plan.restore_seconds and trimmed.download_seconds < plan.download_seconds
    assert trimmed.feed_seconds == plan.feed_seconds
    # 355 tokens are the 6.54 MB that the write-up imported in 0.044 to 0.057 s
    imported = make_plan(PUBLISHED, with_value(IPHONE15, restore_start_seconds=0.0), 355)
    assert 0.044 <= imported.restore_seconds <= 0.057


def test_break_even() -> None:
    slow = with_value(IPHONE15, restore_start_seconds=9.0, download_mb_per_second=1.0)
    at = make_plan(PUBLISHED, slow, LONG).break_even_tokens
    assert at is not None

    def ahead(tokens: int) -> bool:
        plan = make_plan(PUBLISHED, slow, tokens)
        return plan.download_seconds + plan.restore_seconds < plan.feed_seconds

    assert ahead(at) and not ahead(at - 1)
    assert make_plan(PUBLISHED, with_value(slow, download_mb_per_second=0.1), LONG).break_even_tokens is None


def test_a_smaller_model_decodes_faster_in_proportion() -> None:
    half = {key: FunctionSize(size.weights // 2, size.buffers) for key, size in PUBLISHED.functions.items()}
    whole, less = (make_plan(sizes, IPHONE15, LONG) for sizes in (PUBLISHED, ModelSizes(PUBLISHED.config, half)))
    assert less.feed_seconds == pytest.approx(whole.feed_seconds / 2)


# Refusals


@pytest.mark.parametrize("tokens", [0, -1, 2048, 10**9])
def test_a_context_that_does_not_fit_is_refused(tokens: int) -> None:
    with pytest.raises(ContextOverflow, match="1 to 2,047"):
        make_plan(PUBLISHED, MAC, tokens)


def test_a_model_without_batched_heads_has_no_speculation() -> None:
    config = replace(PUBLISHED.config, verify_functions={}, lmhead_batched={})
    plan = make_plan(ModelSizes(config, PUBLISHED.functions), IPHONE17PRO, LONG)
    assert not plan.speculation and verdicts(plan).keys() == {("restore", False), ("prefill", False)}
    with pytest.raises(Refused, match="batched head"):
        plan.require("restore", True)


def test_a_model_without_prefill_functions_feeds_through_decode() -> None:
    config = replace(PUBLISHED.config, prefill_widths=(), prefill_functions={}, plain_width=None)
    plan = make_plan(ModelSizes(config, PUBLISHED.functions), IPHONE15, LONG)
    assert plan.outcome("prefill", False).functions == plan.outcome("restore", False).functions


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
def test_nothing_fits_is_said(profile: Profile) -> None:
    with pytest.raises(WouldBeKilled, match="Nothing fits"):
        make_plan(PUBLISHED, with_value(profile, limit_share=0.01), LONG).require("restore", False)
