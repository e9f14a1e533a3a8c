"""Snapshot manifests, coverage files and refs in a folder: the small, named records beside the objects."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import time
import unicodedata
from collections.abc import Iterable, Iterator

from .codec import (
    HEADER,
    MAX_RECORD,
    decode_coverage,
    decode_ref,
    decode_signatures,
    decode_snapshot,
    encode_coverage,
    encode_ref,
    encode_signatures,
    encode_snapshot,
)
from .digest import SnapshotDigest, label_file
from .disk import below
from .errors import (
    Corrupt,
    CoverageCorrupt,
    FormatTooNew,
    LabelInvalid,
    RefConflict,
    RefCorrupt,
    SignaturesCorrupt,
    SnapshotCorrupt,
    SnapshotMissing,
    StoreCorrupt,
)
from .files import Pending, Root
from .signatures import Signature, joined
from .snapshot import Coverage, Ref, Snapshot

_LIMIT = MAX_RECORD + HEADER
MAX_LABEL = 200
PIN = "pin/"
"""How the label of a pin begins: a ref that is given and removed, and never moves."""


def check_label(label: str) -> str:
    """The label in NFC; `LabelInvalid` unless it is 1 to 200 printable characters without edge spaces."""
    try:
        label.encode()
    except UnicodeEncodeError:
        raise LabelInvalid(
            f"name {label!r}: expected valid Unicode, found a lone surrogate. Choose another name."
        ) from None
    nfc = unicodedata.normalize("NFC", label[: 8 * MAX_LABEL])
    if not 1 <= len(nfc) <= MAX_LABEL or nfc != nfc.strip() or not nfc.isprintable():
        raise LabelInvalid(
            f"name {label!r:.80}: expected 1 to {MAX_LABEL} printable characters without spaces at the ends, found "
            f"something else. Choose another name."
        )
    return nfc


class Records:
    """The ``snapshots/`` and ``refs/`` folders of a store or a folder remote."""

    def __init__(self, root: Root) -> None:
        self._root = root

    # snapshots and coverage

    def snapshots(self) -> Iterator[SnapshotDigest]:
        """Every manifest's digest, in order."""
        for name in self._root.names("snapshots"):
            if len(name) == 64 and not set(name) - set("0123456789abcdef"):
                yield SnapshotDigest.parse(name)

    def has_snapshot(self, digest: SnapshotDigest) -> bool:
        return self._root.size(f"snapshots/{digest}") is not None

    def snapshot(self, digest: SnapshotDigest) -> Snapshot:
        """`SnapshotMissing`, `SnapshotCorrupt`, `FormatTooNew`."""
        data = self._read(SnapshotCorrupt, f"snapshot {digest}", f"snapshots/{digest}", f"trash/{digest}.snapshot")
        if data is not None:
            return decode_snapshot(data, digest)
        raise SnapshotMissing(
            f"snapshot {digest}: expected its manifest in {self._root.path}, found none. `kvferry pull REMOTE NAME` fetches it from a "
            f"remote that has it; `kvferry rm` removes a name that stands for it.",
            digest=digest.hex,
        )

    def coverage(self, digest: SnapshotDigest, snapshot: Snapshot) -> Coverage:
        """What is promised of a snapshot; nothing where no coverage file is. `CoverageCorrupt`, `FormatTooNew`."""
        return self._coverage(digest, snapshot, f"snapshots/{digest}.cov", f"trash/{digest}.cov")

    def _coverage(self, digest: SnapshotDigest, snapshot: Snapshot, *paths: str) -> Coverage:
        groups, blocks = len(snapshot.layout.groups), len(snapshot.blocks)
        data = self._read(CoverageCorrupt, f"coverage of {digest}", *paths)
        return Coverage(digest, ((),) * groups) if data is None else decode_coverage(data, digest, groups, blocks)

    def _read(self, corrupt: type[Corrupt], what: str, *paths: str) -> bytes | None:
        """The first of ``paths`` that is there; a collector may have moved a file to the next since it was looked for."""
        for path in paths:
            try:
                return self._root.read(path, _LIMIT)
            except FileNotFoundError:
                continue
            except StoreCorrupt as error:
                raise corrupt.at(what, error.found.rstrip("."), path=path) from error
        return None

    def put_snapshot(self, snapshot: Snapshot, coverage: Coverage) -> Coverage:
        """Publishes a manifest whose covered objects are all published; joins the coverage that is there.

        The caller holds `locked_snapshots`. Returns the coverage that now holds.
        """
        digest, data = encode_snapshot(snapshot)
        batch: list[Pending] = []
        before, after = None, coverage
        if self.has_snapshot(digest):
            # Damaged files are healed by what the caller just made; without the manifest a coverage promises nothing.
            with contextlib.suppress(CoverageCorrupt):
                before = self._coverage(digest, snapshot, f"snapshots/{digest}.cov")
                after = before.union(coverage)
        if after != before:
            batch.append(Pending(f"snapshots/{digest}.cov", [encode_coverage(after)]))
        if before is None or self._root.read(f"snapshots/{digest}", len(data)) != data:
            batch.append(Pending(f"snapshots/{digest}", [data]))
        self._root.publish(batch)
        if not batch:  # a saver killed between its rename and this sync left entries that are not durable yet
            self._root.sync("snapshots")
        return after

    def signatures(self, digest: SnapshotDigest) -> tuple[Signature, ...]:
        """The signatures of a snapshot by form; whether they are true is not looked at. `SignaturesCorrupt`, `FormatTooNew`."""
        return self._signatures(digest, f"snapshots/{digest}.sig")

    def buried_signatures(self, digest: SnapshotDigest) -> tuple[Signature, ...]:
        """Those of a snapshot that lies in the trash; raises as `signatures`."""
        return self._signatures(digest, f"trash/{digest}.sig")

    def _signatures(self, digest: SnapshotDigest, path: str) -> tuple[Signature, ...]:
        data = self._read(SignaturesCorrupt, f"signatures of {digest}", path)
        return () if data is None else decode_signatures(data, digest)

    def add_signatures(self, digest: SnapshotDigest, more: Iterable[Signature]) -> tuple[Signature, ...]:
        """Adds signatures that the caller found true, durably; returns those that are there then. A damaged file is replaced.

        `SnapshotMissing`; `InputInvalid` where they would be too many.
        """
        path, new = f"snapshots/{digest}.sig", tuple(more)
        with self.locked_snapshots():
            if not self.has_snapshot(digest):
                raise SnapshotMissing(
                    f"snapshot {digest}: expected its manifest in {self._root.path}, found none. Pull or save it, then sign it.",
                    digest=digest.hex,
                )
            try:
                there, damaged = self.signatures(digest), False
            except SignaturesCorrupt:
                there, damaged = (), True
            after = joined(there, new)
            if after and (damaged or after != there or self._root.size(path) is None):
                self._root.publish([Pending(path, [encode_signatures(digest, after)])])
        return after

    @contextlib.contextmanager
    def locked_snapshots(self) -> Iterator[None]:
        """One writer of manifests and coverage at a time."""
        with below(self._root.path), self._root.lock("snapshots", exclusive=True):
            yield

    # refs

    def refs(self) -> Iterator[Ref]:
        """Every ref, by label. `RefCorrupt` names the file."""
        found = [self._ref(name) for name in self.ref_files()]
        yield from sorted((ref for ref in found if ref is not None), key=lambda ref: ref.label)

    def ref_files(self) -> list[str]:
        """The names of all ref files, in order, readable or not; for `read_ref`."""
        return [
            name for name in self._root.names("refs") if len(name) == 64 and not set(name) - set("0123456789abcdef")
        ]

    def read_ref(self, file: str) -> Ref | None:
        """The ref in one file of `ref_files`; None if it is gone meanwhile. `RefCorrupt`, `FormatTooNew`."""
        return self._ref(file)

    def ref(self, label: str) -> Ref | None:
        """What a name stands for; None where there is no such name. `RefCorrupt`, `FormatTooNew`."""
        nfc = check_label(label)
        try:
            return self._ref(label_file(nfc))
        except RefCorrupt as error:
            quoted = shlex.quote(nfc)
            raise error.told(
                what=f"name {nfc!r}: ref file refs/{label_file(nfc)}",
                todo=f"Nobody knows what it stood for. `kvferry rm {quoted}` removes it; `kvferry prefill --name {quoted}` or `kvferry pull "
                f"REMOTE {quoted}` gives the name anew.",
                label=nfc,
            ) from error

    def standing(self, label: str) -> SnapshotDigest | None:
        """Where a name stands, for `move_ref`: None where it is absent or damaged, and so stands for nothing. `FormatTooNew`."""
        with contextlib.suppress(RefCorrupt):
            ref = self.ref(label)
            return None if ref is None else ref.snapshot
        return None

    def damage(self, label: str) -> RefCorrupt | None:
        """What is wrong with the ref of a name; None where nothing is."""
        try:
            self.ref(label)
        except RefCorrupt as error:
            return error
        return None

    def _ref(self, name: str) -> Ref | None:
        try:
            data = self._read(RefCorrupt, f"ref file refs/{name}", f"refs/{name}")
            if data is None:
                return None
            ref = decode_ref(data, f"ref file refs/{name}")
            if label_file(ref.label) != name or not _is_label(ref.label):
                found = f"label: expected one with this file name, found {ref.label!r:.80}"
                raise RefCorrupt.at(f"ref file refs/{name}", found)
        except RefCorrupt as error:
            raise error.told(
                todo=f"Its label is lost with it: `kvferry rm refs/{name}` removes it, then give the name again.",
                file=name,
            ) from error
        return ref

    @contextlib.contextmanager
    def locked_refs(self) -> Iterator[None]:
        """No name is given, moved or removed meanwhile."""
        with below(self._root.path), self._root.lock("refs", exclusive=True):
            yield

    def readable_refs(self) -> Iterator[Ref]:
        """Every ref that can be read: one damaged name must not keep others from being given."""
        for name in self.ref_files():
            with contextlib.suppress(RefCorrupt, FormatTooNew):
                ref = self._ref(name)
                if ref is not None:
                    yield ref

    def move_ref(self, label: str, expect: SnapshotDigest | None, target: SnapshotDigest | None) -> None:
        """Compare-and-swap: sets ``label`` to ``target`` (None removes it) if it is at ``expect`` (None: absent, or damaged).

        Success too when somebody else has set it to ``target`` meanwhile. `RefConflict` when it stands elsewhere, or when another
        label differs from this one by case only; `SnapshotMissing` when the manifest is not here (a collector holds the same lock
        when it takes one, so a name never points at nothing).
        """
        nfc = check_label(label)
        path = f"refs/{label_file(nfc)}"
        with self.locked_refs():
            now = self.standing(nfc)
            if now != expect and (target is None or now != target):
                raise conflict(nfc, expect, now)
            if target is None:
                if now is not None:
                    self._bury(path)
                elif self.damage(nfc) is not None:
                    self._clear(path)
                return
            if not self.has_snapshot(target):
                raise SnapshotMissing(
                    f"name {nfc!r}: expected the manifest of snapshot {target} in {self._root.path}, found none. Pull or save it again.",
                    digest=target.hex,
                )
            if nfc.startswith(PIN) and now not in (None, target):
                raise RefConflict(
                    f"name {nfc!r}: it is a pin, which stays at snapshot {now}. Choose another name, or `kvferry unpin {shlex.quote(nfc)}` first.",
                    label=nfc,
                )
            if now is None:
                require_no_clash((r.label for r in self.readable_refs()), nfc)
            self._give(Ref(nfc, target, int(time.time())))

    def _give(self, ref: Ref) -> None:
        path = f"refs/{label_file(ref.label)}"
        if self.damage(ref.label) is not None:
            self._clear(path)
        self._root.publish([Pending(path, [encode_ref(ref)])])

    def _bury(self, path: str) -> None:
        """Takes a ref away, durably: into the trash, from where it can be given back, or for good where there is no room or no trash."""
        try:
            self._root.rename(path, f"trash/{path.removeprefix('refs/')}.ref")
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOENT):
                raise
            with contextlib.suppress(FileNotFoundError):  # renamed, and only the folder's sync found no room
                self._root.remove(path)

    def buried_refs(self) -> Iterator[Ref]:
        """The removed names that lie in the trash, by label; damaged ones are passed over."""
        found = []
        for name in self._root.names("trash"):
            file, _, end = name.partition(".")
            if end == "ref" and len(file) == 64:
                with contextlib.suppress(RefCorrupt, FormatTooNew, FileNotFoundError, StoreCorrupt):
                    ref = decode_ref(self._root.read(f"trash/{name}", _LIMIT), f"trash/{name}")
                    if label_file(ref.label) == file and _is_label(ref.label):
                        found.append(ref)
        yield from sorted(found, key=lambda ref: ref.label)

    def _clear(self, path: str) -> None:
        """Takes away what stands at the place of a ref, durably. A folder goes to the trash with what somebody put in it."""
        try:
            self._root.remove(path)
        except (IsADirectoryError, PermissionError):  # what Linux and macOS say of a folder
            self._root.rename(path, f"trash/ref-{os.urandom(8).hex()}")

    def remove(self, labels: Iterable[str]) -> list[tuple[str, SnapshotDigest | None]]:
        """Removes names: all of them, or none where one is not here (`SnapshotMissing`). Returns what each stood for.

        That is None for a damaged one. If nobody knows its label either, ``refs/<64 hex digits>``, the file, stands for it.
        """
        found: dict[str, SnapshotDigest | None] = {}
        for label in map(check_label, labels):
            found[label] = self.standing(label)
            if found[label] is None and self.damage(label) is None and not self._is_damaged_file(label):
                raise SnapshotMissing(
                    f"no snapshot named {label!r} in {self._root.path}; nothing was removed. `kvferry ls` lists them.",
                    label=label,
                )
        for label, snapshot in found.items():
            if snapshot is None and self._is_damaged_file(label):
                with self.locked_refs():
                    if self._is_damaged_file(label):
                        self._clear(label)
            else:
                self.move_ref(label, snapshot, None)
        return list(found.items())

    def _is_damaged_file(self, path: str) -> bool:
        folder, _, name = path.partition("/")
        if folder != "refs" or len(name) != 64 or set(name) - set("0123456789abcdef"):
            return False
        try:
            self._ref(name)
        except RefCorrupt:
            return True
        return False

    def rename_ref(self, label: str, to: str) -> Ref:
        """Gives a snapshot another name. A crash in between leaves both; the same again, where both stand for one snapshot, removes
        the old one. `SnapshotMissing`, `RefConflict`."""
        old, new = check_label(label), check_label(to)
        with self.locked_refs():
            ref = self.ref(old)
            if ref is None:
                raise SnapshotMissing(f"no snapshot named {old!r}. `kvferry ls` lists them.", label=old)
            if old == new:
                return ref
            begun = (new, ref.snapshot)  # by a rename that was interrupted
            others = (r.label for r in self.readable_refs() if r.label != old and (r.label, r.snapshot) != begun)
            require_no_clash(others, new)
            moved = Ref(new, ref.snapshot, int(time.time()))
            self._give(moved)
            self._root.remove(f"refs/{label_file(old)}")
            return moved


def _is_label(label: str) -> bool:
    try:
        return check_label(label) == label
    except LabelInvalid:
        return False


def conflict(label: str, expect: SnapshotDigest | None, found: SnapshotDigest | None) -> RefConflict:
    """That a name does not stand where it must to be moved."""
    return RefConflict(
        f"name {label!r}: expected {expect or 'no snapshot'}, found {found or 'none'}: it was moved by somebody else "
        f"in the meantime. Look with `kvferry show`, then try again.",
        label=label,
        expected=None if expect is None else expect.hex,
        found=None if found is None else found.hex,
    )


def require_no_clash(labels: Iterable[str], label: str) -> None:
    """Raises `RefConflict` if one of ``labels`` differs from ``label`` by case only: some file systems and people mix them up."""
    for other in labels:
        if folded(other) == folded(label):
            raise RefConflict(
                f"name {label!r}: {other!r} is there already. Choose another name, or rename or remove that one.",
                label=label,
            )


def folded(label: str) -> str:
    """What is equal for labels that differ by case only."""
    return unicodedata.normalize("NFC", label.casefold())
