"""Notes every change below a folder that is made through ``os``, for `crashdisk`; and kills an operation as kill -9 would."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from crashdisk import INDEX, Cut, Disk, Entry, Event, Mark, Sync, Write

Call = Callable[..., Any]


class Killed(BaseException):
    """The operation ended here: whatever it does to clean up has no effect."""


class Recording:
    """A context manager; ``disk`` grows. One recording at a time, and no other thread may use ``os`` below ``root`` but the operation's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.disk = Disk()
        self._nodes: dict[tuple[int, int], int] = {}
        self._numbers = itertools.count()
        self._kill: tuple[str, int] | None = None
        self._dead = False
        self._notes: dict[str, Callable[..., Any]] = {
            "open": self._open,
            "mkdir": self._mkdir,
            "write": self._write,
            "writev": self._writev,
            "ftruncate": self._ftruncate,
            "fsync": self._fsync,
            "rename": self._rename,
            "replace": self._rename,
            "link": self._link,
            "unlink": self._unlink,
            "rmdir": self._unlink,
        }
        self._real: dict[str, Call] = {name: getattr(os, name) for name in self._notes}
        self._stamps: dict[str, tuple[object, ...]] = {}
        self._read(root)

    def _read(self, path: Path) -> int:
        node = self._node(path.stat())
        self.disk.times.append((0, node, path.stat().st_mtime_ns))
        entries = self.disk.folders.setdefault(node, {})
        for inner in sorted(path.iterdir()):
            if inner.is_dir():
                entries[inner.name] = self._read(inner)
            elif not inner.name.startswith(INDEX):
                entries[inner.name] = self._node(inner.stat())
                self.disk.contents[entries[inner.name]] = inner.read_bytes()
        return node

    def _node(self, found: os.stat_result, *, new: bool = False) -> int:
        key = (found.st_dev, found.st_ino)
        if new or key not in self._nodes:
            self._nodes[key] = next(self._numbers)
        return self._nodes[key]

    def __enter__(self) -> Self:
        for name, note in self._notes.items():
            setattr(os, name, self._watched(name, self._real[name], note))
        self._note_indexes()
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def step(self, run: Callable[[], object], kill: tuple[str, int] | None = None) -> None:
        """Runs one step; with ``kill`` it dies before it makes that call for that time."""
        self._kill, self._dead = kill, False
        with contextlib.suppress(Killed):
            run()
        assert self._dead == (kill is not None), f"the step did not come to {kill}"
        self._kill, self._dead = None, False
        self._note_indexes()
        self.disk.log.append(Mark(kill is None))

    def require_whole(self, scratch: Path) -> None:
        """The log tells all that happened: it makes the folder as it is."""
        self.disk.now(scratch)
        noted, real = _tree(scratch), _tree(self.root)
        differing = sorted(path for path in noted.keys() | real.keys() if noted.get(path) != real.get(path))
        assert not differing, f"something else than {', '.join(self._notes)} changed {differing[:5]}"

    def _watched(self, name: str, real: Call, note: Callable[..., Any]) -> Call:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._kill is not None and self._kill[0] == name:
                self._kill = (name, self._kill[1] - 1)
                self._dead = self._dead or self._kill[1] == 0
            if self._dead:
                raise Killed
            return note(real, *args, **kwargs)

        return run

    def _place(self, path: Any, dir_fd: int | None) -> tuple[int, str] | None:
        """The folder's node and the name in it; None elsewhere, and for the index."""
        parent, name = os.path.split(os.fspath(path))
        found = os.stat(parent or ".", dir_fd=dir_fd)
        node = self._nodes.get((found.st_dev, found.st_ino))
        return None if node is None or name.startswith(INDEX) else (node, name)

    def _stat(self, path: Any, dir_fd: int | None) -> os.stat_result | None:
        try:
            return os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def _add(self, event: Event) -> None:
        self.disk.log.append(event)
        self._note_indexes()

    def _enter(self, path: Any, dir_fd: int | None, node: int | None, needs: int | None = None) -> int | None:
        """Notes an entry and its folder's time; its place in the log."""
        place = self._place(path, dir_fd)
        if place is None:
            return None
        self._add(Entry(*place, node, needs))
        parent = os.path.dirname(os.fspath(path))  # noqa: PTH120
        time = os.stat(parent or ".", dir_fd=dir_fd).st_mtime_ns
        self.disk.times.append((len(self.disk.log), place[0], time))
        return len(self.disk.log) - 1

    def _open(self, real: Call, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        dir_fd = kwargs.get("dir_fd")
        made = bool(flags & os.O_CREAT) and self._stat(path, dir_fd) is None
        fd: int = real(path, flags, *args, **kwargs)
        if made and self._place(path, dir_fd) is not None:
            self._enter(path, dir_fd, self._node(os.fstat(fd), new=True))
        assert not flags & os.O_TRUNC or self._known(fd) is None, "cutting a file by opening it is not recorded"
        return fd

    def _known(self, fd: int) -> int | None:
        found = os.fstat(fd)
        return self._nodes.get((found.st_dev, found.st_ino))

    def _mkdir(self, real: Call, path: Any, *args: Any, **kwargs: Any) -> None:
        real(path, *args, **kwargs)
        dir_fd = kwargs.get("dir_fd")
        found = self._stat(path, dir_fd)
        if found is not None and self._place(path, dir_fd) is not None:
            node = self._node(found, new=True)
            self.disk.folders[node] = {}
            self._enter(path, dir_fd, node)

    def _write(self, real: Call, fd: int, data: Any) -> int:
        return self._writing(fd, [data], lambda: real(fd, data))

    def _writev(self, real: Call, fd: int, parts: Any) -> int:
        return self._writing(fd, parts, lambda: real(fd, parts))

    def _writing(self, fd: int, parts: Any, write: Callable[[], int]) -> int:
        node = self._known(fd)
        at = os.lseek(fd, 0, os.SEEK_CUR) if node is not None else 0
        count = write()
        if node is not None:
            self._add(Write(node, at, b"".join(map(bytes, parts))[:count]))
        return count

    def _ftruncate(self, real: Call, fd: int, size: int) -> None:
        real(fd, size)
        if (node := self._known(fd)) is not None:
            self._add(Cut(node, size))

    def _fsync(self, real: Call, fd: int) -> None:
        if (node := self._known(fd)) is not None:  # what happened during the sync is not covered by it
            self._add(Sync(node))

    def _rename(self, real: Call, src: Any, dst: Any, *, src_dir_fd: Any = None, dst_dir_fd: Any = None) -> None:
        found = self._stat(src, src_dir_fd)
        real(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        assert found is not None
        needs = self._enter(dst, dst_dir_fd, self._node(found))
        self._enter(src, src_dir_fd, None, needs)

    def _link(
        self, real: Call, src: Any, dst: Any, *, src_dir_fd: Any = None, dst_dir_fd: Any = None, **other: Any
    ) -> None:
        real(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, **other)
        found = self._stat(src, src_dir_fd)
        assert found is not None
        self._enter(dst, dst_dir_fd, self._node(found))

    def _unlink(self, real: Call, path: Any, *, dir_fd: Any = None) -> None:
        real(path, dir_fd=dir_fd)
        self._enter(path, dir_fd, None)

    def _note_indexes(self) -> None:
        """The index's files of each store, where they changed."""
        for store in self.root.iterdir():
            files = sorted(store.glob(f"{INDEX}*"))
            stamp = tuple((f.name, (s := f.stat()).st_ino, s.st_size, s.st_mtime_ns) for f in files)
            if self._stamps.get(store.name) != stamp:
                self._stamps[store.name] = stamp
                self.disk.indexes.append((len(self.disk.log), store.name, {f.name: f.read_bytes() for f in files}))


def _tree(root: Path) -> dict[str, bytes | None]:
    """Every entry but the index: a file's bytes, None for a folder."""
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
        if not path.name.startswith(INDEX)
    }
