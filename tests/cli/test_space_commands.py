"""The commands about a store's space, and about what stays and what comes back."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from command import Kvferry

from kvstore import Group, Identity, Layout, Lineage, Store
from kvstore.gauge import physical_bytes
from kvstore.quota import LEAST

LAYOUT = Layout((Group("full", None, (0,), 8, 64),))
IDENTITY = Identity.of({"weights": "w", "tokenizer": "t"})
ROW = LAYOUT.bytes_per_token // 2


class Rows:
    def __init__(self, items: list[int]) -> None:
        self._data = [b"".join(n.to_bytes(4, "big") * (ROW // 4) for n in items) for _ in range(2)]

    def spans(self, group: int, start: int, stop: int) -> list[memoryview]:
        return [memoryview(data)[start * ROW : stop * ROW] for data in self._data]


def save(path: Path, first: int, blocks: int, name: str | None = None) -> str:
    items = [first, *range(first + 1, first + 64 * blocks)]
    with Store.open(path) as store:
        lineage = [Lineage.of({"engine": "test"})] * blocks
        saved = store.save(LAYOUT, IDENTITY, items, Rows(items), namespace="default", name=name, lineage=lineage)
    assert saved.digest is not None
    return saved.digest.hex


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


def labels(kvferry: Kvferry) -> list[str]:
    return [row["name"] for row in kvferry("ls", "--json").json]


def test_removed_collected_and_brought_back(kvferry: Kvferry, place: Path) -> None:
    digest = save(place, 0, 3, "a")
    save(place, 10_000, 1, "b")
    assert kvferry("trash", "ls").out == "0 B in the trash\n"
    kvferry("rm", "a")
    assert "only the name" in kvferry("trash", "ls").out
    assert "`kvferry gc --purge` deletes" in kvferry("gc").out
    listed = kvferry("trash", "ls")
    assert f"{digest[:12]}  a     " in listed.out and "395 kB" in listed.out
    assert kvferry("trash", "ls", "--json").json["snapshots"][0]["names"] == ["a"]
    assert kvferry("trash", "restore", "a").out == "a is back: 192 tokens, 3 objects from the trash\n"
    assert labels(kvferry) == ["a", "b"] and kvferry("check").code == 0
    kvferry("rm", "a")
    kvferry("gc")
    assert kvferry("trash", "restore", digest[:8], "--as", "again").code == 0
    assert labels(kvferry) == ["again", "b"]
    kvferry("rm", "again")
    kvferry("gc")
    assert "without a name the next gc collects it again, `kvferry pin" in kvferry("trash", "restore", digest[:10]).out
    kvferry("gc")
    assert kvferry("trash", "empty").out.startswith("deleted 39")
    assert kvferry("trash", "restore", "again").code == 3
    assert "trash ls" in kvferry("trash", "restore", digest).err


def test_pins(kvferry: Kvferry, place: Path) -> None:
    first, second = save(place, 0, 1, "talk"), save(place, 0, 2)
    assert kvferry("pin", "talk").out == f"pin/talk@{first[:12]} keeps {first[:12]}\n"
    assert kvferry("pin", second[:8], "--as", "exam", "--json").json == {"pin": "pin/exam", "snapshot": second}
    kvferry("rm", "talk")
    kvferry("gc", "--purge", "--yes")
    assert labels(kvferry) == ["pin/exam", f"pin/talk@{first[:12]}"]
    assert kvferry("unpin", "exam", "pin/nothing").code == 3
    assert (
        kvferry("unpin", "exam", f"pin/talk@{first[:12]}").out == f"removed pin/exam\nremoved pin/talk@{first[:12]}\n"
    )
    assert kvferry("gc", "--json").json["pruned"]["snapshots"] == 2
    assert kvferry("pin", "nothing").code == 3


def test_a_quota(kvferry: Kvferry, place: Path) -> None:
    assert kvferry("quota").code == 3
    assert kvferry("quota", "off").code == 3
    save(place, 0, 20, "a")
    assert "no quota; " in kvferry("quota").out and "quota" not in kvferry("du").out
    assert kvferry("quota", "1KB").code == 7 and kvferry("quota", "much").code == 2
    told = kvferry("quota", "9MB").out
    assert told.startswith("quota 9.00 MB: ") and told.endswith(" left\n")
    value = kvferry("quota", "8MiB", "--json").json
    assert value["bytes"] == LEAST and value["used"] + value["left"] == LEAST
    du = kvferry("du")
    assert "quota 8.39 MB: " in du.out and kvferry("du", "--json").json["quota"]["bytes"] == LEAST
    for n in range(1, 8):
        save(place, 100_000 * n, 10)
    assert kvferry("du", "--json").json["quota"]["left"] > 0
    assert kvferry("quota", "off").out.startswith("no quota; ")
    for n in range(1, 8):
        save(place, 100_000 * n, 10)
    told = kvferry("quota", "8MiB").out
    assert f" over it: `kvferry gc --to {LEAST}` deletes cache" in told
    assert kvferry("gc", "--to", str(LEAST), "--yes").code == 0
    assert " left\n" in kvferry("quota").out and labels(kvferry) == ["a"]


def test_gc_down_to_a_size(kvferry: Kvferry, place: Path) -> None:
    save(place, 0, 10, "a")
    for n in range(1, 11):
        save(place, 100_000 * n, 1)
    with Store.open(place) as store:
        total = physical_bytes(store.shelf.root)
    plan = kvferry("gc", "--to", str(total - 300_000), "--dry-run", "--json").json["plan"]
    assert len(plan["snapshots"]) == 3 and 300_000 <= plan["bytes"] < 450_000
    done = kvferry("gc", "--to", str(total - 300_000), "--json").json
    assert done["pruned"]["snapshots"] == 3 and done["freed_bytes"] >= 300_000 and done["left_bytes"] <= total - 300_000
    assert kvferry("gc", "--to", "1GB", "--json").json["pruned"]["snapshots"] == 0
    assert kvferry("gc", "--to", "1MB", "--keep-days", "1").code == 2
    refused = kvferry("gc", "--to", "1MB", "--yes")
    assert refused.code == 10 and "names and pins keep it" in refused.err and "moved 7 snapshots" in refused.out


def test_a_run_that_would_delete_most_asks(kvferry: Kvferry, place: Path) -> None:
    save(place, 0, 1, "a")
    save(place, 100_000, 20)
    refused = kvferry("gc", "--purge", stdin="y\n")
    assert refused.code == 7 and "WouldDeleteMost" in refused.err and "--yes" in refused.err
    assert kvferry("gc", "--purge", "--dry-run").code == 0
    assert kvferry("gc", "--to", "0").code == 7
    assert kvferry("gc", "--purge", "--max-share", "0.999", "--dry-run").code == 0
    moved = kvferry("gc", "--json").json  # can be brought back: nobody is asked
    assert moved["pruned"]["objects"] == 20
    assert kvferry("gc", "--purge").code == 7
    assert kvferry("gc", "--purge", "--max-share", "0.999").code == 0
    assert labels(kvferry) == ["a"]


@pytest.mark.parametrize(("answer", "code"), [("n", 7), ("y", 0)])
def test_at_a_terminal_it_is_a_question(place: Path, answer: str, code: int) -> None:
    save(place, 0, 1, "a")
    save(place, 100_000, 20)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "kvstore", "--store", str(place), "gc", "--purge"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    running = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, env=environment)
    os.close(theirs)
    told = b""
    while b"good? [y/N]" not in told:
        told += os.read(ours, 1000)
    os.write(ours, answer.encode() + b"\n")
    running.communicate(timeout=60)
    os.close(ours)
    assert running.returncode == code
    with Store.open(place) as store:
        assert len(list(store.shelf.objects.names())) == (21 if code else 1)
        assert not os.listdir(place / "trash")  # noqa: PTH208


def test_a_full_store_has_an_exit_code_of_its_own(kvferry: Kvferry, place: Path, story: Path) -> None:
    with Store.open(place):
        pass
    kvferry("quota", "8MiB")
    (place / "letter").write_bytes(b"x" * (LEAST - 100_000))
    refused = kvferry("prefill", "--bundle", "tiny", str(story), "--name", "a", "--tokens", "300", "--receipt", "0")
    assert refused.code == 10 and "StoreFull" in refused.err and "`kvferry quota " in refused.err
    assert labels(kvferry) == []
    kvferry("quota", "9MiB")
    assert (
        kvferry("prefill", "--bundle", "tiny", str(story), "--name", "a", "--tokens", "300", "--receipt", "0").code == 0
    )
