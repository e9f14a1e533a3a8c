"""Repairing a store: what is damaged is set aside, no coverage promises what is not here, no name stands for nothing.

Nothing is deleted: damaged files go to ``damaged/<id>/``, beside a note of where each lay, and no collector looks there. Before an object is
given up, ``trash/`` and dead transfers are looked into for a sound copy; a damaged ref is read as far as it proves itself. Each step leaves
a store that holds what it promises, so that a repair may be killed at any point and run again; running it twice changes nothing more.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from .check import object_fault, pull_command
from .check_report import Problem, Report
from .codec import HEADER, MAX_RECORD, decode_snapshot, encode_coverage, encode_ref
from .digest import ContentDigest, SnapshotDigest, label_file
from .disk import below
from .errors import Corrupt, FormatTooNew, Missing, RefConflict, RefCorrupt, StoreBusy, StoreCorrupt
from .files import Pending
from .index import Index
from .match import usable_at
from .objects import Objects
from .salvage import read_label, read_snapshot
from .shelf import DAMAGED
from .snapshot import Coverage, Ref, Snapshot, runs_of, trimmed, whole
from .store import Store

NOTE = "note.json"
_BATCH = 16
"""Objects that are verified once more, and set aside, under one hold of the store's lock."""


@dataclass(frozen=True, slots=True)
class Action:
    """What was done, or is to be done, about one file: its path in the store, and the deed as a sentence without its subject."""

    path: str
    done: str


@dataclass(frozen=True, slots=True)
class Lost:
    """A name that lost something, as it stands now. ``label`` None: of ``path``, a ref that can't be read, nobody knows it any more.

    ``snapshot``: what it stands for, or stood for, as far as that is known. ``usable``: of its ``tokens``, how many leading ones can still be
    continued; None: the name is gone. ``objects``: promised once, and not here. ``pull``: the command that gets the rest from a remote.
    """

    path: str
    label: str | None
    snapshot: SnapshotDigest | None = None
    tokens: int | None = None
    usable: int | None = None
    objects: int = 0
    pull: str | None = None

    def __str__(self) -> str:
        if self.label is None:
            return f"{self.path}: nobody knows this name any more; what it may have stood for is now named recovered-... (`kvferry ls`)"
        here = "it stands for nothing that can be read, and is gone"
        if self.usable is not None:
            here = f"{self.usable} of {self.tokens} tokens can be continued"
        return f"name {self.label!r}: {here}; `{self.pull}` gets the rest from a remote that has it"


@dataclass(frozen=True, slots=True)
class Repaired:
    """What `apply` did. ``folder``: where it set things aside, None if it set nothing aside. ``names``: those that lost something."""

    folder: str | None
    actions: tuple[Action, ...]
    names: tuple[Lost, ...]

    @property
    def lost(self) -> bool:
        """Whether some name lost something. Cache, which no name needs, may be lost without it."""
        return bool(self.names)

    def value(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "folder": self.folder,
            "lost": self.lost,
            "actions": [{"path": action.path, "done": action.done} for action in self.actions],
            "names": [
                {
                    "name": n.label,
                    "path": n.path,
                    "snapshot": None if n.snapshot is None else n.snapshot.hex,
                    "tokens": n.tokens,
                    "usable": n.usable,
                    "lost": n.objects,
                    "pull": n.pull,
                }
                for n in self.names
            ],
        }

    def __str__(self) -> str:
        lines = [f"{action.path}: {action.done}" for action in self.actions]
        lines += [str(name) for name in self.names]
        if self.folder is not None:
            told = f"whose {NOTE} says what lay where; delete it when you don't need it any more"
            lines.append(f"set aside in {self.folder}, {told}")
        return "\n".join(lines)


_PLANS = {
    "object": "is set aside, if no sound copy is found, and promised no longer",
    "manifest": "is set aside, with its coverage and the names that stand for it",
    "coverage": "is made anew from the objects that are here",
    "ref": "is given anew as far as its file proves what it was; else it is set aside",
    "signatures": "are set aside: nobody vouches by them any more",
    "folder": "is set aside, and an empty folder takes its place",
    "index": "is left alone",
    "newer": "is left alone: upgrade kvferry",
}


