"""Object files: KV content by its digest. Put, has, read; a reader verifies every byte before it hands one over.

A file is in one of two codecs, raw or planes, and may be replaced by the other at any moment: what has to fit together is read through one descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Self

from .codec import HEADER, Header, check_object, check_payload, decode_header, decode_object
from .codec import Kind as FrameKind
from .digest import ContentDigest
from .errors import FormatTooNew, ObjectCorrupt, ObjectMissing, StoreCorrupt
from .files import Root, close, read_at, read_parts
from .planes import fits_planes
from .waiting import read_ahead

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

AHEAD, AHEAD_FILES = 8 << 20, 32
"""Bytes that the disk is told of before they are read, and objects at most: each holds a descriptor."""
DECODERS, WAITING = 2, 4
"""Threads that read and decode planes, and how many objects may wait for them."""


def mending(label: str | None, *, absent: bool = False) -> str:
    """What brings back a damaged object, or one that is ``absent``, for people. ``label``: a name that needs it, where one is known."""
    name = "NAME" if label is None else shlex.quote(label)
    pull = f"kvferry pull {'' if absent else '--verify '}REMOTE {name}"
    return (
        f"`{pull}` fetches it again from a remote that has it; `kvferry prefill --no-reuse --name {name}` with the same text computes "
        f"it again."
    )


class Objects:
    """The ``objects/`` folder of a store or a folder remote."""

    def __init__(self, root: Root) -> None:
        self._root = root

    @staticmethod
    def path(name: ContentDigest) -> str:
        return f"objects/{name.hex[:1]}/{name.hex[1:]}"

    def size(self, name: ContentDigest) -> int | None:
        """Bytes of the object's file, header included; None where it is absent."""
        return self._root.size(self.path(name))

    def has(self, name: ContentDigest) -> bool:
        return self.size(name) is not None

    def complete(self, name: ContentDigest, length: int) -> bool:
        """Whether the object of ``length`` bytes of content is here in full, in either codec. Reads no content: it may still be damaged.

        One call of the system more than `absent` for a raw object; of planes the header is read.
        """
        size = self.size(name)
        if size is None or size == HEADER + length:
            return size is not None
        if not fits_planes(length, size - HEADER):
            return False
        try:
            with self._root.open(self.path(name)) as fd:
                return self._header(fd, name, length) is not None
        except (FileNotFoundError, ObjectCorrupt, FormatTooNew, StoreCorrupt):
            return False

    def header(self, name: ContentDigest) -> Header:
        """The header of an object's file, which is as long as it says. `FileNotFoundError`, `ObjectCorrupt`, `FormatTooNew`, `StoreCorrupt`."""
        with self._root.open(self.path(name)) as fd:
            return self._read_header(fd, name)

    def absent(self, names: Iterable[ContentDigest]) -> set[ContentDigest]:
        """Those in whose place there is nothing at all. A cut file or a link is damage, not absence: it is not among them.

        One call of the system a name: 64 take a tenth of a millisecond.
        """
        wanted, lacking = set(names), set()
        try:
            with self._root.folder("objects") as folder:
                for name in wanted:
                    try:
                        os.lstat(f"{(text := name.hex)[:1]}/{text[1:]}", dir_fd=folder)
                    except FileNotFoundError:
                        lacking.add(name)
                    except NotADirectoryError:  # told as damage by whoever reads it
                        continue
        except FileNotFoundError:  # no such folder
            return wanted
        return lacking

    def names(self) -> Iterator[ContentDigest]:
        """Every object, in order of name; names that are not ours are skipped (`check` lists them)."""
        for fan in self._root.names("objects"):
            if len(fan) != 1:
                continue
            with contextlib.suppress(StoreCorrupt):
                for rest in self._root.names(f"objects/{fan}"):
                    if len(rest) == 63 and not set(fan + rest) - set("0123456789abcdef"):
                        yield ContentDigest.parse(fan + rest)

    def frame(self, name: ContentDigest) -> Iterator[memoryview]:
        """An object's file as it is, *unverified*, in pieces that are each valid until the next is asked for.

        As in `read`, the trash is looked into. `ObjectMissing`, `ObjectCorrupt` (a link in its place), `OSError`.
        """
        for path in (self.path(name), f"trash/{name.hex}"):
            try:
                yield from self._root.chunks(path)
                return
            except FileNotFoundError:
                continue
            except StoreCorrupt as error:
                raise ObjectCorrupt.at(f"object {name}", error.found.rstrip("."), name=name.hex) from error
        raise self._missing(name)

    @contextlib.contextmanager
    def opened(self, names: Sequence[ContentDigest]) -> Iterator[Iterator[int]]:
        """A descriptor of each object's file in order, for `read_into`; closed when the next is asked for.

        The disk works ahead on a few more. An object that a collector has just moved is found in the trash. The iterator raises
        `ObjectMissing`, `ObjectCorrupt` (a link in its place).
        """
        with contextlib.closing(self._opened(names)) as files:
            yield files

    def _opened(self, names: Sequence[ContentDigest]) -> Generator[int, None, None]:
        files: deque[tuple[int, int]] = deque()  # descriptor and size
        ahead, todo = 0, deque(names)
        try:
            while todo or files:
                while todo and (not files or (ahead < AHEAD and len(files) < AHEAD_FILES)):
                    fd = self._open(todo.popleft())
                    files.append((fd, size := os.fstat(fd).st_size))
                    ahead += size
                    read_ahead(fd, size)
                yield files[0][0]
                fd, size = files.popleft()
                close(fd)
                ahead -= size
        finally:
            for fd, _ in files:
                close(fd)

    def _open(self, name: ContentDigest) -> int:
        for path in (self.path(name), f"trash/{name.hex}"):
            try:
                return self._root.descriptor(path)
            except FileNotFoundError:
                continue
            except StoreCorrupt as error:
                raise ObjectCorrupt.at(f"object {name}", error.found.rstrip("."), name=name.hex) from error
        raise self._missing(name)

    def _missing(self, name: ContentDigest) -> ObjectMissing:
        return ObjectMissing(
            f"object {name}: expected its file in {self._root.path}, found none. {mending(None, absent=True)}",
            name=name.hex,
        )

    def read_into(self, fd: int, name: ContentDigest, parts: Sequence[memoryview]) -> None:
        """Fills ``parts``, writable byte views that together are as long as the content, and verifies every byte of it.

        ``fd``: from `opened`. `ObjectCorrupt`, `FormatTooNew`; then the parts hold bytes of which nothing is known.
        """
        length = sum(map(len, parts))
        size = os.fstat(fd).st_size
        try:
            if size != HEADER + length:  # planes; or the file was cut, or something was appended
                decode_object(*self._planes(fd, name, length), name, parts)
                return
            head = memoryview(bytearray(HEADER))
            size = read_parts(fd, [head, *parts])
            if size != HEADER + length:
                raise _wrong_length(name, HEADER + length, size)
            check_object(decode_header(head, FrameKind.OBJECT, f"object {name}"), parts, name)
        except ObjectCorrupt as error:
            raise error.told(name=name.hex) from error

    def take(self, fd: int, name: ContentDigest, parts: Sequence[memoryview]) -> Unread | None:
        """As `read_into`, of a raw object. Of any other nothing is read yet: what is returned does it, on any thread."""
        if os.fstat(fd).st_size == HEADER + sum(map(len, parts)):
            self.read_into(fd, name, parts)
            return None
        return Unread(self, os.dup(fd), name, parts)

    def _planes(self, fd: int, name: ContentDigest, length: int) -> tuple[Header, memoryview]:
        """Header and payload, unverified, of an open file that isn't as long as the raw object would be."""
        header = self._header(fd, name, length)
        if header is None:
            raise _wrong_length(name, HEADER + length, os.fstat(fd).st_size)
        return header, memoryview(read_at(fd, header.stored_length, HEADER))

    def _header(self, fd: int, name: ContentDigest, length: int) -> Header | None:
        """The header of an open file that is as long as it says and holds object ``name`` of ``length`` bytes; else None."""
        size = os.fstat(fd).st_size
        if size != HEADER + length and not fits_planes(length, size - HEADER):
            return None
        header = self._read_header(fd, name)
        return header if header.content_length == length else None

    def _read_header(self, fd: int, name: ContentDigest) -> Header:
        header = decode_header(read_at(fd, HEADER, 0), FrameKind.OBJECT, f"object {name}")
        if header.name != name.raw:
            raise _bad(name, "name in the header", name, header.name.hex())
        size = os.fstat(fd).st_size
        if size != HEADER + header.stored_length:
            raise _wrong_length(name, HEADER + header.stored_length, size)
        return header

    def sound(self, name: ContentDigest, length: int) -> bool:
        """Whether the object is here and every byte of it is right; reads it. False too where the disk fails to read it."""
        try:
            self.read(name, length)
        except (ObjectMissing, ObjectCorrupt):
            return False
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False
        return True

    def read(self, name: ContentDigest, length: int) -> memoryview:
        """The verified content of an object of ``length`` bytes; of planes their stored hash is verified too. `ObjectMissing`, `ObjectCorrupt`."""
        content = memoryview(bytearray(length))
        with self.opened([name]) as files:
            fd = next(files)
            if os.fstat(fd).st_size != HEADER + length:
                header, payload = self._planes(fd, name, length)
                check_payload(header, [payload], name)
            self.read_into(fd, name, [content])
        return content


