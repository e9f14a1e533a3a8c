"""A store in this process's memory: for tests, for a server that keeps prompts while it runs, and to compare other stores with.

It keeps the promises of `Store` but durability, and keeps everything until it is closed. `find` looks at every snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Self

from .codec import HEADER, encode_snapshot
from .digest import BlockId, ContentDigest, SnapshotDigest, content_digest, root_block, root_key
from .errors import InputInvalid, ObjectCorrupt, ObjectMissing, SnapshotMissing
from .identity import Identity
from .items import Item, encode_items
from .layout import Layout, Rows, block_span, blocks_of
from .loss import not_covered
from .match import Match, made_by, match_items
from .records import check_label, conflict, require_no_clash
from .saving import NOTHING_SAVED, Contents, Expected, Saved, beginning, held_places, made_snapshot, require_name
from .snapshot import Coverage, Lineage, Receipt, Snapshot, runs_of

_AGAIN = "Save it again from where it was made: memory that changed by itself is a fault of the machine, or of other code in this process."


@dataclass(slots=True)
class _Entry:
    snapshot: Snapshot
    coverage: Coverage
    used: int


class MemoryStore:
    """A `Backend`. One instance serves one thread. Its methods promise and raise what those of `Store` do."""

    def __init__(self) -> None:
        self.objects: dict[ContentDigest, bytes] = {}
        """Every object's content. Whoever changes it finds out whether damage is noticed."""
        self._entries: dict[SnapshotDigest, _Entry] = {}
        self._names: dict[str, SnapshotDigest] = {}
        self._next: dict[tuple[BlockId, bytes], set[BlockId]] = {}
        self._clock = count()

    def close(self) -> None:
        """Forgets everything."""
        for held in (self.objects, self._entries, self._names, self._next):
            held.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
    ) -> Saved:
        """As `Store.save`; the rows are copied."""
        require_name(name, expect)
        label = None if name is None else self._free(name, expect)
        made = self._content(layout, items, rows, held_places(layout, len(items), covered, known), known)
        contents = [tuple(made[b, g][0] for g in range(len(layout.groups))) for b in range(blocks_of(len(items)))]
        snapshot = made_snapshot(
            layout, identity, items, namespace, contents, lineage, pending, head, receipt, model
        )  # fmt: skip
        dropped = self._fork(snapshot) if label is None else None
        if dropped == 0:
            return NOTHING_SAVED
        if dropped is not None:
            snapshot = beginning(snapshot, dropped)
        fresh = self._put(snapshot, made)
        digest, _ = encode_snapshot(snapshot)
        present = [
            {b for b, c in enumerate(snapshot.blocks) if c[g] in self.objects} for g in range(len(layout.groups))
        ]
        coverage = Coverage(digest, tuple(runs_of(blocks) for blocks in present))
        if (before := self._entries.get(digest)) is not None:
            coverage = coverage.union(before.coverage)
        self._entries[digest] = _Entry(snapshot, coverage, next(self._clock))
        parent = root_block(snapshot.root)
        for link in snapshot.chain():
            self._next.setdefault((parent, link.items), set()).add(link.id)
            parent = link.id
        if label is not None:
            self._names[label] = digest
        return Saved(digest, snapshot, coverage, len(fresh), sum(HEADER + length for length in fresh), dropped)

    def _content(
        self,
        layout: Layout,
        items: Sequence[Item],
        rows: Rows,
        held: set[tuple[int, int]],
        known: Sequence[Contents],
    ) -> dict[tuple[int, int], tuple[ContentDigest, bytes | None]]:
        """Of each (block, group) the digest, and the content where it was read; a known one that is here is not."""
        made: dict[tuple[int, int], tuple[ContentDigest, bytes | None]] = {}
        for b in range(blocks_of(len(items))):
            for g in range(len(layout.groups)):
                name = known[b][g] if b < len(known) else None
                if name is not None and (name in self.objects or (b, g) not in held):
                    made[b, g] = (name, None)
                    continue
                content = b"".join(rows.spans(g, *block_span(b, len(items))))
                found = content_digest([content])
                if name not in (None, found):
                    raise InputInvalid(f"known: block {b}: expected rows with the digest {name}, found {found}")
                made[b, g] = (found, content)
        return made

    def _put(self, snapshot: Snapshot, made: dict[tuple[int, int], tuple[ContentDigest, bytes | None]]) -> list[int]:
        """Keeps what is new or damaged; the length of each."""
        fresh = []
        for b, contents in enumerate(snapshot.blocks):
            for g, name in enumerate(contents):
                content = made[b, g][1]
                if content is not None and self.objects.get(name) != content:
                    self.objects[name] = content
                    fresh.append(len(content))
        return fresh

    def _fork(self, snapshot: Snapshot) -> int | None:
        """The first block whose tokens are here, in the same chain so far, with other bytes."""
        parent = root_block(snapshot.root)
        for b, link in enumerate(snapshot.chain()):
            here = self._next.get((parent, link.items), set())
            if link.id not in here:
                return b if here else None
            parent = link.id
        return None

    def _free(self, name: str, expect: Expected) -> str:
        label = check_label(name)
        found = self._names.get(label)
        if expect != "anything" and found != expect:
            raise conflict(label, expect, found)
        if found is None:
            require_no_clash(self._names, label)
        return label

    def find(
        self,
        layout: Layout,
        identity: Identity,
        items: Sequence[Item],
        *,
        namespace: str,
        head: str | None = None,
        lineage: Lineage | None = None,
    ) -> Match | None:
        """As `Store.find`; among equally long ones it looks at all for one's own lineage."""
        root = root_key(identity.digest, layout.digest, namespace)
        if not encode_items(items):
            return None
        found = [
            (match.n, made_by(match, lineage), entry.used, match)
            for digest, entry in self._entries.items()
            if entry.snapshot.root == root
            and (match := match_items(digest, entry.snapshot, self._here(entry), items, head)).n
        ]
        if not found:
            return None
        best = max(found, key=lambda one: one[:3])[3]
        self._entries[best.digest].used = next(self._clock)
        return best

    def _here(self, entry: _Entry) -> Coverage:
        """Its coverage without objects that somebody took away."""
        blocks, coverage = entry.snapshot.blocks, entry.coverage
        places = ((b, g) for g in range(len(coverage.runs)) for b in coverage.blocks(g))
        gone = {(b, g) for b, g in places if blocks[b][g] not in self.objects}
        return coverage.without(gone) if gone else coverage

    def standing(self, name: str) -> SnapshotDigest | None:
        """As `Store.standing`."""
        return self._names.get(check_label(name))

    def resolve(self, name: str) -> SnapshotDigest:
        """As `Store.resolve`."""
        if (digest := self.standing(name)) is not None:
            return digest
        if len(name) == 64 and not set(name) - set("0123456789abcdef"):
            return SnapshotDigest.parse(name)
        raise SnapshotMissing(f"no snapshot named {name!r} in this memory. Save one under that name.", label=name)

    def match(self, name: str, *, at: int | None = None, head: str | None = None) -> Match:
        """As `Store.match`."""
        digest = self.resolve(name)
        entry = self._entries.get(digest)
        if entry is None:
            raise SnapshotMissing(f"no snapshot {digest} in this memory. Save it again.", digest=digest.hex)
        snapshot = entry.snapshot
        asked = snapshot.tokens if at is None else at
        if not 1 <= asked <= snapshot.tokens:
            raise InputInvalid(f"{name!r}: expected a position of 1 to {snapshot.tokens} tokens, found {at}")
        match = match_items(digest, snapshot, entry.coverage, snapshot.items[:asked], head)
        if match.n < asked - 1:
            raise not_covered(name, match, entry.coverage)
        return match

    def load(self, match: Match, into: Rows) -> int:
        """As `Store.load`."""
        snapshot, total = match.snapshot, 0
        for block, group in match.objects():
            name = snapshot.blocks[block][group]
            where = f"object {name} (block {block} of group {snapshot.layout.groups[group].name} of snapshot {match.digest})"
            content = self.objects.get(name)
            if content is None:
                raise ObjectMissing(f"{where}: expected it in this memory, found none. {_AGAIN}", name=name.hex)
            if (found := content_digest([content])) != name:
                raise ObjectCorrupt.at(where, f"content: expected the digest {name}, found {found}", todo=_AGAIN)
            start, stop = block_span(block, snapshot.tokens)
            targets = into.spans(group, start, min(stop, match.runs[group][1]))
            stride = len(content) // len(targets)
            for i, target in enumerate(targets):
                target[:] = content[i * stride : i * stride + len(target)]
            total += len(content)
        return total
