"""Pull: snapshots from a remote into the store. Objects land out of sight, verified; then the store's publish order."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Sequence

from kvstore.codec import HEADER
from kvstore.digest import ContentDigest, SnapshotDigest
from kvstore.disk import below
from kvstore.errors import InputInvalid, Missing, NotCovered, RefConflict, Refused, SnapshotCorrupt, SnapshotMissing
from kvstore.records import check_label
from kvstore.snapshot import Snapshot, whole
from kvstore.snapshot import trimmed as trimmed_coverage
from kvstore.store import Store

from .carry import ATTEMPTS, Carried, Meter, Moved, Tally, carry, counting, unmetered
from .incoming import Incoming, absent, move_name, promised, unsound
from .plan import Lengths, Plan, continues, objects, parting, parts, plan
from .reach import blaming, blaming_remote
from .remote import MAX_ASKED, Source
from .vouching import Producers, take_along, vouched


def plan_pull(
    store: Store,
    source: Source,
    names: Sequence[str],
    *,
    trimmed: bool = False,
    rename: str | None = None,
    force: bool = False,
    verify: bool = False,
    required: Producers | None = None,
) -> list[Plan]:
    """What `pull` with these arguments would carry, one plan a name; an object that two need is in the first only.

    Moves nothing. Raises what `pull` raises before it carries anything.
    """
    labels = list(dict.fromkeys(check_label(name) for name in names))
    if rename is not None and len(labels) != 1:
        raise InputInvalid(f"another name: expected one snapshot to give it to, found {len(labels)}")
    plans: list[Plan] = []
    coming: set[ContentDigest] = set()
    for label in labels:
        plans.append(
            _plan(store, source, label, check_label(rename or label), trimmed, force, verify, required, coming)
        )
        coming |= plans[-1].move.keys()
    return plans


def pull(
    store: Store,
    source: Source,
    names: Sequence[str],
    *,
    trimmed: bool = False,
    rename: str | None = None,
    force: bool = False,
    verify: bool = False,
    required: Producers | None = None,
    meter: Meter = unmetered,
) -> Moved:
    """Brings the named snapshots into the store: only objects that it lacks, verified before any of them is visible.

    Whole, or ``trimmed`` to what continuing from the end needs; a later whole pull brings the rest. A name that is here moves
    only to a snapshot that continues the one it stands for (`plan.continues`), else `RefConflict`; ``force`` moves it anyway
    and ``rename`` gives a single snapshot another name here. A damaged name here stands for nothing and is given anew. With ``verify`` what is here already is read, and carried again
    where it is damaged; else it is looked for by name and length. Each snapshot is published by itself, in order; on an error the
    earlier ones stay and what was verified of this one waits for the next pull, which carries the rest.

    Signatures come along. With ``required`` a snapshot that none of these producers signed is refused before any object of it is
    fetched: `Unsigned`.

    `SnapshotMissing`, `Unreachable`, `Corrupt` by kind, `NotCovered` (too little of it is left to continue from),
    `Refused` (no room), `OSError` of the store's own disk.
    """
    started = time.monotonic()
    plans = plan_pull(
        store, source, names, trimmed=trimmed, rename=rename, force=force, verify=verify, required=required
    )
    _require_room(store, sum(p.payload_bytes + HEADER * len(p.move) for p in plans))
    done = []
    with (
        below(store.shelf.path),
        Incoming(store.shelf, store.quota) as incoming,
        meter(sum(p.payload_bytes for p in plans)) as advance,
    ):
        tally = Tally(advance)
        for label, first in zip(dict.fromkeys(check_label(name) for name in names), plans, strict=True):
            tally.skipped += first.there
            current = first
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    done.append(_pull(store, source, current, incoming, tally))
                    break
                except Missing:
                    # Collected at the remote since it was planned: ask again what there is now.
                    if attempt == ATTEMPTS:
                        raise
                    current = _plan(store, source, label, first.label, trimmed, force, verify, required, set())
    return tally.moved(time.monotonic() - started, tuple(done))


def _plan(
    store: Store,
    source: Source,
    label: str,
    target: str,
    trimmed: bool,
    force: bool,
    verify: bool,
    required: Producers | None,
    coming: set[ContentDigest],
) -> Plan:
    ref = source.ref(label)
    if ref is None:
        others = [other.label for other in source.refs()]
        raise SnapshotMissing(
            f"{source.where}: no snapshot named {label!r}; it has {', '.join(others[:20]) or 'none at all'}.",
            label=label,
        )
    if required is not None:
        vouched(source, label, ref.snapshot, required)
    snapshot = source.snapshot(ref.snapshot)
    expect = standing(store, source.where, target, ref.snapshot, snapshot, force)
    wanted = (trimmed_coverage if trimmed else whole)(ref.snapshot, snapshot)
    with blaming(source.where):
        want = objects(snapshot, wanted)
    there = want.keys() - (unsound if verify else absent)(store.shelf, want).keys() | coming
    at_source = set(objects(snapshot, source.coverage(ref.snapshot, snapshot)))
    # What it doesn't promise of this snapshot may be there for the sake of another.
    unpromised = {name: length for name, length in want.items() if name not in there and name not in at_source}
    for part in parts(unpromised, MAX_ASKED):
        at_source |= source.have(part)
    made = plan(target, expect, snapshot, wanted, there=there, source=at_source)
    if made.usable == 0:
        raise NotCovered(
            f"{source.where}: {label!r}: expected its objects here or there, found that {made.nowhere} of {len(want)} objects are on neither "
            f"side, and nothing can be continued from the rest. `kvferry push` from a store that has it brings them there.",
            label=label,
            nowhere=made.nowhere,
        )
    return made


def standing(
    store: Store, where: str, label: str, digest: SnapshotDigest, snapshot: Snapshot, force: bool
) -> SnapshotDigest | None:
    """Where ``label`` stands here. `RefConflict` unless it may move to ``snapshot``, which comes from ``where``."""
    now = store.shelf.records.standing(label)
    if now is None:
        return None
    if now != digest and not force:
        here = _standing_for(store, label, now)
        if not continues(snapshot, here):
            raise RefConflict(
                f"name {label!r}: the one here ({here.tokens} tokens) is not continued by the one at {where} "
                f"({snapshot.tokens} tokens): {parting(here, snapshot)}. Pull it under another name with --as NEWNAME, or "
                f"replace the one here with --force.",
                label=label,
                here=now.hex,
                there=digest.hex,
            )
    return now


def _standing_for(store: Store, label: str, digest: SnapshotDigest) -> Snapshot:
    """The snapshot that a name here stands for, to be compared with the remote's."""
    todo = f"Nobody can tell whether the remote's continues it: replace it with `kvferry pull --force REMOTE {shlex.quote(label)}`."
    try:
        return store.shelf.records.snapshot(digest)
    except SnapshotCorrupt as error:
        raise error.told(what=f"name {label!r} here: snapshot {digest}", todo=todo) from error
    except SnapshotMissing as error:
        raise SnapshotMissing(
            f"name {label!r} here: expected the manifest of snapshot {digest} in {store.shelf.path}, found none. {todo}",
            **error.details,
        ) from error


