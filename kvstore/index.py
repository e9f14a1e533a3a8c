"""The index: which blocks follow which, and which snapshots hold them. A cache, rebuilt from the files at any time.

SQLite. ``block`` is a tree: a root per (identity, layout, namespace), then one row for each block of each chain, keyed by
its parent and its encoded items. Among the children of a block, byte order puts the longest common prefix with any
query at the query's predecessor or successor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from .counts import SCHEMA as COUNTS
from .counts import Asked, count
from .digest import SIZE, BlockId, Digest, IdentityDigest, PrefixKey, SnapshotDigest
from .errors import Corrupt, FormatTooNew, InputInvalid, KVError, Missing, StoreBusy, StoreCorrupt
from .holders import lock_holders, waiting_advice
from .items import Item, common_prefix, decode_items, encoded_blocks
from .layout import BLOCK, MAX_GROUPS, Run
from .shelf import Shelf
from .snapshot import Coverage, Link, Snapshot

VERSION = 2
_SURROUNDINGS = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_NOMEM,
)
_FILES = ("", "-wal", "-shm")
"""How the names of the files end that SQLite keeps."""
_D = TypeVar("_D", bound=Digest)
BUSY_SECONDS = 30.0
"""How long another process may hold the index for writing before this one gives up."""
LEAST_FREE = 32 << 10
"""Bytes that SQLite takes beside the database file before it does anything."""
NEIGHBOURS = 32
"""Siblings looked at on each side of a query, at each depth, beyond the exact matches."""

_SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE snapshot(id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, tokens INTEGER NOT NULL, used REAL NOT NULL);
CREATE TABLE block(id INTEGER PRIMARY KEY, parent INTEGER NOT NULL, items BLOB NOT NULL, bid BLOB NOT NULL,
                   UNIQUE(parent, items, bid));
CREATE TABLE holds(block INTEGER NOT NULL, snapshot INTEGER NOT NULL, PRIMARY KEY(block, snapshot)) WITHOUT ROWID;
CREATE INDEX held ON holds(snapshot);
CREATE TABLE run(snapshot INTEGER NOT NULL, grp INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL,
                 PRIMARY KEY(snapshot, grp, first)) WITHOUT ROWID;
CREATE TABLE checked(part INTEGER PRIMARY KEY, run INTEGER NOT NULL);
"""


class Held(tuple[SnapshotDigest, int, float, tuple[tuple[Run, ...], ...]]):
    """(snapshot, its tokens, last use, present runs of blocks per group)."""

    __slots__ = ()


