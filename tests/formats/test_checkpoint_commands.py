"""`kvferry export` and `kvferry import`, as typed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import corellm_independent as independent
import pytest
from command import Kvferry
from corellm_models import manifest, tree


@pytest.fixture
def here(tmp_path: Path, tiny_gemma4_bundle: Path) -> Path:
    """A link to the bundle under the name that the command line's help would give it."""
    (tmp_path / "phone").symlink_to(tiny_gemma4_bundle, target_is_directory=True)
    return tmp_path / "phone"


def test_out_and_in_and_on(kvferry: Kvferry, story: Path, here: Path, tmp_path: Path) -> None:
    words = ("--bundle", str(here))
    made = kvferry("prefill", *words, str(story), "--name", "book", "--tokens", "600", "--receipt", "6", "--json").json
    out = kvferry("export", "book", "kv", "--as", "corellm", *words, "--json")
    assert (out.code, out.err) == (0, "")
    told = out.json
    assert (told["made"], told["tokens"], told["pending"]) == (True, 600, made["receipt"]["tokens"][0])
    assert (told["bytes"], told["zeroed_rows"], told["soft_tokens"], told["notes"]) == (600 * 640, 0, 0, [])
    assert told["path"] == str(tmp_path / "kv")
    assert told["snapshot"] == made["snapshot"]
    independent.read(tmp_path / "kv", here)
    assert manifest(tmp_path / "kv")["createdWithComputeUnits"] == "cpuOnly"
    assert manifest(tmp_path / "kv")["createdAtISO8601"].endswith("Z")
    again = kvferry("export", "book", "kv", "--as", "corellm", *words, "--json")
    assert (again.code, again.json["made"]) == (0, False)
    assert "is there already" in kvferry("export", "book", "kv", "--as", "corellm", *words).out

    other = ("--store", str(tmp_path / "other"))
    taken = kvferry("import", "kv", *words, *other, "--json").json
    assert (taken["name"], taken["tokens"], taken["pending"]) == ("kv", 600, told["pending"])
    assert (taken["bytes"], taken["uncovered_rows"], taken["written_objects"]) == (600 * 640, 0, 20)
    assert taken["bundle_name"] == here.resolve().name
    went = kvferry("generate", "--from", "kv", "-n", "6", "--decode-only", *words, *other, "--json").json
    assert went["tokens"] == made["receipt"]["tokens"]
    assert went["reused_tokens"] == 600
    assert kvferry("find", str(story), "--tokens", "600", *words, *other, "--json").json["reused_tokens"] == 600
    assert "kv" in kvferry("ls", *other).out
    shown = kvferry("show", "kv", *other, "--json").json
    assert shown["lineages"][0]["engine"] == "corellm checkpoint"
    assert "corellm checkpoint" in kvferry("show", "kv", *other).out
    assert kvferry("check", *other).code == 0
    # Out again: what an import notes is enough without the bundle.
    assert kvferry("export", "kv", "back", "--as", "corellm", *other).code == 0
    first, second = manifest(tmp_path / "kv"), manifest(tmp_path / "back")
    assert {**second, "createdAtISO8601": 0} == {k: v for k, v in first.items() if k != "bundleName"} | {
        "createdAtISO8601": 0
    }


def test_a_name_that_moves_is_said(kvferry: Kvferry, story: Path, here: Path) -> None:
    words = ("--bundle", str(here))
    old = kvferry("prefill", *words, str(story), "--name", "book", "--tokens", "9", "--json").json["snapshot"]
    kvferry("export", "book", "kv", "--as", "corellm", *words)
    answer = kvferry("import", "kv", *words, "--name", "book")
    assert answer.code == 0
    assert old in answer.err and "unnamed cache" in answer.err
    assert kvferry("import", "kv", *words, "--name", "book").err == ""


def test_a_trimmed_pull_says_what_is_zero(kvferry: Kvferry, story: Path, here: Path, tmp_path: Path) -> None:
    words = ("--bundle", str(here))
    kvferry("prefill", *words, str(story), "--name", "book", "--tokens", "1000")
    kvferry("push", "remote", "book")
    other = ("--store", str(tmp_path / "other"))
    kvferry("pull", "remote", "book", "--trimmed", *other)
    answer = kvferry("export", "book", "kv", "--as", "corellm", *words, *other, "--json")
    assert answer.json["zeroed_rows"] == 448
    assert "first 448 tokens" in answer.err
    assert answer.json["notes"] == [answer.err.removeprefix("kvferry: ").strip()]
    third = ("--store", str(tmp_path / "third"))
    taken = kvferry("import", "kv", *words, *third, "--json")
    assert taken.json["uncovered_rows"] == 448
    assert kvferry("ls", *third, "--json").json[0]["kept"] == "trimmed"
    refused = kvferry("generate", "--from", "kv", "--at", "900", "-n", "1", *words, *third)
    assert refused.code == 7


def test_exit_codes(kvferry: Kvferry, story: Path, here: Path, tmp_path: Path) -> None:
    words = ("--bundle", str(here))
    kvferry("prefill", *words, str(story), "--name", "book", "--tokens", "20", "--receipt", "0")
    kvferry("export", "book", "kv", "--as", "corellm", *words)
    kvferry("prefill", "--bundle", "tiny", str(story), "--name", "ours", "--tokens", "5", "--receipt", "0")

    def code(*given: str) -> tuple[int, str]:
        answer = kvferry(*given, "--json")
        assert answer.out == "" or answer.code == 0
        assert "Traceback" not in answer.err
        return answer.code, json.loads(answer.err.splitlines()[-1])["message"] if answer.err else ""

    assert code("export", "book", "kv2")[0] == 2
    assert code("export", "nothing", "kv2", "--as", "corellm")[0] == 3
    assert code("export", "book", "kv2", "--as", "corellm", "--bundle", "tiny")[0] == 5
    assert code("export", "book", "remote/kv2", "--as", "corellm", *words)[0] == 7
    for given in ((), ("--bundle", "tiny")):
        number, message = code("export", "ours", "kv2", "--as", "corellm", *given)
        assert (number, "kvferry-bundle-1" in message) == (7, True)
    assert not (tmp_path / "kv2").exists()
    assert code("import", "kv")[0] == 2
    assert code("import", "nowhere", *words)[0] == 3
    assert code("import", "/", *words)[0] == 7, "it has no name to give"
    number, message = code("import", "kv", "--bundle", "tiny")
    assert (number, "kvferry-bundle-1" in message) == (7, True)
    shutil.copytree(tmp_path / "kv", tmp_path / "bad")
    value = manifest(tmp_path / "bad")
    for change, expected in (
        ({"schemaVersion": 2}, 6),
        ({"identity": value["identity"] | {"hd": 8, "ctx": 4096}}, 5),
        ({"tokenCount": 21}, 4),
        ({"position": 0}, 7),
    ):
        independent.put(tmp_path / "bad", value | change)
        assert code("import", "bad", *words)[0] == expected
    independent.put(tmp_path / "bad", value)
    (tmp_path / "bad" / "k_0.bin").unlink()
    assert code("import", "bad", *words)[0] == 3
    assert [row["name"] for row in kvferry("ls", "--json").json] == ["book", "ours"]
    assert tree(tmp_path / "kv") != {}
