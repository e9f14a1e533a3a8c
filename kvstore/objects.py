"""Object files: KV content by its digest. Put, has, read; a reader verifies every byte before it hands one over."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

from .codec import HEADER, check_object, decode_header
from .codec import Kind as FrameKind
from .digest import ContentDigest
from .errors import ObjectCorrupt, ObjectMissing, StoreCorrupt
from .files import Root


class Objects:
    """The ``objects/`` folder of a store or a folder remote."""

    def __init__(self, root: Root) -> None:
        self._root = root

    @staticmethod
    def path(name: ContentDigest) -> str:
        return f"objects/{name.hex[:2]}/{name.hex[2:]}"

    def size(self, name: ContentDigest) -> int | None:
        """Bytes of the object's file, header included; None where it is absent."""
        return self._root.size(self.path(name))

    def has(self, name: ContentDigest) -> bool:
        return self.size(name) is not None

    def names(self) -> Iterator[ContentDigest]:
        """Every object, in order of name; names that are not ours are skipped (`check` lists them)."""
        for fan in self._root.names("objects"):
            if len(fan) != 2:
                continue
            with contextlib.suppress(StoreCorrupt):
                for rest in self._root.names(f"objects/{fan}"):
                    if len(rest) == 62 and not set(fan + rest) - set("0123456789abcdef"):
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
                raise ObjectCorrupt(f"object {name}: {error}", name=name.hex) from error
        raise ObjectMissing(
            f"object {name} is not in {self._root.path}. `kvferry pull` fetches it again from a remote that has it.",
            name=name.hex,
        )

    def announced(self, names: Iterable[ContentDigest]) -> AbstractContextManager[None]:
        """While these objects are read one by one, has the disk work ahead on all of them."""
        return self._root.announced([self.path(name) for name in names])

    def read(self, name: ContentDigest, length: int, buffer: bytearray) -> memoryview:
        """The verified content of an object of ``length`` bytes.

        It lies in ``buffer`` (grown as needed, owned by the caller) until the next call with it. An object that a collector has
        just moved is read from the trash. `ObjectMissing`, `ObjectCorrupt`.
        """
        for path in (self.path(name), f"trash/{name.hex}"):
            try:
                return self._read(path, name, length, buffer)
            except FileNotFoundError:
                continue
            except StoreCorrupt as error:
                raise ObjectCorrupt(f"object {name}: {error}", name=name.hex) from error
        raise ObjectMissing(
            f"object {name} is not in {self._root.path}. `kvferry pull` fetches it again from a remote that has it.",
            name=name.hex,
        )

    def _read(self, path: str, name: ContentDigest, length: int, buffer: bytearray) -> memoryview:
        what = f"object {name}"
        with self._root.open(path) as fd:
            size = os.fstat(fd).st_size
            if size != HEADER + length:
                raise ObjectCorrupt(
                    f"{what}: file length: expected {HEADER + length} bytes, found {size}. "
                    f"`kvferry pull --verify` fetches it again; `kvferry check` to see what is affected.",
                    name=name.hex,
                )
            if len(buffer) < size:
                buffer.extend(bytes(size - len(buffer)))
            view = memoryview(buffer)[:size]
            read = 0
            while read < size and (count := os.preadv(fd, [view[read:]], read)):
                read += count
        if read != size:
            raise ObjectCorrupt(f"{what}: file length: expected {size} bytes, found {read}", name=name.hex)
        header = decode_header(view[:HEADER], FrameKind.OBJECT, what)
        check_object(header, view[HEADER:], name)
        return view[HEADER:]
