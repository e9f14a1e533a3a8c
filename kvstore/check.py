"""Verifying a store: every ref, its manifest, its coverage, every object; and what each name lost if something is damaged.

Changes no file but the index, which is a cache: a damaged one is made anew from the files, and it keeps which objects have waited longest.
Memory: 40 bytes an object, one manifest and two objects at a time.
"""

from __future__ import annotations

import contextlib
import errno
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from .check_report import Kind, Named, Problem, Report
from .codec import HEADER, check_object, decode_header
from .codec import Kind as FrameKind
from .digest import ContentDigest, SnapshotDigest
from .errors import Corrupt, FormatTooNew, KVError, Missing, StoreBusy, StoreCorrupt
from .gauge import COUNT, tree_bytes
from .index import Index
from .inventory import FULL, Inventory, Level, Turn
from .layout import MAX_OBJECT, Run
from .match import usable_at
from .objects import Objects, mending
from .plaintext import counted, size_text
from .quota import FILE as QUOTA
from .shelf import DAMAGED, FOLDERS, Shelf
from .snapshot import Coverage, Snapshot, trimmed
from .store import Store

Progress = Callable[[int], None]
"""Called with the bytes of every few objects read."""
_BATCH = 64
_HEX = frozenset("0123456789abcdef")
_UNNEEDED = "No name needs it: `kvferry gc` collects it."
_NOT_PLAIN = "expected a plain file, found a link, a folder or something else, which was not followed."


