"""Asking remotes by tokens, and fetching just what continuing reads: a folder, a server, a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ferries import IDENTITY, LAYOUT, Ram, object_files, save, tokens_of, verify
from live import serving

from kvstore import Identity, Store
from sync import Folder, push
from sync.blobs import Blobs
from sync.bucket import Bucket
from sync.client import Client
from sync.reuse import Finder, bring, look

WAYS = ["folder", "server", "bucket"]


@contextmanager
def opened(way: str, tmp_path: Path) -> Iterator[Finder]:
    if way == "folder":
        with Folder.open(tmp_path / "remote", create=True) as folder:
            yield folder
    elif way == "server":
        with serving(tmp_path / "remote") as peer, Client.open(peer) as client:
            yield client
    else:
        from obstore.store import MemoryStore

        with Bucket.open(Blobs(MemoryStore(), "memory:"), create=True) as bucket:
            yield bucket


@pytest.mark.parametrize("way", WAYS)
def test_only_what_the_prompt_can_use(way: str, tmp_path: Path) -> None:
    with Store.open(tmp_path / "a") as a, Store.open(tmp_path / "b") as b, opened(way, tmp_path) as remote:
        save(a, "book", 700)
        push(a, remote, ["book"])  # type: ignore[arg-type]
        prompt = [*tokens_of(300), 5, 6, 7]
        found = look(remote, LAYOUT, IDENTITY, prompt, namespace="default")
        assert found is not None and found.n == 300
        brought = bring(b, remote, LAYOUT, IDENTITY, prompt, namespace="default")
        # Full rows 0-299 are in 5 blocks, the window of 128 in the last 3 of them.
        assert brought is not None and brought.objects == 5 + 3 == len(object_files(tmp_path / "b"))
        match = b.find(LAYOUT, IDENTITY, prompt, namespace="default")
        assert match is not None and match.n == 300
        rows, origin = Ram(700, fill=False), Ram(700)
        b.load(match, rows)
        for g, (start, stop) in enumerate(match.runs):
            assert [bytes(s) for s in rows.spans(g, start, stop)] == [bytes(s) for s in origin.spans(g, start, stop)]
        assert bring(b, remote, LAYOUT, IDENTITY, prompt, namespace="default") is None
        longer = [*tokens_of(650), 1]
        more = bring(b, remote, LAYOUT, IDENTITY, longer, namespace="default")
        assert more is not None and more.match.n == 650 and more.objects == (11 - 5) + 3
    verify(tmp_path / "b")


@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_there(way: str, tmp_path: Path) -> None:
    with Store.open(tmp_path / "a") as a, Store.open(tmp_path / "b") as b, opened(way, tmp_path) as remote:
        other = Identity.of({"weights": "x" * 64, "tokenizer": "t" * 64})
        assert bring(b, remote, LAYOUT, IDENTITY, tokens_of(300), namespace="default") is None
        save(a, "book", 200)
        push(a, remote, ["book"])  # type: ignore[arg-type]
        for identity, namespace, items in (
            (other, "default", tokens_of(300)),
            (IDENTITY, "another", tokens_of(300)),
            (IDENTITY, "default", tokens_of(300, "z")),
            (IDENTITY, "default", []),
        ):
            assert look(remote, LAYOUT, identity, items, namespace=namespace) is None
        assert not object_files(tmp_path / "b")
