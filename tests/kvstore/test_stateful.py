"""The store against a dict: saves, names, finds, removals, collections, trimmed copies and reopening, in any order."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvmemory import HEAD, carry, expect_rows, find, save
from test_find import brute_force

from kvstore import Store, prune
from kvstore.check import check
from kvstore.digest import SnapshotDigest
from kvstore.errors import RefConflict, SnapshotMissing
from kvstore.snapshot import Coverage, Snapshot

LABELS = ["a", "b", "B", "c d"]
sequences = st.tuples(
    st.sampled_from([0, 1, 62, 64, 65, 128, 130, 200]), st.integers(1, 3), st.sampled_from([1, 2, 63, 64, 70])
).map(lambda t: [*range(t[0]), *([1000 * t[1]] * t[2])])


class StoreMachine(RuleBasedStateMachine):
    """``snapshots``: what is here, by digest; ``names``: label to digest."""

    def __init__(self) -> None:
        super().__init__()
        base = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
        self.folder = Path(tempfile.mkdtemp(dir=base))
        self.store = Store.open(self.folder / "s")
        self.source = Store.open(self.folder / "source")
        self.snapshots: dict[SnapshotDigest, tuple[Snapshot, Coverage]] = {}
        self.names: dict[str, SnapshotDigest] = {}

    def teardown(self) -> None:
        self.store.close()
        self.source.close()
        shutil.rmtree(self.folder)

    def note(self, digest: SnapshotDigest, snapshot: Snapshot, coverage: Coverage) -> None:
        if digest in self.snapshots:
            coverage = coverage.union(self.snapshots[digest][1])
        self.snapshots[digest] = (snapshot, coverage)

    @rule(items=sequences, label=st.sampled_from([None, *LABELS]), pending=st.booleans())
    def save(self, items: list[int], label: str | None, pending: bool) -> None:
        ready = {"pending": 7, "head": HEAD} if pending else {}
        clash = label is not None and label not in self.names and label.swapcase() in self.names and len(label) == 1
        try:
            saved = save(self.store, items, name=label, **ready)
        except RefConflict:
            assert clash
            saved = save(self.store, items, **ready)  # it is here, without the name
            assert saved.written_objects == 0
        else:
            assert not clash
            if label is not None:
                self.names[label] = saved.digest
        assert saved.dropped_from is None
        self.note(saved.digest, saved.snapshot, saved.coverage)

    @rule(items=sequences)
    def receive_trimmed(self, items: list[int]) -> None:
        made = save(self.source, items)
        carry(self.source, self.store, made.digest)
        coverage = self.store.shelf.records.coverage(made.digest, made.snapshot)
        assert made.digest in self.snapshots or coverage.runs[0] == ((0, len(made.snapshot.blocks)),)
        self.note(made.digest, made.snapshot, coverage)

    @precondition(lambda self: self.names)
    @rule(data=st.data(), to=st.sampled_from(LABELS))
    def rename(self, data: st.DataObject, to: str) -> None:
        label = data.draw(st.sampled_from(sorted(self.names)))
        finished = self.names.get(to) == self.names[label]  # as after a rename that was interrupted
        clash = not finished and any(other != label and other.casefold() == to.casefold() for other in self.names)
        try:
            self.store.shelf.records.rename_ref(label, to)
        except RefConflict:
            assert clash
        else:
            assert not clash
            self.names[to] = self.names.pop(label)

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        label = data.draw(st.sampled_from(sorted(self.names)))
        self.store.shelf.records.move_ref(label, self.names.pop(label), None)

    @rule(purge=st.booleans())
    def collect(self, purge: bool) -> None:
        prune.apply(self.store, prune.plan(self.store))
        if purge:
            prune.purge(self.store)
        kept = set(self.names.values())
        self.snapshots = {digest: entry for digest, entry in self.snapshots.items() if digest in kept}
        needed = {c for snapshot, _ in self.snapshots.values() for block in snapshot.blocks for c in block}
        assert set(self.store.shelf.objects.names()) <= needed

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = Store.open(self.folder / "s")

    @rule()
    def lose_the_index(self) -> None:
        self.store.close()
        for end in ("", "-wal", "-shm"):
            (self.folder / "s" / f"index.sqlite{end}").unlink(missing_ok=True)
        self.store = Store.open(self.folder / "s")

    @rule(items=sequences, head=st.sampled_from([None, HEAD]), cut=st.integers(0, 70))
    def find(self, items: list[int], head: str | None, cut: int) -> None:
        asked = items[: max(1, len(items) - cut)]
        best = max((brute_force(s, c, asked, head) for s, c in self.snapshots.values()), default=0)
        match = find(self.store, asked, head=head)
        if best == 0:
            assert match is None
        else:
            assert match is not None and match.n == best and match.digest in self.snapshots
            expect_rows(self.store, match)

    @rule(label=st.sampled_from(LABELS))
    def match(self, label: str) -> None:
        if label not in self.names:
            try:
                self.store.match(label)
            except SnapshotMissing:
                return
            raise AssertionError(f"{label} is not there")
        match = self.store.match(label, head=HEAD)
        assert match.digest == self.names[label]
        expect_rows(self.store, match)

    @invariant()
    def refs_are_the_names(self) -> None:
        assert {ref.label: ref.snapshot for ref in self.store.shelf.records.refs()} == self.names

    @invariant()
    def manifests_are_the_snapshots(self) -> None:
        assert set(self.store.shelf.records.snapshots()) == set(self.snapshots)
        for digest, (snapshot, coverage) in self.snapshots.items():
            assert self.store.shelf.records.coverage(digest, snapshot) == coverage

    @rule()
    def check(self) -> None:
        report = check(self.store)
        assert report.ok and report.notes == (), report


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestStore = StoreMachine.TestCase
