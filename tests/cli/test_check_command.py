"""`kvferry check`: levels, exit codes for cron, and repairing what the next command then can use."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import Kvferry
from optional import missing

TINY = ("--bundle", "tiny")


@pytest.fixture
def store(kvferry: Kvferry, story: Path, tmp_path: Path) -> Path:
    """A store with the first 150 tokens of the story as ``a``, which the remote ``stick`` has too, and 70 as ``b``."""
    for name, tokens in (("a", "150"), ("b", "70")):
        assert kvferry("prefill", *TINY, str(story), "--name", name, "--tokens", tokens, "--receipt", "0").code == 0
    assert kvferry("push", str(tmp_path / "stick"), "a").code == 0
    return tmp_path / "store"


def objects(store: Path) -> list[Path]:
    return sorted((store / "objects").glob("?/*"))


def flip(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 4]))


def test_levels(kvferry: Kvferry, store: Path) -> None:
    count = len(objects(store))
    for words, level, most in (((), "full", count), (("--full",), "full", count), (("--quick",), "quick", 0),
                               (("--sample", "10%"), "sample", 1), (("--sample", "100"), "full", count),
                               (("--max-duration", "5m"), "full", count), (("--max-duration", "0"), "full", 0),
                               (("--sample", "50%", "--max-duration", "0s"), "sample", 0)):  # fmt: skip
        answer = kvferry("check", *words, "--json")
        assert (answer.code, answer.json["level"], answer.json["objects"]) == (0, level, count)
        assert answer.json["read_objects"] == most, words
    flip(objects(store)[0])
    assert [kvferry("check", *words).code for words in (("--quick",), ("--max-duration", "0"), ())] == [0, 0, 4]


@pytest.mark.parametrize(
    "words",
    ["--quick --full", "--quick --sample 5%", "--full --sample 5%", "--dry-run", "--quick --max-duration 5s", "--sample 0%", "--sample 101%",
     "--sample x", "--sample -5", "--max-duration 5d", "--max-duration x", "--max-duration -1"],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(kvferry: Kvferry, words: str) -> None:
    assert kvferry("check", *words.split()).code == 2


def test_repaired_with_losses_then_fetched_back(kvferry: Kvferry, store: Path, tmp_path: Path) -> None:
    """0 sound, 4 damaged, 11 repaired with losses; and the command that it names brings all of it back."""
    assert kvferry("check", "--repair").code == 0
    only_a = set(objects(store)) - {
        store / p.relative_to(tmp_path / "b") for p in objects(_copy_of_b(kvferry, tmp_path))
    }
    flip(max(only_a))
    before = {p: p.read_bytes() for p in store.rglob("*") if p.is_file() and not p.name.startswith("index")}
    plan = kvferry("check", "--repair", "--dry-run")
    assert plan.code == 4 and "is set aside" in plan.out
    assert {p: p.read_bytes() for p in store.rglob("*") if p.is_file() and not p.name.startswith("index")} == before

    done = kvferry("check", "--repair", "--json")
    assert done.code == 11
    (lost,) = done.json["repair"]["names"]
    assert (lost["name"], lost["usable"] < 150, done.json["repair"]["left"]) == ("a", True, [])
    assert kvferry("check").code == 0 and kvferry("check", "--repair").code == 0
    assert f"{lost['usable']} of 150 tokens" in kvferry("check").out
    assert kvferry("generate", *TINY, "--from", "a", "-n", "2").code == 7

    words = shlex.split(lost["pull"].replace("REMOTE", str(tmp_path / "stick")))
    assert kvferry(*words[1:]).code == 0
    assert kvferry("generate", *TINY, "--from", "a", "-n", "2").code == 0
    assert "tokens can be continued" not in kvferry("check").out
    assert kvferry("gc", "--purge").code == 0
    assert list((store / "damaged").iterdir()), "what was damaged is there until somebody deletes it"


def _copy_of_b(kvferry: Kvferry, tmp_path: Path) -> Path:
    assert kvferry("push", str(tmp_path / "b"), "b").code == 0
    return tmp_path / "b"


def test_what_counts_as_a_loss(kvferry: Kvferry, store: Path) -> None:
    """A coverage can be made again, and cache is nobody's loss: 0."""
    next((store / "snapshots").glob("*.cov")).write_bytes(b"")
    assert kvferry("check").code == 4
    assert kvferry("check", "--repair").code == 0
    assert kvferry("rm", "a").code == 0
    for path in objects(store):
        flip(path)
    answer = kvferry("check", "--repair", "--json")
    assert answer.code == 11 and [n["name"] for n in answer.json["repair"]["names"]] == ["b"]
    assert kvferry("check").code == 0


