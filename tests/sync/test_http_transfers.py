"""Pull and push over HTTP: whole, trimmed, grown, unchanged, and what a server says no to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ferries import assert_restores, object_files, save, verify
from live import serving

from kvstore import Store
from kvstore.errors import NotCovered, RefConflict, SnapshotMissing, Unreachable
from sync import pull, push
from sync.client import Client
from sync.connection import Peer


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Peer, Path]]:
    with serving(tmp_path / "served") as peer:
        yield peer, tmp_path / "served"


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 127, 128, 129, 192, 193, 700])
@pytest.mark.parametrize("trimmed", [False, True])
def test_there_and_back(served: tuple[Peer, Path], tmp_path: Path, tokens: int, trimmed: bool) -> None:
    peer, folder = served
    with Store.open(tmp_path / "a") as a, Store.open(tmp_path / "b") as b, Client.open(peer) as remote:
        save(a, "book", tokens)
        pushed = push(a, remote, ["book"])
        assert pushed.objects == len(object_files(tmp_path / "a"))
        pulled = pull(b, remote, ["book"], trimmed=trimmed)
        assert pulled.objects == len(object_files(tmp_path / "b"))
        assert_restores(b, "book", tokens)
        assert pull(b, remote, ["book"], trimmed=trimmed).payload_bytes == 0
        assert push(a, remote, ["book"]).payload_bytes == 0
        rest = pull(b, remote, ["book"])
        assert pulled.objects + rest.objects == pushed.objects
    verify(folder)
    verify(tmp_path / "b")


def test_grown(served: tuple[Peer, Path], tmp_path: Path) -> None:
    """Full blocks are carried once; the short one at the end anew."""
    peer, _ = served
    with Store.open(tmp_path / "a") as a, Store.open(tmp_path / "b") as b, Client.open(peer) as remote:
        save(a, "book", 300)
        push(a, remote, ["book"])
        pull(b, remote, ["book"])
        save(a, "book", 500)
        assert push(a, remote, ["book"]).objects == 2 * (8 - 4)
        assert pull(b, remote, ["book"]).objects == 2 * (8 - 4)
        assert_restores(b, "book", 500)


def test_the_server_finds_what_was_pushed(served: tuple[Peer, Path], tmp_path: Path) -> None:
    """Its index knows it at once."""
    from ferries import IDENTITY, LAYOUT, tokens_of

    peer, folder = served
    with Store.open(tmp_path / "a") as a, Client.open(peer) as remote:
        save(a, "book", 300)
        push(a, remote, ["book"])
    with Store.open(folder) as store:
        found = store.find(LAYOUT, IDENTITY, tokens_of(200), namespace="default")
        assert found is not None and found.common == 200


def test_refusals_are_told_by_name(served: tuple[Peer, Path], tmp_path: Path) -> None:
    peer, _ = served
    with Store.open(tmp_path / "a") as a, Store.open(tmp_path / "b") as b, Client.open(peer) as remote:
        save(a, "book", 100)
        push(a, remote, ["book"])
        with pytest.raises(SnapshotMissing, match="it has book"):
            pull(b, remote, ["boko"])
        save(b, "book", 90, "other")
        with pytest.raises(RefConflict):
            pull(b, remote, ["book"])
        with pytest.raises(RefConflict):
            push(b, remote, ["book"])
        push(b, remote, ["book"], force=True)
        save(a, "zzz", 10)
        a.shelf.records.rename_ref("book", "other")
        a.shelf.records.rename_ref("zzz", "Book")
        with pytest.raises(RefConflict):
            push(a, remote, ["Book"])


def test_names_that_need_quoting(served: tuple[Peer, Path], tmp_path: Path) -> None:
    peer, _ = served
    labels = ["a/b/c", "späße 🦊", "100%", "a?b#c&d=e", "x+y z", "..", "%2e%2e", "a//b", "v1/refs"]
    with Store.open(tmp_path / "a") as a, Store.open(tmp_path / "b") as b, Client.open(peer) as remote:
        for number, label in enumerate(labels):
            save(a, label, 10 + number)
        push(a, remote, labels)
        assert [ref.label for ref in remote.refs()] == sorted(labels)
        pull(b, remote, labels)
        for number, label in enumerate(labels):
            assert_restores(b, label, 10 + number)


def test_many_names_come_in_pages(served: tuple[Peer, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, folder = served
    monkeypatch.setattr("sync.client.MAX_REFS", 7)
    with Store.open(folder) as store:
        digest = save(store, "n000", 5).digest
        for number in range(1, 30):
            store.shelf.records.move_ref(f"n{number:03}", None, digest)
    with Client.open(peer) as remote:
        assert [ref.label for ref in remote.refs()] == [f"n{number:03}" for number in range(30)]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="kvferry serve"):
        Client.open(Peer("127.0.0.1", 1))


def test_a_server_without_the_objects(served: tuple[Peer, Path], tmp_path: Path) -> None:
    peer, folder = served
    with Store.open(folder) as store:
        save(store, "book", 300)
    for file in object_files(folder):
        file.unlink()
    with (
        Store.open(tmp_path / "b") as b,
        Client.open(peer) as remote,
        pytest.raises((SnapshotMissing, NotCovered, KeyError)),
    ):
        pull(b, remote, ["book"])
