"""A server of somebody else's snapshots: what is asked for is fetched from a remote once, verified, and kept in a store as cache.

Names and manifests are asked from the remote, and again after a few seconds; objects come when they are first read, and stay until the store's
quota evicts them: its snapshots are unnamed, so that all of it may go. While the remote is away what is here is served.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol

import msgspec

from kvstore.codec import decode_layout, encode_coverage, encode_ref, encode_snapshot
from kvstore.digest import SIZE, ContentDigest, PrefixKey, SnapshotDigest
from kvstore.disk import below
from kvstore.errors import (
    Corrupt,
    FormatTooNew,
    InputInvalid,
    Missing,
    SnapshotMissing,
    Unreachable,
)
from kvstore.files import Pending, Root
from kvstore.items import decode_items
from kvstore.match import match_items
from kvstore.objects import Objects
from kvstore.signatures import Signature, true_ones
from kvstore.snapshot import Coverage, Ref, Snapshot, runs_of, whole

from .bodies import MAX_FRAMES, MAX_REFS, Find
from .frames import Buffer
from .incoming import Incoming, absent
from .plan import Lengths, objects
from .reach import blaming_remote
from .recent import FRESH, Recent
from .remote import MAX_ASKED
from .reuse import Finder
from .served import Served, discreet, missing
from .tokens import Grant, NotAllowed
from .vouching import take_along

KNOWN = 64
"""Snapshots whose manifests are kept in memory."""
KEPT = 4096
"""Answers about names, coverages and signatures that are."""
SPACES = 1 << 16
"""Snapshots whose namespaces are."""
TRIES = 3
"""For an object that is evicted again, or whose fetch by another request failed."""


class Origin(Finder, AbstractContextManager["Origin"], Protocol):
    """A remote that is pulled from, looked up by tokens, and closed."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A snapshot, what the remote promises of it (or what is here, while that is away), and the objects of that."""

    snapshot: Snapshot
    coverage: Coverage
    lengths: Lengths