class Unread:
    """An object in planes that is to be read, decoded and verified: called once, or closed. The thread that decodes it reads it too, so that
    its bytes stay near."""

    def __init__(self, objects: Objects, fd: int, name: ContentDigest, parts: Sequence[memoryview]) -> None:
        self._objects = objects
        self._fd = fd
        self._name = name
        self._parts = parts

    def __call__(self) -> None:
        """As `Objects.read_into` raises."""
        try:
            self._objects.read_into(self._fd, self._name, self._parts)
        finally:
            self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Decoding:
    """Reads and decodes planes on a few threads while the caller goes on. A context manager: when it ends all is done, or one's error is raised.

    Nothing is started before there is something to decode.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: deque[tuple[Future[None], Unread]] = deque()

    def add(self, work: Unread) -> None:
        """Takes it over; waits where much is under way."""
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor

            self._pool = ThreadPoolExecutor(DECODERS, "kvferry-planes")
        self._under_way.append((self._pool.submit(work), work))
        if len(self._under_way) > DECODERS + WAITING:
            self._under_way.popleft()[0].result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is None:
            return
        try:
            while kind is None and self._under_way:
                self._under_way.popleft()[0].result()
        finally:
            self._pool.shutdown(cancel_futures=True)  # nothing is written to the parts once it has returned
            for _future, work in self._under_way:
                work.close()


def _wrong_length(name: ContentDigest, expected: int, found: int) -> ObjectCorrupt:
    return _bad(name, "file length", f"{expected} bytes", f"{found}")


def _bad(name: ContentDigest, field: str, expected: object, found: object) -> ObjectCorrupt:
    return ObjectCorrupt.at(
        f"object {name}", f"{field}: expected {expected}, found {found}", field=field, name=name.hex
    )
