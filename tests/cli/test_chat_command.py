"""`kvferry chat` as a script, another process and a terminal use it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import Answer, Kvferry

from runtime.speculation import Speculation

CHAT = ("chat", "--bundle", "tiny", "-n", "10")
CODE = "from kvstore.__main__ import main; main()"
MESSAGES = ("What is fog?", "And mist — “thin” fog 😀?", "Where is the ferry now?", "Who waits?", "Why?", "Then what?")


def lines(answer: Answer) -> list[Any]:
    return [json.loads(line) for line in answer.out.splitlines()]


def test_a_script_talks_line_by_line(kvferry: Kvferry) -> None:
    told = kvferry(*CHAT, "--name", "talk", stdin="What is fog?\n\n  \nWhy?\r\n")
    assert told.code == 0 and len(told.out.splitlines()) >= 2
    first, second = told.err.splitlines()
    assert first.startswith("kvferry: 0 reused, 20 fed in ") and first.endswith(" s (cap)")
    assert second.startswith("kvferry: 32 reused, 15 fed in ")

    again = kvferry(*CHAT, "--name", "other", "--json", stdin="What is fog?\nWhy?")
    assert again.err == "" and "".join(f"{turn['text']}\n" for turn in lines(again)) == told.out
    one, two = lines(again)
    assert [one[key] for key in ("turn", "finish", "reused_tokens", "fed_tokens")] == [1, "cap", 19, 1]
    assert len(one["tokens"]) == 10 and one["saved_tokens"] == one["position"] == 32
    assert [two[key] for key in ("turn", "reused_tokens", "saved_tokens", "position")] == [2, 32, 59, 59]
    assert two["name"] == "other" and two["saved"] == kvferry("show", "other", "--json").json["snapshot"]
    assert kvferry("show", "other", "--json").json["receipt"] is None


def test_it_goes_on_in_another_process_after_every_turn(
    kvferry: Kvferry, tmp_path: Path, tiny_llama_bundle: Path
) -> None:
    words = ["chat", "--bundle", str(tiny_llama_bundle), "-n", "24", "--json"]
    unbroken = lines(
        kvferry(*words, "--name", "whole", "--store", str(tmp_path / "another"), stdin="\n".join(MESSAGES))
    )
    assert len(unbroken) == len(MESSAGES)
    before = 0
    for i, (message, expected) in enumerate(zip(MESSAGES, unbroken, strict=True)):
        done = subprocess.run(
            [sys.executable, "-c", CODE, *words, *(["--resume", "talk"] if i else ["--name", "talk"])],
            input=message, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONUTF8": "1"},
        )  # fmt: skip
        turn = json.loads(done.stdout)
        keep = ("turn", "text", "tokens", "finish", "position", "fed_tokens", "reused_tokens", "saved_tokens")
        assert {key: turn[key] for key in keep} == {key: expected[key] for key in keep}
        assert turn["reused_tokens"] == before
        before = turn["saved_tokens"]
    assert before > 200


def test_it_goes_on_on_another_machine_through_decode_alone(kvferry: Kvferry, tmp_path: Path) -> None:
    there = ("--store", str(tmp_path / "there"))
    here = kvferry(*CHAT, "--name", "talk", "--json", stdin=f"{'fog and mist and ' * 60}\nWhy?\n")
    kvferry("push", "remote", "talk")
    kvferry("pull", "remote", "talk", "--trimmed", *there)
    went = kvferry(*CHAT, "--resume", "talk", "--decode-only", "--json", *there, stdin="And?\n/stats\n")
    turn, stats = lines(went)
    assert went.code == 0 and turn["turn"] == 3 and turn["saved"] is not None
    assert turn["reused_tokens"] == lines(here)[-1]["saved_tokens"] > 512
    assert {name.rpartition(":")[2] for name in stats["stats"]["functions"]} == {"decode", "lmhead.mlpackage"}
    assert [t["role"] for t in stats["stats"]["turns"]] == ["user", "assistant"] * 3
    assert "kvferry: talk: 2 turns, " in went.err


def test_what_can_be_typed_besides_messages(kvferry: Kvferry) -> None:
    script = "/help\n/stats\nHello\n/save a\n//slash\n/save\n/wrong\n/stats now\n/reset\nHello\n/stats\n/quit\nnever\n"
    told = kvferry(*CHAT, stdin=script)
    assert told.code == 0
    for words in (
        "/save NAME   save it under this name", "kvferry: 0 turns, 0 of 2,048 positions, 2,039 left for a message; saved as nothing.",
        "kvferry: a: 28 tokens saved; every turn from now on, too.", "kvferry: /save takes a name: /save NAME",
        "kvferry: /wrong is no command with that; /help lists them.", "kvferry: /stats is no command with that",
        "kvferry: a new conversation, without a name.", "kvferry: 1 turn, 28 of 2,048 positions", "here: 3 turns, ",
    ):  # fmt: skip
        assert words in told.err
    kept = lines(kvferry(*CHAT, "--resume", "a", "--json", stdin="/stats\n"))[0]["stats"]
    assert [t["text"] for t in kept["turns"] if t["role"] == "user"] == ["Hello", "/slash"]
    saved = lines(kvferry(*CHAT, "--resume", "a", "--json", stdin="/save b\n"))[0]
    assert saved == {
        "name": "b",
        "saved": kvferry("show", "a", "--json").json["snapshot"],
        "saved_tokens": kept["position"],
    }


def test_a_name_that_is_taken_and_one_that_is_absent(kvferry: Kvferry) -> None:
    absent = kvferry(*CHAT, "--resume", "talk", stdin="Hello\n")
    assert absent.code == 3 and "SnapshotMissing" in absent.err
    kvferry(*CHAT, "--name", "talk", stdin="Hello\n")
    before = kvferry("show", "talk", "--json").out
    taken = kvferry(*CHAT, "--name", "talk", stdin="Hello\n")
    assert taken.code == 7 and "Go on with it (--resume)" in taken.err and taken.out == ""
    assert kvferry("show", "talk", "--json").out == before
    assert kvferry(*CHAT, stdin="Hello\n/save talk\n").code == 7
    assert kvferry("show", "talk", "--json").out == before


def test_another_system_text_is_explained(kvferry: Kvferry) -> None:
    kvferry(*CHAT, "--name", "talk", "--system", "Be brief.", stdin="Hello\n")
    same = kvferry(*CHAT, "--resume", "talk", "--system", "Be brief.", stdin="/quit\n")
    assert "--system is not" not in same.err
    other = kvferry(*CHAT, "--resume", "talk", "--name", "rude", "--system", "Be rude.", "--json", stdin="Why?\n")
    note = next(line for line in other.err.splitlines() if "--system" in line)
    assert note.startswith("kvferry: --system is not talk's: token 8 is ' r', and there it was ' b'. The ")
    assert lines(other)[0]["reused_tokens"] == 8
    assert kvferry("show", "talk", "--json").json["tokens"] < lines(other)[0]["saved_tokens"]


def test_a_full_context_is_no_error_and_a_failed_turn_is(kvferry: Kvferry) -> None:
    full = kvferry(*CHAT, "--json", stdin=f"{'fog and ' * 1500}\nHello\n")
    turn, after = lines(full)
    assert full.code == 0 and (turn["finish"], turn["taken"], turn["turn"]) == ("contextFull", False, 0)
    assert "/reset begins a new conversation." in turn["notice"] and after["finish"] == "cap"
    assert "The context is full" in kvferry(*CHAT, stdin=f"{'fog and ' * 1500}\n").err
    bad = kvferry(*CHAT, stdin=b"Hello\n\xff\xfe\n")
    assert bad.code == 7 and "stdin: expected UTF-8 text" in bad.err


def test_an_engine_that_fails_fails_its_turn_alone(kvferry: Kvferry, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.chain import Chain

    real = Chain.run
    steps: list[int] = []

    def failing(self: Chain, *given: Any) -> Any:
        steps.append(len(steps))
        if len(steps) == 20:
            raise RuntimeError("the device went away")
        return real(self, *given)

    monkeypatch.setattr(Chain, "run", failing)
    broken = kvferry(*CHAT, "--name", "talk", "--json", stdin="Hello\nWhy?\nWhy?\n")
    first, second, third = lines(broken)
    assert broken.code == 1 and [t["finish"] for t in (first, second, third)] == ["cap", "error", "cap"]
    assert second["error"] == {"error": "RuntimeError", "message": "the device went away", "details": {}}
    assert (second["turn"], second["position"], third["turn"]) == (1, first["position"], 2)
    monkeypatch.undo()


def environment(tmp_path: Path, bundle: Path) -> dict[str, str]:
    cache = tmp_path / "cache"
    (cache / "bundles").mkdir(parents=True)
    (cache / "bundles" / "tiny").symlink_to(bundle, target_is_directory=True)
    mine = {"KVFERRY_CACHE": str(cache), "KVFERRY_STORE": str(tmp_path / "store"), "PYTHONUTF8": "1"}
    return os.environ | mine


def test_ctrl_c_ends_a_reply_and_the_conversation_goes_on(tmp_path: Path, tiny_bundle: Path) -> None:
    """After the first characters of a reply that would be 2,000 tokens long."""
    child = subprocess.Popen(
        [sys.executable, "-c", CODE, "chat", "--bundle", "tiny", "-n", "2000", "--name", "talk"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(tmp_path, tiny_bundle),
    )  # fmt: skip
    assert child.stdin and child.stdout and child.stderr
    child.stdin.write(b"Hello\n")
    child.stdin.flush()
    assert child.stdout.read(8)
    child.send_signal(signal.SIGINT)
    assert child.stderr.readline().rstrip().endswith(b"(cancelled)")
    child.stdin.write(b"/stats\n")
    child.stdin.flush()
    assert b" 1 turn, " in child.stderr.readline()
    child.stdin.close()
    assert child.wait() == 0
    child.stdout.close()
    child.stderr.close()


def test_a_terminal_is_asked_and_told(tmp_path: Path, tiny_bundle: Path) -> None:
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", CODE, "chat", "--bundle", "tiny", "-n", "5"],
        stdin=slave, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(tmp_path, tiny_bundle),
    )  # fmt: skip
    os.close(slave)
    os.write(master, b"Hello\n/quit\n")
    out, err = child.communicate()
    os.close(master)
    assert child.returncode == 0 and out.strip()
    assert "Ctrl-D or /quit ends" in err and "0 reused, " in err and "it was not saved" in err


AGAIN = "The ferry left at six. The ferry left at six. The ferry left"


def test_speculation_gives_the_same_replies_and_tells_each_turn(
    kvferry: Kvferry, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("chat", "--bundle", "tiny", "-n", "16", "--json", "--system", "Be brief.")

    def replies(*how: str) -> list[Any]:
        answer = kvferry(*words, *how, stdin=f"{AGAIN}\n{AGAIN}\n")
        assert answer.code == 0, answer.err
        return lines(answer)

    off = replies("--speculate", "off")
    assert [turn["speculation"] for turn in off] == [{"on": False, "reason": "asked for"}] * 2
    # The tiny model repeats nothing that prompt lookup finds: drafts are what it said without speculation, the second one wrong.
    said = [token for turn in off for token in turn["tokens"]]

    def told(tokens: Any, most: int) -> list[int]:
        for at in range(len(said) - 1, 0, -1):
            if list(tokens[-2:]) == said[at - 1 : at + 1]:
                return [said[i] if i != at + 2 else said[i] ^ 1 for i in range(at + 1, min(len(said), at + 1 + most))]
        return []

    monkeypatch.setattr(Speculation.__init__, "__defaults__", (*Speculation.__init__.__defaults__[:3], told))
    on = replies("--speculate", "on")
    for one, other in zip(off, on, strict=True):
        assert [one[k] for k in ("text", "tokens", "finish", "position")] == [
            other[k] for k in ("text", "tokens", "finish", "position")
        ]
    for turn in on:
        spoken = turn["speculation"]
        assert spoken["on"] and spoken["rounds"] >= 2 and 0 < spoken["accepted"] < spoken["drafted"]
        assert spoken["accepted_with_pending"] == spoken["accepted"] + spoken["rounds"]
        assert sum(spoken["step_tokens"]) == len(turn["tokens"])
    people = kvferry("chat", "--bundle", "tiny", "-n", "16", "--system", "Be brief.", stdin=AGAIN)
    rounds, accepted, drafted = (on[0]["speculation"][k] for k in ("rounds", "accepted", "drafted"))
    assert people.err.endswith(f"; {rounds} rounds, {accepted} of {drafted} drafts accepted\n")


def test_speculation_in_a_decode_only_chat_takes_permission(kvferry: Kvferry) -> None:
    words = (*CHAT, "--decode-only", "--json")
    auto = lines(kvferry(*words, stdin="Why?"))[0]["speculation"]
    assert auto == {"on": False, "reason": "the session is decode-only"}
    refused = kvferry(*words, "--speculate", "on", stdin="Why?")
    assert refused.code == 7 and "--allow-verify" in refused.out + refused.err
    assert lines(kvferry(*words, "--allow-verify", stdin="Why?"))[0]["speculation"]["on"]


@pytest.mark.slow
def test_feeding_a_long_message_tells_how_far_it_is(kvferry: Kvferry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.cli.NOTE_SECONDS", 0.0)
    long = " ".join(f"word {i}" for i in range(300))
    told = kvferry(*CHAT, "--decode-only", stdin=long)
    shown = [line for line in told.err.splitlines() if "Prefilling" in line]
    assert len(shown) > 100 and shown[0].startswith("kvferry: Prefilling 1 of ")
    total = shown[0].split(" of ")[1]
    assert all(line.endswith(f" of {total}") for line in shown) and total.endswith(" tokens")
    assert "Prefilling" not in told.out
