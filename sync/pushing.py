"""Push: snapshots from the store to a remote. Only what it lacks; verified on the way; the ref last, by compare-and-swap."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence

from kvstore.codec import CODECS, Codec, encode_object
from kvstore.digest import ContentDigest, SnapshotDigest
from kvstore.errors import (
    NotCovered,
    ObjectCorrupt,
    ObjectMissing,
    RefConflict,
    RefCorrupt,
    SnapshotCorrupt,
    SnapshotMissing,
)
from kvstore.objects import mending
from kvstore.records import check_label
from kvstore.snapshot import Snapshot, whole
from kvstore.store import Store

from .carry import ATTEMPTS, Carried, Meter, Moved, Tally, carry, counting, unmetered
from .frames import Buffer
from .plan import Lengths, Plan, continues, objects, parting, parts, plan
from .reach import blaming, reaching
from .remote import MAX_ASKED, Frame, Target
from .vouching import send_along


def plan_push(
    store: Store, target: Target, names: Sequence[str], *, force: bool = False, verify: bool = False
) -> list[Plan]:
    """What `push` with these arguments would carry, one plan a name; an object that two need is in the first only.

    Moves nothing. Raises what `push` raises before it carries anything.
    """
    plans: list[Plan] = []
    coming: set[ContentDigest] = set()
    for label in dict.fromkeys(check_label(name) for name in names):
        plans.append(_plan(store, target, label, force, verify, coming))
        coming |= plans[-1].move.keys()
    return plans


def push(
    store: Store,
    target: Target,
    names: Sequence[str],
    *,
    force: bool = False,
    verify: bool = False,
    codec: Codec | None = None,
    meter: Meter = unmetered,
) -> Moved:
    """Sends the named snapshots to a remote: of what the store covers, only objects that the remote lacks.

    The remote then promises what the store covers and what it had anyway. A name that it has moves only to a snapshot that
    continues the one it stands for (`plan.continues`), else `RefConflict` (`RefCorrupt` where nobody can tell); ``force`` moves it
    anyway. With ``verify`` the remote
    reads what it has already, and gets again what is damaged. Objects travel as they are stored, or in ``codec``. Each snapshot is published by itself, in order; on an error the
    earlier ones stay, and a later push carries the rest.

    `SnapshotMissing`, `NotCovered`, `ObjectMissing` and `ObjectCorrupt` (the store's own; never sent on), `Unreachable`.
    """
    started = time.monotonic()
    plans = plan_push(store, target, names, force=force, verify=verify)
    done = []
    with meter(sum(p.payload_bytes for p in plans)) as advance:
        tally = Tally(advance)
        for first in plans:
            tally.skipped += first.there
            current = first
            for attempt in range(1, ATTEMPTS + 1):
                _send(store, target, current, codec, tally)
                try:
                    now = target.publish(current.snapshot, current.coverage, current.label, current.expect)
                except ObjectMissing:
                    # Collected at the remote since it was planned: ask again what it has now.
                    if attempt == ATTEMPTS:
                        raise
                    current = _plan(store, target, current.label, force, verify, set())
                else:
                    send_along(store.shelf.records, target, current.digest)
                    done.append(Carried(current.label, current.digest, current.snapshot, now, current.nowhere))
                    break
    return tally.moved(time.monotonic() - started, tuple(done))


def _plan(store: Store, target: Target, label: str, force: bool, verify: bool, coming: set[ContentDigest]) -> Plan:
    records = store.shelf.records
    ref = records.ref(label)
    if ref is None:
        raise SnapshotMissing(
            f"no snapshot named {label!r} in {store.shelf.path}. `kvferry ls` lists them.", label=label
        )
    snapshot = records.snapshot(ref.snapshot)
    covered = objects(snapshot, records.coverage(ref.snapshot, snapshot))
    expect = _expect(store, target, label, ref.snapshot, snapshot, force)
    wanted = whole(ref.snapshot, snapshot)
    there = set(coming)
    for part in parts(objects(snapshot, wanted), MAX_ASKED):
        there |= target.sound(part) if verify else target.have(part)
    made = plan(label, expect, snapshot, wanted, there=there, source=covered.keys())
    if made.usable == 0:
        raise NotCovered(
            f"{store.shelf.path}: {label!r}: expected its objects here or there, found that {made.nowhere} are on neither side, and nothing "
            f"can be continued from the rest. {mending(label, absent=True)}",
            label=label,
            nowhere=made.nowhere,
        )
    return made


def _expect(
    store: Store, target: Target, label: str, digest: SnapshotDigest, snapshot: Snapshot, force: bool
) -> SnapshotDigest | None:
    """Where ``label`` stands at the remote. `RefConflict` unless it may move to ``snapshot``."""
    try:
        ref = target.ref(label)
    except RefCorrupt:
        if not force:
            raise
        return None
    if ref is None:
        return None
    if ref.snapshot != digest and not force:
        there = _standing_for(target, label, ref.snapshot)
        if not continues(snapshot, there):
            raise RefConflict(
                f"name {label!r}: the one at {target.where} ({there.tokens} tokens) is not continued by the one here "
                f"({snapshot.tokens} tokens): {parting(there, snapshot)}. Give the one here another name with `kvferry "
                f"rename` and push that, or replace the one there with --force.",
                label=label,
                here=digest.hex,
                there=ref.snapshot.hex,
            )
    return ref.snapshot


def _standing_for(target: Target, label: str, digest: SnapshotDigest) -> Snapshot:
    """The snapshot that a name at the remote stands for, to be compared with the one here."""
    todo = f"Nobody can tell whether the one here continues it: replace it with `kvferry push --force REMOTE {shlex.quote(label)}`."
    try:
        return target.snapshot(digest)
    except SnapshotCorrupt as error:
        raise error.told(todo=todo) from error
    except SnapshotMissing as error:
        raise SnapshotMissing(
            f"name {label!r} at {target.where}: expected the manifest of snapshot {digest}, found none. {todo}",
            **error.details,
        ) from error


def _send(store: Store, target: Target, current: Plan, codec: Codec | None, tally: Tally) -> None:
    lengths = current.move
    mend = f"It was not sent. Mend it here: {mending(current.label)}"
    resumed: set[ContentDigest] = set()
    for part in parts(lengths, MAX_ASKED):
        resumed |= target.resume(part)
    tally.adopted({name: lengths[name] for name in resumed})

    def batch(some: Lengths) -> int:
        moved: list[int] = []
        with blaming(str(store.shelf.path), ObjectCorrupt, todo=mend):
            target.put(_frames(store, some, codec, moved), some)
        return sum(moved)

    carry({name: length for name, length in lengths.items() if name not in resumed}, batch, tally)


def _frames(store: Store, names: Lengths, codec: Codec | None, moved: list[int]) -> Iterator[Frame]:
    for name, length in names.items():
        yield name, counting(_frame(store, name, length, codec), moved)


def _frame(store: Store, name: ContentDigest, length: int, codec: Codec | None) -> Iterator[Buffer]:
    with reaching(str(store.shelf.path)):
        if codec is None:
            yield from store.shelf.objects.frame(name)
        else:
            yield from encode_object(name, [store.shelf.objects.read(name, length)], CODECS[codec])
