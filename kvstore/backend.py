"""What a store of KV is to whoever uses one: save, find, match, load. `Store` is one in a folder, `MemoryStore` one in memory.

`kvstore.testing` has the tests that every one of them passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .digest import SnapshotDigest
from .identity import Identity
from .items import Item
from .layout import Layout, Rows
from .match import Match
from .saving import Contents, Expected, Saved
from .snapshot import Lineage, Receipt


class Backend(Protocol):
    """What a session and a conversation need of a store. `Store` says of each method what it promises and raises."""

    def save(
        self,
        layout: Layout,
        identity: Identity,
        items: Sequence[Item],
        rows: Rows,
        *,
        namespace: str,
        name: str | None = None,
        lineage: Sequence[Lineage],
        pending: int | None = None,
        head: str | None = None,
        receipt: Receipt | None = None,
        model: str = "",
        covered: Sequence[int] | None = None,
        known: Sequence[Contents] = (),
        expect: Expected = "anything",
    ) -> Saved: ...

    def find(
        self,
        layout: Layout,
        identity: Identity,
        items: Sequence[Item],
        *,
        namespace: str,
        head: str | None = None,
        lineage: Lineage | None = None,
    ) -> Match | None: ...

    def standing(self, name: str) -> SnapshotDigest | None: ...

    def resolve(self, name: str) -> SnapshotDigest: ...

    def match(self, name: str, *, at: int | None = None, head: str | None = None) -> Match: ...

    def load(self, match: Match, into: Rows) -> int: ...

    def close(self) -> None: ...
