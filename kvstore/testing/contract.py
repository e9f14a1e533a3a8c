"""What every backend does, as tests. Subclass `BackendContract`, give it a fixture ``backend``, and let pytest collect the subclass."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ..backend import Backend
from ..digest import ContentDigest
from ..errors import (
    InputInvalid,
    LabelInvalid,
    NotCovered,
    ObjectCorrupt,
    ObjectMissing,
    RefConflict,
    SnapshotMissing,
)
from ..items import Item, SoftToken
from ..layout import BLOCK, trim_start
from ..match import Match
from ..memory import MemoryStore
from ..saving import Saved
from .data import HEAD, IDENTITY, LAYOUT, PlainRows, lineage, other_identity, save, tokens

LONG = 5 * BLOCK + 10
"""Tokens of most snapshots here: five blocks and a short one, more than two windows."""


class BackendContract:
    """A subclass gives the fixture ``backend``: a new, empty one for each test, closed by the fixture afterwards.

    `damaged`, `lost` and `reopened` say how to do to it what disks and time do; a backend where one has no meaning leaves it as it is,
    and its test is skipped.
    """

    def damaged(self, backend: Backend, name: ContentDigest) -> None:
        """Changes the content of an object behind the backend's back."""
        pytest.skip("this backend's objects can't be damaged")

    def lost(self, backend: Backend, name: ContentDigest) -> None:
        """Takes an object away behind the backend's back."""
        pytest.skip("this backend's objects can't be taken away")

    def reopened(self, backend: Backend) -> Backend:
        """Closes it, and opens what it kept; the answer is closed by the test."""
        pytest.skip("this backend keeps nothing when it is closed")

    # rows

    @pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1, LONG])
    def test_rows_come_back_as_they_were_saved(self, backend: Backend, count: int) -> None:
        items = tokens(count)
        saved = save(backend, items, name="a")
        assert saved.snapshot is not None and saved.snapshot.items == tuple(items)
        expect_rows(backend, backend.match("a"), items)
        match = find(backend, [*items, 5])
        assert match is not None and (match.n, match.digest) == (count, saved.digest)
        expect_rows(backend, match, items)

    def test_a_prefix_is_found_to_the_token(self, backend: Backend) -> None:
        items = tokens(LONG)
        save(backend, items)
        for cut in (1, BLOCK - 1, BLOCK, 2 * BLOCK + 7, LONG - 1):
            asked = [*items[:cut], 2000, 2001]
            match = find(backend, asked)
            assert match is not None and (match.n, match.common, match.first_difference) == (cut, cut, cut)
            expect_rows(backend, match, items)
        assert find(backend, [2000, *items]) is None
        assert find(backend, []) is None

    def test_the_longest_usable_wins_and_then_ones_own_lineage(self, backend: Backend) -> None:
        items = tokens(LONG)
        save(backend, items[:100], "cpu", name="short")
        save(backend, items[:200], "gpu", name="gpu")
        save(backend, items[:200], "cpu", name="cpu")
        for own in ("cpu", "gpu"):
            match = find(backend, [*items[:200], 2000], lineage=lineage(own))
            assert match is not None and match.n == 200 and match.lineage == lineage(own)
            expect_rows(backend, match, items, own)

    def test_saving_changes_no_row(self, backend: Backend) -> None:
        items = tokens(150)
        rows = PlainRows.causal(items)
        save(backend, items, rows=rows)
        assert all(rows.rows(g, 0, 150) == PlainRows.causal(items).rows(g, 0, 150) for g in (0, 1))

    def test_what_is_saved_is_a_copy(self, backend: Backend) -> None:
        items = tokens(70)
        rows = PlainRows.causal(items)
        save(backend, items, name="a", rows=rows)
        for group in (0, 1):
            for span in rows.spans(group, 0, 70):
                span[:] = bytes(len(span))
        expect_rows(backend, backend.match("a"), items)

    def test_soft_tokens_are_told_apart_by_their_rows(self, backend: Backend) -> None:
        def with_image(row: bytes) -> list[Item]:
            return [*tokens(70), SoftToken(7, row * 32), 3]

        save(backend, with_image(b"a"), name="a")
        expect_rows(backend, backend.match("a"), with_image(b"a"))
        match = find(backend, with_image(b"b"))
        assert match is not None and match.n == 70

    # whose KV

    def test_nothing_crosses_models_and_namespaces(self, backend: Backend) -> None:
        items = tokens(100)
        save(backend, items)
        assert find(backend, items, namespace="other") is None
        assert find(backend, items, identity=other_identity(weights="w1")) is None
        assert find(backend, items, identity=other_identity(tokenizer="t1")) is None
        assert find(backend, items) is not None

    def test_chains_never_mix(self, backend: Backend) -> None:
        """An unnamed save whose tokens are here with other bytes leaves them out; a named one forks, and each keeps its own bytes."""
        items = tokens(200)
        save(backend, items, "cpu", name="cpu")
        dropped = save(backend, items, "gpu")
        assert (dropped.digest, dropped.snapshot, dropped.dropped_from, dropped.written_objects) == (None, None, 0, 0)
        named = save(backend, items, "gpu", name="gpu")
        assert named.dropped_from is None
        expect_rows(backend, backend.match("gpu"), items, "gpu")
        expect_rows(backend, backend.match("cpu"), items, "cpu")

    def test_an_unnamed_save_keeps_what_agrees(self, backend: Backend) -> None:
        items = tokens(200)
        first = save(backend, items, "cpu", name="cpu")
        rows = PlainRows.causal(items, "cpu")
        for span in rows.spans(0, 130, 131):
            span[:] = b"\7" * len(span)
        saved = save(backend, items, rows=rows, pending=3, head=HEAD)
        assert saved.dropped_from == 2 and saved.snapshot is not None and first.snapshot is not None
        assert saved.snapshot.blocks == first.snapshot.blocks[:2] and saved.snapshot.pending is None

    def test_equal_bytes_are_kept_once(self, backend: Backend) -> None:
        items = tokens(LONG)
        first = save(backend, items, name="a")
        again = save(backend, items, name="b")
        assert (first.written_objects, again.written_objects, again.written_bytes) == (12, 0, 0)
        grown = save(backend, [*items, *tokens(80, 1)], name="a")
        assert grown.written_objects == 4  # the short block anew, and the next

    # what follows

    def test_a_pending_token_serves_an_exact_hit_of_the_same_head(self, backend: Backend) -> None:
        items = tokens(130)
        save(backend, items, name="a", pending=42, head=HEAD)
        match = find(backend, items, head=HEAD)
        assert match is not None and (match.n, match.pending) == (130, 42)
        for head in (None, "other"):
            match = find(backend, items, head=head)
            assert match is not None and (match.n, match.pending) == (129, None)
        assert (backend.match("a", head=HEAD).pending, backend.match("a").pending) == (42, None)
        assert backend.match("a", at=100, head=HEAD).pending is None

    # parts

    def test_a_trimmed_snapshot_continues_at_its_end_and_refuses_what_it_lacks(self, backend: Backend) -> None:
        items = tokens(LONG)
        trimmed = save_trimmed(backend, items, name="a")
        assert trimmed.coverage is not None and trimmed.coverage.runs[1] == ((trim_start(128, LONG), 6),)
        expect_rows(backend, backend.match("a"), items)
        match = find(backend, [*items[:300], 2000])
        if match is not None:
            expect_rows(backend, match, items)
        assert match is None or match.n <= 300
        with pytest.raises(NotCovered, match="can't be continued after 200 tokens"):
            backend.match("a", at=200)

    def test_what_is_known_is_not_read_again(self, backend: Backend) -> None:
        items = tokens(LONG)
        first = save(backend, items[: 3 * BLOCK], name="a")
        assert first.snapshot is not None
        rows = PlainRows.causal(items)
        for group in (0, 1):
            for span in rows.spans(group, 0, 3 * BLOCK):
                span[:] = bytes(len(span))
        save(backend, items, name="a", rows=rows, known=first.snapshot.blocks)
        expect_rows(backend, backend.match("a"), items)

    def test_what_is_neither_held_nor_known_is_refused(self, backend: Backend) -> None:
        items = tokens(LONG)
        with pytest.raises(InputInvalid, match="rows: expected rows from token 0 of group sliding"):
            save(backend, items, covered=(0, BLOCK))
        with pytest.raises(InputInvalid, match="known: expected at most 5 full blocks, found 6"):
            save(backend, items, known=PlainSaved.blocks(items))
        assert find(backend, items) is None

    # names

    def test_a_name_moves_and_what_it_stood_for_stays_as_cache(self, backend: Backend) -> None:
        one, two = save(backend, tokens(70, 1), name="a"), save(backend, tokens(70, 2), name="a")
        assert backend.resolve("a") == backend.standing("a") == two.digest
        assert one.digest is not None and backend.match(one.digest.hex).digest == one.digest
        match = find(backend, [*tokens(70, 1), 5])
        assert match is not None and match.digest == one.digest

    def test_a_name_is_moved_only_from_where_it_is_expected(self, backend: Backend) -> None:
        one = save(backend, tokens(70, 1), name="a", expect=None)
        with pytest.raises(RefConflict, match="expected no snapshot"):
            save(backend, tokens(70, 2), name="a", expect=None)
        two = save(backend, tokens(70, 2), name="a", expect=one.digest)
        with pytest.raises(RefConflict, match=f"expected {one.digest}, found {two.digest}"):
            save(backend, tokens(70, 3), name="a", expect=one.digest)
        with pytest.raises(RefConflict):
            save(backend, tokens(70, 3), name="b", expect=one.digest)
        assert (backend.standing("a"), backend.standing("b")) == (two.digest, None)
        with pytest.raises(InputInvalid, match="expect"):
            save(backend, tokens(70, 3), expect=None)

    def test_names_that_differ_by_case_only_are_refused(self, backend: Backend) -> None:
        save(backend, tokens(3), name="Straße")
        with pytest.raises(RefConflict, match="there already"):
            save(backend, tokens(3), name="STRASSE")
        assert backend.standing("STRASSE") is None

    @pytest.mark.parametrize("name", ["", " a", "a\n", "x" * 201])
    def test_what_is_no_name_is_refused(self, backend: Backend, name: str) -> None:
        with pytest.raises(LabelInvalid):
            save(backend, tokens(3), name=name)

    def test_what_is_not_here_is_missing(self, backend: Backend) -> None:
        assert backend.standing("a") is None
        for ask in (backend.resolve, backend.match):
            with pytest.raises(SnapshotMissing, match="'a'"):
                ask("a")
        with pytest.raises(SnapshotMissing):
            backend.match("0" * 64)

    @pytest.mark.parametrize("at", [-1, 0, 71])
    def test_a_position_that_is_not_there_is_refused(self, backend: Backend, at: int) -> None:
        save(backend, tokens(70), name="a")
        with pytest.raises(InputInvalid, match=f"expected a position of 1 to 70 tokens, found {at}"):
            backend.match("a", at=at)

    # bad input changes nothing

    @pytest.mark.parametrize(
        "fault", [{"lineage": []}, {"namespace": ""}, {"pending": -1, "head": HEAD}, {"pending": 1}], ids=lambda f: next(iter(f))
    )  # fmt: skip
    def test_what_is_out_of_range_is_refused_whole(self, backend: Backend, fault: dict[str, Any]) -> None:
        with pytest.raises(InputInvalid):
            save(backend, tokens(70), name="a", **fault)
        with pytest.raises(InputInvalid):
            find(backend, [-1])
        assert backend.standing("a") is None and find(backend, tokens(70)) is None

    # damage

    def test_damage_is_an_error_that_names_the_object(self, backend: Backend) -> None:
        items = tokens(LONG)
        name = content_of(save(backend, items, name="a"), 2, 0)
        self.damaged(backend, name)
        with pytest.raises(ObjectCorrupt, match=name.hex):
            backend.load(backend.match("a"), PlainRows(LAYOUT, LONG))
        save(backend, items, name="a")  # with the rows at hand it is written again
        expect_rows(backend, backend.match("a"), items)

    def test_a_lost_object_is_missing_and_what_is_left_serves(self, backend: Backend) -> None:
        items = tokens(LONG)
        save(backend, items, name="a")
        match = backend.match("a")
        self.lost(backend, match.snapshot.blocks[2][0])
        with pytest.raises(ObjectMissing, match=match.snapshot.blocks[2][0].hex):
            backend.load(match, PlainRows(LAYOUT, LONG))
        found = find(backend, [*items, 5])
        assert found is not None and found.n == 2 * BLOCK
        expect_rows(backend, found, items)

    def test_what_was_saved_is_there_when_it_is_opened_again(self, backend: Backend) -> None:
        items = tokens(LONG)
        saved = save(backend, items, name="a", pending=4, head=HEAD)
        again = self.reopened(backend)
        try:
            assert again.standing("a") == saved.digest
            expect_rows(again, again.match("a"), items)
            match = find(again, items, head=HEAD)
            assert match is not None and (match.n, match.pending) == (LONG, 4)
        finally:
            again.close()

    # against another

    @pytest.mark.parametrize("seed", range(3))
    def test_it_answers_as_the_store_in_memory_does(self, backend: Backend, seed: int) -> None:
        chance, model = random.Random(seed), MemoryStore()
        made: list[list[int]] = [tokens(200)]
        for number in range(12):
            stem = chance.choice(made)[: chance.choice([0, 1, 63, 64, 65, 128, 200])]
            items = [*stem, *tokens(chance.choice([1, 40, 64, 130]), chance.randrange(3))]
            made.append(items)
            engine, name = chance.choice(["cpu", "gpu"]), chance.choice([None, f"n{number % 5}"])
            ready = {"pending": 9, "head": HEAD} if chance.random() < 0.5 else {}
            answers = [save(one, items, engine, name=name, **ready) for one in (backend, model)]
            assert answers[0].digest == answers[1].digest and answers[0].coverage == answers[1].coverage
            assert answers[0].dropped_from == answers[1].dropped_from
            assert answers[0].written_objects == answers[1].written_objects
            asked = [*chance.choice(made)[: chance.randrange(1, 260)], *chance.choice([[], [2000]])]
            head, own = chance.choice([None, HEAD]), lineage(chance.choice(["cpu", "gpu"]))
            mine, theirs = (find(one, asked, head=head, lineage=own) for one in (backend, model))
            assert (mine and (mine.n, mine.pending)) == (theirs and (theirs.n, theirs.pending))
            if mine is not None:
                assert mine.lineage is not None
                expect_rows(backend, mine, mine.snapshot.items, dict(mine.lineage.fields)["engine"], own_blocks=True)


