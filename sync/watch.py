"""Watching: names that are given or moved here are pushed on, and snapshots that appear in an inbox folder are taken in.

A scan looks at everything and does what is due; events of the file system only make the next scan come sooner, so that a lost or doubled one does
no harm. What fails is tried again, after longer and longer pauses; what can't succeed until its file changes waits for that. Memory: a line for each name and each file in the inbox.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kvstore.digest import SnapshotDigest
from kvstore.errors import Corrupt, KVError, RefConflict, StoreBusy, Unreachable
from kvstore.store import Store

STABLE = 2.0
"""Seconds for which a file or folder in the inbox must not have changed before it is looked at."""
RESCAN = 30.0
"""Seconds between scans when nothing tells of a change."""
SETTLE = 0.3
"""Seconds that a scan waits after an event, because events come in crowds."""
LONGEST = 300.0
"""Seconds between tries at most."""

Tell = Callable[[str, dict[str, Any]], None]
"""Is told what was done, or why not: a word for the kind, and values."""


@dataclass(slots=True)
class _Try:
    """Something that failed: when it is due again, and the pause after that."""

    due: float = 0.0
    pause: float = 1.0

    def failed(self, now: float) -> float:
        self.due = now + self.pause
        waited, self.pause = self.pause, min(LONGEST, 2 * self.pause)
        return waited


@dataclass(slots=True)
class Pushing:
    """Names of the store that are like one of ``patterns`` are pushed to ``remote``.

    ``send`` pushes one name and raises as `pushing.push`. A name that the remote has otherwise (`RefConflict`) waits until it moves here.
    """

    store: Path
    remote: str
    patterns: Sequence[str]
    send: Callable[[str], object]
    tell: Tell
    _done: dict[str, SnapshotDigest] = field(default_factory=dict)
    _again: dict[str, _Try] = field(default_factory=dict)

    def scan(self, now: float) -> float:
        """Pushes what is due. Seconds until something is due again."""
        with Store.open(self.store) as store:
            refs = {ref.label: ref.snapshot for ref in store.shelf.records.readable_refs()}
        for gone in self._done.keys() - refs.keys():
            del self._done[gone]
        for gone in self._again.keys() - refs.keys():
            del self._again[gone]
        for label, digest in refs.items():
            wanted = any(fnmatchcase(label, pattern) for pattern in self.patterns)
            attempt = self._again.get(label)
            if wanted and self._done.get(label) != digest and (attempt is None or attempt.due <= now):
                self._push(label, digest, now)
        return min((attempt.due - now for attempt in self._again.values()), default=RESCAN)

    def _push(self, label: str, digest: SnapshotDigest, now: float) -> None:
        what = {"name": label, "snapshot": digest.hex, "remote": self.remote}
        try:
            self.send(label)
        except RefConflict as error:
            self._done[label] = digest
            self._again.pop(label, None)
            self.tell("refused", {**what, "error": type(error).__name__, "message": error.message})
        except (KVError, OSError) as error:
            wait = self._again.setdefault(label, _Try()).failed(now)
            self.tell("failed", {**what, "error": type(error).__name__, "message": str(error), "again_in": wait})
        else:
            self._done[label] = digest
            self._again.pop(label, None)
            self.tell("pushed", what)


_State = tuple[int, ...]
"""What changes when a file, or a file in a folder, does."""


@dataclass(slots=True)
class _Seen:
    state: _State
    since: float
    done: bool = False
    attempt: _Try = field(default_factory=_Try)


@dataclass(slots=True)
class Inbox:
    """Files and folders in ``folder`` are taken in by ``take``, which says what it made of one, or None of what is no snapshot.

    They are left where they are. The name of a file says nothing: conflict copies, other cases and other Unicode forms of it are further files, and the snapshot's own name is inside.
    """

    folder: Path
    take: Callable[[Path], dict[str, Any] | None]
    tell: Tell
    _seen: dict[str, _Seen] = field(default_factory=dict)

    def scan(self, now: float) -> float:
        """Takes in what is new and has not changed for `STABLE` seconds. Seconds until something is due again."""
        states = dict(_states(self.folder))
        for gone in self._seen.keys() - states.keys():
            del self._seen[gone]
        for name, state in states.items():
            seen = self._seen.get(name)
            if seen is None or seen.state != state:
                self._seen[name] = seen = _Seen(state, now)
            if not seen.done and now - seen.since >= STABLE and seen.attempt.due <= now:
                self._take(name, seen, now)
        waiting = [max(s.since + STABLE, s.attempt.due) - now for s in self._seen.values() if not s.done]
        return min(waiting, default=RESCAN)

    def _take(self, name: str, seen: _Seen, now: float) -> None:
        path = self.folder / name
        try:
            made = self.take(path)
        except (StoreBusy, Unreachable, OSError) as error:
            wait = seen.attempt.failed(now)
            self.tell(
                "failed", {"path": str(path), "error": type(error).__name__, "message": str(error), "again_in": wait}
            )
        except KVError as error:  # it stays so until the file changes
            seen.done = True
            kind = "incomplete" if isinstance(error, Corrupt) else "refused"
            self.tell(kind, {"path": str(path), "error": type(error).__name__, "message": error.message})
        else:
            seen.done = True
            if made is not None:
                self.tell("imported", {"path": str(path), **made})


def _states(folder: Path) -> Iterator[tuple[str, _State]]:
    """The entries of an inbox. Hidden ones are somebody's unfinished files."""
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:  # a disk that isn't mounted: it may come back
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        try:
            found = entry.stat(follow_symlinks=False)
            state: list[int] = [found.st_ino, found.st_size, found.st_mtime_ns]
            if entry.is_dir(follow_symlinks=False):
                for inner in sorted(os.scandir(entry.path), key=lambda one: one.name):
                    stat = inner.stat(follow_symlinks=False)
                    state += [stat.st_ino, stat.st_size, stat.st_mtime_ns]
            elif not entry.is_file(follow_symlinks=False):
                continue
        except OSError:  # moved away meanwhile
            continue
        yield entry.name, tuple(state)


