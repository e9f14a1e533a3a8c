"""Texts that `prefill` and `find` take, or refuse by name; and what long work says where stderr is no terminal."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Event
from threading import enumerate as enumerate_threads

import pytest
from command import Kvferry

from kvstore import Store
from kvstore.cli import waiting
from runtime import Bundle, PortableEngine, Session

SAVE = ("--bundle", "tiny", "--name", "a", "--receipt", "0")
MARK = b"\xef\xbb\xbf"


def test_only_a_plain_file_or_stdin_is_a_text(kvferry: Kvferry, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for file in ("/dev/zero", str(tmp_path / "fifo")):
        for words in (("prefill", file, *SAVE), ("find", file, "--bundle", "tiny")):
            answer = kvferry(*words)
            assert answer.code != 0
            assert f"{file}: expected a regular file" in answer.err and "`-` reads from a pipe" in answer.err


def test_a_text_without_end_ends(kvferry: Kvferry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.opening.MOST_BYTES", 100)
    (tmp_path / "text").write_bytes(b"y\n" * 51)
    for file in ("text", "-"):
        answer = kvferry("find", file, "--bundle", "tiny", stdin=b"y\n" * 51)
        assert answer.code != 0 and f"{file}: expected at most 100 B of text, found more." in answer.err
        (tmp_path / "text").write_bytes(b"y\n" * 51)
    (tmp_path / "text").write_bytes(b"y\n" * 50)
    assert kvferry("find", "text", "--bundle", "tiny").code == 0


def test_a_byte_order_mark_is_no_part_of_the_text(kvferry: Kvferry, tmp_path: Path) -> None:
    plain, marked = tmp_path / "plain", tmp_path / "marked"
    plain.write_bytes(b"Dear reader,\nhow are you?\n")
    marked.write_bytes(MARK + b"Dear reader,\r\nhow are you?\r\n")
    first = kvferry("prefill", str(plain), *SAVE, "--json").json
    second = kvferry("prefill", str(marked), *SAVE, "--json").json
    third = kvferry("prefill", "-", *SAVE, "--json", stdin=marked.read_bytes()).json
    assert first["snapshot"] == second["snapshot"] == third["snapshot"]
    marked.write_bytes(MARK + b"Dear \xff")
    assert "found invalid start byte at byte 8" in kvferry("prefill", str(marked), *SAVE).err


def test_long_work_says_how_far_it_is(kvferry: Kvferry, story: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("prefill", str(story), *SAVE, "--tokens", "20", "--decode-only")
    assert kvferry(*words, "--no-reuse").err == ""
    monkeypatch.setattr("kvstore.cli.NOTE_SECONDS", 0.0)
    answer = kvferry(*words, "--no-reuse", "--json")
    told = [line for line in answer.err.splitlines() if "Prefilling" in line]
    assert told[:2] == ["kvferry: Prefilling 1 of 20 tokens", "kvferry: Prefilling 2 of 20 tokens"]
    assert len(told) == 19 and answer.json["context_tokens"] == 20


def test_work_that_cannot_say_how_far_it_is_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    twice = Event()

    def note(text: str) -> None:
        told.append(text)
        if len(told) == 2:
            twice.set()

    monkeypatch.setattr("kvstore.cli.note", note)
    monkeypatch.setattr("kvstore.cli.NOTE_SECONDS", 0.01)
    with waiting("Receipt"):
        assert twice.wait(60)
    done = len(told)
    assert all(line.startswith("Receipt, ") and line.endswith(" s so far") for line in told)
    assert not any(thread.name == "Receipt" for thread in enumerate_threads()) and len(told) == done


def test_a_bundle_that_is_nowhere_is_told_where_it_was_looked_for(kvferry: Kvferry, tmp_path: Path) -> None:
    answer = kvferry("generate", "--bundle", "nosuch", "--prompt", "x")
    assert answer.code == 3
    assert f"no bundle named 'nosuch' in {tmp_path / 'cache' / 'bundles'}, and no such folder." in answer.err
    assert "`kvferry bundle build`" in answer.err


def test_one_is_not_many(kvferry: Kvferry, story: Path) -> None:
    assert kvferry("prefill", str(story), *SAVE, "--tokens", "20").code == 0
    assert "ok: 1 snapshot, 2 objects verified" in kvferry("check").out
    assert ": 1 name\n" in kvferry("doctor").out
    assert kvferry("rm", "a").code == 0
    assert ": 0 names\n" in kvferry("doctor").out
    assert "moved 1 snapshot and " in kvferry("gc").out


def test_what_a_session_answers_prints_short(kvferry: Kvferry, story: Path, tmp_path: Path, tiny_bundle: Path) -> None:
    assert kvferry("prefill", str(story), *SAVE, "--tokens", "200").code == 0
    bundle = Bundle.open(tiny_bundle)
    with Store.open(tmp_path / "store") as store:
        session = Session.open(bundle, PortableEngine(tiny_bundle), store=store)
        restored = session.restore("a")
        saved = session.save("b")
    assert len(repr(restored)) < 2000
    assert len(repr(restored.match)) < 1000
    assert len(repr(saved)) < 1000
