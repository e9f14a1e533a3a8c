"""What every remote must do. A test class derives from `RemoteContract` and gives `opened`, which opens the same remote anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import pytest
from ferries import object_files, save

from kvstore import Snapshot, Store
from kvstore.codec import HEADER, Header, Kind, encode_header, encode_snapshot
from kvstore.digest import ContentDigest, SnapshotDigest, content_digest
from kvstore.errors import InputInvalid, ObjectCorrupt, ObjectMissing, RefConflict, SnapshotMissing
from kvstore.signatures import Signature, sign
from kvstore.snapshot import Coverage, trimmed, whole
from sync import Source, Target
from sync.plan import objects


class Both(Source, Target, Protocol):
    """A remote that is read and written."""


Opened = Callable[[], AbstractContextManager[Both]]


def frame(content: bytes, **fields: object) -> tuple[ContentDigest, bytes]:
    """An object's name and frame; ``fields`` replaces header fields."""
    name = content_digest([content])
    header = {"content_length": len(content), "stored_length": len(content), "name": name.raw,
              "stored": name.raw, **fields}  # fmt: skip
    return name, encode_header(Header(Kind.OBJECT, **header)) + content  # type: ignore[arg-type]


class RemoteContract:
    @pytest.fixture
    def opened(self, tmp_path: Path) -> Opened:
        raise NotImplementedError

    @pytest.fixture
    def origin(self, tmp_path: Path) -> Iterator[Store]:
        with Store.open(tmp_path / "origin") as store:
            yield store

    @pytest.fixture
    def book(self, origin: Store) -> tuple[Snapshot, SnapshotDigest, Mapping[ContentDigest, int]]:
        saved = save(origin, "book", 300)
        assert saved.snapshot is not None and saved.digest is not None
        return saved.snapshot, saved.digest, objects(saved.snapshot, whole(saved.digest, saved.snapshot))

    def put(self, remote: Target, origin: Store, lengths: Mapping[ContentDigest, int]) -> None:
        remote.put(((name, origin.shelf.objects.frame(name)) for name in lengths), lengths)

    def test_empty(self, opened: Opened, book: tuple[Snapshot, SnapshotDigest, Mapping[ContentDigest, int]]) -> None:
        snapshot, digest, lengths = book
        with opened() as remote:
            assert remote.where
            assert list(remote.refs()) == [] and remote.ref("book") is None
            assert remote.have(lengths) == set() and remote.have({}) == set()
            assert remote.coverage(digest, snapshot) == Coverage(digest, ((), ()))
            with pytest.raises(SnapshotMissing):
                remote.snapshot(digest)
            name = next(iter(lengths))
            with pytest.raises(ObjectMissing, match=name.hex):
                for _, chunks in remote.fetch([name]):
                    list(chunks)

    def test_nothing_is_visible_before_publish_and_all_of_it_after(
        self, opened: Opened, origin: Store, book: tuple[Snapshot, SnapshotDigest, Mapping[ContentDigest, int]]
    ) -> None:
        snapshot, digest, lengths = book
        with opened() as remote, opened() as other:
            self.put(remote, origin, lengths)
            assert remote.have(lengths) == remote.sound(lengths) == lengths.keys(), "what was put just now counts"
            assert other.ref("book") is None
            with pytest.raises(SnapshotMissing):
                other.snapshot(digest)
            assert remote.publish(snapshot, whole(digest, snapshot), "book", None) == whole(digest, snapshot)
            ref = other.ref("book")
            assert ref is not None and (ref.label, ref.snapshot) == ("book", digest)
            assert [r.label for r in other.refs()] == ["book"]
            assert encode_snapshot(other.snapshot(digest))[0] == digest
            assert other.coverage(digest, snapshot) == whole(digest, snapshot)
            assert other.have(lengths) == lengths.keys()
            wrong = {name: length + 1 for name, length in lengths.items()}
            assert other.have(wrong) == set(), "an object of another length is not there"
            assert other.sound(lengths) == lengths.keys() and other.sound(wrong) == set()

    def test_frames_come_back_in_the_order_asked_for(
        self, opened: Opened, origin: Store, book: tuple[Snapshot, SnapshotDigest, Mapping[ContentDigest, int]]
    ) -> None:
        snapshot, digest, lengths = book
        with opened() as remote:
            self.put(remote, origin, lengths)
            remote.publish(snapshot, whole(digest, snapshot), "book", None)
            names = sorted(lengths, reverse=True)
            files = {p.parent.name + p.name: p for p in object_files(origin.shelf.path)}
            got = [(name, b"".join(bytes(c) for c in chunks)) for name, chunks in remote.fetch(names)]
            assert got == [(name, files[name.hex].read_bytes()) for name in names]

    def test_a_promise_needs_its_objects(
        self, opened: Opened, origin: Store, book: tuple[Snapshot, SnapshotDigest, Mapping[ContentDigest, int]]
    ) -> None:
        snapshot, digest, lengths = book
        missing, *rest = lengths
        with opened() as remote, opened() as other:
            self.put(remote, origin, {name: lengths[name] for name in rest})
            with pytest.raises(ObjectMissing, match=missing.hex):
                remote.publish(snapshot, whole(digest, snapshot), "book", None)
            assert other.ref("book") is None and list(other.refs()) == []
            self.put(remote, origin, {missing: lengths[missing]})
            remote.publish(snapshot, whole(digest, snapshot), "book", None)
            assert other.ref("book") is not None

    def test_coverage_grows_and_never_shrinks(
        self, opened: Opened, origin: Store, book: tuple[Snapshot, SnapshotDigest, Mapping[ContentDigest, int]]
    ) -> None:
        snapshot, digest, lengths = book
        part = trimmed(digest, snapshot)
        with opened() as remote:
            self.put(remote, origin, objects(snapshot, part))
            assert remote.publish(snapshot, part, "book", None) == part
            self.put(remote, origin, lengths)
            assert remote.publish(snapshot, whole(digest, snapshot), "book", digest) == whole(digest, snapshot)
            assert remote.publish(snapshot, part, "book", digest) == whole(digest, snapshot)
            assert remote.coverage(digest, snapshot) == whole(digest, snapshot)

    def test_a_name_moves_by_compare_and_swap(self, opened: Opened, origin: Store) -> None:
        saved = [save(origin, None, 64 * n) for n in (1, 2)]
        (one, first), (two, second) = [(s.snapshot, s.digest) for s in saved]
        assert one and two and first and second
        with opened() as remote, opened() as other:
            self.put(remote, origin, objects(two, whole(second, two)))
            remote.publish(one, whole(first, one), "n", None)
            for expect in (None, second):
                with pytest.raises(RefConflict):
                    other.publish(two, whole(second, two), "n", expect)
            ref = remote.ref("n")
            assert ref is not None and ref.snapshot == first
            other.publish(two, whole(second, two), "n", first)
            ref = remote.ref("n")
            assert ref is not None and ref.snapshot == second
            with pytest.raises(RefConflict):
                remote.publish(one, whole(first, one), "n", first)
            with pytest.raises(RefConflict):
                remote.publish(one, whole(first, one), "N", None)

    def test_labels_are_text_not_paths(self, opened: Opened, origin: Store) -> None:
        saved = save(origin, None, 64)
        assert saved.snapshot and saved.digest
        labels = ["../../etc/passwd", "/", "a/b", "x" * 200, "naïve\u0301", "日本語 1"]
        with opened() as remote:
            self.put(remote, origin, objects(saved.snapshot, whole(saved.digest, saved.snapshot)))
            for label in labels:
                remote.publish(saved.snapshot, whole(saved.digest, saved.snapshot), label, None)
            found = {ref.label: remote.ref(ref.label) for ref in remote.refs()}
        assert len(found) == len(labels) and all(ref is not None and ref.label == k for k, ref in found.items())

    def test_signatures_stand_beside_a_snapshot(
        self, opened: Opened, origin: Store, book: tuple[Snapshot, SnapshotDigest, Mapping[ContentDigest, int]]
    ) -> None:
        snapshot, digest, lengths = book
        one, two, other = (sign(bytes([n]) * 32, digest) for n in (1, 2, 3))
        elsewhere = sign(bytes([3]) * 32, SnapshotDigest(bytes(32)))
        with opened() as remote, opened() as reader:
            assert list(remote.signatures(digest)) == []
            with pytest.raises(SnapshotMissing):
                remote.add_signatures(digest, [one])
            self.put(remote, origin, lengths)
            remote.publish(snapshot, whole(digest, snapshot), "book", None)
            assert list(remote.signatures(digest)) == []
            remote.add_signatures(digest, [one])
            remote.add_signatures(digest, [two, one])
            held = sorted([one, two])
            assert list(reader.signatures(digest)) == held
            flipped = Signature(other.key, bytes([other.raw[0] ^ 1]) + other.raw[1:])
            for wrong in ([flipped], [elsewhere], [Signature(other.key, one.raw)], [other, flipped], []):
                with pytest.raises(InputInvalid, match="signatures"):
                    remote.add_signatures(digest, wrong)
            many = [sign(bytes([n]) * 32, digest) for n in range(3, 66)]
            with pytest.raises(InputInvalid, match="at most 64"):
                remote.add_signatures(digest, many)
            assert list(reader.signatures(digest)) == held
            remote.add_signatures(digest, many[:-1])
            assert len(reader.signatures(digest)) == 64

    @pytest.mark.parametrize("cut", [0, 1, HEADER - 1, HEADER, HEADER + 1, HEADER + 4999, HEADER + 5001])
    def test_a_frame_cut_or_continued_is_refused(self, opened: Opened, cut: int) -> None:
        name, data = frame(bytes(5000))
        with opened() as remote:
            with pytest.raises(ObjectCorrupt, match=name.hex):
                remote.put(iter([(name, [(data + b"\0" * 9)[:cut]])]), {name: 5000})
            assert remote.have({name: 5000}) == set()
            remote.put(iter([(name, [data[:100], data[100:200], b"", data[200:]])]), {name: 5000})
            assert remote.have({name: 5000}) == {name}

    def test_a_frame_with_other_bytes_is_refused(self, opened: Opened) -> None:
        name, good = frame(b"k" * 5000)
        other_name, other = frame(b"v" * 5000)
        flipped = good[:-1] + b"K"
        lies = {
            "content digest": encode_header(
                Header(Kind.OBJECT, 5000, 5000, name.raw, name.raw)
            ) + flipped[HEADER:],
            "stored hash": frame(b"k" * 5000, stored=bytes(32))[1],
            "name": other,
            "content length": frame(b"k" * 5000, content_length=4999, stored_length=4999)[1],
            "magic": b"NOTOURS\0" + good[8:],
            "kind": encode_header(Header(Kind.REF, 5000, 5000, name.raw, name.raw)) + good[HEADER:],
        }  # fmt: skip
        with opened() as remote:
            for field, data in lies.items():
                with pytest.raises(ObjectCorrupt, match=field):
                    remote.put(iter([(name, [data])]), {name: 5000})
            assert remote.have({name: 5000, other_name: 5000}) == set()
