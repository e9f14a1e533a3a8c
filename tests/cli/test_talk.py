"""What commands say besides their answer: what was reused and who made it, names that moved, how much of a text was read."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from command import Kvferry

from kvstore.demo import ANSWER, picture
from runtime.tokenizer import Tokenizer

BUNDLE = ("--bundle", "tiny")
ROUNDING = (*BUNDLE, "--compute", "fp16-rounding")


def test_reusing_what_was_computed_otherwise_is_said(kvferry: Kvferry, story: Path) -> None:
    kvferry("prefill", *BUNDLE, str(story), "--name", "a", "--tokens", "130", "--receipt", "0")
    same = kvferry("prefill", *BUNDLE, str(story), "--name", "b", "--tokens", "140", "--receipt", "0", "--json")
    assert same.err == ""
    assert {made["compute"] for made in same.json["reused_lineages"]} == {"fp32"}

    told = "130 reused tokens were computed otherwise than here: compute fp32 (here fp16-rounding)."
    other = kvferry("prefill", *ROUNDING, str(story), "--name", "c", "--tokens", "135", "--receipt", "0", "--json")
    assert (other.err, other.json["reused_tokens"]) == (f"kvferry: {told.replace('130', '134')}\n", 134)
    went = kvferry("generate", *ROUNDING, "--from", "a", "-n", "1", "--json")
    assert went.err == f"kvferry: {told}\n"
    assert went.json["reused_lineages"] == kvferry("show", "a", "--json").json["lineages"]
    assert told.split(":")[1] in kvferry("generate", *ROUNDING, "--prompt", story.read_text()[:400], "-n", "1").err

    alone = kvferry("prefill", *ROUNDING, str(story), "--name", "d", "--tokens", "5", "--no-reuse", "--json")
    assert (alone.err, alone.json["reused_lineages"]) == ("", [])


def test_a_name_that_moves_is_said_by_whoever_moves_it(kvferry: Kvferry, story: Path) -> None:
    first = kvferry("prefill", *BUNDLE, str(story), "--name", "a", "--tokens", "70", "--receipt", "0", "--json")
    told = f"kvferry: a stood for {first.json['snapshot']}, which is unnamed cache now.\n"
    assert kvferry("generate", *BUNDLE, "--from", "a", "-n", "2", "--save", "b").err == ""
    assert kvferry("generate", *BUNDLE, "--prompt", "x", "-n", "2", "--save", "a").err == told
    assert kvferry("prefill", *BUNDLE, str(story), "--name", "b", "--tokens", "5", "--receipt", "0").err != ""
    again = kvferry("prefill", *BUNDLE, str(story), "--name", "b", "--tokens", "5", "--receipt", "0")
    assert "stood for" not in again.err, "it stands for the same"


@pytest.fixture
def characters(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many characters of texts were tokenised, part by part."""
    seen: list[int] = []
    real = Tokenizer.encode_parts

    def counted(self: Tokenizer, text: str) -> Iterator[tuple[list[int], int]]:
        for ids, count in real(self, text):
            seen.append(count)
            yield ids, count

    monkeypatch.setattr(Tokenizer, "encode_parts", counted)
    return seen


def test_a_long_text_is_read_as_far_as_it_is_needed(
    kvferry: Kvferry, story: Path, tmp_path: Path, characters: list[int]
) -> None:
    long = tmp_path / "long.txt"
    long.write_text("\n".join([story.read_text()] * 50))
    short = kvferry("prefill", *BUNDLE, str(story), "--name", "a", "--tokens", "100", "--receipt", "0", "--json").json
    characters.clear()
    made = kvferry("prefill", *BUNDLE, str(long), "--name", "b", "--tokens", "100", "--receipt", "0", "--json").json
    assert made["snapshot"] == short["snapshot"]
    assert sum(characters) < 40_000 < len(long.read_text())

    characters.clear()
    refused = kvferry("prefill", *BUNDLE, str(long), "--name", "c")
    assert refused.code == 7
    assert "expected at most 2,047 tokens" in refused.err and "found more than" in refused.err
    assert sum(characters) < 40_000

    characters.clear()
    found = kvferry("find", *BUNDLE, str(long), "--json").json
    assert found["reused_tokens"] == 100
    assert sum(characters) == len(long.read_text())
    bundle = Tokenizer.open(tmp_path / "cache" / "bundles" / "tiny")
    assert found["asked_tokens"] == len(bundle.encode(long.read_text()))


def test_ls_and_show_are_for_people(kvferry: Kvferry, story: Path) -> None:
    made = kvferry("prefill", *BUNDLE, str(story), "--name", "book", "--tokens", "1500", "--json").json
    header, row = (line.split() for line in kvferry("ls").out.splitlines())
    assert header == ["name", "tokens", "kept", "size", "model", "updated", "snapshot"]
    (value,) = kvferry("ls", "--json").json
    updated = datetime.fromisoformat(value["updated"])
    assert updated.tzinfo is not None and abs(datetime.now(updated.tzinfo) - updated) < timedelta(hours=1)
    minute = f"{updated:%Y-%m-%d %H:%M}".split()
    assert row == ["book", "1,500", "whole", "1.15", "MB", "tiny", *minute, made["snapshot"][:12]]

    text = kvferry("show", "book").out
    for line in (
        "book", f"  snapshot     {made['snapshot']}", "  tokens       1,500, in 24 blocks of 64",
        "  kept         whole: 1.15 MB here, 768 B a token", "  receipt      32 tokens, finish: cap",
        "group    layers  KV heads  head size  window  blocks here", "sliding       5         1         32  512     all 24",
        "  compute         fp32", "  functions       prefill_512 | prefill_256 | prefill_32 | prefill_4,prefill_8",
    ):  # fmt: skip
        assert line in text.splitlines()
    assert "{" not in text and "[" not in text
    bundle = kvferry("bundle", "show", "tiny").out
    assert "{" not in bundle and "[" not in bundle
    assert "  context       2048" in bundle.splitlines()


CROSSED = {
    "model": "m", "trimmed": False, "kv_bytes_per_token": 768, "context_tokens": 1500, "prefill_seconds": 1.0, "save_seconds": 0.1,
    "snapshot_bytes": 1_152_000, "moved_bytes": 1_158_144, "pull_seconds": 0.2, "restore_seconds": 0.02, "reused_tokens": 1500,
    "producer_functions": ["a:decode", "a:prefill_512"], "consumer_functions": ["a:decode"], "decode_feed_seconds_estimate": 6.0,
    "decode_feed_measured_tokens": 65, "break_even_tokens": 55, "identical": True, "answer": None, "continuation": "no words",
    "continuation_without_context": "none either", "tail": "called the", "blocks_here": {"full": [[0, 24]], "sliding": [[15, 24]]},
}  # fmt: skip


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("trimmed", [False, True])
def test_the_demos_picture(width: int, trimmed: bool) -> None:
    whole = {"full": [[0, 24]], "sliding": [[0, 24]]}
    text = picture(CROSSED | {"trimmed": trimmed} | ({} if trimmed else {"blocks_here": whole}), width)
    assert max(map(len, text.splitlines())) <= width
    assert ("░" in text) == ("left behind" in text) == trimmed
    assert "nothing behind" not in text
    assert "nothing behind" in picture(CROSSED | {"trimmed": True, "blocks_here": {"full": [[0, 24]]}}, width)
    assert "with the context" not in text, "a model that doesn't know the answer isn't quoted"
    known = picture(CROSSED | {"answer": ANSWER, "continuation": f" {ANSWER}, and so on"}, width)
    assert f"  with the context:     {ANSWER}, and so on" in known.splitlines()
