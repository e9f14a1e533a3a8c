"""Rows whose high bytes take few values, as those of real KV do: planes make their objects smaller, which they don't with random bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from kvmemory import LAYOUT, Memory, files
from kvmemory import save as save_rows

from kvstore import Layout, Saved, SoftToken, Store
from kvstore.codec import Codec, Kind, decode_header

_FEW = bytes(0x38 | byte & 7 for byte in range(256))


class Narrow(Memory):
    """Causal rows with eight different high bytes."""

    @classmethod
    def causal(cls, items: Sequence[int | SoftToken], engine: str = "cpu", layout: Layout = LAYOUT) -> Self:
        rows = super().causal(items, engine, layout)
        for arrays in rows._arrays:
            for array in arrays:
                array[1::2] = array[1::2].translate(_FEW)
        return rows


def save(store: Store, items: Sequence[int | SoftToken], *, codec: Codec = "raw", **other: Any) -> Saved:
    return save_rows(store, items, rows=Narrow.causal(items), codec=codec, **other)


def expect(store: Store, name: str) -> None:
    """A name restores what `save` was given, in every row that the store has."""
    match = store.match(name)
    rows, want = Memory(match.snapshot.layout, match.n), Narrow.causal(match.snapshot.items)
    store.load(match, rows)
    for group, (first, last) in enumerate(match.runs):
        assert rows.rows(group, first, last) == want.rows(group, first, last)


def codecs(path: Path) -> dict[str, int]:
    """The codec of every object file, by its name; the files are as long as they say."""
    found = {}
    for name, data in files(path).items():
        if name.startswith("objects/"):
            header = decode_header(data, Kind.OBJECT, name)
            assert len(data) == 128 + header.stored_length
            found[name.removeprefix("objects/").replace("/", "")] = header.codec
    return found
