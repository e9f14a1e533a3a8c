"""What has to be on the disk before what: every write, sync and rename of a transfer, in order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ferries import object_files, save, verify

from kvstore import Store
from kvstore.digest import label_file
from sync import Folder, pull, push

Event = tuple[str, int, str]
"""(what, inode of the file or folder, name within the folder)."""


class Recorder:
    """Notes what `os.writev`, `os.fsync` and `os.rename` are called on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[Event] = []
        writev, fsync, rename = os.writev, os.fsync, os.rename

        def note_writev(fd: int, parts: Sequence[Any]) -> int:
            written = writev(fd, parts)
            self.events.append(("write", os.fstat(fd).st_ino, ""))
            return written

        def note_fsync(fd: int) -> None:
            fsync(fd)
            self.events.append(("sync", os.fstat(fd).st_ino, ""))

        def note_rename(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
            rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            self.events.append(("rename", os.fstat(dst_dir_fd).st_ino, target))

        patch.setattr(os, "writev", note_writev)
        patch.setattr(os, "fsync", note_fsync)
        patch.setattr(os, "rename", note_rename)

    def last(self, what: str, path: Path, name: str = "") -> int | None:
        event = (what, path.stat().st_ino, name)
        return max((i for i, e in enumerate(self.events) if e == event), default=None)

    def durable(self, path: Path) -> int:
        """The event after which a file is on the disk under its name; fails if there is none."""
        written, renamed = self.last("write", path), self.last("rename", path.parent, path.name)
        synced, entered = self.last("sync", path), self.last("sync", path.parent)
        if written is not None:
            assert synced is not None and synced > written, f"{path} is not synced"
            assert renamed is not None and renamed > synced, f"{path} got its name before its content was on the disk"
        assert entered is not None, f"the folder of {path} is not synced"
        assert renamed is None or entered > renamed, f"the name of {path} is not synced"
        return entered


@pytest.mark.parametrize("way", ["pull", "push"])
def test_objects_then_manifest_then_ref_each_on_the_disk_before_the_next(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some objects are here without a promise: one renamed in, and one in quarantine, by processes that died before they synced."""
    source, target = tmp_path / "source", tmp_path / "target"
    with Store.open(source) as store:
        digest = save(store, "book", 640).digest
    assert digest is not None
    with Store.open(target) as store:
        store.indexed(lambda index: None)
    visible, waiting, *_ = object_files(source)
    (target / "objects" / visible.parent.name / visible.name).write_bytes(visible.read_bytes())
    (target / "quarantine" / "dead").mkdir()
    (target / "quarantine" / "dead" / (waiting.parent.name + waiting.name)).write_bytes(waiting.read_bytes())
    with monkeypatch.context() as patch:
        recorder = Recorder(patch)
        if way == "pull":
            with Store.open(target) as store, Folder.open(source) as remote:
                moved = pull(store, remote, ["book"])
        else:
            with Store.open(source) as store, Folder.open(target, create=True) as remote:
                moved = push(store, remote, ["book"])
    assert (moved.objects, moved.skipped, moved.resumed) == (18, 1, 1)
    adopted = target / "objects" / waiting.parent.name / waiting.name
    assert recorder.last("sync", adopted) is not None, "what a dead process wrote was believed to be on the disk"
    objects = max(recorder.durable(file) for file in object_files(target))
    manifest, coverage = target / "snapshots" / digest.hex, target / "snapshots" / f"{digest}.cov"
    for record in (manifest, coverage):
        named = recorder.last("rename", record.parent, record.name)
        assert named is not None and named > objects, "a manifest is visible before its objects are on the disk"
    ref = target / "refs" / label_file("book")
    named = recorder.last("rename", ref.parent, ref.name)
    assert named is not None and named > max(recorder.durable(manifest), recorder.durable(coverage))
    recorder.durable(ref)
    verify(target)


def test_folders_are_synced_once_per_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few disk flushes: one a file, one a folder that got some, and a handful for the records."""
    with Store.open(tmp_path / "source") as store:
        save(store, "book", 2048)
    with Store.open(tmp_path / "target") as store, Folder.open(tmp_path / "source") as remote:
        store.indexed(lambda index: None)
        with monkeypatch.context() as patch:
            recorder = Recorder(patch)
            assert pull(store, remote, ["book"]).objects == 64
        syncs = sum(1 for what, _, _ in recorder.events if what == "sync")
        folders = len({file.parent for file in object_files(tmp_path / "target")})
        assert syncs <= 64 + folders + 6