def plan(report: Report) -> list[Action]:
    """What `apply` would do about what a check found. Changes nothing."""
    return [Action(problem.path, _PLANS[problem.kind]) for problem in report.problems]


def apply(store: Store, report: Report) -> Repaired:
    """Repairs what ``report`` found, looking at each file again. Savers, readers and collectors may be at work; one repair at a time.

    `StoreBusy`; `StoreCorrupt` where something else stands in the place of a folder that holds the rest: nothing is changed then; `OSError`.
    """
    shelf = store.shelf
    for problem in report.problems:
        if problem.kind == "folder" and "/" not in problem.path:
            where = str(shelf.path / problem.path)
            todo = "Put the folder back in its place (nothing was changed), then run it again."
            raise StoreCorrupt.at(where, problem.found.rstrip("."), todo=todo, path=where)
    with below(shelf.path):
        shelf.complete()
        if all(problem.kind in ("index", "newer") for problem in report.problems):
            return Repaired(None, (), ())
        shelf.root.make_folder(DAMAGED)
        with shelf.root.lock(DAMAGED, exclusive=True):
            return _Work(store, report.problems).run()


class _Work:
    """One repair. Locks are taken in the store's order: ``lock``, ``refs``, the index, ``snapshots``."""

    def __init__(self, store: Store, problems: Sequence[Problem]) -> None:
        self._store, self._root, self._records = store, store.shelf.root, store.shelf.records
        self._problems = problems
        self._folder: str | None = None
        self._copied: set[SnapshotDigest] = set()
        self._actions: list[Action] = []
        self._lost: dict[SnapshotDigest, set[tuple[int, int]]] = {}
        self._gone: list[Lost] = []

    def run(self) -> Repaired:
        self._clear_dead()
        for path in self._paths("folder"):
            self._replace_folder(path)
        for path in self._paths("ref"):
            self._mend_ref(path)
        for path in self._paths("manifest"):
            self._give_up_manifest(SnapshotDigest.parse(path.rpartition("/")[2]))
        self._mend_objects(
            [ContentDigest.parse(path.replace("/", "")[len("objects") :]) for path in self._paths("object")]
        )
        for path in self._paths("coverage"):
            self._make_coverage(SnapshotDigest.parse(path.rpartition("/")[2].removesuffix(".cov")))
        for path in self._paths("signatures"):
            self._drop_signatures(path)
        names = sorted([*self._gone, *self._hurt()], key=lambda lost: (lost.label is None, lost.label, lost.path))
        return Repaired(self._folder, tuple(self._actions), tuple(names))

    def _paths(self, kind: str) -> list[str]:
        return [problem.path for problem in self._problems if problem.kind == kind]

    def _note(self, path: str, done: str) -> None:
        self._actions.append(Action(path, done))

    # what is set aside

    def _clear_dead(self) -> None:
        """Folders of repairs that were killed before they set anything aside."""
        for name in self._root.names(DAMAGED):
            folder = f"{DAMAGED}/{name}"
            with contextlib.suppress(OSError, StoreCorrupt):
                if self._root.names(folder) == [NOTE]:
                    self._root.discard(f"{folder}/{NOTE}")
                self._root.remove_folder(folder)  # fails where something is in it

    def _place(self) -> str:
        """This repair's folder; made with its note, durably, before anything lies there."""
        if self._folder is None:
            folder = f"{DAMAGED}/{secrets.token_hex(8)}"
            self._root.make_folder(folder)
            found = [{"path": p.path, "kind": p.kind, "found": p.found, "names": list(p.names)} for p in self._problems]
            text = json.dumps(
                {"set aside by": "kvferry check --repair", "problems": found}, ensure_ascii=False, indent=1
            )
            self._root.publish([Pending(f"{folder}/{NOTE}", [text.encode() + b"\n"])])
            self._root.sync(DAMAGED)
            self._folder = folder
        return self._folder

    def _aside(self, path: str, name: str) -> bool:
        """Moves what stands at ``path``, whatever it is, out of the way, durably. False if nothing stands there."""
        folder = self._place()
        if not self._root.set_aside(path, f"{folder}/{name}"):
            return False
        self._root.sync_all([folder, path.rpartition("/")[0]])
        return True

    def _replace_folder(self, path: str) -> None:
        with self._store.shelf.exclusive():
            with contextlib.suppress(StoreCorrupt, FileNotFoundError), self._root.folder(path):
                return  # it is one by now
            if self._aside(path, path.replace("/", "-")):
                self._note(path, "set aside; an empty folder takes its place")
            self._root.make_folder(path)
            self._root.sync("objects")

    # refs

    def _mend_ref(self, path: str) -> None:
        """What the file proves is given anew. What a name may have stood for gets one before the ref goes: else it would be collected."""
        file = path.rpartition("/")[2]
        with self._records.locked_refs():
            if not self._is_damaged(file):
                return
            data = self._raw(path)
            here = set(self._records.snapshots())
            label, digest = read_label(data, file), read_snapshot(data, here)
            if label is not None and digest is not None:
                self._root.publish([Pending(f"{self._place()}/ref-{file}", [data])])
                self._root.publish([Pending(path, [encode_ref(Ref(label, digest, int(time.time())))])])
                self._note(path, f"the name {label!r} is given anew: its file still proved what it stood for")
                return
        unnamed = here - {ref.snapshot for ref in self._records.readable_refs()} if digest is None else {digest}
        for one in sorted(unnamed):
            self._keep(f"recovered-{one.hex[:12]}", one)
        with self._records.locked_refs():
            if not (self._is_damaged(file) and self._aside(path, f"ref-{file}")):
                return
        self._lose(label, path, None)
        what = "its label can't be read" if label is None else f"nobody knows what the name {label!r} stood for"
        self._note(path, f"set aside: {what}")

    def _lose(self, label: str | None, path: str, digest: SnapshotDigest | None) -> None:
        pull = None if label is None else pull_command(label, trimmed=False, verify=False)
        self._gone.append(Lost(path, label, digest, pull=pull))

    def _is_damaged(self, file: str) -> bool:
        try:
            self._records.read_ref(file)
        except RefCorrupt:
            return True
        except FormatTooNew:
            return False
        return False

    def _raw(self, path: str) -> bytes:
        """What a file holds; nothing where something else stands in its place, or the disk fails."""
        try:
            return self._root.read(path, MAX_RECORD + HEADER)
        except (OSError, StoreCorrupt):
            return b""

    def _keep(self, label: str, digest: SnapshotDigest) -> None:
        """A name for what may have had one."""
        with contextlib.suppress(RefConflict, Missing):  # somebody has such a name; it was collected
            self._records.move_ref(label, None, digest)
            self._note(f"snapshots/{digest}", f"named {label!r}, because a damaged name may have stood for it")

    # manifests

    def _give_up_manifest(self, digest: SnapshotDigest) -> None:
        """Names first: a name never stands for a manifest that is not here."""
        path = f"snapshots/{digest}"
        with self._store.shelf.exclusive(), self._records.locked_refs():
            if self._is_sound(digest):
                return
            spare = self._spare_manifest(digest)
            labels = (
                []
                if spare is not None
                else [ref.label for ref in self._records.readable_refs() if ref.snapshot == digest]
            )
            for label in labels:
                ref = f"refs/{label_file(label)}"
                self._aside(ref, f"ref-{label_file(label)}")
                self._lose(label, ref, digest)
                self._note(ref, f"the name {label!r} is set aside: nothing can be read of what it stood for")

            def run(index: Index) -> None:
                with index.writing(), self._records.locked_snapshots():
                    if self._root.set_aside(path, f"{self._place()}/{digest}.snapshot"):
                        self._note(path, "set aside")
                    if spare is not None:
                        self._root.publish([Pending(path, [spare])])
                        self._note(path, "put back from the trash")
                    else:
                        for end in (".cov", ".sig"):
                            self._root.set_aside(f"{path}{end}", f"{self._place()}/{digest}{end}")
                    self._root.sync_all([self._place(), "snapshots"])
                    index.remove(digest)

            self._store.indexed(run)

    def _is_sound(self, digest: SnapshotDigest) -> bool:
        """Or it can't be judged."""
        return self._reads(f"snapshots/{digest}", digest)

    def _reads(self, path: str, digest: SnapshotDigest) -> bool:
        try:
            decode_snapshot(self._raw(path), digest)
        except FormatTooNew:
            return True
        except Corrupt:
            return False
        return True

    def _spare_manifest(self, digest: SnapshotDigest) -> bytes | None:
        """A sound copy that a collector moved away."""
        path = f"trash/{digest}.snapshot"
        return self._raw(path) if self._reads(path, digest) else None

    # objects

    def _mend_objects(self, bad: Sequence[ContentDigest]) -> None:
        """Copies are put back; of the others no coverage promises any before its file is set aside."""
        naming = _Naming(self._store, {name.raw for name in bad})
        for at in range(0, len(bad), _BATCH):
            with self._store.shelf.exclusive():  # no saver counts on one of them meanwhile
                left = [name for name in bad[at : at + _BATCH] if self._is_bad(name) and not self._put_back(name)]
                for digest in naming.of(left):
                    self._narrow(digest, {name.raw for name in left})
                for name in left:
                    if self._aside(Objects.path(name), name.hex):
                        self._note(Objects.path(name), "set aside")

    def _is_bad(self, name: ContentDigest) -> bool:
        fault = object_fault(self._store.shelf, name)
        return fault is not None and not fault.newer

    def _put_back(self, name: ContentDigest) -> bool:
        """A sound copy from the trash, or from a dead transfer, in the place of what is damaged or absent."""
        target = Objects.path(name)
        for folder, path in self._copies(name):
            with contextlib.suppress(FileNotFoundError, StoreBusy, StoreCorrupt), contextlib.ExitStack() as stack:
                if folder is not None:  # a living transfer holds it
                    stack.enter_context(self._root.lock(folder, exclusive=True, seconds=0))
                if object_fault(self._store.shelf, name, path) is None:
                    self._root.sync_file(path)
                    self._aside(target, name.hex)
                    self._root.move([(path, target)])
                    self._note(target, f"put back from {path.rpartition('/')[0]}")
                    return True
        return False

    def _copies(self, name: ContentDigest) -> Iterator[tuple[str | None, str]]:
        yield None, f"trash/{name.hex}"
        for entry in self._root.names("quarantine"):
            yield f"quarantine/{entry}", f"quarantine/{entry}/{name.hex}"

    def _narrow(self, digest: SnapshotDigest, bad: Set[bytes]) -> None:
        """Promises these objects no longer; the coverage as it was is kept beside what is set aside."""
        with contextlib.suppress(
            Corrupt, FormatTooNew, Missing
        ):  # such a coverage promises nothing; it is made anew later
            snapshot = self._records.snapshot(digest)
            coverage = self._records.coverage(digest, snapshot)
            places = {
                (b, g)
                for g in range(len(coverage.runs))
                for b in coverage.blocks(g)
                if snapshot.blocks[b][g].raw in bad
            }
            if places:
                if digest not in self._copied:
                    self._root.publish([Pending(f"{self._place()}/{digest}.cov", [encode_coverage(coverage)])])
                    self._copied.add(digest)
                self._promise(snapshot, coverage.without(places))
                self._lost.setdefault(digest, set()).update(places)
                self._note(f"snapshots/{digest}.cov", f"promises {len(places)} objects less")

    def _promise(self, snapshot: Snapshot, coverage: Coverage, unless: Callable[[], bool] = lambda: False) -> None:
        """Replaces a coverage, ``unless`` under the locks that is not wanted any more."""

        def run(index: Index) -> None:
            with index.writing(), self._records.locked_snapshots():
                if not unless():
                    self._root.publish([Pending(f"snapshots/{coverage.snapshot}.cov", [encode_coverage(coverage)])])
                    index.add(snapshot, coverage)

        self._store.indexed(run)

    # coverages

    def _make_coverage(self, digest: SnapshotDigest) -> None:
        """Of the objects that are here and sound. A collector, who holds the lock alone, takes none of them meanwhile."""
        path, objects = f"snapshots/{digest}.cov", self._store.shelf.objects

        def readable() -> bool:
            try:
                self._records.coverage(digest, snapshot)
            except FormatTooNew:
                return True
            except Corrupt:
                return False
            return self._root.size(path) is not None

        with contextlib.suppress(Corrupt, FormatTooNew, Missing), self._store.shelf.shared():
            snapshot = self._records.snapshot(digest)
            if readable():
                return
            groups = range(len(snapshot.layout.groups))
            sound: list[set[int]] = [
                {
                    b
                    for b, contents in enumerate(snapshot.blocks)
                    if object_fault(self._store.shelf, contents[g]) is None
                }
                for g in groups
            ]
            coverage = Coverage(digest, tuple(runs_of(blocks) for blocks in sound))
            here = [snapshot.blocks[b][g] for g in groups for b in sound[g]]
            self._root.sync_all(sorted({objects.path(name).rpartition("/")[0] for name in here}))
            with self._records.locked_snapshots():
                if not readable():
                    self._aside(path, f"{digest}.cov")
            self._promise(snapshot, coverage, unless=readable)
            self._note(path, f"made anew: {len(here)} objects are here")
            if usable_at(snapshot, coverage, snapshot.tokens)[0] < snapshot.tokens:
                self._lost.setdefault(digest, set())

    def _drop_signatures(self, path: str) -> None:
        """Whoever requires them is told that there are none. The snapshot itself is sound."""
        name = path.rpartition("/")[2]
        with self._records.locked_snapshots():
            try:
                self._records.signatures(SnapshotDigest.parse(name.removesuffix(".sig")))
            except FormatTooNew:
                return
            except Corrupt:
                if self._aside(path, name):
                    self._note(path, "set aside: nobody vouches by it any more")

    def _hurt(self) -> Iterator[Lost]:
        """The names of what was narrowed, as they stand now."""
        for ref in self._records.readable_refs():
            if ref.snapshot in self._lost:
                with contextlib.suppress(Corrupt, FormatTooNew, Missing):
                    snapshot = self._records.snapshot(ref.snapshot)
                    coverage = self._records.coverage(ref.snapshot, snapshot)
                    lost, tail = self._lost[ref.snapshot], trimmed(ref.snapshot, snapshot)
                    usable = usable_at(snapshot, coverage, snapshot.tokens)[0]
                    all_here = {(b, g) for g in range(len(coverage.runs)) for b in coverage.blocks(g)}
                    was_trimmed = tail != whole(ref.snapshot, snapshot) and all(
                        tail.has(b, g) for b, g in lost | all_here
                    )
                    pull = pull_command(ref.label, trimmed=was_trimmed, verify=False)
                    path = f"refs/{label_file(ref.label)}"
                    yield Lost(path, ref.label, ref.snapshot, snapshot.tokens, usable, len(lost), pull)


class _Naming:
    """Which manifests name which of some objects, covered or not. Reads each manifest once; those that appear, when they are asked for."""

    def __init__(self, store: Store, wanted: Set[bytes]) -> None:
        self._records = store.shelf.records
        self._wanted = wanted
        self._known: set[SnapshotDigest] = set()
        self._of: dict[bytes, set[SnapshotDigest]] = {}
        if wanted:
            self._read()

    def _read(self) -> None:
        for digest in set(self._records.snapshots()) - self._known:
            self._known.add(digest)
            with contextlib.suppress(Corrupt, FormatTooNew, Missing):
                for contents in self._records.snapshot(digest).blocks:
                    for content in contents:
                        if content.raw in self._wanted:
                            self._of.setdefault(content.raw, set()).add(digest)

    def of(self, names: Sequence[ContentDigest]) -> list[SnapshotDigest]:
        """In order. Under the store's exclusive lock no saver adds one."""
        self._read()
        return sorted(set().union(*(self._of.get(name.raw, set()) for name in names)))
