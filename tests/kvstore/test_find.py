"""`find` against a brute-force model: the longest usable continuation, to the token, of whatever runs of blocks are here."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvmemory import HEAD, LAYOUT, Memory, carry, expect_rows, find, lineage, save

from kvstore import Group, Layout, SoftToken, Store
from kvstore.layout import BLOCK, allows, blocks_of, first_read, trim_start, usable
from kvstore.snapshot import Coverage, Snapshot, runs_of

WIDE = Layout((Group("sliding", 192, (0,), 1, 2), Group("full", None, (1,), 1, 2)))


@st.composite
def chains(draw: st.DrawFn) -> list[list[int]]:
    """Token sequences that fork from each other, often at or beside a block's edge."""
    made: list[list[int]] = []
    for _ in range(draw(st.integers(1, 5))):
        stem = draw(st.sampled_from(made)) if made and draw(st.booleans()) else []
        near = draw(st.sampled_from([0, 63, 64, 65, 128, 129, 192, 300, 320])) + draw(st.integers(0, 2))
        tail = draw(st.integers(1, 200))
        symbol = draw(st.integers(1, 3))
        made.append([*stem[:near], *(symbol + 10 * (i % 2) for i in range(tail))])
    return made


def block_runs(draw: st.DrawFn, blocks: int) -> set[int]:
    """Which blocks of a group are here: all, the last ones, or any."""
    kind = draw(st.sampled_from(["all", "all", "end", "some"]))
    if kind == "all":
        return set(range(blocks))
    if kind == "end":
        return set(range(draw(st.integers(0, blocks - 1)), blocks))
    return {b for b in range(blocks) if draw(st.integers(0, 3))} or {0}