class PlainSaved:
    """Digests of causal rows, as a store would name them."""

    @staticmethod
    def blocks(items: list[int]) -> tuple[tuple[ContentDigest, ...], ...]:
        snapshot = save(MemoryStore(), items).snapshot
        assert snapshot is not None
        return snapshot.blocks


def save_trimmed(backend: Backend, items: list[int], **other: Any) -> Saved:
    """Saves what continuing from the end needs: as somebody does who restored a trimmed snapshot elsewhere."""
    start = trim_start(128, len(items))
    known = PlainSaved.blocks(items)[: len(items) // BLOCK]
    rows = PlainRows.causal(items)
    for span in rows.spans(1, 0, start * BLOCK):
        span[:] = bytes(len(span))
    return save(backend, items, rows=rows, covered=(0, start * BLOCK), known=known, **other)


def find(backend: Backend, items: list[Item] | list[int], **other: Any) -> Match | None:
    """`Backend.find` for `LAYOUT` and `IDENTITY` in the namespace ``default``."""
    identity = other.pop("identity", IDENTITY)
    return backend.find(LAYOUT, identity, items, **{"namespace": "default", **other})


def content_of(saved: Saved, block: int, group: int) -> ContentDigest:
    assert saved.snapshot is not None
    return saved.snapshot.blocks[block][group]


def expect_rows(backend: Backend, match: Match, items: Any, engine: str = "cpu", *, own_blocks: bool = False) -> None:
    """Loads ``match``: its rows are those that ``engine`` computes for ``items``, and no other row is touched. ``own_blocks``: of the last block only,
    where others may be another engine's."""
    rows = PlainRows(LAYOUT, match.n)
    backend.load(match, rows)
    want = PlainRows.causal(items[: match.n], engine)
    for group, (first, last) in enumerate(match.runs):
        assert last == match.n
        start = max(first, (last - 1) // BLOCK * BLOCK) if own_blocks else first
        assert rows.rows(group, start, last) == want.rows(group, start, last)
        assert not any(map(any, rows.rows(group, 0, first)))
