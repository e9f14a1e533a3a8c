"""What the commands say about damage, and that doing what they say mends it."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

import pytest
from command import Answer, Kvferry

from kvstore.digest import label_file

TINY = ("--bundle", "tiny")
SHORT = ("--tokens", "150", "--receipt", "0")


@pytest.fixture
def store(kvferry: Kvferry, story: Path, tmp_path: Path) -> Path:
    """A store with the first 150 tokens of the story as ``a``."""
    assert kvferry("prefill", *TINY, str(story), "--name", "a", *SHORT).code == 0
    return tmp_path / "store"


def objects(store: Path) -> list[Path]:
    return sorted((store / "objects").glob("?/*"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)


def told(answer: Answer, verb: str) -> list[str]:
    """The command with this verb that a message tells to run, as words."""
    found = re.findall(rf"`kvferry ({verb}[^`]*)`", answer.err + answer.out)
    assert found, answer
    return str(found[0]).split()


def test_a_text_with_a_damaged_object_can_be_prefilled_again(kvferry: Kvferry, store: Path, story: Path) -> None:
    for harmed in (objects(store)[0], objects(store)[-1]):
        flip(harmed)
        for words in (
            ("prefill", *TINY, str(story), "--name", "b", *SHORT),
            ("generate", *TINY, "--from", "a", "-n", "2"),
            ("check",),
        ):
            answer = kvferry(*words)
            assert answer.code == 4, "damage is no silent miss"
            again = told(answer, "prefill --no-reuse")
            assert again == ["prefill", "--no-reuse", "--name", "a"]
        made = kvferry(*again, *TINY, str(story), *SHORT, "--json").json
        assert (made["reused_tokens"], made["written_objects"]) == (0, 1)
        assert kvferry("check").code == 0
        assert kvferry("prefill", *TINY, str(story), "--name", "b", *SHORT, "--json").json["reused_tokens"] == 150


def test_a_damaged_name_is_removed_or_given_anew(kvferry: Kvferry, store: Path, story: Path, tmp_path: Path) -> None:
    ref = store / "refs" / label_file("a")
    stick = str(tmp_path / "stick")
    assert kvferry("push", stick, "a").code == 0

    flip(ref)
    for words in (("ls",), ("check",), ("gc",)):
        answer = kvferry(*words)
        assert answer.code == 4
        assert told(answer, "rm") == ["rm", f"refs/{label_file('a')}"]
    assert kvferry(*told(answer, "rm"), "--json").json == {
        "removed": [{"name": f"refs/{label_file('a')}", "snapshot": None}]
    }
    assert (kvferry("ls").code, kvferry("check").code, kvferry("show", "a").code) == (0, 0, 3)

    assert kvferry("pull", stick, "a").err == ""
    flip(ref)
    assert told(kvferry("show", "a"), "rm") == ["rm", "a"]
    removed = kvferry("rm", "a")
    assert (removed.code, removed.out) == (0, "removed a (it was damaged)\n")

    for words in (
        ("pull", stick, "a"),
        ("prefill", *TINY, str(story), "--name", "a", *SHORT),
        ("rename", "b", "a"),
    ):
        kvferry("prefill", *TINY, str(story), "--name", "a", *SHORT)
        kvferry("prefill", *TINY, str(story), "--name", "b", *SHORT)
        flip(ref)
        answer = kvferry(*words)
        assert answer.code == 0
        assert "name 'a'" in answer.err
        assert "was damaged, and is given anew" in answer.err
        assert kvferry("check").code == 0
        assert kvferry("show", "a").code == 0


def test_find_says_what_prefill_then_reuses(kvferry: Kvferry, store: Path, story: Path) -> None:
    for gone in objects(store)[::3]:
        data = gone.read_bytes()
        gone.unlink()
        assert "`kvferry pull REMOTE a`" in kvferry("check").out
        found = kvferry("find", *TINY, str(story), "--tokens", "150", "--json").json["reused_tokens"]
        made = kvferry("prefill", *TINY, str(story), "--name", "b", *SHORT, "--json").json
        assert made["reused_tokens"] == found < 150
        gone.write_bytes(data)
        assert kvferry("rm", "b").code == 0
        shutil.rmtree(store / "trash")
        (store / "trash").mkdir()
    assert kvferry("check").code == 0


def test_a_lost_coverage_is_made_again(kvferry: Kvferry, store: Path, story: Path) -> None:
    next((store / "snapshots").glob("*.cov")).unlink()
    answer = kvferry("generate", *TINY, "--from", "a", "-n", "2")
    assert answer.code == 7
    assert kvferry(*told(answer, "prefill"), *TINY, str(story), *SHORT).code == 0
    assert kvferry("generate", *TINY, "--from", "a", "-n", "2").code == 0
    assert kvferry("check").code == 0


@pytest.mark.parametrize("verb", ["ls", "du", "check", "gc", "show a"])
def test_what_is_no_store_is_told(kvferry: Kvferry, store: Path, tmp_path: Path, verb: str) -> None:
    words = verb.split()
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "letter.txt").write_bytes(b"dear")
    shutil.copytree(store, tmp_path / "lost")
    (tmp_path / "lost" / "format.json").unlink()
    for place, found in (("file", "expected a folder"), ("foreign", "letter.txt"), ("lost", '"format": 2')):
        answer = kvferry(*words, "--store", str(tmp_path / place))
        assert (answer.code, answer.out) == (4, ""), place
        assert str(tmp_path / place) in answer.err
        assert found in answer.err
    (tmp_path / "empty").mkdir()
    for place in ("empty", "absent"):
        answer = kvferry(*words, "--store", str(tmp_path / place), "--json")
        assert answer.code == (0 if verb in ("ls", "du") else 3)
        assert not (tmp_path / place).exists() or not list((tmp_path / place).iterdir())


@pytest.mark.parametrize(
    ("words", "number", "advice"),
    [
        ("prefill FILE --name b", errno.ENOSPC, "`kvferry gc --purge`"),
        ("rename a b", errno.EROFS, "writable"),
        ("rm a", errno.EACCES, "writable"),
        ("pull STICK a --as b", errno.EIO, "disk itself fails"),
        ("gc", errno.ENOSPC, "`kvferry gc --purge`"),
    ],
)
def test_a_disk_that_refuses_is_told_with_the_place(
    kvferry: Kvferry, store: Path, story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    words: str, number: int, advice: str,
) -> None:  # fmt: skip
    stick = tmp_path / "stick"
    assert kvferry("push", str(stick), "a").code == 0
    assert kvferry("rename", "a", "cache").code == 0
    assert kvferry("prefill", *TINY, str(story), "--name", "a", "--tokens", "20", "--receipt", "0").code == 0
    assert kvferry("rm", "cache").code == 0
    given = words.replace("FILE", f"{story} --bundle tiny --tokens 30 --receipt 0").replace("STICK", str(stick))

    def failing(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        answer = kvferry(*given.split(), "--json")
    assert answer.code == 1, answer
    assert str(store) in answer.err
    assert os.strerror(number) in answer.err
    assert advice in answer.err
    assert kvferry("check").code == 0


def test_help_lists_every_exit_code(kvferry: Kvferry) -> None:
    text = " ".join(kvferry("--help").out.split())
    for code in ("0 done", "1 other", "2 usage", "3 missing", "4 corrupt", "5 another model", "6 another format",
                 "7 refused", "8 unreachable", "9 a continuation that differs", "11 repaired with losses", "130 interrupted"):  # fmt: skip
        assert code in text
