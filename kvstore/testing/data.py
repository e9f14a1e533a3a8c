"""Small KV that is causal like a model's, without a model and without an array library: the same arguments give the same bytes everywhere."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Self

from blake3 import blake3

from ..backend import Backend
from ..identity import Identity, Value
from ..items import Item, encode_items
from ..layout import Group, Layout, blocks_of
from ..saving import Saved
from ..snapshot import Lineage

LAYOUT = Layout((Group("full", None, (1, 4), 1, 4), Group("sliding", 128, (0, 2, 3), 2, 2)))
"""Two groups, of which one slides over 128 tokens; 80 bytes a token."""

IDENTITY = Identity.of({"weights": "w0", "tokenizer": "t0", "sidecars": [["embed", "e0"]], "window": 128, "scale": 0.5})

HEAD = "h" * 64
"""A head digest, for pending tokens."""


def other_identity(**fields: Value) -> Identity:
    """`IDENTITY` with some fields otherwise."""
    return Identity.of({**IDENTITY.wire(), **fields})


def lineage(engine: str = "cpu") -> Lineage:
    """Who computed a block, by the name of the engine."""
    return Lineage.of({"engine": engine, "os": "test"})


def tokens(count: int, seed: int = 0) -> list[int]:
    """``count`` token ids below 1,000; fewer with one seed are a beginning of more."""
    chance = random.Random(f"tokens {seed}")
    return [chance.randrange(1000) for _ in range(count)]


class PlainRows:
    """Rows of ``tokens`` tokens in bytearrays, zero at first. Implements `Rows`."""

    def __init__(self, layout: Layout, tokens: int) -> None:
        self.layout = layout
        self.tokens = tokens
        self._step = [2 * g.row_elements for g in layout.groups]
        self._arrays = [
            [bytearray(tokens * step) for _ in range(2 * len(g.layers))]
            for g, step in zip(layout.groups, self._step, strict=True)
        ]

    @classmethod
    def causal(cls, items: Sequence[Item], engine: str = "cpu", layout: Layout = LAYOUT) -> Self:
        """A row is a function of all items up to its own, and of the engine that computed it. No byte of a row is zero."""
        rows = cls(layout, len(items))
        hasher = blake3(engine.encode())
        for at, item in enumerate(items):
            hasher.update(encode_items([item]))
            content = hasher.digest(length=layout.bytes_per_token).replace(b"\0", b"\1")
            for group, step in enumerate(rows._step):
                for array in rows._arrays[group]:
                    array[at * step : (at + 1) * step] = content[:step]
                    content = content[step:]
        return rows

    def spans(self, group: int, start: int, stop: int) -> Sequence[memoryview]:
        """See `Rows.spans`."""
        assert 0 <= start < stop <= self.tokens
        step = self._step[group]
        return [memoryview(array)[start * step : stop * step] for array in self._arrays[group]]

    def rows(self, group: int, start: int, stop: int) -> list[bytes]:
        """A copy of these rows, to compare; empty where there are none."""
        return [bytes(span) for span in self.spans(group, start, stop)] if start < stop else []


def save(backend: Backend, items: Sequence[Item], engine: str = "cpu", **other: Any) -> Saved:
    """Saves causal rows of ``items`` in the namespace ``default``; ``other`` goes to `Backend.save`, also ``layout``, ``identity`` and ``rows``."""
    layout = other.pop("layout", LAYOUT)
    rows = other.pop("rows", None) or PlainRows.causal(items, engine, layout)
    other.setdefault("lineage", [lineage(engine)] * blocks_of(len(items)))
    return backend.save(layout, other.pop("identity", IDENTITY), items, rows, **{"namespace": "default", **other})
