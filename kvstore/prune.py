"""Collecting what no name needs: a plan that can be printed, `apply` moves to ``trash/``, `purge` deletes what lies there.

Named snapshots stay; an unnamed one is cache: `plan` takes all of it, unless it was used within ``keep_seconds``, and `eviction` the least
recently used of it. A snapshot's objects go when no other manifest names them. Marking reads refs and manifests, never the index (which
only knows who was used when); where one that stays can't be read nobody knows what it needs, and nothing is collected. Nothing here
writes file content, so it works on a full disk.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from .digest import ContentDigest, SnapshotDigest
from .disk import below
from .errors import Corrupt, SnapshotMissing, StoreBusy, StoreCorrupt, WouldDeleteMost
from .files import Root
from .gauge import physical_bytes, tree_bytes
from .index import Index
from .objects import Objects
from .plaintext import counted, size_text
from .records import Records
from .usage import Shelved

SLICE = 0.04
"""Seconds of work under the store's exclusive lock, before savers and pullers get their turn for `PAUSE`."""
PAUSE = 0.025
MOST = 0.5
"""The share of a store's bytes that one run may delete for good unasked."""

_T = TypeVar("_T")
Progress = Callable[[int], None]
"""Called after every slice with the bytes that it moved or deleted."""


class Indexed(Shelved, Protocol):
    """A store as a collector needs it: `Store` is one."""

    def indexed(self, run: Callable[[Index], _T]) -> _T: ...


@dataclass(frozen=True, slots=True)
class Doomed:
    """An unnamed snapshot to be collected. ``tokens``: None if the manifest can't be read; ``bytes`` of manifest and coverage."""

    digest: SnapshotDigest
    tokens: int | None
    bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What `apply` would move to ``trash/``, each with its bytes as files; and what lies there already, for `purge`.

    ``leftovers``: what dead processes left in ``tmp/``, ``quarantine/`` and ``snapshots/``, by path. An object may be listed because a
    saver has not published its manifest yet: `apply` looks again.
    """

    snapshots: tuple[Doomed, ...]
    objects: tuple[tuple[ContentDigest, int], ...]
    leftovers: tuple[tuple[str, int], ...]
    trash: tuple[tuple[str, int], ...]

    @property
    def bytes(self) -> int:
        """All of it; what is in the trash already is not counted."""
        parts = (sum(d.bytes for d in self.snapshots), *(sum(n for _, n in p) for p in (self.objects, self.leftovers)))
        return sum(parts)

    @property
    def trash_bytes(self) -> int:
        return sum(n for _, n in self.trash)

    def value(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "snapshots": [{"snapshot": d.digest.hex, "tokens": d.tokens, "bytes": d.bytes} for d in self.snapshots],
            "objects": len(self.objects),
            "object_bytes": sum(n for _, n in self.objects),
            "leftovers": [{"path": path, "bytes": n} for path, n in self.leftovers],
            "trash_bytes": self.trash_bytes,
            "bytes": self.bytes,
        }

    def __str__(self) -> str:
        lines = [
            f"snapshot {d.digest.hex[:12]}  {counted(d.tokens, 'token') if d.tokens else 'unreadable'}"
            for d in self.snapshots
        ]
        lines += [f"leftover {path}  {size_text(n)}" for path, n in self.leftovers]
        lines.append(f"{counted(len(self.objects), 'object')}, {size_text(sum(n for _, n in self.objects))}")
        lines.append(f"{size_text(self.bytes)} to collect, {size_text(self.trash_bytes)} in the trash")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `apply` moved. ``kept``: planned snapshots and objects that are needed after all, or were gone already."""

    snapshots: int
    objects: int
    leftovers: int
    bytes: int
    kept: int

    def value(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("snapshots", "objects", "leftovers", "bytes", "kept")}


def plan(store: Indexed, *, keep_seconds: float = 0.0) -> Plan:
    """What can be collected now. Changes nothing.

    ``keep_seconds``: unnamed snapshots used (saved, found) that recently stay, as far as the index knows, and those that were used in the
    future: a clock lied, and nobody knows when. 0 keeps none, so that what `rm` made free is freed. `RefCorrupt`, `SnapshotCorrupt`,
    `SnapshotMissing`, `FormatTooNew` when what a name needs can't be known: remove the name or restore its snapshot first.
    """
    records = store.shelf.records
    marks = _Marks(records)
    recent = store.indexed(lambda index: index.used_since(time.time() - keep_seconds)) if keep_seconds > 0 else set()
    doomed = [d for d, _ in _doomed(store, marks, recent)]
    marks.refresh({d.digest for d in doomed})
    return _planned(store, doomed, _unneeded(store, marks), tuple(_leftovers(store)))


