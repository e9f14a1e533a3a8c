"""Files are synced a few at a time, and all of them; an error of any is told."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from kvstore.files import Root, Unsettled
from kvstore.waiting import SYNCERS, sync


@pytest.fixture
def files(tmp_path: Path) -> list[int]:
    return [os.open(tmp_path / str(i), os.O_WRONLY | os.O_CREAT) for i in range(33)]


@pytest.mark.parametrize("count", [0, 1, 7, 16, 33])
def test_each_is_synced_once(files: list[int], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (real(fd), synced.append(fd)))
    sync(files[:count])
    assert sorted(synced) == sorted(files[:count])


def test_some_wait_at_the_same_time(files: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread's first call waits until all have begun one: with fewer threads nobody would come."""
    met = threading.Barrier(SYNCERS)
    began = threading.local()

    def meeting(_fd: int) -> None:
        if not hasattr(began, "once"):
            began.once = True
            met.wait(30)

    monkeypatch.setattr(os, "fsync", meeting)
    sync(files)
    assert not met.broken


@pytest.mark.parametrize("at", range(0, 33, 4))
def test_an_error_of_any_is_told_and_the_others_are_synced(
    files: list[int], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def failing(fd: int) -> None:
        if fd == files[at]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        synced.append(fd)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        sync(files)
    assert sorted(synced) == sorted(set(files) - {files[at]})


def test_without_more_threads_all_are_synced_all_the_same(files: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    synced: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(os, "fsync", synced.append)
    sync(files)
    assert sorted(synced) == sorted(files)


def test_an_error_leaves_no_descriptor_open(files: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)), Unsettled() as unsettled:
        for fd in files:
            unsettled.add(fd)
    for fd in files:
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            os.fstat(fd)


def test_the_folders_of_a_stage_are_all_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Root(tmp_path)
    names = [f"{i:x}" for i in range(16)]
    for name in names:
        root.make_folder(name)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    root.sync_all(names)
    root.close()
    assert sorted(synced) == sorted((tmp_path / name).stat().st_ino for name in names)