def brute_force(snapshot: Snapshot, coverage: Coverage, asked: list[int], head: str | None) -> int:
    """The longest usable continuation, by trying every one against every row that it reads."""
    common = next((i for i, (a, b) in enumerate(zip(snapshot.items, asked, strict=False)) if a != b), None)
    common = min(len(asked), snapshot.tokens) if common is None else common
    present = [
        {row for b in coverage.blocks(g) for row in range(b * BLOCK, min(b * BLOCK + BLOCK, snapshot.tokens))}
        for g in range(len(snapshot.layout.groups))
    ]
    for p in range(common, 0, -1):
        if p == len(asked) and not (p == snapshot.tokens and snapshot.pending is not None and head == snapshot.head):
            continue
        if all(
            set(range(0 if g.window is None else max(0, p - g.window + 1), p)) <= rows
            for g, rows in zip(snapshot.layout.groups, present, strict=True)
        ):
            return p
    return 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_longest_usable_wins(data: st.DataObject) -> None:
    draw = data.draw
    layout = draw(st.sampled_from([LAYOUT, WIDE]))
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory(dir=base) as folder,
        Store.open(Path(folder) / "source") as source,
        Store.open(Path(folder) / "target") as target,
    ):
        here: dict[object, tuple[Snapshot, Coverage, str]] = {}
        made = draw(chains())
        for number, items in enumerate(made):
            engine = draw(st.sampled_from(["cpu", "gpu"]))
            ready = {"pending": 9, "head": draw(st.sampled_from(["h1", "h2"]))} if draw(st.booleans()) else {}
            saved = save(source, items, engine, name=f"n{number}", layout=layout, **ready)
            runs = tuple(runs_of(block_runs(draw, blocks_of(len(items)))) for _ in layout.groups)
            carry(source, target, saved.digest, runs)
            coverage = target.shelf.records.coverage(saved.digest, saved.snapshot)
            assert all(set(Coverage(saved.digest, runs).blocks(g)) <= set(coverage.blocks(g)) for g in (0, 1))
            here[saved.digest] = (saved.snapshot, coverage, engine)
        for _ in range(6):
            stem = draw(st.sampled_from(made))
            asked = [*stem[: draw(st.integers(0, len(stem)))], *draw(st.sampled_from([[], [1], [2, 12], [99]]))]
            head = draw(st.sampled_from([None, "h1", "h2"]))
            own = draw(st.sampled_from([None, lineage("cpu"), lineage("gpu")]))
            usable = {d: brute_force(s, c, asked, head) for d, (s, c, _) in here.items()}
            best = max(usable.values(), default=0)
            match = find(target, asked, layout=layout, head=head, lineage=own)
            if best == 0:
                assert match is None
                continue
            assert match is not None and match.n == best == usable[match.digest], match
            assert (match.pending is not None) == (best == len(asked))
            lineages = [
                here[d][0].lineages[here[d][0].lineage[(best - 1) // BLOCK]] for d, n in usable.items() if n == best
            ]
            assert own not in lineages or match.lineage == own
            expect_rows(target, match, here[match.digest][2])


def test_the_rule_of_runs() -> None:
    # A window of 128 tokens; the run of blocks 4 to 6 of a snapshot of 440 tokens holds rows 256 to 439.
    assert usable(128, [(4, 7)], 440, 440) == (440, (256, 440))
    assert usable(128, [(4, 7)], 383, 440) == (383, (256, 383))  # 383 - 127 = 256: the first row there
    assert usable(128, [(4, 7)], 382, 440) == (0, (0, 0))
    assert usable(128, [(0, 2), (4, 7)], 382, 440) == (128, (0, 128))
    assert usable(None, [(0, 2)], 382, 440) == (128, (0, 128))
    assert usable(None, [(1, 7)], 382, 440) == (0, (0, 0))
    assert allows(128, [(4, 7)], 383, 440) == (256, 383)
    assert allows(128, [(4, 7)], 382, 440) is None
    assert [first_read(128, p) for p in (0, 127, 128, 440)] == [0, 0, 1, 313]
    # Decoding the last token again at 439 reads rows from 312: block 4 is the first that a trimmed snapshot keeps.
    assert trim_start(128, 440) == 4
    assert usable(128, [(trim_start(128, 440), 7)], 439, 440) == (439, (256, 439))
    for end in range(1, 700):
        for window in (64, 128, 512):
            start = trim_start(window, end)
            assert start * BLOCK <= max(0, end - window) < (start + 1) * BLOCK
            for p in (end, end - 1):
                assert p == 0 or allows(window, [(start, blocks_of(end))], p, end) is not None


def test_what_only_a_pending_token_makes_usable_hides_nothing_shorter(tmp_path: Path) -> None:
    """Continuing at 191 reads windowed rows from 64 on, which are here; at 190 it reads row 63, which is not."""
    items = list(range(191))
    with Store.open(tmp_path / "source") as source, Store.open(tmp_path / "s") as store:
        made = save(source, items, pending=1, head=HEAD)
        carry(source, store, made.digest, (((0, 3),), ((1, 3),)))
        short = save(store, items[:50])
        match = find(store, items, head=HEAD)
        assert (match.digest, match.n, match.pending) == (made.digest, 191, 1)
        expect_rows(store, match)
        match = find(store, items, head="another")
        assert (match.digest, match.n) == (short.digest, 50)
        assert find(store, items[:190]).n == 50
        assert find(store, [*items, 7]).n == 191


def test_ties_go_to_own_lineage_then_to_the_last_used(tmp_path: Path) -> None:
    stem = list(range(64))
    with Store.open(tmp_path / "s") as store:
        first = save(store, [*stem, *[1] * 30], "cpu", name="a")
        second = save(store, [*stem, *[2] * 30], "cpu", name="b")
        third = save(store, [*stem, *[3] * 30], "gpu", name="c")
        asked = [*stem, 500]
        assert find(store, asked).digest == third.digest
        assert find(store, asked, lineage=lineage("cpu")).digest == second.digest
        assert find(store, asked).digest == second.digest  # found a moment ago
        assert find(store, [*stem, *[1] * 9]).digest == first.digest
        assert find(store, asked).digest == first.digest
        assert find(store, asked, lineage=lineage("gpu")).digest == third.digest
        assert find(store, asked, lineage=lineage("npu")).digest == third.digest


def test_soft_tokens_match_by_their_rows(tmp_path: Path) -> None:
    picture, other = SoftToken(7, b"\1" * 32), SoftToken(7, b"\2" * 32)
    items = [1, 2, *[picture] * 70, 3, 4]
    with Store.open(tmp_path / "s") as store:
        save(store, items)
        same = find(store, [*items, 5])
        assert same.n == len(items)
        expect_rows(store, same)
        changed = [1, 2, *[picture] * 66, *[other] * 4, 3, 4]
        match = find(store, changed)
        assert (match.n, match.first_difference) == (68, 68)
        expect_rows(store, match)
        assert find(store, [1, 2, *[other] * 70]).n == 2
        assert find(store, [1, 2, *[7] * 70]).n == 2  # the placeholder's id alone is not the picture


def test_nothing_in_common_is_a_miss(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s") as store:
        assert find(store, [1, 2, 3]) is None
        save(store, [1, 2, 3])
        assert find(store, []) is None
        assert find(store, [2, 2, 3]) is None
        assert find(store, [1]) is None
        assert find(store, [1, 9]).n == 1
        assert Memory(LAYOUT, 1).rows(0, 0, 1) == [b"\0" * 8] * 4


@pytest.mark.parametrize("siblings", [100])
def test_many_siblings_around_a_query(tmp_path: Path, siblings: int) -> None:
    with Store.open(tmp_path / "s") as store:
        for i in range(siblings):
            save(store, [5, 2 * i, *[7] * (i % 9)])
        for i in range(siblings):
            assert find(store, [5, 2 * i, 8]).n == 2
            assert find(store, [5, 2 * i + 1, 8]).n == 1