def eviction(store: Indexed, free: int, slack: int = 0) -> Plan:
    """What makes ``free`` bytes free, the trash and leftovers included: beyond these the least recently used unnamed snapshots, as few as
    suffice, each with the objects that no other one needs. Everything that can go where that isn't enough. Where snapshots have to go, they
    make ``slack`` bytes more. Changes nothing; raises as `plan` does.
    """
    marks = _Marks(store.shelf.records)
    unnamed = _doomed(store, marks, set())
    marks.refresh({d.digest for d, _ in unnamed})
    sizes = {name.raw: (name, size) for name, size in _unneeded(store, marks)}
    needs = {d.digest: contents & sizes.keys() for d, contents in unnamed}
    needed_by = Counter(raw for contents in needs.values() for raw in contents)
    objects = [sizes[raw] for raw in sizes.keys() - needed_by.keys()]
    leftovers = tuple(_leftovers(store))
    chosen = [d for d, _ in unnamed if d.tokens is None]  # as long as one of them stays nothing else can go
    left = free - sum(n for _, n in (*leftovers, *_trash(store), *objects)) - sum(d.bytes for d in chosen)
    left += slack if left > 0 else 0
    for doomed, _ in sorted(unnamed, key=_last_use(store)):
        if left <= 0:
            break
        if doomed.tokens is None:
            continue
        chosen.append(doomed)
        needed_by.subtract(needs[doomed.digest])
        gone = [sizes[raw] for raw in needs[doomed.digest] if not needed_by[raw]]
        objects += gone
        left -= doomed.bytes + sum(n for _, n in gone)
    return _planned(store, chosen, sorted(objects), leftovers)


def require_share(store: Shelved, plan: Plan, most: float = MOST) -> None:
    """Raises `WouldDeleteMost` if ``plan`` and then `purge` would delete more than this share of the bytes of all files of the store."""
    total, gone = physical_bytes(store.shelf.root), plan.bytes + plan.trash_bytes
    if gone > most * total:
        raise WouldDeleteMost(
            f"{store.shelf.path}: expected to delete at most {most:.0%} of {size_text(total)} unasked, found {size_text(gone)} to delete. "
            f"`kvferry gc --dry-run` prints what; `kvferry ls` lists what is kept. If that is right, run it again with --yes.",
            bytes=gone,
            total=total,
            most=most,
        )


def _doomed(store: Shelved, marks: _Marks, spared: set[SnapshotDigest]) -> list[tuple[Doomed, frozenset[bytes]]]:
    """The unnamed snapshots but those to be spared, and what each needs."""
    root, found = store.shelf.root, []
    for digest in store.shelf.records.snapshots():
        if digest in marks.named or digest in spared:
            continue
        size = sum(root.size(f"snapshots/{digest}{end}") or 0 for end in ("", ".cov", ".sig"))
        tokens, contents = None, frozenset[bytes]()
        try:
            snapshot = store.shelf.records.snapshot(digest)
        except SnapshotMissing:  # another collector took it
            continue
        except Corrupt:
            pass  # not needed by anyone, and no use to anyone
        else:
            tokens, contents = snapshot.tokens, frozenset(c.raw for block in snapshot.blocks for c in block)
        found.append((Doomed(digest, tokens, size), contents))
    return found


def _unneeded(store: Shelved, marks: _Marks) -> list[tuple[ContentDigest, int]]:
    """The objects that are not marked, with the bytes of their files."""
    objects = store.shelf.objects
    found = ((name, objects.size(name)) for name in objects.names() if not marks.needs(name))
    return [(name, size) for name, size in found if size is not None]


def _trash(store: Shelved) -> tuple[tuple[str, int], ...]:
    root = store.shelf.root
    return tuple((f"trash/{name}", tree_bytes(root, f"trash/{name}")) for name in root.names("trash"))


def _planned(
    store: Shelved,
    doomed: list[Doomed],
    objects: list[tuple[ContentDigest, int]],
    leftovers: tuple[tuple[str, int], ...],
) -> Plan:
    return Plan(tuple(doomed), tuple(objects), leftovers, _trash(store))


def _last_use(store: Indexed) -> Callable[[tuple[Doomed, frozenset[bytes]]], tuple[float, float, SnapshotDigest]]:
    """Sorts by last use as far as the index knows, then by the times of the manifests."""
    used = store.indexed(lambda index: index.uses())

    def key(entry: tuple[Doomed, frozenset[bytes]]) -> tuple[float, float, SnapshotDigest]:
        digest = entry[0].digest
        return used.get(digest, 0.0), _modified(store.shelf.root, f"snapshots/{digest}"), digest

    return key


