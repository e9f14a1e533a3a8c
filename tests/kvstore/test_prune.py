"""Collecting: what no name needs goes, nothing else does, at any moment, with savers and readers at work and on a full disk."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from independent import MANIFEST, frame
from kvmemory import HEAD, carry, expect_rows, files, find, load, object_file, save

from kvstore import Store, prune
from kvstore.check import check
from kvstore.digest import label_file
from kvstore.errors import (
    FormatTooNew,
    KVError,
    ObjectMissing,
    RefCorrupt,
    SnapshotCorrupt,
    SnapshotMissing,
    StoreBusy,
)
from kvstore.files import Root
from kvstore.plaintext import size_text
from kvstore.usage import usage

A = [(3 * i) % 90 for i in range(200)]
B = [*A[:128], *range(500, 570)]
C = list(range(1000, 1100))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "s")


def remove_name(store: Store, name: str) -> None:
    store.shelf.records.move_ref(name, store.resolve(name), None)


def collect(store: Store) -> prune.Pruned:
    return prune.apply(store, prune.plan(store))


def promises_hold(store: Store) -> None:
    """No coverage promises an absent object, no ref names an absent manifest. Looks at files only, and not into the trash."""
    path = store.shelf.path
    for digest in store.shelf.records.snapshots():
        snapshot = store.shelf.records.snapshot(digest)
        coverage = store.shelf.records.coverage(digest, snapshot)
        for group in range(len(coverage.runs)):
            for block in coverage.blocks(group):
                assert object_file(path, snapshot.blocks[block][group]).is_file()
    for ref in store.shelf.records.refs():
        assert (path / "snapshots" / ref.snapshot.hex).is_file()


def test_what_rm_made_free_is_freed(store: Store) -> None:
    save(store, A, name="a")
    before = files(store.shelf.path)
    save(store, C, name="c")
    remove_name(store, "c")
    assert prune.purge(store) > 0  # the name
    plan = prune.plan(store)
    assert [d.tokens for d in plan.snapshots] == [100] and len(plan.objects) == 4 and plan.leftovers == plan.trash == ()
    gone = {name: data for name, data in files(store.shelf.path).items() if name not in before}
    assert plan.bytes == sum(map(len, gone.values())) == plan.value()["bytes"]
    assert f"{size_text(plan.bytes)} to collect" in str(plan)
    assert files(store.shelf.path) == {**before, **gone}  # a plan changes nothing
    moved: list[int] = []
    pruned = prune.apply(store, plan, moved.append)
    assert (pruned.snapshots, pruned.objects, pruned.leftovers, pruned.kept) == (1, 4, 0, 0)
    assert pruned.bytes == sum(moved) == plan.bytes
    in_trash = {n: d for n, d in files(store.shelf.path).items() if n.startswith("trash/")}
    assert sorted(in_trash.values()) == sorted(gone.values())
    assert prune.plan(store).trash_bytes == plan.bytes
    assert prune.purge(store) == plan.bytes
    assert files(store.shelf.path) == before
    assert find(store, [*C, 1]) is None
    expect_rows(store, store.match("a"))
    assert prune.plan(store).bytes == 0 and prune.purge(store) == 0
    assert check(store).ok and check(store).notes == ()


def test_shared_objects_stay(store: Store) -> None:
    save(store, A, name="a")
    b = save(store, B)
    assert b.written_objects == 4  # blocks 2 and 3
    pruned = collect(store)
    assert (pruned.snapshots, pruned.objects) == (1, 4)
    expect_rows(store, store.match("a"))
    assert find(store, [*B, 1]).n == 128
    promises_hold(store)


def test_a_conversation_leaves_its_last_state(store: Store) -> None:
    for size in (50, 100, 150, 200):
        save(store, A[:size], name="talk")
    pruned = collect(store)
    assert (pruned.snapshots, pruned.objects) == (3, 2 * 3)  # the three short tails
    expect_rows(store, store.match("talk"))


def test_a_manifest_keeps_what_it_names_without_promising_it(tmp_path: Path) -> None:
    with Store.open(tmp_path / "source") as source, Store.open(tmp_path / "s") as store:
        made = save(source, A)
        carry(source, store, made.digest)
        store.shelf.records.move_ref("t", None, made.digest)
        short = save(store, A[:128])
        assert (
            short.written_objects == 1
        )  # the windowed rows of block 0, which the manifest of "t" names without promising
        assert collect(store).objects == 0
        expect_rows(store, store.match("t"))


def test_a_running_reader_finds_what_was_collected(store: Store) -> None:
    save(store, C)
    match = find(store, [*C, 1])
    assert collect(store).objects == 4
    expect_rows(store, match)
    assert store.match(match.digest.hex).n == 99  # by digest, too, while it lies in the trash
    assert find(store, [*C, 1]) is None
    prune.purge(store)
    with pytest.raises(ObjectMissing):
        load(store, match)


def test_purge_waits_for_a_reader(store: Store) -> None:
    save(store, C)
    collect(store)
    reading, done, order = threading.Event(), threading.Event(), []

    def reader() -> None:
        with Store.open(store.shelf.path) as other, other.shelf.reading():
            reading.set()
            done.wait(0.3)
            order.append("read")

    thread = threading.Thread(target=reader)
    thread.start()
    reading.wait()
    prune.purge(store)
    order.append("purged")
    done.set()
    thread.join()
    assert order == ["read", "purged"]


def test_what_is_saved_again_comes_out_of_the_trash_by_being_written(store: Store) -> None:
    save(store, A)
    collect(store)
    assert save(store, A, name="a").written_objects == 8
    prune.purge(store)
    expect_rows(store, store.match("a"))
    promises_hold(store)


@pytest.mark.parametrize("left", ["coverage", "manifest"])
def test_a_collected_coverage_never_comes_back(tmp_path: Path, left: str) -> None:
    """Whole, collected, then received again trimmed: the old coverage, in the trash or left behind, promises nothing."""
    with Store.open(tmp_path / "source") as source, Store.open(tmp_path / "s") as store:
        made = save(source, A)
        save(store, A)
        place = store.shelf.path / "snapshots" / (f"{made.digest}.cov" if left == "coverage" else made.digest.hex)
        data = place.read_bytes()
        collect(store)
        place.write_bytes(data)
        carry(source, store, made.digest, (((0, 4),), ((2, 4),)))
        snapshot = store.shelf.records.snapshot(made.digest)
        assert store.shelf.records.coverage(made.digest, snapshot).runs == (((0, 4),), ((2, 4),))
        promises_hold(store)


@pytest.fixture
def tiny_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """One item in a slice: whatever happens between slices happens between any two items."""
    monkeypatch.setattr(prune, "SLICE", -1.0)
    monkeypatch.setattr(prune, "PAUSE", 0.0)


@pytest.mark.usefixtures("tiny_slices")
@pytest.mark.parametrize("when", range(12))
def test_what_appears_while_collecting_is_protected(store: Store, when: int) -> None:
    """After any number of moved items somebody saves something that needs planned objects."""
    for i in range(3):
        save(store, [i, *A])
    plan = prune.plan(store)
    steps = 0

    def progress(_: int) -> None:
        nonlocal steps
        steps += 1
        promises_hold(store)
        if steps == when + 1:
            with Store.open(store.shelf.path) as other:
                save(other, [1, *A], name="needed")
                save(other, [2, *A[:127]])

    pruned = prune.apply(store, plan, progress)
    assert pruned.kept > 0 and steps > 12
    promises_hold(store)
    prune.purge(store)
    expect_rows(store, store.match("needed"))
    expect_rows(store, find(store, [2, *A[:127], 9]))
    assert check(store).ok
    store.shelf.records.move_ref("needed", store.resolve("needed"), None)
    collect(store)
    prune.purge(store)
    assert not list(store.shelf.objects.names())


def test_a_name_given_after_the_plan_protects(store: Store) -> None:
    saved = save(store, C)
    plan = prune.plan(store)
    store.shelf.records.move_ref("late", None, saved.digest)
    pruned = prune.apply(store, plan)
    assert (pruned.snapshots, pruned.objects, pruned.kept) == (0, 0, 5)
    expect_rows(store, store.match("late"))


def test_a_name_is_never_given_to_what_was_collected(store: Store) -> None:
    saved = save(store, C)
    collect(store)
    with pytest.raises(SnapshotMissing):
        store.shelf.records.move_ref("late", None, saved.digest)


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"\0")


@pytest.mark.parametrize("after_the_plan", [False, True])
@pytest.mark.parametrize(
    ("what", "error"), [("ref", RefCorrupt), ("manifest", SnapshotCorrupt), ("absent", SnapshotMissing)]
)
def test_nothing_is_collected_while_a_need_is_unknown(
    store: Store, what: str, error: type[KVError], after_the_plan: bool
) -> None:
    saved = save(store, A, name="a")
    save(store, C)
    plan = prune.plan(store)
    place = store.shelf.path / ("refs/" + label_file("a") if what == "ref" else f"snapshots/{saved.digest}")
    place.unlink() if what == "absent" else damage(place)
    before = files(store.shelf.path)
    with pytest.raises(error) as caught:
        prune.apply(store, plan if after_the_plan else prune.plan(store))
    if what != "ref":
        assert "'a'" in str(caught.value) and "kvferry rm" in str(caught.value)
    assert files(store.shelf.path) == before


def test_an_unnamed_damaged_manifest_is_collected(store: Store) -> None:
    saved = save(store, C)
    save(store, A, name="a")
    damage(store.shelf.path / "snapshots" / saved.digest.hex)
    plan = prune.plan(store)
    assert [d.tokens for d in plan.snapshots] == [None]
    assert prune.apply(store, plan).objects == 4
    assert check(store).ok


def test_a_newer_manifest_is_not_judged(store: Store) -> None:
    saved = save(store, C)
    place = store.shelf.path / "snapshots" / saved.digest.hex
    place.write_bytes(frame(MANIFEST, place.read_bytes()[128:], version=2))
    with pytest.raises(FormatTooNew):
        prune.plan(store)


def test_recent_cache_can_be_kept(store: Store) -> None:
    old, new = save(store, A), save(store, C)
    store.indexed(
        lambda index: index._db.execute("UPDATE snapshot SET used = used - 1000 WHERE digest = ?", (old.digest.raw,))
    )
    assert {d.digest for d in prune.plan(store).snapshots} == {old.digest, new.digest}
    plan = prune.plan(store, keep_seconds=500)
    assert [d.digest for d in plan.snapshots] == [old.digest]
    prune.apply(store, plan)
    assert find(store, [*C, 1]).n == 100 and find(store, [*A, 1]) is None
    find(store, [*C, 1])
    assert prune.plan(store, keep_seconds=5000).snapshots == ()


# leftovers


def test_leftovers_of_dead_processes_go(store: Store) -> None:
    path = store.shelf.path
    saved = save(store, A, name="a")
    (path / "tmp" / "1f-00").write_bytes(b"x" * 10)
    for name in ("dead", "alive"):
        (path / "quarantine" / name).mkdir()
        (path / "quarantine" / name / ("0" * 64)).write_bytes(b"y" * 20)
    orphan = path / "snapshots" / ("0" * 64 + ".cov")
    orphan.write_bytes(b"z")
    foreign = path / "snapshots" / "letter.cov"
    foreign.write_bytes(b"mine")
    (path / "quarantine" / "link").symlink_to(path / "objects")
    holder = os.open(path / "quarantine" / "alive", os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    plan = prune.plan(store)
    assert plan.leftovers == (("tmp/1f-00", 10), ("quarantine/dead", 20), (f"snapshots/{'0' * 64}.cov", 1))
    assert prune.apply(store, plan).leftovers == 3
    os.close(holder)
    assert prune.plan(store).leftovers == (("quarantine/alive", 20),)
    assert (path / "quarantine" / "alive").is_dir() and foreign.read_bytes() == b"mine"
    assert not orphan.exists() and not list((path / "tmp").iterdir())
    assert prune.purge(store) == 31
    assert not list((path / "trash").iterdir()) and object_file(path, saved.snapshot.blocks[0][0]).is_file()


def test_what_a_saver_is_writing_is_no_leftover(store: Store) -> None:
    (store.shelf.path / "tmp" / "1f-00").write_bytes(b"x")
    with Store.open(store.shelf.path) as other, other.shelf.shared():
        assert prune.plan(store).leftovers == ()
    assert prune.plan(store).leftovers == (("tmp/1f-00", 1),)


def test_a_folder_that_comes_alive_after_the_plan_stays(store: Store) -> None:
    folder = store.shelf.path / "quarantine" / "session"
    folder.mkdir()
    plan = prune.plan(store)
    holder = os.open(folder, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    assert prune.apply(store, plan).leftovers == 0 and folder.is_dir()
    os.close(holder)


# a full disk

FULL = """
import resource, signal, sys
from pathlib import Path
from kvstore import Store, prune
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file can grow by a byte
with Store.open(Path(sys.argv[1]), create=False) as store:
    try:
        (Path(sys.argv[1]) / "tmp" / "probe").write_bytes(b"x")
        raise SystemExit("the limit does not work")
    except OSError:
        (Path(sys.argv[1]) / "tmp" / "probe").unlink()
    pruned = prune.apply(store, prune.plan(store))
    print(pruned.snapshots, pruned.objects, prune.purge(store) == pruned.bytes)
