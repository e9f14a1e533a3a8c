"""A store as a server shows it: what each request asks, with what its token may see. Files, no sockets; called from many threads."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from kvstore.codec import (
    HEADER,
    Kind,
    decode_coverage,
    decode_header,
    decode_layout,
    decode_snapshot,
    encode_coverage,
    encode_ref,
    encode_snapshot,
)
from kvstore.digest import SIZE, ContentDigest, PrefixKey, SnapshotDigest
from kvstore.disk import below
from kvstore.errors import InputInvalid, ObjectMissing, RefConflict, SnapshotMissing, StoreFull
from kvstore.items import decode_items
from kvstore.objects import Objects
from kvstore.search import Query
from kvstore.shelf import FEATURES
from kvstore.signatures import Signature
from kvstore.snapshot import Ref
from kvstore.store import Store

from .bodies import MAX_FRAMES, MAX_REFS, Find
from .catalogue import Catalogue
from .frames import Buffer
from .incoming import Incoming, absent, move_name, promised, unsound
from .plan import Lengths, objects
from .remote import MAX_ASKED
from .streams import frames
from .tokens import Grant
from .vouching import checked


class Served:
    """Answers for one store. A context manager; `serve` opens it."""

    def __init__(self, path: Path) -> None:
        self._store = Store.open(path)
        self.shelf = self._store.shelf
        self._catalogue = Catalogue(self.shelf)
        self._writing = threading.Lock()
        self._landings: dict[str, _Landing] = {}

    def close(self) -> None:
        for landing in self._landings.values():
            landing.incoming.close()
        self._store.close()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def features(self) -> tuple[str, ...]:
        """What a reader of its objects must know beyond the format."""
        return tuple(FEATURES)

    # reading

    def refs(self, grant: Grant, after: str, limit: int) -> tuple[list[Ref], bool]:
        """A page of names, the first after ``after``, and whether there are more. A damaged one is left out."""
        if not 1 <= limit <= MAX_REFS:
            raise InputInvalid(f"limit: expected 1 to {MAX_REFS}, found {limit}")
        found = sorted(self.shelf.records.readable_refs(), key=lambda ref: ref.label)
        later = (ref for ref in found if ref.label > after and self._catalogue.sees(grant, ref.snapshot))
        page = list(islice(later, limit + 1))
        return page[:limit], len(page) > limit

    def ref(self, grant: Grant, label: str) -> tuple[SnapshotDigest, bytes]:
        """Where a name stands, and its frame. `SnapshotMissing`, `RefCorrupt`."""
        ref = self.shelf.records.ref(label)
        if ref is None or not self._catalogue.sees(grant, ref.snapshot):
            raise SnapshotMissing(f"no snapshot named {label!r}.", label=label)
        return ref.snapshot, encode_ref(ref)

    def manifest(self, grant: Grant, digest: SnapshotDigest) -> bytes:
        """The frame of a manifest. `SnapshotMissing`, `SnapshotCorrupt`."""
        return encode_snapshot(self._catalogue.snapshot(grant, digest))[1]

    def coverage(self, grant: Grant, digest: SnapshotDigest) -> bytes:
        """The frame of what is promised of a snapshot. `SnapshotMissing` also where nothing is; `CoverageCorrupt`."""
        found = self.shelf.records.coverage(digest, self._catalogue.snapshot(grant, digest))
        if not any(found.runs):
            raise SnapshotMissing(
                f"coverage of {digest}: expected a promise of some objects, found none.", digest=digest.hex
            )
        return encode_coverage(found)

    def signatures(self, grant: Grant, digest: SnapshotDigest) -> Sequence[Signature]:
        """The signatures of a snapshot. `SnapshotMissing`, `SignaturesCorrupt`."""
        self._catalogue.snapshot(grant, digest)
        return self.shelf.records.signatures(digest)

    def have(self, grant: Grant, asked: Lengths, *, sound: bool) -> set[ContentDigest]:
        """Those objects that are there for ``grant``, what it has just sent included. ``sound``: reading each."""
        if len(asked) > MAX_ASKED:
            raise InputInvalid(f"objects: expected at most {MAX_ASKED}, found {len(asked)}")
        landed = self._landed(grant, asked)
        rest = {name: length for name, length in asked.items() if name not in landed}
        seen = self._catalogue.seen(grant, (name.raw for name in rest))
        rest = {name: length for name, length in rest.items() if name.raw in seen}
        with below(self.shelf.path):
            lacking = (unsound if sound else absent)(self.shelf, rest)
            if lacking and "push" in grant.scopes and grant.namespaces is None and self.shelf.root.names("quarantine"):
                # What an earlier server, or a killed pull, left here complete.
                landed |= self._landing(grant).incoming.adopt(lacking)
        return landed | (rest.keys() - lacking.keys())

    def _landed(self, grant: Grant, asked: Lengths) -> set[ContentDigest]:
        with self._writing:
            landing = self._landings.get(grant.id)
        if landing is None:
            return set()
        return asked.keys() - landing.incoming.unlanded(asked).keys()

    @contextlib.contextmanager
    def opened(self, grant: Grant, names: Sequence[ContentDigest]) -> Iterator[list[tuple[int, int]]]:
        """A descriptor and the bytes of each object's file. `ObjectMissing` where one is not there for ``grant``, with its name; then none is open."""
        if not 1 <= len(names) <= MAX_FRAMES:
            raise InputInvalid(f"objects: expected 1 to {MAX_FRAMES}, found {len(names)}")
        seen = self._catalogue.seen(grant, (name.raw for name in names))
        with contextlib.ExitStack() as stack:
            stack.enter_context(below(self.shelf.path))
            found = []
            for name in names:
                if name.raw not in seen:
                    raise missing(name)
                try:
                    fd = self.shelf.root.descriptor(Objects.path(name))
                except FileNotFoundError:
                    raise missing(name) from None
                stack.callback(os.close, fd)
                found.append((fd, os.fstat(fd).st_size))
            yield found

    def find(self, grant: Grant, asked: Find) -> tuple[SnapshotDigest, int] | None:
        """The snapshot that serves the items best, and how many it gives."""
        if not grant.sees(asked.namespace):
            return None
        if len(asked.root) != SIZE:
            raise InputInvalid(f"root: expected {SIZE} bytes, found {len(asked.root)}")
        with self._writing:  # one question at a time: its items are many times larger than they were in the body
            query = Query(
                decode_layout(asked.layout), PrefixKey(asked.root), tuple(decode_items(asked.items)), asked.head, None
            )
            match = self._store.answer(query)
        # A root key is a hash: whose namespace it is, only a snapshot says.
        return None if match is None or not grant.sees(match.snapshot.namespace) else (match.digest, match.n)

    def tidy(self, seconds: float) -> None:
        """Gives up what landed and was not published, of tokens that sent nothing for so long."""
        with self._writing:
            idle = [id_ for id_, landing in self._landings.items() if landing.idle(seconds)]
            for id_ in idle:
                self._landings.pop(id_).incoming.discard()

    # pushing

    def land(self, grant: Grant, chunks: Iterable[Buffer], unpublished: int) -> int:
        """Takes in a body of object frames, out of sight; returns how many. What came whole before an error stays.

        `StoreFull` where the store's quota is, and for more than ``unpublished`` bytes that ``grant`` sent and did not publish.
        """
        landing = self._landing(grant)
        count = 0
        for header, frame in frames(chunks, MAX_FRAMES):
            name = ContentDigest(header.name)
            with landing.arriving():
                if landing.incoming.unlanded({name: header.content_length}):
                    with landing.room(name, HEADER + header.stored_length, unpublished), discreet():
                        landing.incoming.land(name, header.content_length, frame)
                else:
                    for _ in frame:
                        pass
            count += 1
        landing.incoming.settle()
        return count

    def _landing(self, grant: Grant) -> _Landing:
        with self._writing:
            if grant.id not in self._landings:
                self._landings[grant.id] = _Landing(Incoming(self.shelf, self._store.quota))
            return self._landings[grant.id]

    def publish(
        self, grant: Grant, label: str, expect: SnapshotDigest | None, manifest: bytes, coverage: bytes
    ) -> bytes:
        """Objects, then manifest and coverage, then the name, durably; the frame of the coverage that now holds.

        `ObjectMissing` when a covered object is neither here for ``grant`` nor landed by it; `RefConflict`; `NotAllowed` for a namespace that it
        has no leave for.
        """
        digest = SnapshotDigest(decode_header(manifest, Kind.SNAPSHOT, "the manifest that was sent").name)
        snapshot = decode_snapshot(manifest, digest)
        brought = decode_coverage(coverage, digest, len(snapshot.layout.groups), len(snapshot.blocks))
        if not grant.sees(snapshot.namespace):
            raise InputInvalid(
                f"namespace: expected one of {sorted(grant.namespaces or ())}, found {snapshot.namespace!r}"
            )
        needed = objects(snapshot, brought)
        landing = self._landing(grant)
        incoming = landing.incoming
        with self._writing, below(self.shelf.path), self.shelf.shared():
            seen = self._catalogue.seen(grant, (name.raw for name in needed))
            unlanded = incoming.unlanded(needed)
            hidden = {name for name in unlanded if name.raw not in seen}
            lacking = hidden | absent(self.shelf, unlanded).keys()
            if lacking:
                first = min(lacking)
                raise ObjectMissing(
                    f"{len(lacking)} objects of {label!r} are not there, the first is {first}. Push again to send them.",
                    name=first.hex,
                )
            now = self.shelf.records.standing(label)
            if now is not None and not self._catalogue.sees(grant, now):
                raise _taken(label)
            if now != expect and now != digest:
                raise RefConflict(
                    f"name {label!r}: expected {expect or 'no snapshot'}, found {now or 'none'}: it was moved in the meantime. Push again.",
                    label=label,
                )
            incoming.publish(needed, promised(self.shelf, digest, snapshot, expect))
            landing.published()
            held = self._store.publish(snapshot, brought)
            try:
                move_name(self.shelf.records, label, now, digest)
            except RefConflict as error:
                if grant.namespaces is None:
                    raise
                raise _taken(label) from error  # it may be told with a name that doesn't exist for this token
        return encode_coverage(held)

    def sign(self, grant: Grant, digest: SnapshotDigest, signatures: Sequence[Signature]) -> Sequence[Signature]:
        """Adds signatures, and returns all. `SnapshotMissing`; `InputInvalid` for such that are not true, or too many."""
        self._catalogue.snapshot(grant, digest)
        checked(signatures, digest)
        return self.shelf.records.add_signatures(digest, signatures)

    def remove(self, grant: Grant, label: str, expect: SnapshotDigest) -> None:
        """Takes a name away that stands at ``expect``. `SnapshotMissing`, `RefConflict`."""
        self.ref(grant, label)
        self.shelf.records.move_ref(label, expect, None)