def _modified(root: Root, path: str) -> float:
    try:
        with root.open(path) as fd:
            return os.fstat(fd).st_mtime
    except (OSError, StoreCorrupt):
        return 0.0


def apply(store: Indexed, plan: Plan, progress: Progress | None = None) -> Pruned:
    """Moves what ``plan`` lists to ``trash/``, where running readers still find it, in slices of about `SLICE` seconds.

    A manifest or ref that appeared since the plan protects what it names. Manifests go first, durably, so that no coverage ever
    promises an absent object. May be stopped at any point and planned again. Raises as `plan` does, and `StoreBusy`.
    """
    work = _Work(store, {d.digest for d in plan.snapshots})
    moved = [0, 0, 0]
    total = 0
    stages: tuple[Callable[[Iterator[Any]], Iterator[int]], ...] = (work.snapshots, work.objects, work.leftovers)
    store.shelf.root.make_folder("trash")
    for stage, (step, items) in enumerate(zip(stages, (plan.snapshots, plan.objects, plan.leftovers), strict=True)):
        queue, work.done = iter(items), not items
        while not work.done:
            with store.shelf.exclusive():
                sizes = list(step(queue))
            moved[stage] += len(sizes)
            total += sum(sizes)
            if progress is not None:
                progress(sum(sizes))
            time.sleep(PAUSE)  # a waiting saver looks at the lock every 20 ms
    kept = len(plan.snapshots) + len(plan.objects) - moved[0] - moved[1]
    return Pruned(moved[0], moved[1], moved[2], total, kept)


def purge(store: Shelved, progress: Progress | None = None) -> int:
    """Deletes what lies in ``trash/``, in slices while no reader loads. Returns the bytes. `StoreBusy` if one loads for too long."""
    root, freed = store.shelf.root, 0
    there = root.names("trash")
    names, done = iter(there), not there
    while not done:
        with below(root.path), root.lock("trash", exclusive=True):
            end, sizes = time.monotonic() + SLICE, 0
            done = True
            for name in names:
                sizes += tree_bytes(root, f"trash/{name}")
                with suppress(FileNotFoundError):  # another purge
                    root.remove_tree(f"trash/{name}")
                if time.monotonic() > end:
                    done = False
                    break
        freed += sizes
        if progress is not None:
            progress(sizes)
        time.sleep(0 if done else PAUSE)
    if there:
        with below(root.path):
            root.sync("trash")
    return freed


