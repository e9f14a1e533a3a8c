"""The folder remote under the contract, and what is a folder's own."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ferries import IDENTITY, LAYOUT, object_files, quarantined, save, tokens_of, verify
from remote_contract import Opened, RemoteContract, frame

from kvstore import Store
from kvstore.digest import ContentDigest
from kvstore.errors import Unreachable
from kvstore.files import Root
from kvstore.shelf import Shelf
from sync import Folder, pull, push
from sync.carry import BATCH_OBJECTS, Tally, carry
from sync.incoming import Incoming
from sync.plan import Lengths
from sync.remote import WORKERS


class TestFolder(RemoteContract):
    @pytest.fixture
    def opened(self, tmp_path: Path) -> Opened:
        return lambda: Folder.open(tmp_path / "remote", create=True)


def test_a_store_is_a_remote_too(tmp_path: Path) -> None:
    """Its index catches up with what was pushed behind its back."""
    with Store.open(tmp_path / "a") as a, Store.open(tmp_path / "b") as b:
        save(a, "book", 300)
        save(b, "mine", 100, "b")
        with Folder.open(tmp_path / "b", create=True) as remote:
            assert push(a, remote, ["book"]).objects == 10
        with Store.open(tmp_path / "b") as anew:
            found = anew.find(LAYOUT, IDENTITY, tokens_of(200), namespace="default")
        assert found is not None and found.n == 199
        with Folder.open(tmp_path / "b") as remote:
            assert pull(a, remote, ["mine"]).objects == 4
    verify(tmp_path / "a")


def test_a_folder_that_goes_away_is_unreachable_not_missing(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a") as store:
        saved = save(store, "book", 300)
        with Folder.open(tmp_path / "stick", create=True) as remote:
            push(store, remote, ["book"])
        assert saved.snapshot and saved.digest
        with Folder.open(tmp_path / "stick") as remote:
            (tmp_path / "away").mkdir()
            for entry in list((tmp_path / "stick").iterdir()):
                entry.rename(tmp_path / "away" / entry.name)
            name = saved.snapshot.blocks[0][0]
            for ask in (
                lambda: remote.ref("book"),
                lambda: list(remote.refs()),
                lambda: remote.snapshot(saved.digest),
                lambda: remote.coverage(saved.digest, saved.snapshot),
                lambda: remote.have({name: 1}),
                lambda: [list(chunks) for _, chunks in remote.fetch([name])],
                lambda: remote.put(iter([(name, [])]), {name: 1}),
                lambda: remote.publish(saved.snapshot, saved.coverage, "book", None),
            ):
                with pytest.raises(Unreachable, match="kept"):
                    ask()


def test_a_transfers_folder_is_locked_while_it_lives_and_taken_over_when_it_died(tmp_path: Path) -> None:
    name, data = frame(bytes(5000))
    other, other_data = frame(b"o" * 5000)
    cut, cut_data = frame(b"c" * 5000)
    wanted = {name: 5000, cut: 5000}
    with Shelf.open(tmp_path / "s") as shelf:
        alive = Incoming(shelf)
        alive.land(name, 5000, [data])
        alive.land(other, 5000, [other_data])
        (folder,) = (tmp_path / "s" / "quarantine").iterdir()
        fd = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / cut.hex).write_bytes(cut_data[:3000])
        with Incoming(shelf) as second:
            assert second.adopt(wanted) == set() and set(second.lacking(wanted)) == {name, cut}
        alive.close()
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # what a collector does before it deletes one
        os.close(fd)
        assert {p.name for p in quarantined(tmp_path / "s")} == {name.hex, other.hex, cut.hex}
        with Incoming(shelf) as third:
            assert third.adopt(wanted) == {name} and set(third.lacking(wanted)) == {cut}
            assert {p.name for p in folder.iterdir()} == {other.hex}, (
                "what nobody asked for stays; what was cut is gone"
            )
            third.land(cut, 5000, [cut_data])
            third.publish(wanted, set())
            assert not third.lacking(wanted)
        assert {p.parent.name + p.name for p in object_files(tmp_path / "s")} == {name.hex, cut.hex}
        with Incoming(shelf) as fourth:
            assert fourth.adopt({other: 5000}) == {other} and not folder.exists()
    verify(tmp_path / "s")


@pytest.mark.parametrize("moment", ["before it is opened", "before it is locked"])
def test_a_transfers_folder_that_a_collector_takes_at_once_is_made_again(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    taken: list[str] = []
    make, lock = Root.make_folder, fcntl.flock

    def collect(root: Root) -> None:
        if not taken:
            taken.append(made[-1])
            root.remove_folder(made[-1])

    def make_and_lose(self: Root, path: str) -> None:
        make(self, path)
        made.append(path)
        if moment == "before it is opened":
            collect(self)

    def lose_and_lock(fd: int, mode: int) -> None:
        if made and moment == "before it is locked":
            collect(shelf.root)
        lock(fd, mode)

    with Shelf.open(tmp_path / "s") as shelf:
        monkeypatch.setattr(Root, "make_folder", make_and_lose)
        monkeypatch.setattr(fcntl, "flock", lose_and_lock)
        name, data = frame(bytes(5000))
        with Incoming(shelf) as incoming:
            incoming.land(name, 5000, [data])
            incoming.publish({name: 5000}, set())
        assert len(made) == 2 and taken == made[:1] and shelf.objects.has(name)


def test_batches_wait_until_they_are_due() -> None:
    """A snapshot of any size has a few batches under way, no more."""
    taken, ahead = [0], [0]

    class Counted(dict[ContentDigest, int]):
        def items(self) -> Iterator[tuple[ContentDigest, int]]:  # type: ignore[override]
            for item in super().items():
                taken[0] += 1
                yield item

    done = Tally(lambda amount: None)

    def work(batch: Lengths) -> int:
        ahead[0] = max(ahead[0], taken[0] - done.objects)
        return 0

    carry(Counted({ContentDigest(i.to_bytes(32)): 1 for i in range(5000)}), work, done)
    assert done.objects == 5000 and ahead[0] <= (2 * WORKERS + 2) * BATCH_OBJECTS


def test_rubbish_in_quarantine_is_left_alone(tmp_path: Path) -> None:
    name, data = frame(bytes(5000))
    with Shelf.open(tmp_path / "s") as shelf:
        quarantine = tmp_path / "s" / "quarantine"
        (quarantine / "file").write_bytes(b"x")
        (quarantine / "link").symlink_to(tmp_path)
        os.mkfifo(quarantine / "pipe")
        (quarantine / "dead").mkdir()
        (quarantine / "dead" / name.hex).symlink_to(tmp_path / "outside")
        (tmp_path / "outside").write_bytes(data)
        with Incoming(shelf) as incoming:
            assert incoming.adopt({name: 5000}) == set()
        assert {p.name for p in quarantine.iterdir()} == {"file", "link", "pipe", "dead"}
        assert (tmp_path / "outside").read_bytes() == data
