"""What a session holds besides KV rows, as one immutable value: a step commits by replacing it in a single assignment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvstore.digest import ContentDigest
from kvstore.items import Item
from kvstore.layout import BLOCK
from kvstore.snapshot import Lineage

FUNCTIONS = "functions"
"""The lineage field that names the functions which computed a block, comma-separated, sorted."""


@dataclass(frozen=True, slots=True)
class State:
    """``items``: fed, each with a KV row; ``makers``: who computed each row; ``known``: contents of leading full blocks that are already
    named by digest; ``pending``: chosen, not yet fed; ``emitted``: whether the pending token was already given to the caller.
    """

    items: tuple[Item, ...] = ()
    makers: tuple[Lineage, ...] = ()
    known: tuple[tuple[ContentDigest, ...], ...] = ()
    pending: int | None = None
    emitted: bool = False

    def fed(self, items: Sequence[Item], maker: Lineage, pending: int | None) -> State:
        """After one step; the new pending token, if chosen, was not emitted."""
        makers = self.makers + (maker,) * len(items)
        return State(self.items + tuple(items), makers, self.known, pending)

    def cut(self, position: int) -> State:
        """The first ``position`` items, without a pending token: it is known only for the end that it was chosen at."""
        return State(self.items[:position], self.makers[:position], self.known[: position // BLOCK])

    def with_emitted(self, emitted: bool) -> State:
        return replace(self, emitted=emitted)

    def with_known(self, contents: Sequence[tuple[ContentDigest, ...]]) -> State:
        """``contents``: of this state's own leading blocks; a short last block is not kept, because it will grow."""
        return replace(self, known=tuple(contents[: len(self.items) // BLOCK]))

    def lineage(self) -> tuple[Lineage, ...]:
        """One for each block, made of those of its rows."""
        return tuple(merge(self.makers[i : i + BLOCK]) for i in range(0, len(self.makers), BLOCK))


def made_by(engine: Mapping[str, str], functions: Iterable[str]) -> Lineage:
    """The lineage of rows that ``functions`` of an engine described by ``engine`` computed."""
    return Lineage.of({**engine, FUNCTIONS: ",".join(sorted(functions))})


def merge(lineages: Iterable[Lineage]) -> Lineage:
    """One lineage for rows of several: functions united; where other fields differ, every value joined by " + ".

    Nothing is lost and nothing claimed: "portable + coreml" says that each computed some rows.
    """
    distinct = dict.fromkeys(lineages)
    if len(distinct) == 1:
        return next(iter(distinct))
    values: dict[str, dict[str, None]] = {}
    for lineage in distinct:
        for name, value in lineage.fields:
            parts = value.split("," if name == FUNCTIONS else " + ")
            values.setdefault(name, {}).update(dict.fromkeys(parts))
    return Lineage.of({k: ",".join(sorted(v)) if k == FUNCTIONS else " + ".join(v) for k, v in values.items()})