class _Marks:
    """Which snapshots refs name, and which objects the manifests that stay name. Grows as files appear, never shrinks."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._needed: set[bytes] = set()
        self._seen: set[SnapshotDigest] = set()
        self.named = self._names()

    def _names(self) -> dict[SnapshotDigest, str]:
        return {ref.snapshot: ref.label for ref in self._records.refs()}

    def refresh(self, doomed: set[SnapshotDigest]) -> None:
        """Reads what appeared; takes what is named now out of ``doomed``."""
        self.named = self._names()
        doomed.difference_update(self.named)
        for digest in (self.named.keys() | set(self._records.snapshots())) - doomed - self._seen:
            try:
                blocks = self._records.snapshot(digest).blocks
            except (Corrupt, SnapshotMissing) as error:
                label = self.named.get(digest)
                whose = "an unnamed snapshot" if label is None else f"the name {label!r}"
                raise type(error)(
                    f"nothing more is collected, because nobody knows what {whose} needs: {error.message} "
                    f"Remove the name (`kvferry rm`) if it is not needed.",
                    **error.details,
                ) from error
            for contents in blocks:
                self._needed.update(content.raw for content in contents)
            self._seen.add(digest)

    def needs(self, name: ContentDigest) -> bool:
        return name.raw in self._needed


class _Work:
    """The steps of one `apply`. Each takes from a queue until the slice is over; ``done`` when the queue is empty."""

    def __init__(self, store: Indexed, doomed: set[SnapshotDigest]) -> None:
        self._store = store
        self._root = store.shelf.root
        self._doomed = doomed
        self._marks = _Marks(store.shelf.records)
        self.done = False

    def _sliced(self, queue: Iterator[Any]) -> Iterator[Any]:
        end = time.monotonic() + SLICE
        for item in queue:
            yield item
            if time.monotonic() > end:
                return
        self.done = True

    def snapshots(self, queue: Iterator[Doomed]) -> Iterator[int]:
        """Bytes of each manifest and coverage moved. The ref lock keeps names from being given or moved meanwhile."""
        moved: list[Doomed] = []
        begun: list[bool] = []
        entered: list[bool] = []

        def run(index: Index | None) -> None:
            with ExitStack() as stack:
                if index is not None:
                    stack.enter_context(index.writing())
                if not entered:  # an index found damaged is made anew and asked again, when the files are moved already
                    stack.enter_context(self._store.shelf.records.locked_snapshots())
                    begun.append(True)
                    moved.extend(self._move_snapshots(queue))
                    entered.append(True)
                if index is not None:
                    for doomed in moved:
                        index.remove(doomed.digest)

        with self._store.shelf.records.locked_refs():
            try:
                self._store.indexed(run)
            except (OSError, StoreBusy):
                # A full disk, say. The folder's time tells the index later that it is behind.
                if not begun:
                    run(None)
                elif not entered:  # the files themselves: what was moved may not be durable, so nothing more may go
                    raise
        yield from (doomed.bytes for doomed in moved)

    def _move_snapshots(self, queue: Iterator[Doomed]) -> Iterator[Doomed]:
        self._marks.refresh(self._doomed)
        moved = []
        for doomed in self._sliced(queue):
            digest = doomed.digest
            if digest in self._doomed and _set_aside(self._root, f"snapshots/{digest}", f"trash/{digest}.snapshot"):
                for end in (".cov", ".sig"):
                    _set_aside(self._root, f"snapshots/{digest}{end}", f"trash/{digest}{end}")
                self._doomed.discard(digest)
                moved.append(doomed)
        if moved:
            self._root.sync_all(["trash", "snapshots"])
        return iter(moved)

    def objects(self, queue: Iterator[tuple[ContentDigest, int]]) -> Iterator[int]:
        """Bytes of each object moved."""
        self._marks.refresh(self._doomed)
        for name, size in self._sliced(queue):
            if not self._marks.needs(name) and _set_aside(self._root, Objects.path(name), f"trash/{name.hex}"):
                yield size

    def leftovers(self, queue: Iterator[tuple[str, int]]) -> Iterator[int]:
        """Bytes of each leftover moved."""
        records = self._store.shelf.records
        with records.locked_refs(), records.locked_snapshots():
            for path, size in self._sliced(queue):
                if _stale(self._store, path, partial(_set_aside, self._root, path, _trash_name(path))):
                    yield size


def _leftovers(store: Shelved) -> Iterator[tuple[str, int]]:
    """What dead processes left, by path. None while a saver or puller is at work: its files can't be told apart."""
    root, records = store.shelf.root, store.shelf.records
    try:
        with store.shelf.exclusive(seconds=1.0), records.locked_refs(), records.locked_snapshots():
            for folder in ("tmp", "quarantine", "snapshots"):
                for name in root.names(folder):
                    path = f"{folder}/{name}"
                    if (folder != "snapshots" or name.endswith((".cov", ".sig"))) and _stale(store, path, lambda: True):
                        yield path, tree_bytes(root, path)
    except StoreBusy:
        return


def _stale(store: Shelved, path: str, then: Callable[[], bool]) -> bool:
    """``then()`` if nobody uses the file or folder at ``path``; under the exclusive, ref and snapshot locks.

    No saver runs, so nobody writes to ``tmp/``; a transfer keeps its folder in ``quarantine/`` locked; a coverage without its manifest
    promises nothing, and signatures vouch for nothing.
    """
    folder, _, name = path.partition("/")
    if folder == "snapshots":
        digest = name.removesuffix(".cov").removesuffix(".sig")
        ours = len(digest) == 64 and not set(digest) - set("0123456789abcdef")
        return ours and not store.shelf.records.has_snapshot(SnapshotDigest.parse(digest)) and then()
    if folder == "tmp":
        return then()
    try:
        with store.shelf.root.lock(path, exclusive=True, seconds=0):
            return then()
    except (StoreBusy, FileNotFoundError, StoreCorrupt):
        return False


def _trash_name(path: str) -> str:
    folder, _, name = path.partition("/")
    return f"trash/{name}" if folder == "snapshots" else f"trash/{folder}-{name}"


def _set_aside(root: Root, source: str, target: str) -> bool:
    """Renames; False where there is no source. On a disk too full for another entry it is deleted, if no reader loads."""
    try:
        return root.set_aside(source, target)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
    try:
        with root.lock("trash", exclusive=True, seconds=1.0):
            root.remove_tree(source)
    except FileNotFoundError:
        return False
    return True
