"""What one side lacks of a snapshot, and whether a name may move. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from kvstore.digest import ContentDigest, SnapshotDigest
from kvstore.errors import SnapshotCorrupt
from kvstore.items import common_prefix
from kvstore.layout import BLOCK
from kvstore.match import usable_at
from kvstore.snapshot import Coverage, Snapshot, runs_of

Lengths = Mapping[ContentDigest, int]
"""Objects by name, with their content bytes."""

_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(frozen=True, slots=True)
class Plan:
    """What has to be carried so that ``coverage`` of a snapshot can be promised under ``label``.

    ``expect``: where the label stands on that side now. ``move``: objects to carry; ``there``: how many of the wanted ones need
    not be. ``coverage``: of what was wanted, what can be had at all; ``nowhere`` objects of it are on neither side.
    """

    label: str
    expect: SnapshotDigest | None
    digest: SnapshotDigest
    snapshot: Snapshot = field(repr=False)
    coverage: Coverage
    move: Lengths = field(repr=False)
    there: int
    nowhere: int

    @property
    def payload_bytes(self) -> int:
        """Content bytes to carry, headers left out."""
        return sum(self.move.values())

    @property
    def usable(self) -> int:
        """The most tokens that ``coverage`` allows to continue from."""
        return usable_at(self.snapshot, self.coverage, self.snapshot.tokens)[0]


def objects(snapshot: Snapshot, coverage: Coverage) -> dict[ContentDigest, int]:
    """The distinct objects that ``coverage`` names, in the order of their blocks, with their content bytes.

    `SnapshotCorrupt` when the manifest names one object in two lengths: they can't both be its content.
    """
    found: dict[ContentDigest, int] = {}
    for block in sorted({b for g in range(len(coverage.runs)) for b in coverage.blocks(g)}):
        for group, name in enumerate(snapshot.blocks[block]):
            if not coverage.has(block, group):
                continue
            length = snapshot.object_bytes(block, group)
            if found.setdefault(name, length) != length:
                raise SnapshotCorrupt.at(
                    f"snapshot {coverage.snapshot}",
                    f"object {name}: expected {found[name]} bytes as in an earlier block, found {length} in block {block}",
                    todo="Whoever wrote this snapshot made a mistake; don't use it, and remove its name with `kvferry rm`.",
                    digest=coverage.snapshot.hex,
                    name=name.hex,
                )
    return found


def plan(
    label: str,
    expect: SnapshotDigest | None,
    snapshot: Snapshot,
    wanted: Coverage,
    *,
    there: Set[ContentDigest],
    source: Set[ContentDigest],
) -> Plan:
    """What to carry from ``source`` so that the side that has ``there`` gets ``wanted`` of a snapshot."""
    want = objects(snapshot, wanted)
    move = {name: length for name, length in want.items() if name not in there and name in source}
    had = [name for name in want if name in there]
    within = [
        runs_of({b for b in wanted.blocks(g) if snapshot.blocks[b][g] in move or snapshot.blocks[b][g] in there})
        for g in range(len(wanted.runs))
    ]
    coverage = Coverage(wanted.snapshot, tuple(within))
    return Plan(label, expect, wanted.snapshot, snapshot, coverage, move, len(had), len(want) - len(had) - len(move))


def continues(longer: Snapshot, shorter: Snapshot) -> bool:
    """Whether ``longer`` has all of ``shorter``: the same model and tokens, and the same KV in every full block.

    Then a name may move from the one to the other without losing work. Of a short last block only the tokens can be
    compared, unless both end there.
    """
    if longer.root != shorter.root or longer.items[: shorter.tokens] != shorter.items:
        return False
    full = len(shorter.blocks) if longer.tokens == shorter.tokens else shorter.tokens // BLOCK
    return longer.blocks[:full] == shorter.blocks[:full]


def parting(now: Snapshot, new: Snapshot) -> str:
    """Why a name may not move from ``now`` to ``new``, for people."""
    if now.root != new.root:
        return "they are of different models or namespaces"
    n = common_prefix(now.items, new.items)
    if n < min(now.tokens, new.tokens):
        return f"they differ from token {n} on"
    if continues(now, new):
        return f"it would lose its last {now.tokens - new.tokens} tokens"
    return "their tokens agree, their KV does not: they were computed separately"


def parts(mapping: Mapping[_K, _V], size: int) -> Iterator[dict[_K, _V]]:
    """A mapping in pieces of at most ``size`` entries."""
    entries = iter(mapping.items())
    while piece := dict(islice(entries, size)):
        yield piece