class _Landing:
    """What one token sends: its objects out of sight, and when the last of them came."""

    def __init__(self, incoming: Incoming) -> None:
        self.incoming = incoming
        self._lock = threading.Lock()
        self._arriving = 0
        self._names: set[ContentDigest] = set()
        """What landed since the last `published`."""
        self._landed = self._coming = 0
        """Bytes of those frames, and of those under way."""
        self._used = time.monotonic()

    def idle(self, seconds: float) -> bool:
        """Whether nothing arrived for so long."""
        with self._lock:
            return not self._arriving and time.monotonic() - self._used >= seconds

    @contextlib.contextmanager
    def room(self, name: ContentDigest, size: int, limit: int) -> Iterator[None]:
        """Around a frame of ``size`` bytes that lands. `StoreFull` beyond ``limit``."""
        with self._lock:
            used = self._coming + self._landed
            if used + size > limit:
                raise StoreFull(
                    f"expected at most {limit} bytes that one token has sent and not published, found {used + size}. Push less at once; what is "
                    f"not published is deleted after a day.",
                    quota=limit,
                    used=used,
                    needed=size,
                )
            self._coming += size
        try:
            yield
            with self._lock:
                self._landed += size if name not in self._names else 0
                self._names.add(name)
        finally:
            with self._lock:
                self._coming -= size

    def published(self) -> None:
        """What landed is visible, and counts no more."""
        with self._lock:
            self._names.clear()
            self._landed = 0

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """Around an object that comes in."""
        with self._lock:
            self._arriving += 1
        try:
            yield
        finally:
            with self._lock:
                self._arriving -= 1
                self._used = time.monotonic()


@contextlib.contextmanager
def discreet() -> Iterator[None]:
    """Tells a full store without the names and paths that its owner is told."""
    try:
        yield
    except StoreFull as error:
        numbers = {key: error.details[key] for key in ("quota", "used", "needed") if key in error.details}
        raise StoreFull(
            f"the server's store: expected {numbers.get('needed')} bytes free below its quota of {numbers.get('quota')}, found {numbers.get('used')} "
            f"used. Whoever runs it makes room there, with `kvferry gc --purge` or `kvferry quota SIZE`; then push again.",
            **numbers,
        ) from error


def _taken(label: str) -> RefConflict:
    return RefConflict(
        f"name {label!r}: it is taken, or one that differs by case only. Choose another one with `kvferry rename`.",
        label=label,
    )


def missing(name: ContentDigest) -> ObjectMissing:
    """That an object is not there, or not for who asks."""
    return ObjectMissing(f"object {name}: expected its file, found none.", name=name.hex)