def _pull(store: Store, source: Source, current: Plan, incoming: Incoming, tally: Tally) -> Carried:
    needed = objects(current.snapshot, current.coverage)
    signatures = vouched(source, current.label, current.digest, None)
    while True:
        with store.shelf.shared():
            # What the plan carries may be here, damaged.
            left = incoming.lacking(needed) | incoming.unlanded(current.move)
            if not left:
                durable = promised(store.shelf, current.digest, current.snapshot, current.expect)
                incoming.publish(needed, durable)
                coverage = store.publish(current.snapshot, current.coverage)
                take_along(store.shelf.records, current.digest, signatures)
                move_name(store.shelf.records, current.label, current.expect, current.digest)
                return Carried(current.label, current.digest, current.snapshot, coverage, current.nowhere)
        # The lock is not held while bytes travel: what a collector takes meanwhile is found lacking above, and carried.
        adopted = incoming.adopt(left)
        tally.adopted({name: left[name] for name in adopted})
        fetch_into(source, {name: length for name, length in left.items() if name not in adopted}, incoming, tally)


def fetch_into(source: Source, left: Lengths, incoming: Incoming, tally: Tally) -> None:
    """Has ``left`` land, several batches at once."""

    def batch(lengths: Lengths) -> int:
        moved: list[int] = []
        for asked, (name, chunks) in zip(lengths, source.fetch(list(lengths)), strict=True):
            assert name == asked, "a remote answered for another object"
            with blaming_remote(source.where):
                incoming.land(name, lengths[name], counting(chunks, moved))
        return sum(moved)

    carry(left, batch, tally)


def _require_room(store: Store, needed: int) -> None:
    gauge = store.quota.gauge()
    if gauge is not None and needed:
        store.quota.make_room(gauge, needed)  # StoreFull with the whole need, before anything is carried
    free = shutil.disk_usage(store.shelf.path).free
    if needed > free:
        raise Refused(
            f"{store.shelf.path}: expected {needed:,} bytes free for what is to be pulled, found {free:,}. "
            f"Free some with `kvferry gc`, or pull with --trimmed.",
            needed=needed,
            free=free,
        )
