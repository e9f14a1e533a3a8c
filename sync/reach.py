"""Whose fault an error is: the operating system's errors as ours, and corruption with the place where it was found."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator

from kvstore.errors import (
    Corrupt,
    CoverageCorrupt,
    FormatTooNew,
    KVError,
    ObjectCorrupt,
    RefCorrupt,
    SnapshotCorrupt,
    Unreachable,
)


@contextlib.contextmanager
def reaching(where: str) -> Iterator[None]:
    """Turns an `OSError` of the disk ``where`` into `Unreachable`."""
    try:
        yield
    except OSError as error:
        what = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename not in (None, where) else "")
        raise Unreachable(
            f"{where}: {what}. What was carried so far is kept. See that the disk is there, readable and has room, "
            f"then run it again.",
            where=where,
            errno=error.errno,
        ) from error


@contextlib.contextmanager
def blaming(where: str, *kinds: type[Corrupt], todo: str | None = None) -> Iterator[None]:
    """Puts ``where`` in front of what is found corrupt (of ``kinds`` only, if given) or too new; with ``todo`` that is what to do."""
    blamed: tuple[type[KVError], ...] = (FormatTooNew, *(kinds or (Corrupt,)))
    try:
        yield
    except blamed as error:
        if "where" in error.details:
            raise
        if isinstance(error, Corrupt):
            raise _blamed(error, where, todo) from error
        message = error.message if error.message.startswith(where) else f"{where}: {error.message}"
        raise type(error)(message, **{**error.details, "where": where}) from error


@contextlib.contextmanager
def blaming_remote(where: str) -> Iterator[None]:
    """As `blaming`, around what a remote holds: says what mends it there, from a store that has the snapshot."""
    push = f"from a store that has it, or pull from another remote: `kvferry push {{}}{shlex.quote(where)} NAME`."
    todo = {
        ObjectCorrupt: push.format("--verify "),
        SnapshotCorrupt: push.format(""),
        CoverageCorrupt: push.format(""),
        RefCorrupt: push.format("--force "),
    }
    try:
        yield
    except (SnapshotCorrupt, CoverageCorrupt, RefCorrupt, ObjectCorrupt) as error:
        if "where" in error.details:
            raise
        raise _blamed(error, where, f"Mend it there {todo[type(error)]}") from error
    except (FormatTooNew, Corrupt):
        with blaming(where):
            raise


def _blamed(error: Corrupt, where: str, todo: str | None) -> Corrupt:
    what = str(error.details.get("what", error.details.get("path", "store")))
    return error.told(what=what if what.startswith(where) else f"{where}: {what}", todo=todo, where=where)