"""


@pytest.mark.parametrize("index", ["there", "absent"])
def test_collecting_needs_no_free_byte(tmp_path: Path, index: str) -> None:
    path = tmp_path / "s"
    with Store.open(path) as store:
        save(store, A, name="a")
        save(store, C)
    if index == "absent":
        (path / "index.sqlite").unlink()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stdout == "1 4 True\n", done.stderr[-800:]
    with Store.open(path) as store:
        assert find(store, [*C, 1]) is None
        expect_rows(store, store.match("a"))
        assert check(store).ok


def test_a_disk_too_full_for_a_rename(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, A, name="a")
    save(store, C)

    def full(root: Root, source: str, target: str) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Root, "set_aside", full)
    plan = prune.plan(store)
    with Store.open(store.shelf.path) as other, other.shelf.reading(), pytest.raises(StoreBusy):
        prune.apply(store, plan)
    assert collect(store).objects == 4
    assert not list((store.shelf.path / "trash").iterdir()) and len(list(store.shelf.objects.names())) == 8
    assert check(store).ok


# usage


def test_usage_adds_up(store: Store) -> None:
    save(store, A, name="a", pending=1, head=HEAD)
    save(store, B, name="b")
    save(store, C)
    (store.shelf.path / "tmp" / "x").write_bytes(b"12345")
    found = usage(store)
    on_disk = [p for p in store.shelf.path.rglob("*") if p.is_file()]
    assert found.bytes == sum(p.stat().st_size for p in on_disk) == found.value()["total"]
    assert dict(found.parts)["tmp"] == 5 and dict(found.parts)["trash"] == 0
    a, b, unnamed = found.snapshots
    assert (a.names, b.names, unnamed.names) == (("a",), ("b",), ())
    assert a.shared == b.shared > 0 and unnamed.shared == 0
    for name, entry in (("b", b), ("a", a)):
        before = usage(store).bytes - dict(usage(store).parts)["index"]
        own = next(s.own for s in usage(store).snapshots if s.names == (name,))
        assert own >= entry.own
        ref = len((store.shelf.path / "refs" / label_file(name)).read_bytes())
        remove_name(store, name)
        freed = collect(store).bytes
        prune.purge(store)
        if name == "b":
            freed -= unnamed.own + 5  # went along
            assert before - (usage(store).bytes - dict(usage(store).parts)["index"]) == own + ref + unnamed.own + 5
        assert freed == own
    assert usage(store).snapshots == ()


def test_usage_passes_over_what_is_damaged(store: Store) -> None:
    a = save(store, A, name="a")
    save(store, C, name="c")
    damage(store.shelf.path / "snapshots" / a.digest.hex)
    damage(store.shelf.path / "refs" / label_file("c"))
    found = usage(store)
    assert found.unreadable == (a.digest,) and [s.names for s in found.snapshots] == [()]
    value: dict[str, Any] = found.value()
    assert value["unreadable"] == [a.digest.hex] and value["snapshots"][0]["name"] is None
