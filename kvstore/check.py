"""Verifying a store: every ref, its manifest, its coverage, every object; and what each name lost if something is damaged.

Changes no file but the index, which is a cache: a damaged one is made anew from the files.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from .codec import HEADER, Kind, check_object, decode_header
from .digest import ContentDigest, SnapshotDigest
from .errors import Corrupt, FormatTooNew, KVError, Missing, StoreCorrupt
from .index import Index
from .layout import MAX_OBJECT, Run
from .match import usable_at
from .objects import Objects, mending
from .plaintext import counted, size_text
from .shelf import FOLDERS, Shelf
from .snapshot import Coverage, Snapshot
from .store import Store

Progress = Callable[[int], None]
"""Called with the bytes of every few objects examined."""
_BATCH = 64
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Problem:
    """One damaged or absent file: its path in the store, what is wrong, the names it hurts, and what to do."""

    path: str
    found: str
    names: tuple[str, ...]
    todo: str


@dataclass(frozen=True, slots=True)
class Named:
    """One ref. ``lost``: promised (block, group) objects that are absent or damaged; ``usable``: how many leading tokens can still be
    continued from here, None where the manifest can't be read.

    A trimmed snapshot loses nothing by being trimmed: ``usable`` is all of its tokens.
    """

    label: str
    snapshot: SnapshotDigest
    tokens: int | None
    lost: tuple[tuple[int, int], ...]
    usable: int | None


@dataclass(frozen=True, slots=True)
class Report:
    """``problems`` are damage; ``notes`` are harmless: leftovers, files that are not ours, a remade index."""

    quick: bool
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    names: tuple[Named, ...]
    snapshots: int
    objects: int
    bytes: int

    @property
    def ok(self) -> bool:
        """Nothing is damaged or absent."""
        return not self.problems

    def value(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "ok": self.ok,
            "quick": self.quick,
            "snapshots": self.snapshots,
            "objects": self.objects,
            "bytes": self.bytes,
            "problems": [
                {"path": p.path, "found": p.found, "names": list(p.names), "todo": p.todo} for p in self.problems
            ],
            "names": [
                {
                    "name": n.label,
                    "snapshot": n.snapshot.hex,
                    "tokens": n.tokens,
                    "usable": n.usable,
                    "lost": len(n.lost),
                }
                for n in self.names
            ],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [f"{p.path}: {p.found} {p.todo}".rstrip() for p in self.problems]
        for n in self.names:
            if n.usable != n.tokens:
                lines.append(f"name {n.label!r}: {n.usable or 0} of {n.tokens or 'unknown'} tokens can be continued")
        lines += list(self.notes)
        how = "present with the right size" if self.quick else "verified"
        verdict = "ok" if self.ok else counted(len(self.problems), "problem")
        lines.append(
            f"{verdict}: {counted(self.snapshots, 'snapshot')}, {counted(self.objects, 'object')} {how}, {size_text(self.bytes)}"
        )
        return "\n".join(lines)


def check(store: Store, *, quick: bool = False, progress: Progress | None = None) -> Report:
    """Examines every file. ``quick``: objects by presence and size only, else every byte against its digests.

    A saver or collector at work at the same time is no problem: what it has just moved is looked for once more.
    """
    seen = _Seen()
    _read_refs(store.shelf, seen)
    _read_snapshots(store.shelf, seen)
    total = _examine_objects(store.shelf, seen, quick, progress)
    _judge(store.shelf, seen)
    _compare_index(store, seen)
    _foreign(store.shelf, seen)
    return Report(
        quick, tuple(seen.problems), tuple(seen.notes), tuple(seen.named), len(seen.snapshots), len(seen.sizes), total
    )


@dataclass(slots=True)
class _Seen:
    labels: dict[SnapshotDigest, list[str]] = field(default_factory=dict)
    snapshots: dict[SnapshotDigest, tuple[Snapshot, Coverage]] = field(default_factory=dict)
    uncovered: set[SnapshotDigest] = field(default_factory=set)
    """Of ``snapshots``, those whose coverage can't be read."""
    sizes: dict[bytes, int] = field(default_factory=dict)
    """Of every object file, by name."""
    damaged: dict[bytes, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    named: list[Named] = field(default_factory=list)

    def names(self, digest: SnapshotDigest) -> tuple[str, ...]:
        return tuple(self.labels.get(digest, ()))


def _read_refs(shelf: Shelf, seen: _Seen) -> None:
    for file in shelf.records.ref_files():
        try:
            ref = shelf.records.read_ref(file)
        except (Corrupt, FormatTooNew) as error:
            found = error.found if isinstance(error, Corrupt) else error.message
            seen.problems.append(Problem(f"refs/{file}", found, (), error.details.get("todo", "")))
            continue
        if ref is not None:
            seen.labels.setdefault(ref.snapshot, []).append(ref.label)


def _read_snapshots(shelf: Shelf, seen: _Seen) -> None:
    records = shelf.records
    for digest in sorted(seen.labels.keys() | set(records.snapshots())):
        names = seen.names(digest)
        todo = "No name needs it: `kvferry gc` collects it."
        if names:
            name = shlex.quote(names[0])
            todo = (
                f"`kvferry pull REMOTE {name}` fetches it again from a remote that has it; `kvferry prefill --no-reuse --name {name}` "
                f"with the same text makes it again; `kvferry rm {name}` gives it up."
            )
        try:
            snapshot = records.snapshot(digest)
        except Missing:
            if names:
                seen.problems.append(Problem(f"snapshots/{digest}", "expected a manifest, found none.", names, todo))
            continue
        except (Corrupt, FormatTooNew) as error:
            found, todo = _told(error, todo)
            seen.problems.append(Problem(f"snapshots/{digest}", found, names, todo))
            continue
        path = f"snapshots/{digest}.cov"
        try:
            coverage = records.coverage(digest, snapshot)
        except (Corrupt, FormatTooNew) as error:
            found, todo = _told(error, todo)
            seen.problems.append(Problem(path, found, names, todo))
            seen.uncovered.add(digest)
            coverage = Coverage(digest, ((),) * len(snapshot.layout.groups))
        else:
            if not any(coverage.runs):
                seen.problems.append(Problem(path, "expected a promise of some objects, found none.", names, todo))
        seen.snapshots[digest] = (snapshot, coverage)


def _told(error: KVError, todo: str) -> tuple[str, str]:
    """What was found, and what to do: what stands in a file's place and is none has to be moved away first."""
    if not isinstance(error, Corrupt):
        return error.message, ""
    return error.found, f"Move it away, then: {todo}" if isinstance(error.__cause__, StoreCorrupt) else todo


def _examine_objects(shelf: Shelf, seen: _Seen, quick: bool, progress: Progress | None) -> int:
    """Notes the size of every object, and the damaged ones. Returns the bytes examined."""
    total = 0
    names = shelf.objects.names()
    with ThreadPoolExecutor(2) as pool:
        while batch := list(islice(names, _BATCH)):
            sizes = [shelf.objects.size(name) for name in batch]
            here = [(name, size) for name, size in zip(batch, sizes, strict=True) if size is not None]
            faults = [] if quick else list(pool.map(lambda one: _fault(shelf, *one), here))
            for name, fault in zip([name for name, _ in here], faults, strict=False):
                if fault:
                    seen.damaged[name.raw] = fault
            for name, size in zip(batch, sizes, strict=True):
                if size is not None:
                    seen.sizes[name.raw] = size
                elif name.raw not in seen.damaged:
                    seen.damaged[name.raw] = (
                        "expected a plain file, found a link, a folder or something else, which was not followed."
                    )
            done = sum(size for _, size in here)
            total += done
            if progress is not None:
                progress(done)
    return total


def _fault(shelf: Shelf, name: ContentDigest, size: int) -> str | None:
    """What is wrong with an object's file; None if nothing is, or it was collected meanwhile."""
    try:
        data = memoryview(shelf.root.read(Objects.path(name), MAX_OBJECT + HEADER))
        header = decode_header(data, Kind.OBJECT, f"object {name}")
        check_object(header, [data[HEADER:]], name)
    except FileNotFoundError:
        return None
    except (Corrupt, FormatTooNew) as error:
        return _told(error, "")[0]
    return None


def _judge(shelf: Shelf, seen: _Seen) -> None:
    """What the damage means for each snapshot and name."""
    hurt: dict[bytes, tuple[str, set[str]]] = {raw: (found, set()) for raw, found in seen.damaged.items()}
    absent: set[bytes] = set()
    for digest, (snapshot, coverage) in seen.snapshots.items():
        lost = []
        for g in range(len(snapshot.layout.groups)):
            for b in coverage.blocks(g):
                content = snapshot.blocks[b][g]
                expected = HEADER + snapshot.object_bytes(b, g)
                size = seen.sizes.get(content.raw)
                if size is None and content.raw not in hurt:
                    size = shelf.objects.size(content)  # saved since the listing
                if size != expected and content.raw not in hurt:
                    found = "none" if size is None else f"one of {size} bytes"
                    absent |= {content.raw} if size is None else set()
                    hurt[content.raw] = (f"expected a file of {expected} bytes, found {found}.", set())
                if content.raw in hurt:
                    hurt[content.raw][1].update(seen.names(digest))
                    lost.append((b, g))
        for label in seen.names(digest):
            usable = usable_at(snapshot, coverage.without(set(lost)), snapshot.tokens)[0]
            seen.named.append(Named(label, digest, snapshot.tokens, tuple(lost), usable))
    unread = [(label, digest) for digest, labels in seen.labels.items() for label in labels]
    seen.named += [Named(label, digest, None, (), None) for label, digest in unread if digest not in seen.snapshots]
    seen.named.sort(key=lambda named: named.label)
    kept = {
        content.raw
        for d, (snapshot, _) in seen.snapshots.items()
        if d in seen.labels
        for block in snapshot.blocks
        for content in block
    }
    for raw, (found, names) in sorted(hurt.items()):
        todo = "No name needs it: `kvferry gc` collects it."
        if names:
            todo = mending(min(names), absent=raw in absent)
        elif raw in kept:
            todo = "No name promises it, so that it hurts nobody; `kvferry pull --verify` of the whole snapshot replaces it."
        if "not followed" in found:
            todo = f"Move it away, then: {todo}"
        seen.problems.append(Problem(Objects.path(ContentDigest(raw)), found, tuple(sorted(names)), todo))


def _compare_index(store: Store, seen: _Seen) -> None:
    """Makes the index anew where it says something else than the files."""
    readable = {
        digest: (snapshot.tokens, _trimmed(coverage.runs))
        for digest, (snapshot, coverage) in seen.snapshots.items()
        if digest not in seen.uncovered
    }

    def run(index: Index) -> bool:
        return index.sound() and index.contents() == readable

    try:
        if not store.indexed(run):
            store.indexed(Index.rebuild)
            if not store.indexed(run):
                seen.notes.append("index: differs from the files after it was made anew; a saver may be at work.")
            else:
                seen.notes.append("index: differed from the files and was made anew.")
    except StoreCorrupt as error:
        seen.problems.append(Problem("index.sqlite", error.found, (), error.details.get("todo", "")))
    except OSError as error:
        seen.notes.append(f"index: {error.strerror}.")
    except KVError as error:
        seen.notes.append(f"index: {error}")


def _trimmed(runs: tuple[tuple[Run, ...], ...]) -> tuple[tuple[Run, ...], ...]:
    """Without the empty groups at the end, as `Index.contents` has it."""
    return _trimmed(runs[:-1]) if runs and not runs[-1] else runs


def _foreign(shelf: Shelf, seen: _Seen) -> None:
    """Files that are not ours, and what dead processes left."""
    ours = {*FOLDERS, "lock", "format.json", "index.sqlite", "index.sqlite-wal", "index.sqlite-shm"}
    strange = [name for name in shelf.root.names("") if name not in ours]
    for folder, names in _listed(shelf, seen):
        for name in names:
            good = {
                "objects": len(name) == 1 and set(name) <= _HEX,
                "snapshots": _is_digest(name.removesuffix(".cov")),
                "refs": _is_digest(name),
                "tmp": True,
                "quarantine": True,
            }.get(folder, len(name) == 63 and set(name) <= _HEX)
            if not good:
                strange.append(f"{folder}/{name}")
            elif folder == "snapshots" and name.endswith(".cov"):
                if shelf.records.has_snapshot(SnapshotDigest.parse(name.removesuffix(".cov"))):
                    continue
                seen.notes.append(f"{folder}/{name}: a coverage without its manifest; `kvferry gc` collects it.")
            elif folder in ("tmp", "quarantine"):
                seen.notes.append(f"{folder}/{name}: unfinished; `kvferry gc` collects it if nobody is at work on it.")
    seen.notes += [f"{path}: not a name that kvferry gives; it is left alone." for path in strange]


def _listed(shelf: Shelf, seen: _Seen) -> Iterator[tuple[str, list[str]]]:
    folders = ["objects", "snapshots", "refs", "tmp", "quarantine"]
    for folder in [*folders, *(f"objects/{fan}" for fan in shelf.root.names("objects") if len(fan) == 1)]:
        try:
            yield folder, shelf.root.names(folder)
        except StoreCorrupt as error:
            seen.problems.append(Problem(folder, error.found, (), "Look at it with `ls -l`, then move it away."))


def _is_digest(name: str) -> bool:
    return len(name) == 64 and set(name) <= _HEX
