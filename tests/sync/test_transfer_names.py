"""Which names a transfer moves, and to what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ferries import assert_restores, pulled, pushed, save, tree, verify

from kvstore import Store
from kvstore.errors import InputInvalid, RefConflict, SnapshotMissing
from sync import Folder, Moved, pull, push


@pytest.mark.parametrize("way", ["pull", "push"])
def test_a_name_moves_only_to_what_continues_it(way: str, mac: Store, phone: Store, stick: Path) -> None:
    """``now``: where the name stands at the destination; ``new``: what is to be put there."""

    def attempt(now: tuple[int, str, str], new: tuple[int, str, str], force: bool = False) -> Moved:
        save(mac, "n", new[0], new[1], kv=new[2])
        pushed(mac, stick, "n", force=True)
        save(phone, "n", now[0], now[1], kv=now[2])
        if way == "pull":
            return pulled(phone, stick, "n", force=force)
        return pushed(phone, stick, "n", force=force)

    # The push goes from the phone to the stick, so the sides are swapped.
    def sides(now: tuple[int, str, str], new: tuple[int, str, str], force: bool = False) -> Moved:
        return attempt(now, new, force) if way == "pull" else attempt(new, now, force)

    assert sides((100, "a", "a"), (200, "a", "a")).snapshots[0].snapshot.tokens == 200
    assert sides((200, "a", "a"), (200, "a", "a")).objects == 0
    for now, new, why in (
        ((200, "a", "a"), (100, "a", "a"), "would lose its last 100 tokens"),
        ((200, "a", "a"), (300, "b", "b"), "differ from token 0"),
        ((200, "a", "a"), (300, "a", "b"), "computed separately"),
        ((50, "a", "a"), (50, "a", "b"), "computed separately"),
    ):
        with pytest.raises(RefConflict, match=why) as refused:
            sides(now, new)
        assert "--force" in str(refused.value)
        assert sides(now, new, force=True).snapshots[0].snapshot.tokens == new[0]
    verify(stick)
    verify(phone.shelf.path)


def test_a_short_last_block_is_compared_by_tokens_alone(mac: Store, phone: Store, stick: Path) -> None:
    save(mac, "n", 70, "a", kv="b")
    pushed(mac, stick, "n")
    save(phone, "n", 50, "a", kv="a")
    assert pulled(phone, stick, "n").snapshots[0].snapshot.tokens == 70


def test_a_conflict_is_seen_before_anything_is_carried(mac: Store, phone: Store, stick: Path) -> None:
    save(mac, "one", 300)
    save(mac, "two", 300, "b")
    pushed(mac, stick, "one", "two")
    save(phone, "two", 300, "c")
    before = tree(phone.shelf.path)
    with pytest.raises(RefConflict):
        pulled(phone, stick, "one", "two")
    assert tree(phone.shelf.path) == before
    got = pulled(phone, stick, "two", rename="zwei")
    assert got.snapshots[0].label == "zwei" and phone.resolve("zwei") == mac.resolve("two")
    assert_restores(phone, "two", 300, "c")
    with pytest.raises(InputInvalid):
        pulled(phone, stick, "one", "two", rename="zwei")


def test_a_name_that_moves_meanwhile_is_not_overwritten(mac: Store, phone: Store, stick: Path) -> None:
    save(mac, "book", 300)
    pushed(mac, stick, "book")

    @contextmanager
    def meddling(total: float) -> Iterator[Callable[[float], None]]:
        yield lambda amount: _take("book", phone)

    def _take(name: str, store: Store) -> None:
        if store.shelf.records.ref(name) is None:
            save(store, name, 100, "mine")

    with Folder.open(stick) as remote, pytest.raises(RefConflict):
        pull(phone, remote, ["book"], meter=meddling)
    assert_restores(phone, "book", 100, "mine")

    save(mac, "new", 300, "b")

    @contextmanager
    def elsewhere(total: float) -> Iterator[Callable[[float], None]]:
        def advance(amount: float) -> None:
            with Store.open(stick) as there:
                _take("new", there)

        yield advance

    with Folder.open(stick, create=True) as remote, pytest.raises(RefConflict):
        push(mac, remote, ["new"], meter=elsewhere)
    with Store.open(stick) as there:
        assert_restores(there, "new", 100, "mine")
    verify(stick)


def test_names_that_are_not_there(mac: Store, phone: Store, stick: Path) -> None:
    save(mac, "book", 100)
    pushed(mac, stick, "book")
    with pytest.raises(SnapshotMissing, match=r"no snapshot named 'boot'; it has book"):
        pulled(phone, stick, "boot")
    with pytest.raises(SnapshotMissing, match="no snapshot named 'boot' in"):
        pushed(mac, stick, "boot")
