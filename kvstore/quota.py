"""A bound on the bytes of all files of a store, kept while they are written.

Set per store, in its file ``quota.json``, so that every process keeps to the same one; without that file nothing is counted. Whoever writes
counts before writing (`Gauge`). What doesn't fit gets room by eviction: the trash, leftovers, then the least recently used unnamed snapshots;
`StoreFull` where that isn't enough. What has a name is never evicted.
"""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar

from . import prune
from .codec import encode_coverage, encode_snapshot
from .disk import below
from .errors import InputInvalid, KVError, StoreBusy, StoreCorrupt, StoreFull
from .files import Buffer, Pending, Root
from .gauge import Gauge, NoRoom, physical_bytes
from .plaintext import size_text
from .shelf import Shelf
from .snapshot import Coverage, Snapshot
from .usage import Usage, usage

FILE = "quota.json"
LEAST = 8 << 20
"""Bytes. The index's write-ahead log alone may take half of this while processes write."""
ROUNDS = 4
"""How often room is made for one write, when others take what was made for it."""
WAIT = 30.0
"""Seconds that another process's eviction, and what it writes then, is waited for."""
SLACK = 32
"""An eviction makes one part in so many of the quota free beyond what is needed, so that not every write has to evict."""
REF_BYTES = 2048
"""More than a ref file takes."""

_T = TypeVar("_T")
_TAKEN = f"others took what was made free, {ROUNDS} times"


def read_quota(root: Root) -> int | None:
    """The quota of a store in bytes, None if it has none. `StoreCorrupt` where its file says something else."""
    try:
        data = root.read(FILE, 1 << 12)
    except FileNotFoundError:
        return None
    where = str(root.path / FILE)
    todo = "`kvferry quota off` removes it, `kvferry quota SIZE` sets it anew."
    try:
        value: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreCorrupt.at(
            where, f'expected {{"quota": BYTES}}, found something else ({error})', todo=todo, path=where
        ) from error
    quota = value.get("quota") if isinstance(value, dict) else None
    if type(quota) is not int or quota < 1:
        raise StoreCorrupt.at(where, f'expected {{"quota": BYTES}}, found {value!r:.100}', todo=todo, path=where)
    return quota


def set_quota(root: Root, quota: int | None) -> None:
    """Gives a store a quota of so many bytes, durably; None takes it away, with its count, on a full disk too. Evicts nothing yet."""
    with below(root.path):
        if quota is None:
            for name in ("quota.count", FILE):
                with suppress(FileNotFoundError):
                    root.remove(name)
            return
        if not LEAST <= quota < 1 << 62:
            raise InputInvalid(
                f"quota: expected at least {size_text(LEAST)}, found {quota:,} bytes. `kvferry quota off` takes it away."
            )
        root.publish([Pending(FILE, [json.dumps({"quota": quota}).encode() + b"\n"])])


