"""What was saved comes back, at every size around the block's edges; and only what is new is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvmemory import HEAD, IDENTITY, LAYOUT, Memory, carry, expect_rows, files, find, lineage, load, save

from kvstore import Store
from kvstore.codec import HEADER
from kvstore.errors import InputInvalid, NotCovered, SnapshotMissing
from kvstore.layout import BLOCK, blocks_of
from kvstore.snapshot import Receipt

SIZES = [1, 63, 64, 65, 127, 128, 129, 511, 512, 513, 2048]


@pytest.mark.parametrize("size", SIZES)
def test_save_find_load(tmp_path: Path, size: int) -> None:
    items = [(7 * i) % 1000 for i in range(size)]
    with Store.open(tmp_path / "s") as store:
        receipt = Receipt((5, 6), 2, "cap")
        saved = save(store, items, name="one", pending=42, head=HEAD, receipt=receipt, model="tiny")
        assert saved.written_objects == 2 * blocks_of(size)
        assert saved.written_bytes == size * LAYOUT.bytes_per_token + saved.written_objects * HEADER
    with Store.open(tmp_path / "s", create=False) as store:
        match = find(store, items, head=HEAD)
        assert (match.n, match.pending, match.first_difference, match.common) == (size, 42, None, size)
        assert match.snapshot == saved.snapshot and match.snapshot.receipt == receipt and match.snapshot.model == "tiny"
        assert match.lineage == lineage()
        expect_rows(store, match)
        longer = find(store, [*items, 3, 4], head=HEAD)
        assert (longer.n, longer.pending, longer.first_difference) == (size, None, size)
        expect_rows(store, longer)
        by_name = store.match("one", head=HEAD)
        assert (by_name.n, by_name.pending) == (size, 42)
        assert store.load(by_name, Memory(LAYOUT, size)) == size * LAYOUT.bytes_per_token


@pytest.mark.parametrize("size", [65, 512])
def test_a_prefix_is_exact_to_the_token(tmp_path: Path, size: int) -> None:
    items = [(7 * i) % 1000 for i in range(size)]
    with Store.open(tmp_path / "s") as store:
        save(store, items, pending=42, head=HEAD)
        for asked in range(1, size + 1):
            match = find(store, items[:asked])
            if asked == 1:
                assert match is None  # the only token is decoded again: nothing to reuse
                continue
            assert (match.n, match.pending) == (asked - 1, None)
            different = find(store, [*items[: asked - 1], 5000, 5001])
            assert (different.n, different.first_difference) == (asked - 1, asked - 1)
        expect_rows(store, find(store, [*items[:37], 5000]))
        expect_rows(store, find(store, [*items[:64], 5000]))


def test_another_head_decodes_the_last_token_again(tmp_path: Path) -> None:
    items = list(range(100))
    with Store.open(tmp_path / "s") as store:
        save(store, items, pending=42, head=HEAD)
        assert (find(store, items, head=HEAD).n, find(store, items, head=HEAD).pending) == (100, 42)
        other = find(store, items, head="another")
        assert (other.n, other.pending, other.first_difference) == (99, None, None)
        assert (find(store, items).n, find(store, items).pending) == (99, None)


def test_restore_by_name_at_a_position(tmp_path: Path) -> None:
    items = list(range(200))
    with Store.open(tmp_path / "s") as store:
        saved = save(store, items, name="one", pending=1, head=HEAD)
        for at in (1, 2, 64, 65, 199):
            match = store.match("one", at=at, head=HEAD)
            assert (match.n, match.pending) == (at - 1, None)
            expect_rows(store, match)
        assert store.match(saved.digest.hex).n == 199
        for bad in (0, 201, -1):
            with pytest.raises(InputInvalid, match="1 to 200"):
                store.match("one", at=bad)
        with pytest.raises(SnapshotMissing, match="no snapshot named 'two'"):
            store.match("two")
        with pytest.raises(SnapshotMissing):
            store.match("0" * 64)


def test_growing_writes_the_new_blocks_and_the_tail_only(tmp_path: Path) -> None:
    items = [(11 * i) % 700 for i in range(400)]
    with Store.open(tmp_path / "s") as store:
        save(store, items[:100], name="talk")
        before = files(tmp_path / "s")
        grown = save(store, items[:300], name="talk")
        # Block 0 is there. Block 1 was short before: it is another object now. Blocks 2, 3 and 4 are new.
        assert grown.written_objects == 2 * 4
        assert grown.written_bytes == (300 - 64) * LAYOUT.bytes_per_token + 8 * HEADER
        after = files(tmp_path / "s")
        assert all(after[path] == data for path, data in before.items() if not path.startswith("refs/"))
        again = save(store, items[:300], name="talk")
        assert (again.written_objects, again.written_bytes, again.digest) == (0, 0, grown.digest)
        assert find(store, items).n == 300


class Watched(Memory):
    """Notes which rows were asked for."""

    def __init__(self, source: Memory) -> None:
        super().__init__(source.layout, source.tokens)
        self._arrays = source._arrays
        self.asked: set[tuple[int, int]] = set()

    def spans(self, group: int, start: int, stop: int) -> list[memoryview]:
        self.asked.add((group, start // BLOCK))
        return list(super().spans(group, start, stop))


def test_known_blocks_are_not_read_again(tmp_path: Path) -> None:
    items = list(range(300))
    with Store.open(tmp_path / "s") as store:
        first = save(store, items[:200])
        rows = Watched(Memory.causal(items))
        grown = save(store, items, rows=rows, known=first.snapshot.blocks[:3])
        assert rows.asked == {(g, b) for g in (0, 1) for b in (3, 4)}
        assert grown.snapshot.blocks[:3] == first.snapshot.blocks[:3]
        expect_rows(store, find(store, [*items, 0]))
    with Store.open(tmp_path / "other") as store:
        # Known, but this store does not have them: written from the rows.
        saved = save(store, items, known=first.snapshot.blocks[:3])
        assert saved.written_objects == 10 and saved.digest == grown.digest
        with pytest.raises(InputInvalid, match="known: expected at most 4"):
            save(store, items, known=grown.snapshot.blocks)
        wrong = [tuple(reversed(first.snapshot.blocks[0]))]
        with pytest.raises(InputInvalid, match="known: expected the content digest"):
            save(store, [9, *items[1:]], known=wrong, rows=Memory.causal([9, *items[1:]], "other"), identity=IDENTITY)


def test_a_trimmed_restore_grows_without_the_rows_it_lacks(tmp_path: Path) -> None:
    items = [(3 * i) % 500 for i in range(520)]
    with Store.open(tmp_path / "whole") as whole, Store.open(tmp_path / "phone") as phone:
        saved = save(whole, items[:400], pending=1, head=HEAD)
        carry(whole, phone, saved.digest)
        match = find(phone, items)
        assert (match.n, match.runs) == (400, ((0, 400), (256, 400)))  # block 4 is the first with the last 128 rows
        memory = Memory(LAYOUT, 520)
        phone.load(match, memory)
        full = Memory.causal(items)
        for group in (0, 1):
            for target, source in zip(memory.spans(group, 400, 520), full.spans(group, 400, 520), strict=True):
                target[:] = source
        covered = [first for first, _ in match.runs]
        known = match.snapshot.blocks[: 400 // BLOCK]
        grown = save(phone, items, rows=memory, covered=covered, known=known, name="grown")
        # The chain names every block, as if it had been computed here; this store promises what it has.
        assert grown.digest == save(whole, items, name="grown").digest
        assert grown.coverage.runs == (((0, 9),), ((4, 9),))
        assert grown.written_objects == 2 * 3
        expect_rows(phone, find(phone, [*items, 0]))
        assert phone.match("grown").n == 519
        with pytest.raises(NotCovered, match="can't be continued after 200"):
            phone.match("grown", at=200)
        with pytest.raises(InputInvalid, match="rows from token"):
            save(phone, items, rows=memory, covered=covered, known=known[:2])
        # The rows below `covered` are zero in memory: no object of zeros was written.
        assert not any(data[HEADER:] and not any(data[HEADER:]) for path, data in files(tmp_path / "phone").items())


def test_load_verifies_before_it_copies(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        saved = save(store, list(range(64)), name="one")
        match = store.match("one")
        assert load(store, match).rows(0, 0, 63) == Memory.causal(list(range(64))).rows(0, 0, 63)
        assert saved.coverage.runs == (((0, 1),), ((0, 1),))


def test_limits_of_what_can_be_saved(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        with pytest.raises(InputInvalid, match="tokens: expected 1 to"):
            save(store, [], name="x")
        for items in ([-1], [2**31], ["a"], [1.5]):
            with pytest.raises(InputInvalid):
                save(store, items, rows=Memory(LAYOUT, 1))  # type: ignore[list-item]
        with pytest.raises(InputInvalid, match="lineage"):
            save(store, [1, 2], lineage=[])
        with pytest.raises(InputInvalid, match="receipt: expected a pending"):
            save(store, [1, 2], receipt=Receipt((1,), 1, "cap"))
        with pytest.raises(InputInvalid, match="pending"):
            save(store, [1, 2], pending=-5, head=HEAD)
        with pytest.raises(InputInvalid, match="pending"):
            save(store, [1, 2], pending=5)
        with pytest.raises(InputInvalid, match="receipt"):
            save(store, [1, 2], pending=5, head=HEAD, receipt=Receipt((1, 2), 1, "cap"))
        with pytest.raises(InputInvalid, match="can hold"):
            save(store, [1, 2], model="\ud800")
        for namespace in ("", " a", "a ", "a\n", "e\u0301", "x" * 201):
            with pytest.raises(InputInvalid, match="namespace"):
                save(store, [1, 2], namespace=namespace)
        assert list(store.shelf.records.snapshots()) == []
