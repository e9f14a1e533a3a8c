"""Recoding: nothing is lost whoever is at work, it ends where it is killed, and what can't be recoded stays."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from crashing import RECODING
from kvmemory import IDENTITY, LAYOUT, files, object_file
from kvmemory import save as save_random
from narrow import codecs, expect, save
from test_crash import HERE, Forker

from kvstore import KVError, Store, prune, recode
from kvstore.check import check
from kvstore.codec import PLANES, RAW, Codec, encode_object
from kvstore.digest import ContentDigest
from kvstore.errors import SnapshotMissing, StoreBusy, StoreFull
from kvstore.gauge import physical_bytes
from kvstore.index import Index
from kvstore.quota import set_quota

ITEMS = [(7 * i) % 90 for i in range(330)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "s") as store:
        yield store


@pytest.fixture
def forker(tmp_path: Path) -> Iterator[Forker]:
    forker = Forker(tmp_path / "unused")
    yield forker
    forker.close()


def run(store: Store, to: Codec, names: list[str] | None = None, **other: float) -> recode.Recoded:
    return recode.apply(store, recode.plan(store, to, names, **other))


def test_there_and_back(store: Store) -> None:
    path = store.shelf.path
    save(store, ITEMS, name="a")
    save(store, ITEMS[:100])
    before = {name: data for name, data in files(path).items() if name != "format.json"}
    plan = recode.plan(store, "planes")
    assert (len(plan.items), plan.there, plan.content_bytes) == (14, 0, 430 * 80 - 64 * 80)
    seen: list[int] = []
    done = recode.apply(store, plan, seen.append)
    assert sum(seen) == plan.content_bytes and len(seen) == 1
    assert done.objects == 14 and done.bytes_after < 0.9 * done.bytes_before
    assert done.bytes_after == sum(len(data) for name, data in files(path).items() if name.startswith("objects/"))
    assert set(codecs(path).values()) == {PLANES} and check(store).ok and not list((path / "tmp").iterdir())
    expect(store, "a")
    assert recode.plan(store, "planes").items == () and recode.plan(store, "planes").there == 14
    back = run(store, "raw")
    assert (back.bytes_before, back.bytes_after) == (done.bytes_after, done.bytes_before)
    assert {name: data for name, data in files(path).items() if name != "format.json"} == before
    assert '"planes"' in files(path)["format.json"].decode()


def test_only_what_the_names_need(store: Store) -> None:
    save(store, ITEMS, name="a")
    save(store, [5, *ITEMS[:200]], name="b")
    save(store, [6, *ITEMS[:64]], name="c")
    run(store, "planes", ["a", "c"])
    wanted = {c.hex for n in "ac" for block in store.match(n).snapshot.blocks for c in block}
    made = {name for name, codec in codecs(store.shelf.path).items() if codec == PLANES}
    assert made <= wanted and len(made) >= len(wanted) - 2  # a short block of one row may be no smaller
    with pytest.raises(SnapshotMissing):
        recode.plan(store, "planes", ["nobody"])


def test_what_planes_do_not_make_smaller_stays(store: Store) -> None:
    save_random(store, ITEMS, name="a")
    before = files(store.shelf.path)
    done = run(store, "planes")
    assert (done.objects, done.kept, done.bytes_after) == (0, 12, 0)
    assert {**files(store.shelf.path), "format.json": b""} == {**before, "format.json": b""}


def test_what_was_used_lately_stays_raw(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 10 * 86400)
    save(store, ITEMS, name="cold")
    monkeypatch.setattr(time, "time", lambda: now)
    save(store, [*ITEMS[:128], *range(100)], name="warm")
    warm = {c.hex for block in store.match("warm").snapshot.blocks for c in block}
    run(store, "planes", older_seconds=86400)
    assert {name for name, codec in codecs(store.shelf.path).items() if codec == RAW} == warm
    run(store, "planes", ["warm"], older_seconds=86400)
    assert {name for name, codec in codecs(store.shelf.path).items() if codec == RAW} == warm
    run(store, "planes", ["warm"])
    assert RAW not in codecs(store.shelf.path).values()


def test_damage_is_left_alone_and_named(store: Store) -> None:
    save(store, ITEMS, name="a")
    blocks = store.match("a").snapshot.blocks
    content, header, link = (object_file(store.shelf.path, blocks[b][0]) for b in (0, 1, 2))
    content.write_bytes(content.read_bytes()[:-1] + b"x")
    header.write_bytes(b"x" * 2000)
    link.unlink()
    link.symlink_to(content)
    before = {file: file.read_bytes() for file in (content, header)}
    plan = recode.plan(store, "planes")
    assert set(plan.unreadable) == {blocks[1][0], blocks[2][0]}
    done = recode.apply(store, plan)
    assert done.damaged == (blocks[0][0],) and done.objects == 9
    assert all(file.read_bytes() == data for file, data in before.items()) and link.is_symlink()


def test_what_goes_away_after_the_plan_is_passed_over(store: Store) -> None:
    save(store, ITEMS, name="a")
    save(store, [5, *ITEMS[:63]])
    plan = recode.plan(store, "planes")
    prune.apply(store, prune.plan(store))
    run(store, "planes", ["a"])
    done = recode.apply(store, plan)
    assert (done.objects, done.gone) == (0, 14) and check(store).ok


def test_a_wrong_encoder_replaces_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, ITEMS, name="a")
    before = files(store.shelf.path)
    encode = encode_object

    def wrong(name: object, parts: list[memoryview], codec: int) -> object:
        return encode(name, [bytes(parts[0])[2:] + bytes(parts[0])[:2]], codec)  # type: ignore[arg-type]

    monkeypatch.setattr("kvstore.recode.encode_object", wrong)
    with pytest.raises(KVError, match="Nothing was replaced"):
        run(store, "planes")
    monkeypatch.undo()
    assert {**files(store.shelf.path), "format.json": b""} == {**before, "format.json": b""}


def test_an_error_in_the_middle_of_a_batch_leaves_no_file_behind(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, ITEMS, name="a")
    real, calls = os.writev, [0]

    def full(fd: int, parts: list[memoryview]) -> int:
        calls[0] += 1
        if calls[0] == 5:
            raise OSError(28, "No space left on device")
        return real(fd, parts)

    store.shelf.require("planes")
    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space"):
        run(store, "planes")
    monkeypatch.undo()
    assert set(codecs(store.shelf.path).values()) == {RAW} and not list((store.shelf.path / "tmp").iterdir())
    assert run(store, "planes").objects == 12
    expect(store, "a")


def test_a_quota_holds(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of recoded files are counted; raw ones that don't fit are refused, and what was done stays."""
    monkeypatch.setattr("kvstore.quota.LEAST", 0)
    save(store, ITEMS, name="a", codec="planes")
    root = store.shelf.root
    free = 7000
    set_quota(root, physical_bytes(root) + free)
    monkeypatch.setattr(recode, "BATCH_OBJECTS", 2)
    with pytest.raises(StoreFull):
        run(store, "raw")
    made = codecs(store.shelf.path)
    assert set(made.values()) == {RAW, PLANES} and not list((store.shelf.path / "tmp").iterdir())
    expect(store, "a")
    set_quota(root, physical_bytes(root) + 100_000)
    run(store, "raw")
    gauge = store.quota.gauge()
    assert gauge is not None and gauge.charge(80_000), "what was replaced is taken back"
    expect(store, "a")


