"""Asking a remote how much of some tokens it has, and fetching just the blocks that continuing them reads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.digest import ContentDigest, PrefixKey, SnapshotDigest, root_key
from kvstore.disk import below
from kvstore.errors import Missing
from kvstore.identity import Identity
from kvstore.items import Item
from kvstore.layout import Layout, trim_start
from kvstore.match import Match, match_items
from kvstore.snapshot import Coverage, runs_of
from kvstore.store import Store

from .carry import ATTEMPTS, Meter, Tally, unmetered
from .incoming import Incoming, absent
from .pulling import fetch_into
from .remote import Source


class Finder(Source, Protocol):
    """A source that can be asked by tokens."""

    def find(
        self, layout: Layout, root: PrefixKey, namespace: str, items: Sequence[Item], head: str | None
    ) -> SnapshotDigest | None:
        """The snapshot there that serves ``items`` best; None where none does. A hint: the asker computes what it can use of it."""
        ...


@dataclass(frozen=True, slots=True)
class Brought:
    """What was fetched so that ``match`` can be loaded from the store: ``objects`` of ``payload_bytes``."""

    match: Match
    objects: int
    payload_bytes: int
    seconds: float


def look(
    source: Finder,
    layout: Layout,
    identity: Identity,
    items: Sequence[Item],
    *,
    namespace: str,
    head: str | None = None,
) -> Match | None:
    """What `Store.find` would answer on a store that holds what the remote does. Sends it the tokens."""
    root = root_key(identity.digest, layout.digest, namespace)
    try:
        digest = source.find(layout, root, namespace, items, head)
        if digest is None:
            return None
        snapshot = source.snapshot(digest)
        if snapshot.root != root:
            return None
        match = match_items(digest, snapshot, source.coverage(digest, snapshot), items, head)
    except Missing:
        return None  # collected meanwhile
    return match if match.n else None


def bring(
    store: Store,
    source: Finder,
    layout: Layout,
    identity: Identity,
    items: Sequence[Item],
    *,
    namespace: str,
    head: str | None = None,
    meter: Meter = unmetered,
) -> Brought | None:
    """Fetches the blocks that ``items`` can use of what the remote has, as unnamed cache; None where the store has as much already.

    Verified before any of them is visible. Errors as `pull`.
    """
    started = time.monotonic()
    for attempt in range(1, ATTEMPTS + 1):
        here = store.look(layout, identity, items, namespace=namespace, head=head)
        there = look(source, layout, identity, items, namespace=namespace, head=head)
        if there is None or (here is not None and here.n >= there.n):
            return None
        try:
            return _bring(store, source, there, meter, started)
        except Missing:
            if attempt == ATTEMPTS:
                raise
    raise AssertionError("the last attempt ended without an answer or an error")


def _bring(store: Store, source: Finder, match: Match, meter: Meter, started: float) -> Brought:
    snapshot = match.snapshot
    # All of a full group, of the others the window before the end.
    starts = [trim_start(group.window, match.n) for group in snapshot.layout.groups]
    places = [(b, g) for b, g in match.objects() if b >= starts[g]]
    needed: dict[ContentDigest, int] = {snapshot.blocks[b][g]: snapshot.object_bytes(b, g) for b, g in places}
    runs = tuple(runs_of({b for b, group in places if group == g}) for g in range(len(snapshot.layout.groups)))
    coverage = Coverage(match.digest, runs)
    left = absent(store.shelf, needed)
    with (
        below(store.shelf.path),
        Incoming(store.shelf, store.quota) as incoming,
        meter(sum(left.values())) as advance,
    ):
        tally = Tally(advance)
        while True:
            with store.shelf.shared():
                left = incoming.lacking(needed)
                if not left:
                    incoming.publish(needed, set())
                    store.publish(snapshot, coverage)
                    break
            adopted = incoming.adopt(left)
            tally.adopted({name: left[name] for name in adopted})
            fetch_into(source, {n: length for n, length in left.items() if n not in adopted}, incoming, tally)
    return Brought(match, tally.objects, tally.payload, time.monotonic() - started)