def run(scans: Sequence[Callable[[float], float]], folders: Sequence[Path], stop: threading.Event, tell: Tell) -> None:
    """Scans until ``stop`` is set. An error of a scan itself (a store that is busy, a disk that is full) is told, and the scan comes again."""
    woken = threading.Event()
    with _events(folders, woken):
        while not stop.is_set():
            wait = RESCAN
            for scan in scans:
                try:
                    wait = min(wait, scan(time.monotonic()))
                except (KVError, OSError) as error:
                    tell("failed", {"error": type(error).__name__, "message": str(error), "again_in": RESCAN})
            if _either(woken, stop, max(0.05, wait)) and not stop.is_set():
                stop.wait(SETTLE)
                woken.clear()


def _either(woken: threading.Event, stop: threading.Event, seconds: float) -> bool:
    """Waits for one of two events; whether ``woken`` came."""
    end = time.monotonic() + seconds
    while not stop.is_set() and (left := end - time.monotonic()) > 0:
        if woken.wait(min(left, 0.5)):
            return True
    return woken.is_set()


@contextmanager
def _events(folders: Sequence[Path], woken: threading.Event) -> Iterator[None]:
    """Sets ``woken`` when something changes in one of ``folders``, as far as the system tells; those that aren't there are left to the scans."""
    from watchdog.events import FileSystemEvent, FileSystemEventHandler
    from watchdog.observers import Observer

    class Handler(FileSystemEventHandler):
        def on_any_event(self, event: FileSystemEvent) -> None:
            if event.event_type in ("created", "modified", "moved", "deleted", "closed"):
                woken.set()

    observer = Observer()
    for folder in folders:
        if folder.is_dir():
            observer.schedule(Handler(), str(folder), recursive=False)
    observer.start()
    try:
        yield
    finally:
        observer.stop()
        observer.join(5)
