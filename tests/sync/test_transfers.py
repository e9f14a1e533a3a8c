"""Push and pull between a store, a folder and another store: what is carried and what is promised."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ferries import (
    IDENTITY,
    LAYOUT,
    LINEAGE,
    MASTER,
    ROW,
    Ram,
    assert_restores,
    object_files,
    pulled,
    pushed,
    quarantined,
    save,
    tokens_of,
    tree,
    verify,
)

from kvstore import Group, Layout, Store
from kvstore.codec import HEADER, encode_coverage
from kvstore.errors import (
    InputInvalid,
    NotCovered,
    ObjectCorrupt,
    ObjectMissing,
    Refused,
    StoreMissing,
    Unreachable,
)
from kvstore.layout import BLOCK
from kvstore.snapshot import Coverage, trimmed, whole
from sync import Folder, Moved, folder_path, plan_pull, plan_push, pull, push


def counts(moved: Moved) -> tuple[int, int, int, int]:
    return moved.objects, moved.payload_bytes, moved.frame_bytes, moved.skipped


def whole_bytes(tokens: int) -> int:
    return tokens * sum(ROW.values())


def test_whole_round_trip(mac: Store, phone: Store, stick: Path) -> None:
    save(mac, "book", 1000)
    sent = pushed(mac, stick, "book")
    assert counts(sent) == (32, whole_bytes(1000), whole_bytes(1000) + 32 * HEADER, 0)
    got = pulled(phone, stick, "book")
    assert counts(got) == counts(sent)
    assert got.snapshots[0].coverage == whole(got.snapshots[0].digest, got.snapshots[0].snapshot)
    assert_restores(phone, "book", 1000)
    for path in (mac.shelf.path, stick, phone.shelf.path):
        verify(path)
        assert (
            not quarantined(path) and not list((path / "quarantine").iterdir()) and not list((path / "tmp").iterdir())
        )
    assert phone.resolve("book") == mac.resolve("book")
    found = phone.find(LAYOUT, got.snapshots[0].snapshot.identity, tokens_of(900), namespace="default")
    assert found is not None and found.n == 899, "the pulled snapshot is not in the index"


def test_unchanged_moves_nothing(mac: Store, phone: Store, stick: Path) -> None:
    save(mac, "book", 1000)
    pushed(mac, stick, "book")
    pulled(phone, stick, "book")
    before = {k: v for k, v in tree(stick).items() if not k.startswith("quarantine")}
    objects = {p: p.stat().st_ino for p in object_files(phone.shelf.path)}
    assert counts(pushed(mac, stick, "book")) == (0, 0, 0, 32)
    assert counts(pulled(phone, stick, "book")) == (0, 0, 0, 32)
    assert {k: v for k, v in tree(stick).items() if not k.startswith("quarantine")} == before
    assert {p: p.stat().st_ino for p in object_files(phone.shelf.path)} == objects


def test_grown_moves_new_blocks_and_tail_only(mac: Store, phone: Store, stick: Path) -> None:
    save(mac, "book", 1000)
    pushed(mac, stick, "book")
    pulled(phone, stick, "book")
    save(mac, "book", 1100)
    # 1000 tokens are 15 full blocks and a tail of 40; 1100 are 17 and a tail of 12. Blocks 15, 16 and the tail are new.
    new = (3 * 2, (1100 - 15 * BLOCK) * sum(ROW.values()))
    sent, got = pushed(mac, stick, "book"), pulled(phone, stick, "book")
    assert (sent.objects, sent.payload_bytes) == new and (got.objects, got.payload_bytes) == new
    assert sent.skipped == got.skipped == 30
    assert_restores(phone, "book", 1100)
    verify(stick)
    verify(phone.shelf.path)


def test_trimmed_then_whole_fills_in_the_rest(mac: Store, phone: Store, stick: Path) -> None:
    save(mac, "book", 1000)
    pushed(mac, stick, "book")
    first = pulled(phone, stick, "book", trim=True)
    # Sliding rows from block (1000 - 128) // 64 = 13: blocks 13, 14 and the tail; full rows from 0.
    assert (first.objects, first.payload_bytes) == (16 + 3, 1000 * ROW[1] + (1000 - 13 * BLOCK) * ROW[0])
    assert first.snapshots[0].coverage == trimmed(first.snapshots[0].digest, first.snapshots[0].snapshot)
    assert_restores(phone, "book", 1000)
    with pytest.raises(NotCovered):
        phone.match("book", at=500)
    second = pulled(phone, stick, "book")
    assert (second.objects, second.skipped) == (13, 19)
    assert second.snapshots[0].coverage == whole(first.snapshots[0].digest, first.snapshots[0].snapshot)
    assert phone.match("book", at=500).n in (499, 500)
    third = pulled(phone, stick, "book", trim=True)
    assert third.objects == 0 and third.snapshots[0].coverage == second.snapshots[0].coverage, "a promise was narrowed"
    verify(phone.shelf.path)


def test_trimmed_store_pushes_what_it_covers_and_the_remote_adds_what_it_has(
    mac: Store, phone: Store, stick: Path, tmp_path: Path
) -> None:
    save(mac, "book", 1000)
    pushed(mac, stick, "book")
    pulled(phone, stick, "book", trim=True)
    sent = pushed(phone, tmp_path / "other", "book")
    digest, snapshot = sent.snapshots[0].digest, sent.snapshots[0].snapshot
    assert sent.snapshots[0].coverage == trimmed(digest, snapshot) and sent.snapshots[0].nowhere == 13
    with Store.open(tmp_path / "third") as third:
        got = pulled(third, tmp_path / "other", "book")
        assert got.snapshots[0].coverage == trimmed(digest, snapshot) and got.snapshots[0].nowhere == 13
        assert_restores(third, "book", 1000)
    again = pushed(phone, stick, "book")
    assert again.objects == 0 and again.snapshots[0].coverage == whole(digest, snapshot)
    filled = pushed(mac, tmp_path / "other", "book")
    assert (filled.objects, filled.skipped) == (13, 19) and filled.snapshots[0].coverage == whole(digest, snapshot)
    verify(tmp_path / "other")


def test_a_trimmed_snapshot_that_grew_is_whole_at_the_remote_that_has_the_rest(
    mac: Store, phone: Store, stick: Path
) -> None:
    """A device that pulled trimmed, went on and pushed: the remote still has the older windowed blocks, so it can promise them."""
    old = save(mac, "book", 1000)
    pushed(mac, stick, "book")
    pulled(phone, stick, "book", trim=True)
    assert old.snapshot is not None
    phone.save(
        LAYOUT, IDENTITY, tokens_of(1100), Ram(1100), namespace="default", name="book", lineage=[LINEAGE] * 18,
        pending=7, head=MASTER, model="small", covered=[13 * BLOCK, 0], known=old.snapshot.blocks[:15],
    )  # fmt: skip
    sent = pushed(phone, stick, "book")
    assert sent.objects == 6 and sent.snapshots[0].nowhere == 0
    assert sent.snapshots[0].coverage == whole(sent.snapshots[0].digest, sent.snapshots[0].snapshot)
    pulled(mac, stick, "book")
    assert_restores(mac, "book", 1100)
    verify(stick)


def test_several_names_share_their_objects(mac: Store, phone: Store, stick: Path) -> None:
    save(mac, "a", 640)
    save(mac, "b", 704)
    save(mac, "c", 640, "other")
    assert (pushed(mac, stick, "a", "b", "c", "a").objects, len(object_files(stick))) == (20 + 2 + 20, 42)
    with Folder.open(stick) as remote:
        plans = plan_pull(phone, remote, ["a", "b", "c"])
        assert [len(p.move) for p in plans] == [20, 2, 20] and [p.there for p in plans] == [0, 20, 0]
    moved = pulled(phone, stick, "a", "b", "c")
    assert moved.objects == 42 and [c.label for c in moved.snapshots] == ["a", "b", "c"]
    assert_restores(phone, "b", 704)
    assert_restores(phone, "c", 640, "other")


def test_dry_run_says_what_is_then_done_and_does_nothing(mac: Store, phone: Store, stick: Path) -> None:
    save(mac, "book", 300)
    pushed(mac, stick, "book")
    save(mac, "book", 400)
    before = tree(stick)
    with Folder.open(stick) as remote:
        (plan,) = plan_push(mac, remote, ["book"])
    assert tree(stick) == before
    sent = pushed(mac, stick, "book")
    assert (
        (len(plan.move), plan.payload_bytes, plan.there)
        == (sent.objects, sent.payload_bytes, sent.skipped)
        == (6, 46080, 8)
    )
    here = tree(phone.shelf.path)
    with Folder.open(stick) as remote:
        (plan,) = plan_pull(phone, remote, ["book"], trimmed=True)
    assert tree(phone.shelf.path) == here and len(plan.move) == 7 + 3


def test_what_the_remote_does_not_promise_but_has_is_pulled(
    mac: Store, phone: Store, stick: Path, tmp_path: Path
) -> None:
    """A trimmed longer snapshot at the remote beside a whole shorter one with the same blocks."""
    save(mac, "old", 640)
    pushed(mac, stick, "old")
    with Store.open(tmp_path / "tablet") as tablet:
        save(mac, "new", 704)
        pushed(mac, tmp_path / "aside", "new")
        pulled(tablet, tmp_path / "aside", "new", trim=True)
        pushed(tablet, stick, "new")
    digest = mac.resolve("new")
    snapshot = mac.shelf.records.snapshot(digest)
    # As a remote writes it that can't look for more than it was sent.
    (stick / "snapshots" / f"{digest}.cov").write_bytes(encode_coverage(trimmed(digest, snapshot)))
    got = pulled(phone, stick, "new")
    assert got.snapshots[0].coverage == whole(digest, snapshot) and got.snapshots[0].nowhere == 0
    verify(phone.shelf.path)


def test_too_little_to_continue_from_is_refused(mac: Store, phone: Store, stick: Path) -> None:
    digest = save(mac, "book", 640).digest
    assert digest is not None
    pushed(mac, stick, "book")
    for path in (stick, mac.shelf.path):
        narrowed = encode_coverage(Coverage(digest, ((), ((5, 6),))))
        (path / "snapshots" / f"{digest}.cov").write_bytes(narrowed)
    for file in object_files(stick):
        file.unlink()
    with pytest.raises(NotCovered, match="19 of 20 objects"):
        pulled(phone, stick, "book")
    assert phone.shelf.records.ref("book") is None
    before = tree(stick)
    with pytest.raises(NotCovered, match="found that 19 are on neither side"):
        pushed(mac, stick, "book")
    assert tree(stick) == before


def test_a_corrupt_object_is_never_pushed(mac: Store, stick: Path) -> None:
    save(mac, "book", 640)
    bad = object_files(mac.shelf.path)[7]
    data = bytearray(bad.read_bytes())
    data[HEADER + 99] ^= 1
    bad.write_bytes(data)
    with pytest.raises(ObjectCorrupt) as refused:
        pushed(mac, stick, "book")
    assert bad.parent.name + bad.name in str(refused.value) and str(mac.shelf.path) in str(refused.value)
    assert (
        not list((stick / "snapshots").iterdir()) and not list((stick / "refs").iterdir()) and not object_files(stick)
    )
    assert bad.parent.name + bad.name not in {p.name for p in quarantined(stick)}
    bad.unlink()
    with pytest.raises(ObjectMissing):
        pushed(mac, stick, "book")
    assert not list((stick / "refs").iterdir())


@pytest.mark.parametrize("way", ["pull", "push"])
def test_verify_finds_and_mends_what_is_damaged_at_the_destination(
    way: str, mac: Store, phone: Store, stick: Path
) -> None:
    save(mac, "book", 640)
    pushed(mac, stick, "book")
    pulled(phone, stick, "book")
    target = phone.shelf.path if way == "pull" else stick
    files = object_files(target)
    for file, at in ((files[3], HEADER + 50), (files[9], 80), (files[12], -1)):
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)
    files[5].write_bytes(files[5].read_bytes()[:-1])  # noticed anyway

    def again(verify: bool) -> Moved:
        if way == "pull":
            with Folder.open(stick) as remote:
                return pull(phone, remote, ["book"], verify=verify)
        with Folder.open(stick, create=True) as remote:
            return push(mac, remote, ["book"], verify=verify)

    assert again(False).objects == 1
    with pytest.raises(ObjectCorrupt):
        verify(target)
    assert (again(True).objects, again(True).objects) == (3, 0)
    verify(target)


@pytest.mark.parametrize("suffix", ["", ".cov"])
@pytest.mark.parametrize("way", ["pull", "push"])
def test_a_damaged_manifest_or_coverage_at_the_destination_is_mended(
    way: str, suffix: str, mac: Store, phone: Store, stick: Path
) -> None:
    digest = save(mac, "book", 640).digest
    pushed(mac, stick, "book")
    pulled(phone, stick, "book")
    target = phone.shelf.path if way == "pull" else stick
    record = target / "snapshots" / f"{digest}{suffix}"
    good = record.read_bytes()
    record.write_bytes(good[:-1])
    moved = pulled(phone, stick, "book") if way == "pull" else pushed(mac, stick, "book")
    assert moved.objects == 0 and record.read_bytes() == good
    verify(target)


def test_remote_folders(mac: Store, phone: Store, tmp_path: Path) -> None:
    save(mac, "book", 100)
    with pytest.raises(Unreachable, match="found nothing"):
        pulled(phone, tmp_path / "absent", "book")
    (tmp_path / "empty").mkdir()
    with pytest.raises(Unreachable, match="empty folder"):
        pulled(phone, tmp_path / "empty", "book")
    assert list((tmp_path / "empty").iterdir()) == []
    with pytest.raises(Unreachable, match="mounted"):
        pushed(mac, tmp_path / "not mounted" / "kv", "book")
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.jpg").write_bytes(b"x")
    with pytest.raises(Refused, match=r"cat\.jpg"):
        pushed(mac, photos, "book")
    with pytest.raises(StoreMissing, match=r"cat\.jpg"):
        pulled(phone, photos, "book")
    assert [p.name for p in photos.iterdir()] == ["cat.jpg"]
    with pytest.raises(Refused, match="a file"):
        pushed(mac, photos / "cat.jpg", "book")
    assert pushed(mac, tmp_path / "empty", "book").objects == 4
    assert pulled(phone, folder_path(f"file://{tmp_path}/empty"), "book").objects == 4
    for address in ("s3://bucket/x", "file://host/x", "http://x"):
        with pytest.raises(InputInvalid):
            folder_path(address)


def test_a_read_only_remote_is_pulled_from_and_left_as_it_was(mac: Store, phone: Store, stick: Path) -> None:
    save(mac, "book", 640)
    pushed(mac, stick, "book")
    entries = [stick, *stick.rglob("*")]
    for entry in entries:
        entry.chmod(0o500 if entry.is_dir() else 0o400)
    try:
        before = tree(stick)
        assert pulled(phone, stick, "book").objects == 20
        assert tree(stick) == before
    finally:
        for entry in entries:
            entry.chmod(0o700 if entry.is_dir() else 0o600)
    assert_restores(phone, "book", 640)


def test_no_room_is_said_before_anything_is_carried(
    mac: Store, phone: Store, stick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(mac, "book", 640)
    pushed(mac, stick, "book")
    usage = shutil.disk_usage(stick)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=whole_bytes(640)))
    with pytest.raises(Refused, match=f"expected {whole_bytes(640) + 20 * HEADER:,} bytes free"):
        pulled(phone, stick, "book")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=whole_bytes(640) + 20 * HEADER))
    assert pulled(phone, stick, "book").objects == 20


def test_memory_stays_bounded_by_what_is_under_way(mac: Store, phone: Store, stick: Path) -> None:
    """48 MB each way in objects of 8 MiB: four at once, in pieces of 1 MiB, and never a whole one in memory."""
    big = Layout((Group("full", None, (0,), 4, 8192),))
    save(mac, "big", 6 * BLOCK, layout=big)
    peaks = []
    for transfer in (lambda: pushed(mac, stick, "big"), lambda: pulled(phone, stick, "big")):
        tracemalloc.start()
        moved = transfer()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (moved.objects, moved.payload_bytes) == (6, 6 * 8 * (1 << 20))
    assert max(peaks) < 7e6, peaks
    assert_restores(phone, "big", 6 * BLOCK, layout=big)


def test_progress_adds_up(mac: Store, phone: Store, stick: Path) -> None:
    save(mac, "book", 1000)
    shown: list[float] = []
    totals: list[float] = []

    @contextmanager
    def meter(total: float) -> Iterator[Callable[[float], None]]:
        totals.append(total)
        yield shown.append

    with Folder.open(stick, create=True) as remote:
        push(mac, remote, ["book"], meter=meter)
    with Folder.open(stick) as remote:
        pull(phone, remote, ["book"], meter=meter)
    assert totals == [whole_bytes(1000)] * 2 and sum(shown) == 2 * whole_bytes(1000) and len(shown) >= 4