class Gateway(Served):
    """Answers for a remote with the store at ``path``; read-only.

    ``reach`` opens the remote, when it is first needed; it is then asked from many threads. ``where``: the remote for people. ``names``: a file that keeps
    names for when the remote is away.
    """

    def __init__(self, path: Path, where: str, reach: Callable[[], Origin], names: Path | None = None) -> None:
        super().__init__(path)
        self._where, self._reach = where, reach
        self._opening = threading.Lock()
        self._opened: Origin | None = None
        self._answers = Recent(KEPT)
        self._manifests = Recent(KNOWN)
        self._names = _Names(names)
        self._lock = threading.Lock()
        self._known: OrderedDict[SnapshotDigest, _Known] = OrderedDict()
        self._spaces: dict[SnapshotDigest, str] = {}
        self._flying: dict[ContentDigest, Future[None]] = {}

    def close(self) -> None:
        super().close()
        if self._opened is not None:
            self._opened.__exit__(None, None, None)

    def connect(self) -> None:
        """Opens the remote now. What the opening raises; `Unreachable` is no reason not to serve."""
        self._answers.reach(lambda: self._origin)

    @property
    def _origin(self) -> Origin:
        """Asked within `Recent.ask` or `Recent.reach` only."""
        with self._opening:
            if self._opened is None:
                self._opened = self._reach()
            return self._opened

    # names

    def refs(self, grant: Grant, after: str, limit: int) -> tuple[list[Ref], bool]:
        if not 1 <= limit <= MAX_REFS:
            raise InputInvalid(f"limit: expected 1 to {MAX_REFS}, found {limit}")
        later = (ref for ref in self._refs() if ref.label > after and self._sees(grant, ref.snapshot))
        page = list(islice(later, limit + 1))
        return page[:limit], len(page) > limit

    def _refs(self) -> list[Ref]:
        def question() -> list[Ref]:
            found = sorted(self._origin.refs(), key=lambda ref: ref.label)
            self._names.replace(found)
            return found

        try:
            return self._answers.ask("refs", question)
        except Unreachable:
            return self._names.all()

    def ref(self, grant: Grant, label: str) -> tuple[SnapshotDigest, bytes]:
        def question() -> Ref | None:
            found = self._origin.ref(label)
            self._names.note(label, found)
            return found

        try:
            ref = self._answers.ask(("ref", label), question)
        except Unreachable:
            ref = self._names.get(label)
            if ref is None:
                raise
        if ref is None or not self._sees(grant, ref.snapshot):
            raise SnapshotMissing(f"no snapshot named {label!r}.", label=label)
        return ref.snapshot, encode_ref(ref)

    # records

    def manifest(self, grant: Grant, digest: SnapshotDigest) -> bytes:
        return encode_snapshot(self._know(grant, digest).snapshot)[1]

    def coverage(self, grant: Grant, digest: SnapshotDigest) -> bytes:
        found = self._know(grant, digest).coverage
        if not any(found.runs):
            raise SnapshotMissing(
                f"coverage of {digest}: expected a promise of some objects, found none.", digest=digest.hex
            )
        return encode_coverage(found)

    def signatures(self, grant: Grant, digest: SnapshotDigest) -> Sequence[Signature]:
        self._know(grant, digest)
        try:
            return self._vouching(digest, FRESH)
        except Unreachable:
            return self.shelf.records.signatures(digest)

    def _vouching(self, digest: SnapshotDigest, fresh: float) -> tuple[Signature, ...]:
        return self._answers.ask(("signatures", digest), lambda: tuple(self._origin.signatures(digest)), fresh=fresh)

    def _snapshot(self, digest: SnapshotDigest) -> Snapshot:
        def question() -> Snapshot:
            with contextlib.suppress(Missing, Corrupt, FormatTooNew):
                return self.shelf.records.snapshot(digest)  # a digest has one manifest, wherever it lies
            return self._answers.reach(lambda: self._origin.snapshot(digest))

        return self._manifests.ask(digest, question, fresh=float("inf"))

    def _sees(self, grant: Grant, digest: SnapshotDigest) -> bool:
        if grant.namespaces is None:
            return True
        namespace = self._spaces.get(digest)
        if namespace is None:
            try:
                namespace = self._snapshot(digest).namespace
            except (Corrupt, FormatTooNew, Missing, Unreachable):
                return False
            if len(self._spaces) >= SPACES:
                self._spaces.clear()
            self._spaces[digest] = namespace
        return grant.sees(namespace)

    def _know(self, grant: Grant, digest: SnapshotDigest) -> _Known:
        """`SnapshotMissing` where it does not exist for ``grant``."""
        snapshot = self._snapshot(digest)
        if not grant.sees(snapshot.namespace):
            raise SnapshotMissing(f"snapshot {digest}: expected its manifest, found none.", digest=digest.hex)
        try:
            coverage = self._answers.ask(("coverage", digest), lambda: self._origin.coverage(digest, snapshot))
        except Unreachable:
            coverage = self._here(digest, snapshot)
        known = self._known.get(digest)
        if known is None or known.coverage != coverage:
            with blaming_remote(self._where):
                known = _Known(snapshot, coverage, objects(snapshot, coverage))
        with self._lock:
            self._known[digest] = known
            self._known.move_to_end(digest)
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)
        return known

    def _here(self, digest: SnapshotDigest, snapshot: Snapshot) -> Coverage:
        """What of a snapshot lies in the store."""
        with blaming_remote(self._where):
            lacking = absent(self.shelf, objects(snapshot, whole(digest, snapshot)))
        groups = range(len(snapshot.layout.groups))
        return Coverage(
            digest,
            tuple(
                runs_of({b for b, contents in enumerate(snapshot.blocks) if contents[g] not in lacking}) for g in groups
            ),
        )

    def find(self, grant: Grant, asked: Find) -> tuple[SnapshotDigest, int] | None:
        if not grant.sees(asked.namespace):
            return None
        if len(asked.root) != SIZE:
            raise InputInvalid(f"root: expected {SIZE} bytes, found {len(asked.root)}")
        with self._writing:
            layout, root, items = decode_layout(asked.layout), PrefixKey(asked.root), tuple(decode_items(asked.items))
            try:
                found = self._answers.reach(lambda: self._origin.find(layout, root, asked.namespace, items, asked.head))
            except Unreachable:
                found = None
        if found is None:
            return super().find(grant, asked)
        try:
            known = self._know(grant, found)
        except SnapshotMissing:
            return None
        match = match_items(found, known.snapshot, known.coverage, items, asked.head)
        return (found, match.n) if match.n else None

    # objects

    def have(self, grant: Grant, asked: Lengths, *, sound: bool) -> set[ContentDigest]:
        if sound:
            return super().have(grant, asked, sound=True)
        if len(asked) > MAX_ASKED:
            raise InputInvalid(f"objects: expected at most {MAX_ASKED}, found {len(asked)}")
        promised = self._promised(grant, asked)
        there = {name for name, length in asked.items() if promised.get(name) == length}
        rest = {name: length for name, length in asked.items() if name not in there}
        if rest and grant.namespaces is None:
            with contextlib.suppress(Unreachable):
                there |= self._answers.reach(lambda: self._origin.have(rest))
        return there

    def _promised(self, grant: Grant, names: Iterable[ContentDigest]) -> dict[ContentDigest, int]:
        """Those objects that a known snapshot of the namespaces of ``grant`` promises, with their lengths."""
        with self._lock:
            known = [one for one in reversed(self._known.values()) if grant.sees(one.snapshot.namespace)]
        found: dict[ContentDigest, int] = {}
        for name in names:
            for one in known:
                if name in one.lengths:
                    found[name] = one.lengths[name]
                    break
        return found

    @contextlib.contextmanager
    def opened(self, grant: Grant, names: Sequence[ContentDigest]) -> Iterator[list[tuple[int, int]]]:
        if not 1 <= len(names) <= MAX_FRAMES:
            raise InputInvalid(f"objects: expected 1 to {MAX_FRAMES}, found {len(names)}")
        promised = self._promised(grant, names)
        for name in names:
            if name not in promised:
                raise missing(name)
        with contextlib.ExitStack() as stack:
            stack.enter_context(below(self.shelf.path))
            files: dict[ContentDigest, tuple[int, int]] = {}
            self._open(promised, files, stack)
            for _ in range(TRIES):
                if lacking := {name: length for name, length in promised.items() if name not in files}:
                    self._bring(lacking)
                    self._open(promised, files, stack)
            if lost := promised.keys() - files.keys():
                raise missing(min(lost))
            yield [files[name] for name in names]

    def _open(self, wanted: Lengths, files: dict[ContentDigest, tuple[int, int]], stack: contextlib.ExitStack) -> None:
        """Opens those that are here; open, they outlive an eviction."""
        for name in wanted.keys() - files.keys():
            with contextlib.suppress(FileNotFoundError):
                fd = self.shelf.root.descriptor(Objects.path(name))
                stack.callback(os.close, fd)
                files[name] = fd, os.fstat(fd).st_size

    def _bring(self, lacking: Lengths) -> None:
        """Fetches objects into the store, each once however many ask. What others fetch is waited for; whether they got it, the caller sees."""
        mine: dict[ContentDigest, Future[None]] = {}
        theirs: list[Future[None]] = []
        with self._lock:
            for name in lacking:
                if name in self._flying:
                    theirs.append(self._flying[name])
                else:
                    mine[name] = self._flying[name] = Future()
        try:
            # Somebody may have brought it since it was found lacking.
            if wanted := absent(self.shelf, {name: lacking[name] for name in mine}):
                self._fetch(wanted)
        finally:
            with self._lock:
                for name, future in mine.items():
                    del self._flying[name]
                    future.set_result(None)
        for future in theirs:
            future.result()

    def _fetch(self, wanted: Lengths) -> None:
        """`Unreachable`, `ObjectMissing`, `ObjectCorrupt`, `StoreFull`; what came whole before is kept."""
        with Incoming(self.shelf, self._store.quota) as incoming:
            landed: dict[ContentDigest, int] = {}
            try:
                self._answers.reach(partial(self._land, incoming, wanted, landed))
            finally:
                if landed:
                    self._publish(incoming, landed)

    def _land(self, incoming: Incoming, wanted: Lengths, landed: dict[ContentDigest, int]) -> None:
        for name, chunks in self._origin.fetch(list(wanted)):
            with blaming_remote(self._where), discreet():
                incoming.land(name, wanted[name], chunks)
            landed[name] = wanted[name]

    def _publish(self, incoming: Incoming, landed: Lengths) -> None:
        """With each object goes a manifest that names it: else a collector would take it at once."""
        with self._lock:
            known = list(reversed(self._known.items()))
        left, parts = set(landed), []
        for digest, one in known:
            if mine := left & one.lengths.keys():
                left -= mine
                groups = range(len(one.snapshot.layout.groups))
                runs = [
                    runs_of({b for b in one.coverage.blocks(g) if one.snapshot.blocks[b][g] in mine}) for g in groups
                ]
                signatures: tuple[Signature, ...] = ()
                with contextlib.suppress(Unreachable, Missing, Corrupt, FormatTooNew):
                    signatures = true_ones(self._vouching(digest, float("inf")), digest)
                parts.append((one.snapshot, Coverage(digest, tuple(runs)), signatures))
        with self.shelf.shared():
            incoming.publish(landed, set())
            for snapshot, coverage, signatures in parts:
                self._store.publish(snapshot, coverage)
                take_along(self.shelf.records, coverage.snapshot, signatures)

    # what a gateway does not do

    def land(self, grant: Grant, chunks: Iterable[Buffer], unpublished: int) -> int:
        raise _read_only()

    def publish(
        self, grant: Grant, label: str, expect: SnapshotDigest | None, manifest: bytes, coverage: bytes
    ) -> bytes:
        raise _read_only()

    def sign(self, grant: Grant, digest: SnapshotDigest, signatures: Sequence[Signature]) -> Sequence[Signature]:
        raise _read_only()

    def remove(self, grant: Grant, label: str, expect: SnapshotDigest) -> None:
        raise _read_only()