def test_a_manifest_that_is_lost_is_pulled_again_by_the_name_that_repair_tells(
    kvferry: Kvferry, store: Path, tmp_path: Path
) -> None:
    digest = kvferry("show", "a", "--json").json["snapshot"]
    flip(store / "snapshots" / digest)
    assert kvferry("gc").code == 4
    answer = kvferry("check", "--repair")
    assert answer.code == 11 and "name 'a': it stands for nothing that can be read, and is gone" in answer.out
    assert kvferry("show", "a").code == 3 and kvferry("gc").code == 0
    assert kvferry("pull", str(tmp_path / "stick"), "a").code == 0
    assert kvferry("generate", *TINY, "--from", "a", "-n", "2").code == 0


def test_what_can_not_be_repaired_stays_4(kvferry: Kvferry, store: Path) -> None:
    (store / "tmp").rmdir()
    (store / "tmp").symlink_to(store)
    assert kvferry("check", "--repair").code == 4


READER = """
import contextlib, io, json, sys
from kvstore.__main__ import main
answers = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["kvferry", *words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            answers.append([ended.code, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""


def test_a_store_on_a_disk_that_can_only_be_read(kvferry: Kvferry, store: Path, story: Path, tmp_path: Path) -> None:
    """Every verb that only reads works; one that writes says what to do. The mount is real: root can't write there either."""
    can = ["unshare", "-m", "true"]
    if (
        sys.platform != "linux"
        or shutil.which("unshare") is None
        or subprocess.run(can, capture_output=True).returncode
    ):
        missing("a mount namespace needs Linux and root")
    reads = [
        ["ls"], ["show", "a"], ["du"], ["check"], ["check", "--quick"], ["check", "--sample", "50%"], ["gc"],
        ["find", *TINY, str(story), "--tokens", "150"], ["generate", *TINY, "--from", "a", "-n", "2"],
        ["push", str(tmp_path / "other"), "a"], ["pull", str(store), "b", "--store", str(tmp_path / "phone")], ["doctor"],
    ]  # fmt: skip
    writes = [
        ["rm", "a"], ["rename", "a", "c"], ["prefill", *TINY, str(story), "--tokens", "9", "--name", "x"],
        ["check", "--repair"],
    ]  # fmt: skip
    before = {p: p.read_bytes() for p in store.rglob("*") if p.is_file()}
    script = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && exec "$2" -c "$3" "$4"'
    ran = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", str(store), sys.executable, READER, json.dumps(reads + writes)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    answers = json.loads(ran.stdout)
    for words, (code, out, err) in zip(reads, answers[: len(reads)], strict=True):
        assert code == 0, (words, out, err)
    assert "150" in answers[7][1]
    for words, (code, out, err) in zip(writes[:-1], answers[len(reads) : -1], strict=True):
        assert code == 1 and "Read-only file system" in err and "--store" in err, (words, out, err)
    assert answers[-1][0] == 0, "sound: there is nothing to write"
    assert {p: p.read_bytes() for p in store.rglob("*") if p.is_file()} == before
    assert kvferry("check", "--store", str(tmp_path / "phone")).code == 0
    assert kvferry("check", "--store", str(tmp_path / "other")).code == 0
