"""What people who came new to it stumbled over, and what it says and does now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import Kvferry


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e999"])
@pytest.mark.parametrize(
    "words",
    [("gc", "--purge", "--max-share"), ("gc", "--keep-days"), ("bucket", "gc", "s3://a/b", "--grace"), ("peers", "--seconds"),
     ("generate", "--bundle", "tiny", "--prompt", "x", "--threshold")],
    ids=lambda words: " ".join(words[-1:]),
)  # fmt: skip
def test_a_number_is_one(kvferry: Kvferry, words: tuple[str, ...], number: str) -> None:
    answer = kvferry(*words, number)
    assert answer.code == 2 and "Traceback" not in answer.err and answer.out == ""


def test_a_short_grace_has_to_be_meant(kvferry: Kvferry) -> None:
    answer = kvferry("bucket", "gc", "s3://a/b", "--grace", "0")
    assert answer.code == 7 and "--yes" in answer.err
    assert kvferry("bucket", "gc", "s3://a/b", "--grace", "1e12").code == 2


@pytest.fixture
def book(kvferry: Kvferry, story: Path) -> str:
    made = kvferry("prefill", "--bundle", "tiny", str(story), "--tokens", "70", "--name", "book", "--receipt", "0")
    assert made.code == 0, made.err
    return "book"


def test_one_file_forms(kvferry: Kvferry, book: str, tmp_path: Path) -> None:
    answer = kvferry("export", book, "x.txt")
    assert answer.code == 2 and ".kvferry" in answer.err and answer.err.count("\n") == 1
    answer = kvferry("export", book, "nowhere/x.kvferry")
    assert answer.code == 7 and "nowhere" in answer.err
    assert kvferry("import", "nope.kvferry").code == 3
    (tmp_path / "d.kvferry").mkdir()
    answer = kvferry("import", "d.kvferry")
    assert answer.code == 7 and "d.kvferry" in answer.err
    assert kvferry("export", book, "book.kvferry").code == 0
    data = bytearray((tmp_path / "book.kvferry").read_bytes())
    data[-1] ^= 1
    (tmp_path / "bad.kvferry").write_bytes(data)
    answer = kvferry("import", "bad.kvferry", "--name", "bad")
    assert answer.code == 4 and "Export it again" in answer.err and "prefill" not in answer.err


def test_doctor_knows_what_the_network_needs(kvferry: Kvferry) -> None:
    assert "[sync]" in json.dumps(kvferry("doctor", "--json").json)


@pytest.mark.slow
def test_a_pull_that_no_quota_allows_is_refused_before_anything_moves(
    kvferry: Kvferry, book: str, tmp_path: Path, story: Path
) -> None:
    """The whole need is told, and nothing landed."""
    for number in range(16):
        text = tmp_path / f"{number}.txt"
        text.write_text(f"Chapter {number}. " + story.read_text())
        made = kvferry(
            "prefill", "--bundle", "tiny", str(text), "--tokens", "1900", "--name", f"b{number}", "--receipt", "0"
        )
        assert made.code == 0, made.err
    names = [f"b{number}" for number in range(16)]
    other = ("--store", str(tmp_path / "other"))
    assert kvferry("pull", str(tmp_path / "store"), book, *other).code == 0
    assert kvferry("quota", "8.4MB", *other).code == 0
    answer = kvferry("pull", str(tmp_path / "store"), *names, *other)
    assert answer.code == 10 and "StoreFull" in answer.err
    assert not list((tmp_path / "other" / "quarantine").iterdir())