@pytest.mark.slow
@pytest.mark.parametrize("action", RECODING)
def test_killed_before_every_step(tmp_path: Path, forker: Forker, action: Codec) -> None:
    made = tmp_path / "made"
    with Store.open(made) as store:
        save(store, ITEMS, name="a", codec="planes" if action == "raw" else "raw")
        save(store, ITEMS[:70])
    forker.ask(f"step {action} 0 {shutil.copytree(made, tmp_path / 'count')}")
    calls = next(int(words[1]) for words in forker.until_end() if words[0] == "calls")
    list(forker.until_end())
    assert calls > 40
    between = 0
    for number in range(1, calls + 1, max(1, calls // 25)):
        path = tmp_path / f"at-{number}"
        shutil.copytree(made, path)
        forker.ask(f"step {action} {number} {path}")
        list(forker.until_end())
        assert forker.status == signal.SIGKILL
        between += len(set(codecs(path).values())) == 2
        with Store.open(path) as store:
            expect(store, "a")
            assert check(store).ok
            left = run(store, action)
            assert left.damaged == () and recode.plan(store, action).items == ()
            prune.apply(store, prune.plan(store))
            prune.purge(store)
            report = check(store)
            assert report.ok and report.notes == ()
            expect(store, "a")
        shutil.rmtree(path)
    assert between > 3, "no kill fell between two renames"


WORKER = """
import random, sys, time
from pathlib import Path
from narrow import expect, save
from kvstore import Store, prune, recode
from kvstore.digest import ContentDigest
from kvstore.errors import SnapshotMissing, StoreBusy, StoreFull
from kvstore.gauge import physical_bytes
prune.SLICE = prune.PAUSE = recode.PAUSE = 0.001
recode.BATCH_OBJECTS = 3
kind, seed = sys.argv[2], int(sys.argv[3])
chance, count = random.Random(seed), 0
items = [(7 * i) % 90 for i in range(330)]
with Store.open(Path(sys.argv[1])) as store:
    print("ready", flush=True)
    sys.stdin.readline()
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        if kind == "recode":
            done = recode.apply(store, recode.plan(store, chance.choice(["planes", "raw"])))
            assert not done.damaged, done
        elif kind == "read":
            expect(store, "a")
            expect(store, "b")
        elif kind == "save":
            made = save(store, [*items[: chance.randrange(300)], seed, count], name=f"{seed} {count % 3}", codec=chance.choice(["planes", "raw"]))
            expect(store, f"{seed} {count % 3}")
            if chance.random() < 0.4:
                store.shelf.records.remove([f"{seed} {count % 3}"])
        else:
            prune.apply(store, prune.plan(store))
            prune.purge(store)
        count += 1
print("did", count, flush=True)
"""


@pytest.mark.slow
def test_recoders_savers_readers_and_a_collector_at_once(tmp_path: Path) -> None:
    """Nobody sees an error, and nothing is lost: two of them recode the same objects back and forth all the time."""
    path = tmp_path / "s"
    with Store.open(path) as store:
        save(store, ITEMS, name="a")
        save(store, [*ITEMS[:130], 1, 2, 3], name="b", codec="planes")
    kinds = ["recode", "recode", "read", "save", "save", "collect"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)])}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(path), kind, str(number)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for number, kind in enumerate(kinds)
    ]  # fmt: skip
    for worker in workers:
        assert worker.stdout and worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin
        worker.stdin.write("\n")
        worker.stdin.flush()
    for worker, kind in zip(workers, kinds, strict=True):
        out, err = worker.communicate(timeout=120)
        assert worker.returncode == 0 and out.startswith("did ") and not err, f"{kind}: {err}"
        assert int(out.split()[1]) > 1, kind
    with Store.open(path) as store:
        report = check(store)
        assert report.ok, report
        for ref in store.shelf.records.refs():
            expect(store, ref.label)


