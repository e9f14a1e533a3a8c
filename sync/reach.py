"""Whose fault an error is: the operating system's errors as ours, and corruption with the place where it was found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvstore.errors import Corrupt, FormatTooNew, KVError, Unreachable


@contextlib.contextmanager
def reaching(where: str) -> Iterator[None]:
    """Turns an `OSError` of the disk ``where`` into `Unreachable`."""
    try:
        yield
    except OSError as error:
        what = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        raise Unreachable(
            f"{where}: {what}. What was carried so far is kept. See that the disk is there, readable and has room, "
            f"then run it again.",
            where=where,
            errno=error.errno,
        ) from error


@contextlib.contextmanager
def blaming(where: str, *kinds: type[Corrupt], todo: str = "") -> Iterator[None]:
    """Puts ``where`` in front of what is found corrupt (of ``kinds`` only, if given) or too new, and ``todo`` behind it."""
    blamed: tuple[type[KVError], ...] = (FormatTooNew, *(kinds or (Corrupt,)))
    try:
        yield
    except blamed as error:
        if "where" in error.details:
            raise
        message = error.message if error.message.startswith(where) else f"{where}: {error.message}"
        raise type(error)(f"{message} {todo}".rstrip(), **{**error.details, "where": where}) from error
