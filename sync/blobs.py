"""An object store of S3's kind through obstore: whole small files by path, with conditional writes; every error told as ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from kvstore.errors import InputInvalid, Refused, Unreachable

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PIECE = 1 << 20
_RETRIES: Any = {"max_retries": 5, "retry_timeout": timedelta(seconds=60)}
"""A bucket that doesn't answer is told of within a minute, not in three."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file: its path, bytes, and when it was written by the store's own clock."""

    path: str
    size: int
    modified: datetime


@dataclass(frozen=True, slots=True)
class Version:
    """What a conditional write compares."""

    e_tag: str | None
    version: str | None


class Blobs:
    """The files below one URL. May be used from several threads."""

    def __init__(self, store: ObjectStore, where: str) -> None:
        self._store = store
        self.where = where

    @classmethod
    def open(cls, url: str) -> Blobs:
        """``s3://BUCKET/PREFIX``, ``gs://…`` or ``az://…``; credentials and endpoint from the environment, as those systems' own tools have them. `InputInvalid`."""
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        try:
            return cls(from_url(url, retry_config=_RETRIES), url)
        except (BaseError, ValueError, TypeError) as error:
            raise InputInvalid(
                f"remote {url!r}: expected s3://BUCKET/PREFIX, gs://… or az://…, found: {_first_line(error)}"
            ) from error

    def read(self, path: str, limit: int) -> tuple[bytes, Version] | None:
        """A file of at most ``limit`` bytes, and one byte more of a longer one; None where there is none."""
        import obstore

        with self._asking():
            try:
                found = obstore.get(self._store, path)
            except FileNotFoundError:
                return None
            meta = found.meta
            data = bytearray()
            for piece in found.stream(PIECE):
                data += piece
                if len(data) > limit:
                    break
            return bytes(data), Version(meta.get("e_tag"), meta.get("version"))

    def start(self, path: str, count: int) -> bytes | None:
        """The first ``count`` bytes of a file that has so many; None where there is none."""
        import obstore

        with self._asking():
            try:
                return bytes(obstore.get_range(self._store, path, start=0, end=count))
            except FileNotFoundError:
                return None

    def stream(self, path: str) -> Iterator[bytes] | None:
        """A file in pieces; None where there is none."""
        import obstore

        with self._asking():
            try:
                found = obstore.get(self._store, path)
            except FileNotFoundError:
                return None
        return self._pieces(found)

    def _pieces(self, found: Any) -> Iterator[bytes]:
        with self._asking():
            for piece in found.stream(PIECE):
                yield bytes(piece)

    def entry(self, path: str) -> Entry | None:
        """What is known of a file without reading it; None where there is none."""
        import obstore

        with self._asking():
            try:
                found = obstore.head(self._store, path)
            except FileNotFoundError:
                return None
        return Entry(path, found["size"], found["last_modified"])

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Every file below a folder. An error on the way is raised: a short listing is none."""
        import obstore

        with self._asking():
            for page in obstore.list(self._store, f"{prefix}/", chunk_size=1000):
                for found in page:
                    yield Entry(found["path"], found["size"], found["last_modified"])

    def write(self, path: str, data: bytes) -> None:
        """Writes a file, whatever was there."""
        import obstore

        with self._asking():
            obstore.put(self._store, path, data)

    def create(self, path: str, data: bytes) -> bool:
        """Writes a file where there is none; False where there is one."""
        return self._put(path, data, "create")

    def replace(self, path: str, data: bytes, version: Version) -> bool:
        """Writes a file in the place of the version that was read; False where it is another one by now."""
        told = {"e_tag": version.e_tag, "version": version.version}
        return self._put(path, data, {key: value for key, value in told.items() if value is not None})

    def _put(self, path: str, data: bytes, mode: Any) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._asking():
            try:
                obstore.put(self._store, path, data, mode=mode)
            except (AlreadyExistsError, PreconditionError, FileNotFoundError):
                return False
        return True

    def delete(self, paths: Iterable[str]) -> None:
        """Deletes files; those that are not there too."""
        import obstore

        with self._asking():
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(self._store, path)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise Refused(
                f"{self.where}: the bucket refused: {_first_line(error)}. See that the credentials in the environment (for S3 AWS_ACCESS_KEY_ID and "
                f"AWS_SECRET_ACCESS_KEY) may do this.",
                where=self.where,
            ) from error
        except (BaseError, OSError) as error:
            raise Unreachable(
                f"{self.where}: {_first_line(error)}. What was carried so far is kept. See that the bucket is there and its endpoint right (for S3 "
                f"AWS_ENDPOINT_URL), then run it again.",
                where=self.where,
            ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].strip().rstrip(".")