class Quota:
    """The quota of one store. With ``store`` it evicts snapshots; a folder remote, which has no index, only deletes its trash."""

    def __init__(self, shelf: Shelf, store: prune.Indexed | None = None) -> None:
        self._shelf = shelf
        self._store = store
        self._mutex = threading.Lock()

    def gauge(self) -> Gauge | None:
        """What counts, None without a quota."""
        quota = read_quota(self._shelf.root)
        return None if quota is None else Gauge(self._shelf.root, quota)

    def within(self, write: Callable[[Gauge | None], _T]) -> _T:
        """Runs ``write``; when it raises `NoRoom`, having left nothing, makes room and runs it again. `StoreFull`.

        The caller holds no lock of the store; ``write`` may. While it runs again nobody else evicts: whoever runs short meanwhile waits, so that
        what was made free isn't taken again and again.
        """
        gauge = self.gauge()
        if gauge is None:
            return write(None)
        try:
            return write(gauge)
        except NoRoom as short:
            needed = short.needed
        with self._evicting(gauge, needed):
            for _ in range(ROUNDS):
                self._make_room(gauge, needed)
                try:
                    return write(gauge)
                except NoRoom as short:
                    needed = short.needed
        raise self._full(gauge, gauge.recount(), needed, 0, _TAKEN)

    def counted(self, gauge: Gauge, chunks: Iterable[Buffer]) -> Generator[Buffer, None, None]:
        """``chunks`` of a file, each given on when it is counted, with room made for it if need be. On an error, also one of whoever writes
        them, all of them are taken back: the file is deleted. The caller holds no lock of the store. `StoreFull`."""
        total = 0
        try:
            for chunk in chunks:
                if not gauge.charge(len(chunk)):
                    self._claim(gauge, len(chunk))
                total += len(chunk)
                yield chunk
        except BaseException:
            gauge.release(total)
            raise

    def _claim(self, gauge: Gauge, size: int) -> None:
        with self._evicting(gauge, size):
            for _ in range(ROUNDS):
                self._make_room(gauge, size)
                if gauge.charge(size):
                    return
        raise self._full(gauge, gauge.recount(), size, 0, _TAKEN)

    def make_room(self, gauge: Gauge, needed: int) -> None:
        """Evicts so much that ``needed`` bytes more fit, if they don't. `StoreFull`, and nothing is evicted, where all of it wouldn't be enough.

        Waits for another process's eviction for at most `WAIT` seconds, and for readers and savers as `prune.apply` and `prune.purge` do.
        """
        with self._evicting(gauge, needed):
            self._make_room(gauge, needed)

    @contextmanager
    def _evicting(self, gauge: Gauge, needed: int) -> Iterator[None]:
        """One thread of one process at a time."""
        root = self._shelf.root
        with ExitStack() as held:
            held.enter_context(self._mutex)
            try:
                held.enter_context(below(root.path))
                root.make_folder("quarantine")
                held.enter_context(root.lock("quarantine", exclusive=True, seconds=WAIT))
            except StoreBusy as error:
                raise self._full(gauge, gauge.recount(), needed, 0, error.message) from error
            yield

    def _make_room(self, gauge: Gauge, needed: int) -> None:
        """As `make_room`, but others may have taken what it made free when it returns."""
        short = gauge.recount() + needed - gauge.limit
        if short <= 0:
            return
        evictable, why = 0, None
        try:
            evictable = self._evict(gauge, short)
        except KVError as error:  # busy, or nobody knows what is needed
            why = error.message
        if evictable < short:
            raise self._full(gauge, gauge.recount(), needed, evictable, why)

    def _evict(self, gauge: Gauge, short: int) -> int:
        """Frees ``short`` bytes and a little more, if it can. Returns what could be freed at most, as far as it looked.

        A folder remote may lie on a disk that several machines share, where the locks of one say nothing to the others: only what nobody can need
        is deleted there.
        """
        if self._store is None:
            return prune.purge(_Files(self._shelf))
        plan = prune.eviction(self._store, short, gauge.limit // SLACK)
        evictable = plan.bytes + plan.trash_bytes
        if evictable >= short:
            prune.apply(self._store, plan)
            prune.purge(self._store)
        return evictable

    def _full(self, gauge: Gauge, used: int, needed: int, evictable: int, why: str | None) -> StoreFull:
        """What to say, and which commands would free how much."""
        found = usage(_Files(self._shelf))
        store = f"--store {shlex.quote(str(self._shelf.path))}"
        trash, cache = found.part("trash"), sum(s.own for s in found.snapshots if not s.names)
        unfinished = found.part("tmp") + found.part("quarantine")
        ways = []
        if trash:
            ways.append(f"`kvferry trash empty {store}` frees {size_text(trash)}")
        if cache + unfinished:
            what = f"{size_text(cache)} of cache and {size_text(unfinished)} of transfers that have ended"
            ways.append(f"`kvferry gc --purge {store}` frees up to {what}")
        largest = max((s for s in found.snapshots if s.names), key=lambda s: s.own, default=None)
        if largest is not None:
            names = " ".join(map(shlex.quote, largest.names))
            ways.append(
                f"`kvferry rm {names} {store}`, then `kvferry gc --purge {store}`, frees {size_text(largest.own)} (`kvferry du` lists the rest)"
            )
        ways.append(f"`kvferry quota {used + needed} {store}` makes room")
        reason = "" if why is None else f" Nothing could be evicted: {why.rstrip('.')}."
        return StoreFull(
            f"{self._shelf.path}: expected {size_text(needed)} free below the quota of {size_text(gauge.limit)}, found {size_text(used)} used, of which "
            f"{size_text(evictable)} can be evicted.{reason} {'; '.join(ways)}.",
            quota=gauge.limit,
            used=used,
            needed=needed,
            evictable=evictable,
            trash=trash,
            cache=cache,
            unfinished=unfinished,
        )


def records_bytes(snapshot: Snapshot, coverage: Coverage) -> int:
    """At least what the files take that a save writes beside objects: manifest, coverage, ref."""
    return len(encode_snapshot(snapshot)[1]) + len(encode_coverage(coverage)) + REF_BYTES


def overview(shelf: Shelf, found: Usage | None = None) -> dict[str, int | None]:
    """The quota, what is used of it and what is left, in bytes; nothing but ``used`` without one."""
    quota = read_quota(shelf.root)
    used = physical_bytes(shelf.root) if found is None else found.bytes
    return {"bytes": quota, "used": used, "left": None if quota is None else max(0, quota - used)}


class _Files:
    """A shelf as `Shelved`."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
