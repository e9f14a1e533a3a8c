"""The store: save, find, load. Everything a caller needs; the files and the index are its parts.

Publish order is objects, then manifest with its coverage, then ref. A saver holds the store's lock shared from its first
dedupe check to the ref, so that a collector can't take what it relies on.
"""

from __future__ import annotations

import errno
import sqlite3
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

from .codec import Codec, encode_snapshot, object_header
from .digest import ContentDigest, SnapshotDigest, root_key
from .disk import below
from .errors import InputInvalid, ObjectCorrupt, ObjectMissing, SnapshotMissing, StoreBusy
from .files import Buffer, Pending
from .gauge import Gauge
from .identity import Identity
from .index import Index, damaged, refusal
from .items import Item
from .layout import BLOCK, Layout, Rows, block_span, blocks_of
from .loss import lost_object, not_covered
from .match import Match, match_items
from .mounts import network_file_system
from .objects import Decoding, Objects
from .quota import Quota, records_bytes
from .records import conflict
from .saving import NOTHING_SAVED, Contents, Expected, Saved, beginning, held_places, made_snapshot, require_name
from .search import Behind, Query, search
from .shelf import Shelf
from .snapshot import Coverage, Lineage, Link, Receipt, Snapshot, runs_of
from .staging import Rows as StagedRows
from .staging import Staging

