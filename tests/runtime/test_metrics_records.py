"""A line of metrics.jsonl: the published fields by their published names, absent ones left out, the app's own lines read."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from metrics_lines import AGENT, APPS, BASE, MESSAGE, line

from runtime.metrics import machine
from runtime.metrics.generated import per_token, spec_fields, spec_of
from runtime.metrics.records import FIELDS, OUR_FIELDS, LineDamaged, Ours, Record, decode, encode
from runtime.speculation import SpeculationStats

PUBLISHED = re.findall(
    r"\w+",
    """kind timestamp deviceModel osVersion appBuild modelID hfRevision computeUnits bundleFolder contextLength promptTokens
reusedTokens generatedTokens finishReason errorPhase errorReason modelLoadSeconds ttftSeconds prefillSeconds decodeTokPerSec
perTokenMillis perTokenMinMs perTokenMedianMs perTokenMeanMs perTokenMaxMs feedWidths specEnabled specRounds specDrafted specAccepted
specAcceptanceRate specFallbackRounds kvOp kvBytes kvDurationSeconds footprintAfterPrefillMB footprintAtEndMB peakFootprintMB
availableMemoryMB thermalStateStart thermalStateEnd batteryLevel batteryState models""",
)

STATS = SpeculationStats(
    rounds=5,
    fallback_rounds=2,
    drafted=35,
    accepted=26,
    step_tokens=(1, *(6,) * 5, 1, 1),
    step_drafts=(0, *(7,) * 5, 0, 0),
    corrected=0,
    unsettled=0,
    refusal=None,
)


def record(**fields: object) -> Record:
    return Record(kind="kv", timestamp="t", device_model="d", os_version="o", app_build="a", **fields)  # type: ignore[arg-type]


def test_the_fields_are_the_published_ones_and_one_object_of_ours() -> None:
    assert list(FIELDS) == [*PUBLISHED, "kvferry"]
    assert not set(OUR_FIELDS) & set(PUBLISHED)


def test_what_is_absent_is_left_out_and_keys_are_sorted() -> None:
    written = encode(record(kv_op="save", kv_bytes=0, kvferry=Ours(engine="portable")))
    assert written == (
        b'{"appBuild":"a","deviceModel":"d","kind":"kv","kvBytes":0,"kvOp":"save","kvferry":{"engine":"portable"},'
        b'"osVersion":"o","timestamp":"t"}\n'
    )
    assert decode(written) == record(kv_op="save", kv_bytes=0, kvferry=Ours(engine="portable"))


@pytest.mark.parametrize("value", APPS, ids=lambda value: str(value["kind"]))
def test_the_apps_lines_are_read_and_keep_every_field_that_is_known(value: dict[str, object]) -> None:
    again = json.loads(encode(decode(line(value))))
    assert again == {key: found for key, found in value.items() if key in PUBLISHED}


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"kind":"kv"}',
        b"\xff\xfe",
        line(BASE)[:-20],
        line({**BASE, "promptTokens": "many"}),
        line({**MESSAGE, "perTokenMillis": [1, "x"]}),
        b"[" * 100_000,
    ],
)
def test_what_is_no_record_is_told(broken: bytes) -> None:
    with pytest.raises(LineDamaged, match="expected one JSON object with the fields"):
        decode(broken)


def test_an_unknown_kind_and_unknown_fields_are_read() -> None:
    assert decode(line({**AGENT, "kind": "from the future"})).kind == "from the future"


def test_the_median_is_the_upper_one() -> None:
    assert per_token([0.004, 0.001, 0.003, 0.002]) == {
        "per_token_millis": [4, 1, 3, 2],
        "per_token_min_ms": 1,
        "per_token_median_ms": 3,
        "per_token_mean_ms": 2.5,
        "per_token_max_ms": 4,
    }
    assert per_token([]) == {}


def test_a_message_counts_the_pending_tokens_and_ours_say_both() -> None:
    fields = spec_fields(STATS)
    assert (fields["spec_accepted"], fields["spec_drafted"], fields["spec_acceptance_rate"]) == (31, 40, 0.775)
    ours = spec_of(STATS)
    assert ours is not None
    assert (ours.spec_accepted_with_pending, ours.spec_drafted_with_pending) == (31, 40)
    assert (ours.spec_accepted_without_pending, ours.spec_drafted_without_pending) == (26, 35)
    assert ours.spec_step_tokens == list(STATS.step_tokens) and ours.spec_step_drafts == list(STATS.step_drafts)
    assert spec_fields(None) == {} and spec_of(None) is None


def test_what_a_machine_says_of_itself(tmp_path: Path) -> None:
    before = machine.footprint_mb()
    held = bytearray(64 << 20)
    held[:: 1 << 12] = b"x" * (64 << 8)
    after = machine.footprint_mb()
    assert (before is None) is (after is None)
    assert before is None or after is None or 48 < after - before < 80, "64 MiB more"
    assert machine.available_memory_mb() > 0
    told = [machine.battery_state(*found) for found in ((57, False), (57, True), (100, True), (57, None))]
    assert told == ["unplugged", "charging", "full", "unknown"]
    level, state = machine.battery()
    assert (level is None) is (state is None) and (level is None or 0 <= level <= 1)
    assert machine.device_model(tmp_path), "the architecture, where no maker is named"
    if sys.platform == "linux":
        name = tmp_path / "sys/class/dmi/id/product_name"
        name.parent.mkdir(parents=True)
        name.write_text("Some Book 7\n")
        assert machine.device_model(tmp_path) == "Some Book 7"