def check(
    store: Store,
    level: Level = FULL,
    *,
    begin: Callable[[int], None] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Examines every file; of the objects it reads those that ``level`` asks for, and compares every byte of them with their digests.

    A saver, collector or repair at work at the same time is no problem: what it has just moved is looked for once more. ``begin`` is told
    how many bytes will be read, before the first is.
    """
    shelf, seen = store.shelf, _Seen()
    _read_refs(shelf, seen)
    seen.objects = Inventory.of(shelf.objects)
    turns = seen.objects.turns(level, _waited(store))
    if begin is not None:
        begin(sum(turn.bytes for turn in turns))
    done, read_objects, read_bytes = _read_objects(shelf, seen, turns, level.seconds, progress)
    _note_checked(store, [turn.part for turn in done])
    for digest in sorted(seen.labels.keys() | set(shelf.records.snapshots())):
        _examine_snapshot(shelf, seen, digest)
    _tell_objects(seen)
    seen.named.sort(key=lambda named: named.label)
    _compare_index(store, seen)
    _foreign(shelf, seen)
    return Report(
        level, tuple(seen.problems), tuple(seen.notes), tuple(seen.named), seen.snapshots, len(seen.objects), seen.objects.bytes,
        read_objects, read_bytes, len(done) == len(turns),
    )  # fmt: skip


@dataclass(slots=True)
class Fault:
    """A damaged or absent object: what was found, and the names that promise it, or keep it without promising it (``kept``).

    ``newer``: a newer version wrote it, and nobody here can judge it.
    """

    found: str
    absent: bool = False
    names: set[str] = field(default_factory=set)
    kept: bool = False
    newer: bool = False


@dataclass(slots=True)
class _Seen:
    labels: dict[SnapshotDigest, list[str]] = field(default_factory=dict)
    objects: Inventory = field(default_factory=Inventory)
    hurt: dict[bytes, Fault] = field(default_factory=dict)
    snapshots: int = 0
    indexed: dict[SnapshotDigest, tuple[int, tuple[tuple[Run, ...], ...]]] = field(default_factory=dict)
    """What the index should say."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    named: list[Named] = field(default_factory=list)


def pull_command(label: str, *, trimmed: bool, verify: bool) -> str:
    """The command that gets what is missing of a name from a remote."""
    flags = f"{'--verify ' if verify else ''}{'--trimmed ' if trimmed else ''}"
    return f"kvferry pull {flags}REMOTE {shlex.quote(label)}"


def _read_refs(shelf: Shelf, seen: _Seen) -> None:
    for file in shelf.records.ref_files():
        try:
            ref = shelf.records.read_ref(file)
        except (Corrupt, FormatTooNew) as error:
            found = error.found if isinstance(error, Corrupt) else error.message
            seen.problems.append(Problem(_kind("ref", error), f"refs/{file}", found, (), error.details.get("todo", "")))
            continue
        if ref is not None:
            seen.labels.setdefault(ref.snapshot, []).append(ref.label)


def _kind(kind: Kind, error: KVError) -> Kind:
    return "newer" if isinstance(error, FormatTooNew) else kind


# objects


def _waited(store: Store) -> dict[int, int] | None:
    """When each part of the objects was last read, in runs; None where nobody keeps that, or it can't be had."""
    try:
        return store.indexed(Index.checked)
    except (OSError, StoreBusy, StoreCorrupt):
        return None


def _note_checked(store: Store, parts: Sequence[int]) -> None:
    """A store that can only be read, or has no room, keeps no order: then the next sample may read the same objects."""
    if parts:
        try:
            store.indexed(lambda index: index.note_checked(parts))
        except (OSError, StoreBusy, StoreCorrupt):
            return


def _read_objects(
    shelf: Shelf, seen: _Seen, turns: Sequence[Turn], seconds: float | None, progress: Progress | None
) -> tuple[list[Turn], int, int]:
    """Notes damaged objects. Returns the parts that were read whole, and how many objects and bytes that were."""
    objects, end = seen.objects, None if seconds is None else time.monotonic() + seconds
    for at in range(len(objects)):
        if objects.size(at) is None:
            fault = object_fault(shelf, objects.name(at))
            if (
                fault is not None and not fault.absent
            ):  # else it was collected between its listing and the look at its size
                seen.hurt[objects.name(at).raw] = fault
    done: list[Turn] = []
    count = total = 0
    with ThreadPoolExecutor(2) as pool:
        for batch in _batches(turns):
            if end is not None and time.monotonic() >= end:
                break
            names = [
                objects.name(at)
                for turn in batch
                for at in range(turn.first, turn.last)
                if objects.size(at) is not None
            ]
            for name, fault in zip(names, pool.map(lambda name: object_fault(shelf, name), names), strict=True):
                if fault is not None:  # a saver may just have written it again over the file that was read
                    fault = object_fault(shelf, name)
                if fault is not None and not fault.absent:  # else it was collected
                    seen.hurt[name.raw] = fault
            done += batch
            count += len(names)
            read = sum(turn.bytes for turn in batch)
            total += read
            if progress is not None:
                progress(read)
    return done, count, total


def _batches(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """Parts of together about `_BATCH` objects."""
    batch: list[Turn] = []
    for turn in turns:
        batch.append(turn)
        if sum(one.last - one.first for one in batch) >= _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def object_fault(shelf: Shelf, name: ContentDigest, path: str | None = None) -> Fault | None:
    """What is wrong with an object's file, every byte of it read; None if nothing is. ``path``: where it lies, if not in its own place."""
    try:
        data = memoryview(shelf.root.read(path or Objects.path(name), MAX_OBJECT + HEADER))
        header = decode_header(data, FrameKind.OBJECT, f"object {name}")
        check_object(header, [data[HEADER:]], name)
    except FileNotFoundError:
        return Fault("expected a file, found none.", absent=True)
    except FormatTooNew as error:
        return Fault(error.message, newer=True)
    except StoreCorrupt:
        return Fault(_NOT_PLAIN)
    except Corrupt as error:
        return Fault(error.found)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return Fault(f"expected bytes, found that the disk fails to read them ({error.strerror}).")
    return None


# snapshots


def _examine_snapshot(shelf: Shelf, seen: _Seen, digest: SnapshotDigest) -> None:
    """One manifest, its coverage and what of it is here. Keeps no snapshot: a store may have many."""
    names = tuple(seen.labels.get(digest, ()))
    path, todo = f"snapshots/{digest}", _UNNEEDED
    if names:
        name = shlex.quote(names[0])
        todo = (
            f"`kvferry pull REMOTE {name}` fetches it again from a remote that has it; `kvferry prefill --no-reuse --name {name}` "
            f"with the same text makes it again; `kvferry rm {name}` gives it up."
        )
    try:
        snapshot = shelf.records.snapshot(digest)
    except Missing:
        if names:
            seen.problems.append(Problem("manifest", path, "expected a manifest, found none.", names, todo))
    except (Corrupt, FormatTooNew) as error:
        found, todo = _told(error, todo)
        seen.problems.append(Problem(_kind("manifest", error), path, found, names, todo))
    else:
        seen.snapshots += 1
        if names and not shelf.records.has_snapshot(digest) and _still_named(shelf, names, digest):
            found = "expected a manifest, found it in the trash only."
            seen.problems.append(
                Problem("manifest", path, found, names, f"`kvferry check --repair` puts it back; {todo}")
            )
        _check_signatures(shelf, seen, digest)
        coverage = _coverage(shelf, seen, digest, snapshot, todo)
        lost = _lost(shelf, seen, snapshot, coverage)
        for b, g in lost:
            seen.hurt[snapshot.blocks[b][g].raw].names.update(names)
        if names and seen.hurt:
            for contents in snapshot.blocks:
                for raw in (content.raw for content in contents if content.raw in seen.hurt):
                    seen.hurt[raw].kept = True
        here = coverage.without(set(lost))
        usable = usable_at(snapshot, here, snapshot.tokens)[0]
        pull = [
            pull_command(label, trimmed=_is_trimmed(snapshot, coverage), verify=bool(lost))
            if lost or usable < snapshot.tokens
            else None
            for label in names
        ]
        seen.named += [
            Named(label, digest, snapshot.tokens, tuple(lost), usable, command)
            for label, command in zip(names, pull, strict=True)
        ]
        return
    seen.named += [
        Named(label, digest, None, (), None, pull_command(label, trimmed=False, verify=False)) for label in names
    ]


def _still_named(shelf: Shelf, names: Sequence[str], digest: SnapshotDigest) -> bool:
    return any(shelf.records.standing(label) == digest for label in names)


def _coverage(shelf: Shelf, seen: _Seen, digest: SnapshotDigest, snapshot: Snapshot, todo: str) -> Coverage:
    """What is promised of a snapshot; nothing where the file can't be read, which is noted."""
    names, path = tuple(seen.labels.get(digest, ())), f"snapshots/{digest}.cov"
    try:
        coverage = shelf.records.coverage(digest, snapshot)
    except (Corrupt, FormatTooNew) as error:
        found, todo = _told(error, todo)
        seen.problems.append(Problem(_kind("coverage", error), path, found, names, todo))
        return Coverage(digest, ((),) * len(snapshot.layout.groups))
    if not any(coverage.runs) and shelf.root.size(path) is None and shelf.records.has_snapshot(digest):
        found = "expected a promise of some objects, found none."
        if names:
            seen.problems.append(Problem("coverage", path, found, names, todo))
        else:  # a save that nobody was told of, ended by a power loss between the two files
            seen.notes.append(f"{path}: {found} No name needs it: `kvferry gc` collects it.")
    seen.indexed[digest] = (snapshot.tokens, _without_empty(coverage.runs))
    return coverage


def _check_signatures(shelf: Shelf, seen: _Seen, digest: SnapshotDigest) -> None:
    """Their form; whether they are true, whoever requires them looks."""
    try:
        shelf.records.signatures(digest)
    except (Corrupt, FormatTooNew) as error:
        names, found = tuple(seen.labels.get(digest, ())), error.found if isinstance(error, Corrupt) else error.message
        todo = error.details.get("todo", "")
        seen.problems.append(Problem(_kind("signatures", error), f"snapshots/{digest}.sig", found, names, todo))


def _is_trimmed(snapshot: Snapshot, coverage: Coverage) -> bool:
    """Whether nothing is promised that a trimmed snapshot does without."""
    tail = trimmed(coverage.snapshot, snapshot)
    left_out = {(b, g) for g in range(len(tail.runs)) for b in range(len(snapshot.blocks)) if not tail.has(b, g)}
    return bool(left_out) and not any(coverage.has(b, g) for b, g in left_out)


def _told(error: KVError, todo: str) -> tuple[str, str]:
    """What was found, and what to do: what stands in a file's place and is none has to be moved away first."""
    if not isinstance(error, Corrupt):
        return error.message, ""
    return error.found, f"Move it away, then: {todo}" if isinstance(error.__cause__, StoreCorrupt) else todo


def _lost(shelf: Shelf, seen: _Seen, snapshot: Snapshot, coverage: Coverage) -> list[tuple[int, int]]:
    """The promised (block, group) objects that are absent or damaged."""
    lost: list[tuple[int, int]] = []
    new: dict[tuple[int, int], Fault] = {}
    for g in range(len(snapshot.layout.groups)):
        for b in coverage.blocks(g):
            content = snapshot.blocks[b][g]
            if content.raw in seen.hurt:
                lost.append((b, g))
            elif (hurt := _misfit(shelf, seen, content, snapshot.object_bytes(b, g))) is not None:
                new[b, g] = hurt
    if new:  # collected, or narrowed by a repair, while it was looked at?
        still = _standing(shelf, coverage, snapshot)
        for (b, g), hurt in new.items():
            if still.has(b, g):
                seen.hurt.setdefault(snapshot.blocks[b][g].raw, hurt)
                lost.append((b, g))
    return sorted(lost)


def _misfit(shelf: Shelf, seen: _Seen, content: ContentDigest, length: int) -> Fault | None:
    """That an object's file is absent, or can't hold ``length`` bytes of content. Asks the disk once an object, where the listing doesn't tell."""
    at = seen.objects.find(content.raw)
    if at is not None and seen.objects.looked_at(at, HEADER + length):
        return None
    if shelf.objects.complete(content, length):  # as planes; or saved, or written again, since the listing
        if at is not None:
            seen.objects.note(at)
        return None
    size = shelf.objects.size(content)
    found = "none" if size is None else f"one of {size} bytes"
    return Fault(f"expected a file with {length} bytes of content, found {found}.", absent=size is None)


def _standing(shelf: Shelf, coverage: Coverage, snapshot: Snapshot) -> Coverage:
    """What is promised now; nothing of a snapshot that is gone."""
    if shelf.records.has_snapshot(coverage.snapshot):
        with contextlib.suppress(Corrupt, FormatTooNew):
            return shelf.records.coverage(coverage.snapshot, snapshot)
        return coverage
    return Coverage(coverage.snapshot, ((),) * len(coverage.runs))


def _tell_objects(seen: _Seen) -> None:
    for raw, hurt in sorted(seen.hurt.items()):
        todo = _UNNEEDED
        if hurt.newer:
            todo = ""
        elif hurt.names:
            todo = mending(min(hurt.names), absent=hurt.absent)
        elif hurt.kept:
            todo = "No name promises it, so that it hurts nobody; `kvferry pull --verify` of the whole snapshot replaces it."
        if hurt.found == _NOT_PLAIN:
            todo = f"Move it away, then: {todo}"
        path = Objects.path(ContentDigest(raw))
        kind: Kind = "newer" if hurt.newer else "object"
        seen.problems.append(Problem(kind, path, hurt.found, tuple(sorted(hurt.names)), todo))


# the index, and what else lies there


def _compare_index(store: Store, seen: _Seen) -> None:
    """Makes the index anew where it says something else than the files."""

    def run(index: Index) -> bool:
        return index.sound() and index.contents() == seen.indexed

    try:
        if not store.indexed(run):
            store.indexed(Index.rebuild)
            if not store.indexed(run):
                seen.notes.append("index: differs from the files after it was made anew; a saver may be at work.")
            else:
                seen.notes.append("index: differed from the files and was made anew.")
    except StoreCorrupt as error:
        seen.problems.append(Problem("index", "index.sqlite", error.found, (), error.details.get("todo", "")))
    except OSError as error:
        seen.notes.append(f"index: {error.strerror}.")
    except KVError as error:
        seen.notes.append(f"index: {error}")


def _without_empty(runs: tuple[tuple[Run, ...], ...]) -> tuple[tuple[Run, ...], ...]:
    """Without the empty groups at the end, as `Index.contents` has it."""
    return _without_empty(runs[:-1]) if runs and not runs[-1] else runs


def _foreign(shelf: Shelf, seen: _Seen) -> None:
    """Files that are not ours, what dead processes left, what repair set aside, and folders that a copy left out."""
    ours = {
        *FOLDERS,
        DAMAGED,
        COUNT,
        QUOTA,
        "lock",
        "format.json",
        "index.sqlite",
        "index.sqlite-wal",
        "index.sqlite-shm",
    }
    there = shelf.root.names("")
    strange = [name for name in there if name not in ours]
    for folder, names in _listed(shelf, seen):
        for name in names:
            good = {
                "objects": len(name) == 1 and set(name) <= _HEX,
                "snapshots": _is_digest(name.removesuffix(".cov").removesuffix(".sig")),
                "refs": _is_digest(name),
                "tmp": True,
                "quarantine": True,
            }.get(folder, len(name) == 63 and set(name) <= _HEX)
            if not good:
                strange.append(f"{folder}/{name}")
            elif folder == "snapshots" and name.endswith((".cov", ".sig")):
                if shelf.records.has_snapshot(SnapshotDigest.parse(name[:-4])):
                    continue
                what = "a coverage" if name.endswith(".cov") else "signatures"
                seen.notes.append(f"{folder}/{name}: {what} without its manifest; `kvferry gc` collects it.")
            elif folder in ("tmp", "quarantine"):
                seen.notes.append(f"{folder}/{name}: unfinished; `kvferry gc` collects it if nobody is at work on it.")
    seen.notes += [f"{path}: not a name that kvferry gives; it is left alone." for path in strange]
    if lacking := [name for name in (*FOLDERS, "lock") if name not in there]:
        seen.notes.append(f"{', '.join(lacking)}: not here; `kvferry check --repair` puts what was empty back.")
    if DAMAGED in there and (kept := shelf.root.names(DAMAGED)):
        size = size_text(tree_bytes(shelf.root, DAMAGED))
        told = f"{counted(len(kept), 'repair')} set aside what was damaged, {size}; delete it when you don't need it any more."
        seen.notes.append(f"{DAMAGED}: {told}")


def _listed(shelf: Shelf, seen: _Seen) -> Iterator[tuple[str, list[str]]]:
    folders = ["objects", "snapshots", "refs", "tmp", "quarantine"]
    for folder in [*folders, *(f"objects/{fan}" for fan in shelf.root.names("objects") if len(fan) == 1)]:
        try:
            yield folder, shelf.root.names(folder)
        except StoreCorrupt as error:
            todo = "Look at it with `ls -l`, then move it away."
            seen.problems.append(Problem("folder", folder, error.found, (), todo))


def _is_digest(name: str) -> bool:
    return len(name) == 64 and set(name) <= _HEX
