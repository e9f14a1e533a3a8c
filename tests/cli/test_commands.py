"""Every verb, its JSON keys, its exit codes, and that options mean the same before and after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import Kvferry


def test_ls_of_an_absent_store_is_empty(kvferry: Kvferry, tmp_path: Path) -> None:
    assert kvferry("ls") == kvferry("ls", "--store", str(tmp_path / "other"))
    answer = kvferry("ls")
    assert (answer.code, answer.out, answer.err) == (0, "", "")
    assert kvferry("ls", "--json").json == []
    assert not (tmp_path / "store").exists(), "looking must not make a store"


def test_the_way_of_a_snapshot(kvferry: Kvferry, story: Path, tmp_path: Path) -> None:
    made = kvferry("prefill", "--bundle", "tiny", str(story), "--name", "book", "--tokens", "700", "--json").json
    assert made["context_tokens"] == 700
    assert made["reused_tokens"] == 0
    assert made["kv_bytes_per_token"] == 6 * 2 * 32 * 2
    assert made["snapshot_bytes"] == 700 * 768
    assert made["written_objects"] == 11 * 2
    assert len(made["receipt"]["tokens"]) == 32
    assert "chunk_0.mlpackage:prefill_512" in made["functions"]

    rows = kvferry("ls", "--json").json
    assert [(r["name"], r["tokens"], r["kept"], r["bytes"]) for r in rows] == [("book", 700, "whole", 700 * 768)]
    assert "book" in kvferry("ls").out

    remote = str(tmp_path / "remote")
    assert kvferry("push", remote, "book", "--dry-run", "--json").code == 0
    assert not (tmp_path / "remote").exists()
    pushed = kvferry("push", remote, "book", "--json").json
    assert (pushed["objects"], pushed["payload_bytes"]) == (22, 700 * 768)

    other = ("--store", str(tmp_path / "other"))
    pulled = kvferry(*other, "pull", remote, "book", "--trimmed", "--json").json
    # trimmed: the full group's 11 blocks, and of the sliding one those from token 700 - 512 on: blocks 2 to 10
    assert pulled["objects"] == 11 + 9
    assert kvferry(*other, "ls", "--json").json[0]["kept"] == "trimmed"

    went = kvferry("generate", "--bundle", "tiny", "--from", "book", "-n", "32", "--decode-only", "--json", *other).json
    assert went["tokens"] == made["receipt"]["tokens"]
    assert went["reused_tokens"] == 700
    assert went["functions"] == ["chunk_0.mlpackage:decode", "chunk_1.mlpackage:decode", "lmhead.mlpackage"]
    assert went["position"] == 700 + 32 - 1
    assert went["finish"] == made["receipt"]["finish"]

    proved = kvferry(*other, "verify", "book", "--bundle", "tiny", "--json")
    assert (proved.code, proved.json["identical"], proved.json["tokens"]) == (0, True, 32)

    again = kvferry(*other, "pull", remote, "book", "--json").json
    assert again["objects"] == 2, "a later whole pull fetches what the trimmed one left"
    assert kvferry(*other, "pull", remote, "book", "--json").json["payload_bytes"] == 0
    assert kvferry(*other, "check").code == 0


def test_find_says_where_a_text_first_differs(kvferry: Kvferry, story: Path, tmp_path: Path) -> None:
    assert kvferry("find", "--bundle", "tiny", str(story), "--json").json["reused_tokens"] == 0
    kvferry("prefill", "--bundle", "tiny", str(story), "--name", "book", "--tokens", "300", "--receipt", "0")
    assert kvferry("find", "--bundle", "tiny", str(story), "--tokens", "300", "--json").json["reused_tokens"] == 300
    assert kvferry("find", "--bundle", "tiny", str(story), "--tokens", "200", "--json").json["reused_tokens"] == 199
    text = story.read_text()
    other = tmp_path / "other.txt"
    other.write_text(text[:200] + "!!" + text[200:])
    found = kvferry("find", "--bundle", "tiny", str(other), "--json").json
    assert found["names"] == ["book"]
    assert found["first_difference"] == found["reused_tokens"] == found["common_tokens"] < 300
    assert "0 of" in kvferry("find", "--bundle", "tiny", str(story), "--namespace", "else").out


def test_a_snapshot_stays_in_its_namespace(kvferry: Kvferry, story: Path) -> None:
    words = ("--bundle", "tiny", "--namespace", "mine")
    kvferry("prefill", str(story), "--name", "a", "--tokens", "20", *words)
    for verb in (("generate", "--from", "a", "-n", "2"), ("verify", "a")):
        assert kvferry(*verb, *words).code == 0
        answer = kvferry(*verb, "--bundle", "tiny")
        assert answer.code == 7
        assert "'default', found 'mine'" in answer.err


def test_prefill_reuses_what_is_there(kvferry: Kvferry, story: Path) -> None:
    kvferry("prefill", "--bundle", "tiny", str(story), "--name", "a", "--tokens", "300", "--receipt", "0")
    longer = kvferry(
        "prefill", "--bundle", "tiny", str(story), "--name", "b", "--tokens", "400", "--receipt", "0", "--json"
    )
    assert longer.json["reused_tokens"] == 300
    assert "unnamed cache" not in longer.err
    moved = kvferry("prefill", "--bundle", "tiny", str(story), "--name", "b", "--tokens", "5", "--receipt", "0")
    assert longer.json["snapshot"] in moved.err
    assert "unnamed cache" in moved.err
    assert longer.json["written_objects"] == 2 * 3, "blocks 4 (grown), 5 and 6"


def test_generate_can_save_and_go_on(kvferry: Kvferry, story: Path) -> None:
    kvferry("prefill", "--bundle", "tiny", str(story), "--name", "a", "--tokens", "100", "--receipt", "0")
    whole = kvferry("generate", "--bundle", "tiny", "--from", "a", "-n", "12", "--json").json
    first = kvferry("generate", "--bundle", "tiny", "--from", "a", "-n", "6", "--save", "b", "--json").json
    assert first["saved"] is not None
    rest = kvferry("generate", "--bundle", "tiny", "--from", "b", "-n", "6", "--json").json
    assert first["tokens"] + rest["tokens"] == whole["tokens"]


def test_names(kvferry: Kvferry, story: Path) -> None:
    kvferry("prefill", "--bundle", "tiny", str(story), "--name", "a", "--tokens", "10", "--receipt", "0")
    assert kvferry("rename", "a", "b").code == 0
    assert kvferry("show", "b", "--json").json["tokens"] == 10
    assert kvferry("show", "a").code == 3
    assert kvferry("rm", "b", "nothing").code == 3
    assert [r["name"] for r in kvferry("ls", "--json").json] == ["b"], "nothing is removed when one name is missing"
    assert kvferry("rm", "b").code == 0
    assert kvferry("ls", "--json").json == []
    assert kvferry("gc", "--dry-run").code == 0
    assert kvferry("gc").code == 0
    assert kvferry("du", "--json").code == 0


def test_damage_hides_nothing_else(kvferry: Kvferry, story: Path, tmp_path: Path) -> None:
    for name, tokens in (("a", "10"), ("b", "70"), ("c", "130")):
        kvferry("prefill", "--bundle", "tiny", str(story), "--name", name, "--tokens", tokens, "--receipt", "0")
    store = tmp_path / "store"
    snapshots = {row["name"]: row["snapshot"] for row in kvferry("ls", "--json").json}
    from kvstore.digest import label_file

    for path, error in (
        (store / "refs" / label_file("a"), "RefCorrupt"),
        (store / "snapshots" / snapshots["b"], "SnapshotCorrupt"),
    ):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        answer = kvferry("ls", "--json")
        assert answer.code == 4
        assert error in answer.err
    assert [(r["name"], r["kept"]) for r in answer.json] == [("b", "unreadable"), ("c", "whole")]
    assert kvferry("generate", "--bundle", "tiny", "--from", "b").code == 4
    assert kvferry("generate", "--bundle", "tiny", "--from", "c", "-n", "2").code == 0
    (store / "index.sqlite").write_bytes(b"not a database")
    assert kvferry("find", "--bundle", "tiny", str(story), "--tokens", "100", "--json").json["reused_tokens"] == 99


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("nonsense",), 2),
        (("prefill",), 2),
        (("generate", "--bundle", "tiny"), 2),
        (("generate", "--bundle", "tiny", "--prompt", "x", "--at", "1"), 2),
        (("show", "nothing"), 3),
        (("generate", "--bundle", "tiny", "--from", "nothing"), 3),
        (("generate", "--bundle", "nowhere", "--prompt", "x"), 3),
        (("bundle", "show", "nowhere"), 3),
        (("pull", "nowhere", "x"), 8),
    ],
)
def test_exit_codes(kvferry: Kvferry, words: tuple[str, ...], code: int) -> None:
    answer = kvferry(*words)
    assert (answer.code, answer.out) == (code, "")
    assert answer.err
    assert "Traceback" not in answer.err


def test_too_long_a_text_is_refused_and_says_what_fits(kvferry: Kvferry, story: Path) -> None:
    answer = kvferry("prefill", "--bundle", "tiny", str(story), "--name", "x")
    assert answer.code == 7
    assert "2047" in answer.err
    assert kvferry("ls", "--json").json == []


def test_another_models_snapshot_is_refused_by_name(kvferry: Kvferry, story: Path, tmp_path: Path) -> None:
    kvferry("bundle", "build", "tiny", str(tmp_path / "other"), "--seed", "1")
    kvferry(
        "prefill", "--bundle", str(tmp_path / "other"), str(story), "--name", "x", "--tokens", "70", "--receipt", "0"
    )
    answer = kvferry("generate", "--bundle", "tiny", "--from", "x", "--json")
    assert answer.code == 5
    error = json.loads(answer.err)
    assert error["error"] in ("WeightsMismatch", "IdentityMismatch")
    assert "weights" in [field[0] for field in error["details"]["fields"]]


def test_options_before_and_after_the_verb(kvferry: Kvferry, story: Path, tmp_path: Path) -> None:
    words = ("prefill", "--bundle", "tiny", str(story), "--name", "a", "--tokens", "5", "--receipt", "0")
    kvferry("--store", str(tmp_path / "one"), *words)
    kvferry(*words, "--store", str(tmp_path / "two"))
    for store in ("one", "two"):
        before = kvferry("--json", "--store", str(tmp_path / store), "ls").json
        assert before == kvferry("ls", "--json", "--store", str(tmp_path / store)).json
        assert [r["name"] for r in before] == ["a"]


def test_text_that_is_not_utf8(kvferry: Kvferry, tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"abc\xff\xfe")
    answer = kvferry("prefill", "--bundle", "tiny", "bad.txt", "--name", "x")
    assert answer.code == 7
    assert "byte 3" in answer.err


def test_an_empty_text(kvferry: Kvferry, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    made = kvferry("prefill", "--bundle", "tiny", "empty.txt", "--name", "x", "--json").json
    assert made["context_tokens"] == 1, "the beginning-of-text token"


def test_version_help_and_completion(kvferry: Kvferry) -> None:
    assert kvferry("--version").out.startswith("kvferry 0.")
    assert "prefill" in kvferry("--help").out
    for shell in ("bash", "zsh", "fish"):
        assert "_KVFERRY_COMPLETE" in kvferry("completion", shell).out


def test_doctor(kvferry: Kvferry) -> None:
    answer = kvferry("doctor", "--json")
    assert {f["what"] for f in answer.json["findings"]} >= {"python", "package kvstore", "package runtime", "store"}


@pytest.mark.parametrize("trimmed", [False, True])
def test_the_demo_on_the_tiny_model(kvferry: Kvferry, trimmed: bool) -> None:
    answer = kvferry("demo", "--model", "tiny", "--json", *(["--trimmed"] if trimmed else []))
    value = answer.json
    assert answer.code == 0
    assert set(value) >= {
        "model", "kv_bytes_per_token", "context_tokens", "prefill_seconds", "save_seconds", "snapshot_bytes", "moved_bytes",
        "restore_seconds", "reused_tokens", "consumer_functions", "decode_feed_seconds_estimate", "identical", "continuation",
    }  # fmt: skip
    assert value["identical"] is True
    assert value["reused_tokens"] == value["context_tokens"] == 1500
    assert value["snapshot_bytes"] == 1500 * 768
    assert all(f.endswith((":decode", "lmhead.mlpackage")) for f in value["consumer_functions"])
    # full: 24 blocks of 128 bytes a token; sliding: 24 or the last 9 of 640; and a 128-byte header each
    sliding = 1500 - 15 * 64 if trimmed else 1500
    assert value["moved_bytes"] == 1500 * 128 + sliding * 640 + (24 + (9 if trimmed else 24)) * 128


def test_ls_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['kvferry', 'ls']\n"
        "from kvstore.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([m for m in sys.modules if m.partition('.')[0] in "
        "('numpy', 'zstandard', 'rich', 'cryptography', 'runtime', 'sync', 'asyncio')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"KVFERRY_STORE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "[]"
