"""The commands push and pull: what they print, and with which exit code they end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ferries import ROW, assert_restores, object_files, save, tree, verify

from kvstore import Store
from kvstore.__main__ import app
from kvstore.errors import RefConflict, SnapshotMissing, Unreachable


def kvferry(*args: str | Path) -> None:
    app.main([str(a) for a in args], standalone_mode=False)


@pytest.fixture
def mac(tmp_path: Path) -> Path:
    with Store.open(tmp_path / "mac") as store:
        save(store, "book", 300)
        save(store, "other", 100, "b")
    return tmp_path / "mac"


def test_push_and_pull(mac: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kvferry("--store", mac, "push", tmp_path / "stick", "book", "other")
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ["book: 300 tokens, whole", "other: 100 tokens, whole"]
    assert out[2].startswith("carried 14 objects, 128 kB, in ") and out[2].endswith(" s; 0 were there")
    kvferry("pull", f"file://{tmp_path}/stick", "book", "--trimmed", "--as", "buch", "--store", tmp_path / "phone")
    assert capsys.readouterr().out.splitlines()[0] == "buch: 300 tokens, trimmed"
    with Store.open(tmp_path / "phone") as phone:
        assert_restores(phone, "buch", 300)


def test_json(mac: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kvferry("push", tmp_path / "stick", "book", "--json", "--store", mac)
    value = json.loads(capsys.readouterr().out)
    seconds, snapshots = value.pop("seconds"), value.pop("snapshots")
    assert 0 < seconds < 60
    payload = 300 * sum(ROW.values())
    assert value == {
        "remote": str(tmp_path / "stick"),
        "objects": 10,
        "payload_bytes": payload,
        "frame_bytes": payload + 1280,
        "skipped": 0,
        "resumed": 0,
    }
    with Store.open(mac) as store:
        digest = store.resolve("book").hex
    assert snapshots == [{"name": "book", "snapshot": digest, "tokens": 300, "kept": "whole", "nowhere": 0}]


def test_dry_run_changes_nothing(mac: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kvferry("--store", mac, "push", tmp_path / "stick", "book")
    with Store.open(tmp_path / "phone") as phone:
        save(phone, "mine", 100)
    capsys.readouterr()
    before = tree(tmp_path / "phone" / "objects"), tree(tmp_path / "stick")
    kvferry("--store", tmp_path / "phone", "pull", tmp_path / "stick", "book", "--dry-run")
    assert capsys.readouterr().out == "book: 300 tokens; would carry 8 objects, 75.5 kB; 2 are there already\n"
    kvferry("--store", mac, "push", tmp_path / "stick", "other", "--dry-run", "--json")
    plan = json.loads(capsys.readouterr().out)
    assert (plan["dry_run"], plan["objects"], plan["payload_bytes"]) == (True, 4, 100 * sum(ROW.values()))
    assert (tree(tmp_path / "phone" / "objects"), tree(tmp_path / "stick")) == before


def test_a_mistake_makes_no_folder(mac: Path, tmp_path: Path) -> None:
    with pytest.raises(SnapshotMissing, match="boot"):
        kvferry("--store", mac, "push", tmp_path / "stick", "book", "boot")
    kvferry("--store", mac, "push", tmp_path / "stick", "book", "--dry-run")
    with pytest.raises(Unreachable):
        kvferry("--store", mac, "push", tmp_path / "not" / "mounted", "book", "--dry-run")
    with pytest.raises(Unreachable):
        kvferry("--store", tmp_path / "phone", "pull", tmp_path / "stick", "book")
    assert [p.name for p in tmp_path.iterdir()] == ["mac"]


def test_verify(mac: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for way in ("push", "pull"):
        kvferry("--store", mac, "push", tmp_path / "stick", "book")
        bad = object_files(tmp_path / "stick")[2]
        if way == "pull":
            bad = mac / bad.relative_to(tmp_path / "stick")
        data = bytearray(bad.read_bytes())
        data[-1] ^= 1
        bad.write_bytes(data)
        capsys.readouterr()
        kvferry("--store", mac, way, tmp_path / "stick", "book", "--verify", "--json")
        assert json.loads(capsys.readouterr().out)["objects"] == 1
    verify(tmp_path / "stick")
    verify(mac)


def test_force(mac: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kvferry("--store", mac, "push", tmp_path / "stick", "book")
    with Store.open(tmp_path / "phone") as phone:
        save(phone, "book", 200, "mine")
    with pytest.raises(RefConflict):
        kvferry("--store", tmp_path / "phone", "pull", tmp_path / "stick", "book")
    with pytest.raises(RefConflict):
        kvferry("--store", tmp_path / "phone", "push", tmp_path / "stick", "book")
    kvferry("--store", tmp_path / "phone", "push", tmp_path / "stick", "book", "--force")
    kvferry("--store", mac, "pull", tmp_path / "stick", "book", "--force")
    with Store.open(mac) as store:
        assert_restores(store, "book", 200, "mine")


def test_exit_codes_and_errors_of_the_process(mac: Path, tmp_path: Path) -> None:
    def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvstore", "--store", str(tmp_path / "phone"), *map(str, args)]
        return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent.parent)

    absent = run("pull", tmp_path / "absent", "book", "--json")
    assert absent.returncode == 8 and absent.stdout == ""
    error = json.loads(absent.stderr)
    assert error["error"] == "Unreachable" and "mounted" in error["message"]
    usage = run("pull", tmp_path / "absent")
    assert usage.returncode == 2 and "Missing argument 'NAME...'" in usage.stderr
    assert run("pull", mac, "boot").returncode == 3
    done = run("pull", mac, "book")
    assert done.returncode == 0 and done.stderr == "" and done.stdout.startswith("book: 300 tokens, whole\n")