_T = TypeVar("_T")
FileSystem = Callable[[Path], str | None]
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class Store:
    """A content-addressed store of KV. One instance serves one thread; any number of processes may share a folder.

    `publish`, `answer` and the quota may be used from several threads: they take turns at the index.
    """

    def __init__(self, shelf: Shelf, *, network: FileSystem = network_file_system) -> None:
        """``network``: says on which network file system a folder lies, if it does. There the index is held in memory."""
        self.shelf = shelf
        self._network = network
        self._index: Index | None = None
        self._memory: Index | None = None
        self._turns = threading.RLock()
        """At the index. Taken where the index's write transaction stands in the order of the store's locks."""
        self.quota = Quota(shelf, self)

    @classmethod
    def open(cls, path: Path, *, create: bool = True) -> Self:
        """Opens (or makes) the store in a folder. `StoreMissing`, `StoreCorrupt`, `FormatTooNew`."""
        return cls(Shelf.open(path, create=create))

    def close(self) -> None:
        self._close_index()
        self._close_memory()
        self.shelf.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # save

    def save(
        self,
        layout: Layout,
        identity: Identity,
        items: Sequence[Item],
        rows: Rows,
        *,
        namespace: str,
        name: str | None = None,
        lineage: Sequence[Lineage],
        pending: int | None = None,
        head: str | None = None,
        receipt: Receipt | None = None,
        model: str = "",
        covered: Sequence[int] | None = None,
        known: Sequence[Contents] = (),
        expect: Expected = "anything",
        codec: Codec = "raw",
    ) -> Saved:
        """Publishes the KV of ``items`` durably, under ``name`` if given (moving the name if it is taken).

        ``expect``: where the name must stand (`standing`), else `RefConflict`, mostly before anything is written.

        ``rows`` holds rows ``[covered[g], len(items))`` of each group g (all by default); they are only read, and
        nobody may write to them meanwhile. ``lineage`` says per block who computed it. ``known`` are the contents of leading full
        blocks that are unchanged since they were loaded or saved: they are neither hashed nor written again where the store has them, and only they may lie below
        ``covered``. Of the others, an object that is here already is read, and written again if it is damaged; so is a damaged
        ref of the name. New objects are written raw, the fast way, or as ``planes``, the small one. When it returns the snapshot survives power loss; when it raises no reader sees a part of one: the name
        is where it was, and at most the whole snapshot is here as unnamed cache. In a store with a quota that it would exceed, unnamed
        snapshots are evicted first; `StoreFull` where that isn't enough.
        """
        require_name(name, expect)
        held = held_places(layout, len(items), covered, known)
        if codec == "planes":
            self.shelf.require("planes")

        def write(gauge: Gauge | None) -> Saved:
            before: SnapshotDigest | None = None
            with self.shelf.shared(), Staging(self.shelf.root, codec, gauge) as staging:
                if name is not None:
                    before = self.shelf.records.standing(name)
                    if expect != "anything" and before != expect:
                        raise conflict(name, expect, before)
                contents = self._contents(layout, items, rows, held, known, staging)
                snapshot = made_snapshot(
                    layout, identity, items, namespace, contents, lineage, pending, head, receipt, model
                )  # fmt: skip
                dropped = None if name is not None else self._fork(snapshot)
                if dropped == 0:
                    return NOTHING_SAVED
                if dropped is not None:
                    snapshot = beginning(snapshot, dropped)
                coverage, places = self._present(snapshot, staging)
                hits = {(b, g) for b, g in places if b >= len(known)}
                if gauge is not None:
                    gauge.require(records_bytes(snapshot, coverage), more=staging.bytes)
                self.shelf.root.sync_all(self._unsettled(snapshot, hits))
                count, written = staging.publish({content for block in snapshot.blocks for content in block})
                healed = self._heal(snapshot, rows, hits)
                coverage = self._publish(snapshot, coverage)
                if name is not None:
                    self.shelf.records.move_ref(name, before, coverage.snapshot)
            return Saved(coverage.snapshot, snapshot, coverage, count + len(healed), written + sum(healed), dropped)

        return self.quota.within(write)

    def _contents(
        self,
        layout: Layout,
        items: Sequence[Item],
        rows: Rows,
        held: set[tuple[int, int]],
        known: Sequence[Contents],
        staging: Staging,
    ) -> list[Contents]:
        """Per block the digests of its groups. Objects that ``rows`` holds and the store lacks are staged."""
        count, groups = blocks_of(len(items)), range(len(layout.groups))
        places = [(b, g) for b in range(count) for g in groups]
        # A known block is not read where its object is here already.
        absent = {
            (b, g)
            for b, block in enumerate(known)
            for g in groups
            if (b, g) in held and not self.shelf.objects.complete(block[g], BLOCK * layout.row_bytes(g))
        }
        todo = [(b, g) for b, g in places if b >= len(known) or (b, g) in absent]
        names = staging.add(
            [
                StagedRows(rows.spans(g, *block_span(b, len(items))), known[b][g] if b < len(known) else None)
                for b, g in todo
            ]
        )
        fresh = dict(zip(todo, names, strict=True))
        return [known[b] if b < len(known) else tuple(fresh[b, g] for g in groups) for b in range(count)]

    def _present(self, snapshot: Snapshot, staging: Staging) -> tuple[Coverage, set[tuple[int, int]]]:
        """The coverage once ``staging`` is published; and the places of the objects that were here before."""
        hits: set[tuple[int, int]] = set()
        present: list[set[int]] = [set() for _ in snapshot.layout.groups]
        for b, block in enumerate(snapshot.blocks):
            for g, content in enumerate(block):
                if staging.has(content):
                    present[g].add(b)
                elif self.shelf.objects.complete(content, snapshot.object_bytes(b, g)):
                    present[g].add(b)
                    hits.add((b, g))
        digest, _ = encode_snapshot(snapshot)
        return Coverage(digest, tuple(runs_of(blocks) for blocks in present)), hits

    def _heal(self, snapshot: Snapshot, rows: Rows, hits: set[tuple[int, int]]) -> list[int]:
        """Writes those objects among ``hits`` again that are damaged, from ``rows``. Returns the bytes of each one's file."""
        batch: dict[ContentDigest, Pending] = {}
        for b, g in sorted(hits):
            name, length = snapshot.blocks[b][g], snapshot.object_bytes(b, g)
            if name not in batch and not self.shelf.objects.sound(name, length):
                parts: list[Buffer] = [object_header(name, length), *rows.spans(g, *block_span(b, snapshot.tokens))]
                batch[name] = Pending(Objects.path(name), parts)
        self.shelf.root.publish(list(batch.values()))
        return [sum(len(part) for part in pending.parts) for pending in batch.values()]

    def _unsettled(self, snapshot: Snapshot, hits: set[tuple[int, int]]) -> list[str]:
        """The folders of those objects among ``hits`` that no published snapshot promises.

        Another saver renamed them in and may not have synced their folders yet, or was killed before it did.
        """
        if not hits:
            return []

        def run(index: Index) -> list[str]:
            folders: dict[str, None] = {}
            row = index.root(snapshot.root)
            for b, link in enumerate(snapshot.chain()):
                row, promised = index.settled(row, link, b, len(link.contents))
                for g, content in enumerate(link.contents):
                    if g not in promised and (b, g) in hits:
                        folders[Objects.path(content).rpartition("/")[0]] = None
            return list(folders)

        return self.indexed(run)

    def publish(self, snapshot: Snapshot, coverage: Coverage) -> Coverage:
        """Publishes a manifest whose covered objects are here, and enters it in the index. The caller holds `Shelf.shared`.

        Returns the coverage that now holds: joined with what was promised before. Counts for a quota, and is never refused for one.
        """
        gauge = self.quota.gauge()
        if gauge is not None:
            gauge.add(records_bytes(snapshot, coverage))
        return self._publish(snapshot, coverage)

    def _publish(self, snapshot: Snapshot, coverage: Coverage) -> Coverage:
        """As `publish`, of what is counted already."""

        def run(index: Index) -> Coverage:
            with index.writing(), self.shelf.records.locked_snapshots():
                now = self.shelf.records.put_snapshot(snapshot, coverage)
                index.add(snapshot, now)
            return now

        return self.indexed(run)

    def _fork(self, snapshot: Snapshot) -> int | None:
        """The first block whose tokens are here, in the same chain so far, with other bytes; None if there is none."""

        def run(index: Index) -> int | None:
            parent = index.root(snapshot.root)
            for b, link in enumerate(snapshot.chain()):
                here = [] if parent is None else index.children(parent, link.items)
                parent = _same(here, link)
                if parent is None:
                    return b if here else None
            return None

        return self.indexed(run)

    # find and load

    def find(
        self,
        layout: Layout,
        identity: Identity,
        items: Sequence[Item],
        *,
        namespace: str,
        head: str | None = None,
        lineage: Lineage | None = None,
    ) -> Match | None:
        """The chain from which most of ``items`` can be reused; None if nothing can.

        What the files promise is looked for: a match is as long as the objects that it reads are there (absent ones make it
        shorter, damaged ones don't). A store that can only be read is searched too. The longest usable wins, then one of ``lineage`` (of the few most recent), then the most recently used. Exact to
        the token: part of a block serves as well as a block. ``head`` is the asker's head digest, for the pending token of an exact
        hit. A damaged snapshot is passed over if another serves, and ``Match.reason`` names it; else its `Corrupt` error is raised.
        Counted, for `kvferry stats store`, and a use of the snapshot: `look` is neither.
        """
        query = Query(layout, root_key(identity.digest, layout.digest, namespace), tuple(items), head, lineage)

        def note(index: Index, match: Match | None) -> None:
            found = None if match is None else (match.digest, match.n)
            index.note(identity.digest, namespace, len(items), found)

        return self._answered(query, note)

    def look(
        self, layout: Layout, identity: Identity, items: Sequence[Item], *, namespace: str, head: str | None = None
    ) -> Match | None:
        """What `find` would answer, for somebody who is only curious."""
        query = Query(layout, root_key(identity.digest, layout.digest, namespace), tuple(items), head, None)
        return self._answered(query, lambda _index, _match: None)

    def answer(self, query: Query) -> Match | None:
        """As `look`, for an asker of whose identity only the root key is known."""
        return self._answered(query, lambda _index, _match: None)

    def _answered(self, query: Query, note: Callable[[Index, Match | None], None]) -> Match | None:
        def run(index: Index, strict: bool = True) -> Match | None:
            match = search(self.shelf, index, query, strict=strict)
            note(index, match)
            return match

        # Files may have been taken away behind the index; or it contradicts itself.
        for cure in (partial(self.searched, Index.catch_up), self._renew_index):
            try:
                return self.searched(run)
            except Behind:
                cure()
        return self.searched(partial(run, strict=False))

    def standing(self, name: str) -> SnapshotDigest | None:
        """Where a name stands, for ``expect`` of `save`; None where there is none, or where its file is damaged and says nothing."""
        return self.shelf.records.standing(name)

    def resolve(self, name: str) -> SnapshotDigest:
        """The snapshot of a name, or of 64 hex digits. `SnapshotMissing`."""
        ref = self.shelf.records.ref(name)
        if ref is not None:
            return ref.snapshot
        if len(name) == 64 and not set(name) - set("0123456789abcdef"):
            return SnapshotDigest.parse(name)
        raise SnapshotMissing(f"no snapshot named {name!r} in {self.shelf.path}. `kvferry ls` lists them.", label=name)

    def match(self, name: str, *, at: int | None = None, head: str | None = None) -> Match:
        """The snapshot ``name``, to be continued after its first ``at`` tokens (all by default).

        `SnapshotMissing`; `NotCovered` when rows that this continuation would read are not here: nothing shorter is put in its place.
        """
        digest = self.resolve(name)
        snapshot = self.shelf.records.snapshot(digest)
        coverage = self.shelf.records.coverage(digest, snapshot)
        asked = snapshot.tokens if at is None else at
        if not 1 <= asked <= snapshot.tokens:
            raise InputInvalid(f"{name!r}: expected a position of 1 to {snapshot.tokens} tokens, found {at}")
        match = match_items(digest, snapshot, coverage, snapshot.items[:asked], head)
        if match.n < asked - 1:
            raise not_covered(name, match, coverage)
        return match

    def load(self, match: Match, into: Rows) -> int:
        """Reads the rows of ``match.runs`` into host memory and verifies every byte.

        Returns the bytes of content read. On an error (`ObjectMissing`, `ObjectCorrupt`) these rows may hold anything, also bytes that are
        not what was saved: the caller clears ``into``.
        """
        try:
            return self._load(match, into)
        except (ObjectMissing, ObjectCorrupt) as error:
            raise lost_object(error, match, self.shelf) from error

    def _load(self, match: Match, into: Rows) -> int:
        snapshot, objects, places = match.snapshot, Objects(self.shelf.root), match.objects()
        names = [snapshot.blocks[block][group] for block, group in places]
        total = 0
        with self.shelf.reading(), Decoding() as decoding, objects.opened(names) as files:
            for name, (block, group), fd in zip(names, places, files, strict=True):
                length = snapshot.object_bytes(block, group)
                start, stop = block_span(block, snapshot.tokens)
                targets = into.spans(group, start, min(stop, match.runs[group][1]))
                rest = objects.take(fd, name, _whole(targets, length // len(targets)))
                if rest is not None:
                    decoding.add(rest)
                total += length
        return total

    # the index

    def indexed(self, run: Callable[[Index], _T]) -> _T:
        """Runs a query on the index, opened on first use; a damaged one is rebuilt from the files and asked again.

        `StoreBusy` when another process writes to it for too long; `OSError` when the disk fails it or is full.
        """
        try:
            with self._turns, below(self.shelf.path):
                try:
                    return run(self._opened())
                except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # its message quotes a damaged schema
                    if isinstance(error, sqlite3.Error) and not damaged(error):
                        raise
                self._discard_index()
                return run(self._opened())
        except sqlite3.OperationalError as error:
            raise refusal(error, self.shelf.path) from error

    def searched(self, run: Callable[[Index], _T]) -> _T:
        """As `indexed`, for a query. A store that can only be read, or whose index is held for too long, gets one in memory, made from its files."""
        with self._turns:
            if self._memory is None:
                try:
                    return self.indexed(run)
                except OSError as error:
                    if error.errno not in _READ_ONLY:
                        raise
                except StoreBusy:  # somebody sleeps while he writes to the index, which is behind
                    pass
                self._close_index()
                self._memory = Index.in_memory(self.shelf)
            else:
                self._memory.refresh()
            return run(self._memory)

    def _renew_index(self) -> None:
        with self._turns:
            if self._memory is None:
                self._discard_index()
            self._close_memory()

    def _close_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _opened(self) -> Index:
        if self._index is None:
            local = self._network(self.shelf.path) is None
            self._index = Index.open(self.shelf) if local else Index.in_memory(self.shelf)
        elif not self._index.kept:
            self._index.refresh()
        return self._index

    def _discard_index(self) -> None:
        self._close_index()
        if self._network(self.shelf.path) is None:
            Index.discard(self.shelf)

    def _close_index(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None


def _whole(targets: Sequence[memoryview], stride: int) -> Sequence[memoryview]:
    """Targets for a whole object, ``stride`` bytes a layer's K or V: where fewer rows are wanted, the rest goes nowhere."""
    if sum(map(len, targets)) == stride * len(targets):
        return targets
    return [part for target in targets for part in (target, memoryview(bytearray(stride - len(target))))]


def _same(here: Sequence[tuple[int, object]], link: Link) -> int | None:
    return next((row for row, block in here if block == link.id), None)
