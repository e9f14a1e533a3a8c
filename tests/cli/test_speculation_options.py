"""--speculate and its neighbours: what they load, what they refuse, and that the text is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command import Kvferry

from kvstore.errors import InputInvalid
from runtime.bundle import Bundle
from runtime.speculation import Choice
from runtime.speculation_options import chosen

START = ("generate", "--bundle", "tiny", "--prompt", "The ferry left at six.", "-n", "12", "--json")


def test_on_and_off_and_auto_say_the_same_and_why(kvferry: Kvferry) -> None:
    answers = {how: kvferry(*START, "--speculate", how).json for how in ("on", "off", "auto")}
    assert len({answer["text"] for answer in answers.values()}) == 1
    off = answers["off"]["speculation"]
    assert off == {"on": False, "reason": "asked for"}
    assert answers["auto"]["speculation"]["on"] and "width 4" in answers["auto"]["speculation"]["reason"]
    on = answers["on"]["speculation"]
    assert on["verify"] == "trust" and on["drafted"] == 0 and on["acceptance"] is None and on["refusal"] is None
    # The first token was at hand, and for the last three less than a full round was left.
    assert on["step_tokens"] == [1] * 12 and on["fallback_rounds"] == 8
    # Without a draft nothing that verifies is loaded.
    assert answers["on"]["functions"] == answers["off"]["functions"]


def test_decode_only_speculates_by_permission(kvferry: Kvferry) -> None:
    auto = kvferry(*START, "--decode-only").json["speculation"]
    assert auto == {"on": False, "reason": "the session is decode-only"}
    refused = kvferry(*START, "--decode-only", "--speculate", "on")
    assert refused.code == 7 and "--allow-verify" in refused.err and "prefill_4" in refused.err
    allowed = kvferry(*START, "--decode-only", "--allow-verify").json
    assert allowed["speculation"]["on"]
    assert kvferry(*START, "--decode-only", "--allow-verify", "--speculate", "off").json["text"] == allowed["text"]


def test_ways_to_verify(kvferry: Kvferry) -> None:
    assert kvferry(*START, "--verify", "recheck").json["speculation"]["verify"] == "recheck"
    margin = kvferry(*START, "--verify", "margin", "--threshold", "0.1").json["speculation"]
    assert (margin["verify"], margin["threshold"], margin["unsettled"]) == ("margin", 0.1, 0)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--allow-verify",), "expected with --decode-only"),
        (("--threshold", "1"), "expected with --verify margin"),
        (("--verify", "margin"), "threshold: expected a number of logits"),
        (("--threshold", "-1", "--verify", "margin"), "not in the range"),
    ],
)
def test_options_that_do_not_go_together_are_refused(kvferry: Kvferry, words: tuple[str, ...], told: str) -> None:
    answer = kvferry(*START, *words)
    assert answer.code in (2, 7) and told in answer.err


def test_a_devices_profile_decides_auto_only(tiny_bundle: Path) -> None:
    config = Bundle.open(tiny_bundle).config

    def asked(speculate: Any, device: Choice | None, *, only: bool = False, allowed: bool = False) -> Any:
        return chosen(
            config, decode_only=only, speculate=speculate, verify="trust", threshold=None, allow_verify=allowed, device=device
        )  # fmt: skip

    small = Choice(False, "the device has less than 7 GiB")
    how, choice = asked("auto", small)
    assert how is None and choice == small
    assert asked("on", small)[0].refused == "raise" and asked("auto", None)[0].refused == "decode"
    with pytest.raises(InputInvalid, match="--allow-verify"):
        asked("on", None, allowed=True)
