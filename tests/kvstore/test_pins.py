"""Pins: refs that keep a snapshot whatever becomes of its name, and never move."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvmemory import expect_rows, save

from kvstore import Store, prune
from kvstore.errors import LabelInvalid, RefConflict, SnapshotMissing
from kvstore.pins import find_snapshot, pin, unpin
from kvstore.records import Records
from kvstore.report import listing

A = list(range(100))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "s")


@pytest.fixture
def records(store: Store) -> Records:
    return store.shelf.records


def labels(records: Records) -> list[str]:
    return [ref.label for ref in records.refs()]


def collect(store: Store) -> None:
    for plan in (prune.plan(store), prune.eviction(store, 1 << 60)):
        prune.apply(store, plan)
        prune.purge(store)


def test_the_states_of_a_name_can_be_kept_one_after_the_other(store: Store, records: Records) -> None:
    first = save(store, A, name="talk")
    one = pin(records, "talk")
    second = save(store, [*A, 1], name="talk")
    two = pin(records, "talk")
    save(store, [*A, 1, 2], name="talk")
    lost = save(store, [*A, 7])
    assert first.digest is not None and second.digest is not None and lost.digest is not None
    assert one.label == f"pin/talk@{first.digest.hex[:12]}" and one.snapshot == first.digest
    assert labels(records) == [*sorted([one.label, two.label]), "talk"]
    records.move_ref("talk", store.resolve("talk"), None)
    collect(store)
    assert set(records.snapshots()) == {first.digest, second.digest}
    expect_rows(store, store.match(one.label))
    assert [row["name"] for row in listing(store.shelf)[0]] == sorted([one.label, two.label])
    assert unpin(records, [one.label, two.label.removeprefix("pin/")]) == [
        (one.label, first.digest),
        (two.label, second.digest),
    ]
    collect(store)
    assert list(records.snapshots()) == []


def test_an_unnamed_snapshot_can_be_pinned_by_the_start_of_its_digest(store: Store, records: Records) -> None:
    saved = save(store, A)
    assert saved.digest is not None
    assert pin(records, saved.digest.hex[:8]).label == f"pin/{saved.digest.hex[:12]}"
    assert pin(records, saved.digest.hex, "exam").label == "pin/exam"
    assert pin(records, f"pin/{saved.digest.hex[:12]}", "pin/again").label == "pin/again"
    collect(store)
    expect_rows(store, store.match("pin/exam"))
    unpin(records, ["exam", "again"])
    assert labels(records) == [f"pin/{saved.digest.hex[:12]}"]


def test_a_pin_never_moves(store: Store, records: Records) -> None:
    first = save(store, A, name="a")
    other = save(store, [*A, 1], name="b")
    pin(records, "a", "x")
    assert pin(records, "a", "x").snapshot == first.digest
    for change in (
        lambda: pin(records, "b", "x"),
        lambda: records.move_ref("pin/x", first.digest, other.digest),
        lambda: save(store, [*A, 2], name="pin/x"),
        lambda: records.rename_ref("b", "pin/x"),
    ):
        with pytest.raises(RefConflict, match="'pin/x'"):
            change()
        assert store.resolve("pin/x") == first.digest
    assert store.resolve("b") == other.digest
    assert records.rename_ref("pin/x", "free").label == "free"


def test_what_is_not_there_cannot_be_pinned(store: Store, records: Records) -> None:
    saved = save(store, A)
    assert saved.digest is not None
    for text in ("nothing", saved.digest.hex[:7], "0" * 64, saved.digest.hex[:8].upper() + "x", "z" * 10):
        with pytest.raises(SnapshotMissing, match="kvferry ls"):
            pin(records, text)
    with pytest.raises(SnapshotMissing):
        unpin(records, ["x"])
    with pytest.raises(LabelInvalid):
        pin(records, saved.digest.hex, "x" * 200)
    assert labels(records) == []


def test_two_that_begin_alike_are_not_guessed(store: Store, records: Records) -> None:
    (store.shelf.path / "snapshots" / ("ab" * 32)).write_bytes(b"")
    (store.shelf.path / "snapshots" / ("ab" * 31 + "cd")).write_bytes(b"")
    with pytest.raises(SnapshotMissing, match="2 that begin so"):
        find_snapshot(records, "ab" * 31)
    assert find_snapshot(records, "ab" * 31 + "c").hex == "ab" * 31 + "cd"


def test_a_name_goes_before_a_digest(store: Store, records: Records) -> None:
    saved, other = save(store, A), save(store, [*A, 1])
    assert saved.digest is not None and other.digest is not None
    records.move_ref(saved.digest.hex[:12], None, other.digest)
    assert find_snapshot(records, saved.digest.hex[:12]) == other.digest