class Index:
    """One store's index. Not shared between threads; several processes may have it open."""

    def __init__(self, shelf: Shelf, connection: sqlite3.Connection, kept: bool = True) -> None:
        self._shelf = shelf
        self._db = connection
        self.kept = kept
        """Whether it is a file, which other processes see, and which is there the next time."""

    @classmethod
    def open(cls, shelf: Shelf) -> Self:
        """Opens it, and rebuilds it if it is absent, damaged or of another version, or behind the files."""
        path = shelf.path / "index.sqlite"
        if not all(_plain(shelf.path / f"index.sqlite{suffix}") for suffix in _FILES):
            cls.discard(shelf)
        try:
            index = cls(shelf, _connect(path))
        except sqlite3.DatabaseError as error:
            if not damaged(error):
                raise
            cls.discard(shelf)
            index = cls(shelf, _connect(path))
        try:
            if index._stale():
                with index.writing():
                    pass
        except BaseException:
            index.close()
            raise
        return index

    @classmethod
    def in_memory(cls, shelf: Shelf) -> Self:
        """An index of this process alone, made from the files: for a store that can only be read, or lies on a network file system."""
        db = _prepared(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))
        index = cls(shelf, db, kept=False)
        try:
            index.catch_up()
        except BaseException:
            index.close()
            raise
        return index

    @staticmethod
    def discard(shelf: Shelf) -> None:
        """Deletes the index's files, and whatever stands in their places; the next `open` makes them anew. A folder there, which may hold
        something, goes to ``trash/``."""
        for suffix in _FILES:
            path = shelf.path / f"index.sqlite{suffix}"
            if path.is_dir() and not path.is_symlink():
                shelf.root.make_folder("trash")
                shelf.root.rename(path.name, f"trash/index-{secrets.token_hex(8)}")
            else:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        self._db.close()

    # writing

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction around a change of ``snapshots/``; first catches up with changes that it did not see."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            if self._stale():
                self._reconcile()
            yield
            mtime = self._shelf.root.mtime_ns("snapshots")
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('snapshots_mtime_ns', ?)", (mtime,))
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # a full disk may have ended it already
                self._db.execute("ROLLBACK")
            raise

    def add(self, snapshot: Snapshot, coverage: Coverage) -> None:
        """Enters a published snapshot, or its new coverage, and notes a use. Inside `writing`."""
        moment = self._moment()
        self._enter(snapshot, coverage, moment)
        self._db.execute("UPDATE snapshot SET used = ? WHERE digest = ?", (moment, coverage.snapshot.raw))

    def _moment(self) -> float:
        """Unix seconds of a use: now, or where the clock stands behind the last use, just after that. Whoever is used later sorts later,
        whatever the clock does. Inside a transaction."""
        rows = self._rows("SELECT value FROM meta WHERE key = 'last_use_us'", (), int)
        moment: int = max([int(time.time() * 1e6), *(row[0] + 1 for row in rows)])
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('last_use_us', ?)", (moment,))
        return moment / 1e6

    def _enter(self, snapshot: Snapshot, coverage: Coverage, used: float) -> None:
        """``used``: of a snapshot that it doesn't know."""
        digest = coverage.snapshot.raw
        row = self._db.execute("SELECT id FROM snapshot WHERE digest = ?", (digest,)).fetchone()
        if row is None:
            parent = self._child(0, snapshot.root.raw, snapshot.root.raw)
            ids = []
            for link in snapshot.chain():
                parent = self._child(parent, link.items, link.id.raw)
                ids.append(parent)
            cursor = self._db.execute(
                "INSERT INTO snapshot(digest, tokens, used) VALUES (?, ?, ?)", (digest, snapshot.tokens, used)
            )
            row = (cursor.lastrowid,)
            self._db.executemany("INSERT OR IGNORE INTO holds VALUES (?, ?)", ((i, row[0]) for i in ids))
        self._db.execute("DELETE FROM run WHERE snapshot = ?", row)
        self._db.executemany(
            "INSERT INTO run VALUES (?, ?, ?, ?)",
            ((row[0], g, a, b) for g, runs in enumerate(coverage.runs) for a, b in runs),
        )

    def _child(self, parent: int, items: bytes, bid: bytes) -> int:
        key = (parent, items, bid)
        row = self._db.execute("SELECT id FROM block WHERE parent = ? AND items = ? AND bid = ?", key).fetchone()
        if row is None:
            row = (self._db.execute("INSERT INTO block(parent, items, bid) VALUES (?, ?, ?)", key).lastrowid,)
        assert row[0] is not None
        return int(row[0])

    def remove(self, digest: SnapshotDigest) -> None:
        """Forgets a snapshot, and the blocks that no other snapshot holds. Inside `writing`."""
        row = self._db.execute("SELECT id FROM snapshot WHERE digest = ?", (digest.raw,)).fetchone()
        if row is None:
            return
        blocks = self._db.execute("SELECT block FROM holds WHERE snapshot = ?", row).fetchall()
        for table, column in (("holds", "snapshot"), ("run", "snapshot"), ("snapshot", "id")):
            self._db.execute(f"DELETE FROM {table} WHERE {column} = ?", row)
        self._db.executemany(
            "DELETE FROM block WHERE id = ? AND NOT EXISTS (SELECT 1 FROM holds WHERE block = ?)",
            ((block, block) for (block,) in blocks),
        )

    def note(
        self, identity: IdentityDigest, namespace: str, asked: int, found: tuple[SnapshotDigest, int] | None
    ) -> None:
        """Notes that ``asked`` tokens were looked for and, of which snapshot, how many were found: for "most recent", and for `counts`.

        A busy or full index is not waited for: both are kept as well as it goes, and nothing relies on them.
        """
        self._db.execute("PRAGMA busy_timeout = 0")
        try:
            with contextlib.suppress(sqlite3.OperationalError):
                self._db.execute("BEGIN IMMEDIATE")
                if found is not None:
                    self._db.execute("UPDATE snapshot SET used = ? WHERE digest = ?", (self._moment(), found[0].raw))
                count(self._db, identity, namespace, asked, 0 if found is None else found[1])
                self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self._db.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}")

    def counts(self) -> list[Asked]:
        """What was asked and found since counting began: with the index's file, which may be lost, and its counts with it."""
        rows = self._rows("SELECT * FROM asked ORDER BY namespace, identity", (), bytes, str, int, int, int, int, float)
        return [Asked(_digest(IdentityDigest, raw) if raw else None, *rest) for raw, *rest in rows]

    def settled(self, parent: int | None, link: Link, block: int, groups: int) -> tuple[int | None, set[int]]:
        """(the row of a block in its chain, the groups of it whose object some published snapshot promises)."""
        row = None if parent is None else next((i for i, b in self.children(parent, link.items) if b == link.id), None)
        if row is None:
            return None, set()
        found = self._db.execute(
            "SELECT DISTINCT r.grp FROM holds h JOIN run r ON r.snapshot = h.snapshot "
            "WHERE h.block = ? AND r.first <= ? AND r.last > ? LIMIT ?",
            (row, block, block, groups),
        )
        return row, {int(g) for (g,) in found}

    def sound(self) -> bool:
        """Whether SQLite finds its pages in order, and its tables and indexes equal."""
        return [tuple(row) for row in self._db.execute("PRAGMA integrity_check(1)")] == [("ok",)]

    def contents(self) -> dict[SnapshotDigest, tuple[int, tuple[tuple[Run, ...], ...]]]:
        """Every snapshot that it knows: its tokens, and its present runs of blocks per group, empty groups at the end left out."""
        rows = self._rows("SELECT id, digest, tokens FROM snapshot", (), int, bytes, int)
        return {_digest(SnapshotDigest, digest): (tokens, self._runs(row)) for row, digest, tokens in rows}

    def used_since(self, moment: float) -> set[SnapshotDigest]:
        """Snapshots saved or found at or after ``moment`` (Unix seconds); all of them after the index was made anew."""
        rows = self._rows("SELECT digest FROM snapshot WHERE used >= ?", (moment,), bytes)
        return {_digest(SnapshotDigest, raw) for (raw,) in rows}

    def uses(self) -> dict[SnapshotDigest, float]:
        """When each snapshot was last saved, received or found: in their true order, by the clock's time as far as it can be believed."""
        rows = self._rows("SELECT digest, used FROM snapshot", (), bytes, float)
        return {_digest(SnapshotDigest, raw): used for raw, used in rows}

    def catch_up(self) -> None:
        """Makes the rows match the files, in one transaction, whatever the folder's time says."""
        with self.writing():
            self._reconcile()

    def rebuild(self) -> None:
        """Empties it and reads every manifest again, in one transaction."""
        with self.writing():
            for table in ("holds", "run", "snapshot", "block", "meta"):
                self._db.execute(f"DELETE FROM {table}")
            self._reconcile()

    def refresh(self) -> None:
        """Catches up with what others changed, where the time of their folder tells: for an index that others don't write to."""
        if self._stale():
            with self.writing():
                pass

    def checked(self) -> dict[int, int] | None:
        """For each part of the objects (`inventory`) the number of the check that last read it; None where that isn't kept."""
        return dict(self._rows("SELECT part, run FROM checked", (), int, int)) if self.kept else None

    def note_checked(self, parts: Iterable[int]) -> None:
        """A check has read these parts of the objects. Only an order: no clock is read, and a busy index is not waited for."""
        self._db.execute("PRAGMA busy_timeout = 0")
        try:
            self._db.execute("BEGIN IMMEDIATE")
            ((last,),) = self._db.execute("SELECT COALESCE(MAX(run), 0) FROM checked").fetchall()
            rows = ((part, last + 1) for part in parts)
            self._db.executemany("INSERT OR REPLACE INTO checked VALUES (?, ?)", rows)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        finally:
            self._db.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}")

    def _stale(self) -> bool:
        row = self._db.execute("SELECT value FROM meta WHERE key = 'snapshots_mtime_ns'").fetchone()
        return row is None or row[0] != self._shelf.root.mtime_ns("snapshots")

    def _reconcile(self) -> None:
        """Makes the rows match ``snapshots/``. A manifest that can't be read is left out: `check` reports it."""
        records = self._shelf.records
        here = set(records.snapshots())
        known = {_digest(SnapshotDigest, raw) for (raw,) in self._rows("SELECT digest FROM snapshot", (), bytes)}
        for digest in known - here:
            self.remove(digest)
        moment = self._moment()
        for digest in sorted(here):
            try:
                snapshot = records.snapshot(digest)
                coverage = records.coverage(digest, snapshot)
            except (Corrupt, FormatTooNew, Missing):
                self.remove(digest)
                continue
            self._enter(snapshot, coverage, moment)

    # reading

    def children(self, parent: int, items: bytes) -> list[tuple[int, BlockId]]:
        """The blocks with exactly these items under a parent; more than one where chains forked."""
        rows = self._rows("SELECT id, bid FROM block WHERE parent = ? AND items = ?", (parent, items), int, bytes)
        return [(i, _digest(BlockId, bid)) for i, bid in rows]

    def root(self, key: PrefixKey) -> int | None:
        rows = self.children(0, key.raw)
        return rows[0][0] if rows else None

    def roots(self) -> list[PrefixKey]:
        """The root of every model, layout and namespace that a snapshot was ever entered of."""
        return [_digest(PrefixKey, raw) for (raw,) in self._rows("SELECT items FROM block WHERE parent = 0", (), bytes)]

    def candidates(self, root: PrefixKey, items: Sequence[Item]) -> Iterator[tuple[int, int]]:
        """Blocks that share a prefix with ``items``, as (tokens in common from the start, block), longest first.

        Goes down the blocks that are equal, and then up again only as far as the caller asks.
        """
        start = self.root(root)
        levels = [[] if start is None else [start]]
        queries = []
        for query in encoded_blocks(items, BLOCK):
            if not levels[-1]:
                break
            queries.append(query)
            levels.append([child for parent in levels[-1] for child, _ in self.children(parent, query)])
        for depth in range(len(levels) - 2, -1, -1):
            at, query = depth * BLOCK, queries[depth]
            block = items[at : at + BLOCK]
            near = ((at + n, child) for parent in levels[depth] for n, child in self._siblings(parent, block, query))
            yield from sorted(near, reverse=True)

    def _siblings(self, parent: int, block: Sequence[Item], query: bytes) -> Iterator[tuple[int, int]]:
        """Children of ``parent`` near ``query`` in byte order, as (items in common, child); 0 in common is left out."""
        for comparison, order in ((">=", "ASC"), ("<", "DESC")):
            rows = self._rows(
                f"SELECT id, items FROM block WHERE parent = ? AND items {comparison} ? ORDER BY items {order} LIMIT ?",
                (parent, query, NEIGHBOURS),
                int,
                bytes,
            )
            for child, items in rows:
                try:
                    n = common_prefix(block, decode_items(items))
                except InputInvalid as error:
                    raise _nonsense(error.message) from error
                if n == 0:
                    break
                yield n, child

    def holders(self, block: int) -> list[Held]:
        """The snapshots that hold a block, most recently used first (at most 256)."""
        rows = self._rows(
            "SELECT s.id, s.digest, s.tokens, s.used FROM holds h JOIN snapshot s ON s.id = h.snapshot "
            "WHERE h.block = ? ORDER BY s.used DESC LIMIT 256",
            (block,),
            int,
            bytes,
            int,
            float,
        )
        return [Held((_digest(SnapshotDigest, raw), tokens, used, self._runs(row))) for row, raw, tokens, used in rows]

    def _runs(self, snapshot: int) -> tuple[tuple[Run, ...], ...]:
        groups: dict[int, list[Run]] = {}
        sql = "SELECT grp, first, last FROM run WHERE snapshot = ? ORDER BY grp, first"
        for g, a, b in self._rows(sql, (snapshot,), int, int, int):
            if not 0 <= g < MAX_GROUPS:
                raise _nonsense(f"group {g}")
            groups.setdefault(g, []).append((a, b))
        return tuple(tuple(groups.get(g, ())) for g in range(max(groups, default=-1) + 1))

    def _rows(self, sql: str, values: tuple[object, ...], *kinds: type) -> list[tuple[Any, ...]]:
        """All rows of a query. A flipped bit can change a value's type: then the index is as good as damaged."""
        rows = self._db.execute(sql, values).fetchall()
        for row in rows:
            if not all(type(value) is kind for value, kind in zip(row, kinds, strict=True)):
                raise _nonsense(f"types {[type(value).__name__ for value in row]}")
        return rows


