"""What a transfer brings keeps below the receiving side's quota: cache gives way, names don't, and what has arrived waits out of sight."""

from __future__ import annotations

from pathlib import Path

import pytest
from ferries import LAYOUT, save

from kvstore import Group, Layout, Store, prune
from kvstore.check import check
from kvstore.errors import StoreFull
from kvstore.gauge import files_bytes
from kvstore.quota import LEAST, set_quota
from sync import Folder, pull, push
from sync.carry import WORKERS

BIG = Layout((Group("full", None, (0,), 8, 64),))
BLOCK_FILE = 64 * BIG.bytes_per_token + 128


def big(store: Store, name: str | None, blocks: int, seed: str) -> None:
    save(store, name, 64 * blocks, seed, layout=BIG)


def within(store: Store) -> bool:
    """But for what each of the connections had counted and not written when somebody walked."""
    return files_bytes(store.shelf.root) <= LEAST + WORKERS * BLOCK_FILE


def test_a_pull_evicts_cache_and_keeps_names(tmp_path: Path) -> None:
    with Store.open(tmp_path / "from") as source, Store.open(tmp_path / "to") as target:
        big(source, "book", 30, "book")
        with Folder.open(tmp_path / "stick", create=True) as stick:
            push(source, stick, ["book"])
        set_quota(target.shelf.root, LEAST)
        big(target, "kept", 20, "kept")
        for seed in "uvw":
            big(target, None, 10, seed)
        with Folder.open(tmp_path / "stick") as stick:
            assert pull(target, stick, ["book"]).objects == 30
        assert within(target)
        assert target.match("book").asked == 64 * 30 and target.match("kept").asked == 64 * 20
        assert not check(target).problems


def test_a_pull_that_does_not_fit_is_refused_and_goes_on_later(tmp_path: Path) -> None:
    with Store.open(tmp_path / "from") as source, Store.open(tmp_path / "to") as target:
        big(source, "book", 50, "book")
        with Folder.open(tmp_path / "stick", create=True) as stick:
            push(source, stick, ["book"])
        set_quota(target.shelf.root, LEAST)
        big(target, "kept", 40, "kept")
        with Folder.open(tmp_path / "stick") as stick, pytest.raises(StoreFull) as caught:
            pull(target, stick, ["book"])
        assert within(target) and caught.value.details["quota"] == LEAST
        assert {ref.label for ref in target.shelf.records.refs()} == {"kept"}
        set_quota(target.shelf.root, 4 * LEAST)
        with Folder.open(tmp_path / "stick") as stick:
            moved = pull(target, stick, ["book"])
        assert moved.resumed == 0 and moved.objects == 50, "nothing was carried in vain before"
        assert target.match("book").asked == 64 * 50


def test_a_folder_remote_keeps_its_own_quota(tmp_path: Path) -> None:
    with Store.open(tmp_path / "from") as source, Folder.open(tmp_path / "stick", create=True) as stick:
        save(source, "small", 100, layout=LAYOUT)
        push(source, stick, ["small"])
        with Store.open(tmp_path / "stick") as there:
            set_quota(there.shelf.root, LEAST)
        big(source, "book", 80, "book")
    advice = f"`kvferry gc --purge --store {tmp_path / 'stick'}`"
    with (
        Store.open(tmp_path / "from") as source,
        Folder.open(tmp_path / "stick") as stick,
        pytest.raises(StoreFull, match=advice),
    ):
        push(source, stick, ["book"])
    with Store.open(tmp_path / "stick") as there:  # what it says
        assert prune.apply(there, prune.plan(there)).leftovers == 1 and prune.purge(there) > LEAST // 2
    with Store.open(tmp_path / "from") as source, Folder.open(tmp_path / "stick") as stick:
        big(source, "page", 3, "page")
        assert push(source, stick, ["page"]).objects == 3
    with Store.open(tmp_path / "stick") as there:
        assert within(there)
        assert {ref.label for ref in there.shelf.records.refs()} == {"small", "page"}
        assert not check(there).problems
