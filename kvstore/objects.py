"""Object files: KV content by its digest. Put, has, read; a reader verifies every byte before it hands one over."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import islice

from .codec import HEADER, check_object, decode_header
from .codec import Kind as FrameKind
from .digest import ContentDigest
from .errors import ObjectCorrupt, ObjectMissing, StoreCorrupt
from .files import Root, read_ahead, read_parts

AHEAD = 8
"""Objects that the disk is told of before they are read."""


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
        fds: deque[int] = deque()
        ahead = iter(names)
        try:
            for _ in names:
                for name in islice(ahead, AHEAD - len(fds)):
                    fds.append(self._open(name))
                    read_ahead(fds[-1])
                yield fds[0]
                os.close(fds.popleft())
        finally:
            for fd in fds:
                os.close(fd)

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
        """Fills ``parts``, writable byte views that together are as long as the content, and verifies every byte.

        ``fd``: from `opened`. `ObjectCorrupt`; then the parts hold bytes of which nothing is known.
        """
        what, length = f"object {name}", sum(map(len, parts))
        header = memoryview(bytearray(HEADER))
        size = os.fstat(fd).st_size
        if size == HEADER + length:  # else the file was cut, or something was appended
            size = read_parts(fd, [header, *parts])
        if size != HEADER + length:
            raise ObjectCorrupt.at(
                what, f"file length: expected {HEADER + length} bytes, found {size}", field="file length", name=name.hex
            )
        try:
            check_object(decode_header(header, FrameKind.OBJECT, what), parts, name)
        except ObjectCorrupt as error:
            raise error.told(name=name.hex) from error

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
        """The verified content of an object of ``length`` bytes. `ObjectMissing`, `ObjectCorrupt`."""
        content = memoryview(bytearray(length))
        with self.opened([name]) as files:
            self.read_into(next(files), name, [content])
        return content