def _digest(kind: type[_D], raw: bytes) -> _D:
    if len(raw) != SIZE:
        raise _nonsense(f"a digest of {len(raw)} bytes")
    return kind(raw)


def _nonsense(found: str) -> sqlite3.DatabaseError:
    """SQLite has no checksums: what can't be ours is damage too."""
    return sqlite3.DatabaseError(f"index: expected what was written, found {found}")


def _connect(path: Path) -> sqlite3.Connection:
    if not path.exists():
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    return _prepared(sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False))


def _plain(path: Path) -> bool:
    """Whether a plain file is there, or nothing. SQLite would wait for a fifo's other end, and follow a link."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return True


def _prepared(db: sqlite3.Connection) -> sqlite3.Connection:
    """The connection with our tables; closed if they can't be had."""
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        if _version(db) == 0:
            db.execute("BEGIN IMMEDIATE")
            if _version(db) == 0:  # not made by another process meanwhile
                for statement in (_SCHEMA + COUNTS).split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {VERSION}")
            db.execute("COMMIT")
        if _version(db) != VERSION:
            raise sqlite3.DatabaseError(f"index version {_version(db)}, expected {VERSION}")
        for name in ("meta", "snapshot", "block", "holds", "run", "asked", "checked"):
            db.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchone()
    except BaseException:
        db.close()
        raise
    return db


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def damaged(error: sqlite3.DatabaseError) -> bool:
    """Whether the file itself is at fault; a busy, failing or full disk is not."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is None or code & 0xFF not in _SURROUNDINGS


def refusal(error: sqlite3.OperationalError, store: Path) -> KVError | OSError:
    """What to raise for an error that is not the index's own."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        who: list[str] = []
        with contextlib.suppress(OSError):
            who = lock_holders((store / "index.sqlite-shm").stat(), writers=True)
        told = ", ".join(who) or "another process"
        return StoreBusy(
            f"{store}: {told} wrote to the index for over {BUSY_SECONDS:g} s. {waiting_advice(who)}.",
            path=str(store),
            holders=who,
        )
    path = store / "index.sqlite"
    if path.is_dir():
        return StoreCorrupt.at(str(path), "expected a plain file, found a folder", path=str(path))
    number = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_READONLY: errno.EROFS}.get(code, errno.EIO)
    try:  # SQLite says that it could not; the system says why
        with path.open("r+b"):
            if number == errno.EIO and not os.access(store, os.W_OK):  # SQLite needs files beside it
                number = errno.EACCES
            number = errno.ENOSPC if shutil.disk_usage(store).free < LEAST_FREE else number
    except OSError as why:
        number = why.errno or number
    return OSError(number, f"the index can't be opened or written: {error}, {os.strerror(number)}", str(path))