class _Names:
    """The names that the remote was seen with, in memory and in a JSON file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._refs: dict[str, Ref] = {}
        if path is not None:
            with contextlib.suppress(OSError, ValueError, RecursionError, msgspec.ValidationError, InputInvalid):
                plain = msgspec.convert(json.loads(path.read_bytes()), dict[str, tuple[str, int]])
                self._refs = {label: Ref(label, SnapshotDigest.parse(hex_), at) for label, (hex_, at) in plain.items()}

    def all(self) -> list[Ref]:
        with self._lock:
            return [self._refs[label] for label in sorted(self._refs)]

    def get(self, label: str) -> Ref | None:
        with self._lock:
            return self._refs.get(label)

    def replace(self, refs: Sequence[Ref]) -> None:
        with self._lock:
            self._keep({ref.label: ref for ref in refs})

    def note(self, label: str, ref: Ref | None) -> None:
        with self._lock:
            rest = {other: there for other, there in self._refs.items() if other != label}
            self._keep(rest if ref is None else {**rest, label: ref})

    def _keep(self, refs: dict[str, Ref]) -> None:
        if refs == self._refs:
            return
        self._refs = refs
        if self._path is not None:
            plain: Mapping[str, tuple[str, int]] = {ref.label: (ref.snapshot.hex, ref.updated) for ref in refs.values()}
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            root = Root(self._path.parent)
            try:
                root.make_folder("tmp")
                root.publish([Pending(self._path.name, [json.dumps(plain, ensure_ascii=False).encode() + b"\n"])])
            finally:
                root.close()


def _read_only() -> NotAllowed:
    return NotAllowed(
        "expected to be asked for reading only, because this server is a gateway, found another request. Push to what it serves from."
    )
