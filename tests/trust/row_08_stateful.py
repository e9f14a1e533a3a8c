"""Row 8: the store against a dict, in any order of things that can happen to it, with processes that die in the middle of them.

The machine of `tests/kvstore/test_stateful.py`, and another process beside it that opens the same store, begins something, and kills itself
before its n-th call that changes a file; pins, the trash and both codecs. What it was doing has then happened or has not, and everything else is as before.

Measured: 204 sequences, 9,393 steps and 2,039 processes that died, in 272 s on a busy machine, a fifth of it computing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import kvmemory
import test_stateful
from battery import Size, Tally
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import get_state_machine_test, precondition, rule
from kvmemory import HEAD, expect_rows
from narrow import Narrow, save
from test_stateful import LABELS, StoreMachine, sequences

from kvstore import Store, pins, prune, recode, trash
from kvstore.check import check
from kvstore.codec import Codec
from kvstore.digest import SnapshotDigest
from kvstore.errors import KVError
from kvstore.snapshot import Coverage, Snapshot

TITLE = "stateful property test against a dict, with reopen, crash and collect"
REQUIRED = 200
STEPS = 50
CALLS = ("rename", "fsync", "writev", "unlink", "open", "mkdir", "rmdir")
"""The calls by which a store changes its files: a process dies before one of them."""
WHERE = st.integers(1, 40)


def dying(path: Path, at: int, action: Callable[[Store], object]) -> bool:
    """Does ``action`` in a process of its own that dies before its call number ``at``. Whether it died."""
    pid = os.fork()
    if pid:
        status = os.waitpid(pid, 0)[1]
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"the other process ended with {status:#x}"
        return os.WIFSIGNALED(status)
    try:
        with Store.open(path) as store:
            _die_at(at)
            action(store)
    except KVError as error:
        os.write(2, f"{error}\n".encode())
        os._exit(3)
    except BaseException as error:
        os.write(2, f"{error!r}\n".encode())
        os._exit(4)
    os._exit(0)


def _die_at(number: int) -> None:
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapped

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


class CrashingMachine(StoreMachine):
    """Adds what another process does to the store until it dies."""

    made, steps, deaths, recoded = 0, 0, 0, 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        self.littered = False
        """Whether a dead process may have left files that nobody needs."""

    def die(self, at: int, action: Callable[[Store], object]) -> bool:
        died = dying(self.folder / "s", at, action)
        type(self).deaths += died
        self.littered |= died
        return died

    def here(self) -> dict[SnapshotDigest, tuple[Snapshot, Coverage]]:
        records = self.store.shelf.records
        found = {digest: records.snapshot(digest) for digest in records.snapshots()}
        return {digest: (one, records.coverage(digest, one)) for digest, one in found.items()}

    def named(self) -> dict[str, SnapshotDigest]:
        return {ref.label: ref.snapshot for ref in self.store.shelf.records.refs()}

    def sound(self) -> None:
        report = check(self.store)
        assert report.ok, report
        assert all(one.usable == one.tokens for one in report.names), report

    @rule(items=sequences, label=st.sampled_from([None, "a", "b", "c d"]), pending=st.booleans(), at=WHERE)
    def die_while_saving(self, items: list[int], label: str | None, pending: bool, at: int) -> None:
        if label is not None and label not in self.names and any(n.casefold() == label for n in self.names):
            return  # a clash is an answer, no crash
        ready: dict[str, Any] = {"pending": 7, "head": HEAD} if pending else {}
        made = save(self.source, items, **ready)
        before, names = dict(self.snapshots), dict(self.names)
        died = self.die(at, lambda store: save(store, items, name=label, **ready))
        now = self.here()
        assert before.keys() <= now.keys() <= before.keys() | {made.digest}
        for digest, entry in before.items():
            assert digest == made.digest or now[digest] == entry
        if made.digest in now:
            old = before.get(made.digest)
            whole = made.coverage if old is None else old[1].union(made.coverage)
            assert now[made.digest][1] in ([whole] if old is None else [whole, old[1]])
        self.snapshots = now
        after = names if label is None else {**names, label: made.digest}
        self.names = self.named()
        assert self.names in ([after, names] if died else [after])
        assert died or made.digest in now
        self.sound()

    @precondition(lambda self: self.names)
    @rule(data=st.data(), to=st.sampled_from(LABELS), at=WHERE)
    def die_while_renaming(self, data: st.DataObject, to: str, at: int) -> None:
        label = data.draw(st.sampled_from(sorted(self.names)))
        if any(other != label and other.casefold() == to.casefold() for other in self.names):
            return
        before = dict(self.names)
        died = self.die(at, lambda store: store.shelf.records.rename_ref(label, to))
        after = {**{k: v for k, v in before.items() if k != label}, to: before[label]}
        self.names = self.named()
        assert self.names in ([before, {**before, **after}, after] if died else [after])
        if label != to and {label, to} <= self.names.keys():
            assert self.names[label] == self.names[to]
            if label.casefold() == to.casefold():  # both are here now: the next rename would clash with it
                self.store.shelf.records.move_ref(label, self.names.pop(label), None)
        self.sound()

    @precondition(lambda self: self.names)
    @rule(data=st.data(), at=WHERE)
    def die_while_removing(self, data: st.DataObject, at: int) -> None:
        label = data.draw(st.sampled_from(sorted(self.names)))
        before, target = dict(self.names), self.names[label]
        died = self.die(at, lambda store: store.shelf.records.move_ref(label, target, None))
        after = {k: v for k, v in before.items() if k != label}
        self.names = self.named()
        assert self.names in ([before, after] if died else [after])
        self.sound()

    @rule(purge=st.booleans(), at=WHERE)
    def die_while_collecting(self, purge: bool, at: int) -> None:
        died = self.die(at, partial(collect, purge=purge))
        before, self.snapshots = self.snapshots, self.here()
        kept = {digest: entry for digest, entry in before.items() if digest in self.names.values()}
        assert kept.items() <= self.snapshots.items() <= before.items()
        assert died or self.snapshots == kept
        self.sound()

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        label = data.draw(st.sampled_from(sorted(self.names)))
        made = pins.pin(self.store.shelf.records, label)
        assert made.snapshot == self.names[label] and made.label.startswith("pin/")
        self.names[made.label] = made.snapshot

    @precondition(lambda self: any(name.startswith("pin/") for name in self.names))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        label = data.draw(st.sampled_from(sorted(name for name in self.names if name.startswith("pin/"))))
        assert pins.unpin(self.store.shelf.records, [label]) == [(label, self.names.pop(label))]

    @rule(data=st.data())
    def restore_from_the_trash(self, data: st.DataObject) -> None:
        there = [one for one in trash.collected(self.store.shelf) if one.tokens is not None and not one.lacking]
        if not there:
            return
        chosen = data.draw(st.sampled_from([one.digest for one in there]))
        assert trash.restore(self.store, chosen.hex).lacking == 0
        snapshot, coverage = self.here()[chosen]
        if chosen in self.snapshots:
            assert coverage == self.snapshots[chosen][1]
        self.snapshots[chosen] = (snapshot, coverage)
        expect_rows(self.store, self.store.match(chosen.hex, head=HEAD))

    @rule(codec=st.sampled_from(["raw", "planes"]))
    def recode(self, codec: Codec) -> None:
        plan = recode.plan(self.store, codec)
        done = recode.apply(self.store, plan)
        assert done.objects + done.kept == len(plan.items) and not done.gone and not done.damaged
        type(self).recoded += done.objects

    @rule(codec=st.sampled_from(["raw", "planes"]), at=WHERE)
    def die_while_recoding(self, codec: Codec, at: int) -> None:
        self.die(at, lambda store: recode.apply(store, recode.plan(store, codec)))
        self.sound()

    @rule(purge=st.booleans())
    def collect(self, purge: bool) -> None:
        super().collect(purge=purge)
        self.littered = False

    @rule()
    def check(self) -> None:
        report = check(self.store)
        assert report.ok and (self.littered or report.notes == ()), report

    def check_invariants(self, *args: Any, **kwargs: Any) -> None:
        type(self).steps += 1
        super().check_invariants(*args, **kwargs)


def collect(store: Store, purge: bool) -> None:
    prune.apply(store, prune.plan(store))
    if purge:
        prune.purge(store)


def run(size: Size, tally: Tally, scratch: Path) -> None:
    """Half of the attempts again at most: the first failing sequence is made small before it is told."""
    test_stateful.save, kvmemory.Memory = save, Narrow  # type: ignore[assignment, misc]  # rows that planes make smaller
    rounds = settings(
        max_examples=size.pick(3, REQUIRED),
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    test = get_state_machine_test(CrashingMachine, settings=rounds)
    failure = None
    try:
        hypothesis.seed(size.seed)(test)()
    except Exception as error:
        failure = error
    tally.tried = CrashingMachine.made
    tally.caught = max(0, tally.tried - (failure is not None))
    tally.facts |= {
        "steps": CrashingMachine.steps,
        "processes that died": CrashingMachine.deaths,
        "objects recoded": CrashingMachine.recoded,
    }
    if failure is not None:
        tally.fail("a sequence of steps", failure)