def test_a_collector_waits_for_a_batch_only(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is free between batches: who wants it alone gets it before the work is done."""
    save(store, ITEMS, name="a")
    monkeypatch.setattr(recode, "BATCH_OBJECTS", 1)
    plan, begun, got = recode.plan(store, "planes"), threading.Event(), []

    def collect() -> None:
        with Store.open(store.shelf.path) as other:
            begun.wait()
            with other.shelf.exclusive():
                got.append(len([c for c in codecs(store.shelf.path).values() if c == PLANES]))

    thread = threading.Thread(target=collect)
    thread.start()
    recode.apply(store, plan, lambda _: begun.set())
    thread.join()
    assert got and got[0] < 12


def test_recoding_leaves_the_index_alone(store: Store) -> None:
    save(store, ITEMS, name="a")
    run(store, "planes")
    assert store.indexed(Index.sound)
    match = store.find(LAYOUT, IDENTITY, [*ITEMS[:300], 1], namespace="default")
    assert match is not None and match.n == 300


def test_no_collector_runs_during_a_batch(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, ITEMS[:64], name="a")
    tried = []

    def watched(name: ContentDigest, parts: list[memoryview], codec: int) -> object:
        with Store.open(store.shelf.path) as other, pytest.raises(StoreBusy), other.shelf.exclusive(seconds=0):
            pass
        tried.append(name)
        return encode_object(name, parts, codec)

    monkeypatch.setattr("kvstore.recode.encode_object", watched)
    assert run(store, "planes").objects == len(tried) == 2
