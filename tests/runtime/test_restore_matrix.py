"""A restored session is the uninterrupted one: same tokens, same end, same bytes; whole and trimmed, in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from consumer import nonzero_outside, rows_digest
from families import every_family_slow
from trimming import copy_trimmed

from kvstore import Store
from kvstore.errors import NotCovered
from kvstore.layout import BLOCK, first_read, trim_start
from runtime.bundle import Bundle
from runtime.decoding import ContextOverflow
from runtime.portable import PortableEngine
from runtime.session import Session

CTX, WINDOW = 2048, 512
LENGTHS = (1, 3, 4, 5, 63, 64, 65, 511, 512, 513, 1024, 1500, 2007, 2008, 2009, 2039, *range(2040, 2048))
RECEIPTS = (65, 1500, 2009, 2039, 2047)


@dataclass(frozen=True, slots=True)
class Produced:
    """What the producer had when it saved n tokens, and where it got without interruption. Digests by the first row of each group."""

    tokens: tuple[int, ...]
    finish: str
    position: int
    at_save: dict[tuple[int, ...], str] = field(default_factory=dict)
    at_end: dict[tuple[int, ...], str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class World:
    """The producer's store, the same trimmed, and per n what the producer did."""

    whole: Path
    trimmed: Path
    produced: dict[int, Produced]


def kept_from(n: int) -> int:
    return trim_start(WINDOW, n) * BLOCK


def firsts(bundle: Bundle, n: int, kind: str) -> tuple[int, ...]:
    """The first row of each group that a store of this kind has of n tokens."""
    return tuple(trim_start(g.window, n) * BLOCK if kind == "trimmed" else 0 for g in bundle.layout().groups)


@pytest.fixture(scope="module")
def world(bundle: Bundle, engine: PortableEngine, ids: list[int], tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("restore")
    produced: dict[int, Produced] = {}
    with Store.open(folder / "whole") as store, Store.open(folder / "trimmed") as device:
        session = Session.open(bundle, engine, store=store)
        fed = 0
        for n in LENGTHS:
            # Up to 2007 each prompt is fed at once, as the published schedule splits it; the last ones grow from there.
            session.rollback(fed if n > 2007 else 0)
            session.feed(ids[session.position : n])
            fed = n
            session.save(str(n), receipt=session.receipt() if n in RECEIPTS else None)
            starts = {firsts(bundle, n, kind) for kind in ("whole", "trimmed")}
            at_save = {start: rows_digest(session, start) for start in starts}
            made = session.generate(32)
            at_end = {start: rows_digest(session, start) for start in starts}
            produced[n] = Produced(made.tokens, made.finish, session.position, at_save, at_end)
            copy_trimmed(store, str(n), device)
    return World(folder / "whole", folder / "trimmed", produced)


def consume(bundle: Bundle, store: Path) -> Iterator[dict[str, Any]]:
    """Restores every length in one fresh process that has no bundle functions but decode."""
    here = Path(__file__).resolve()
    run = subprocess.run(
        [sys.executable, str(here.with_name("consumer.py")), str(bundle.root), str(store)],
        input=json.dumps([str(n) for n in LENGTHS]),
        env={**os.environ, "PYTHONPATH": str(here.parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    yield from json.loads(run.stdout)


@every_family_slow
@pytest.mark.parametrize("kind", ["whole", "trimmed"])
def test_restore_in_a_fresh_decode_only_process_continues_as_the_producer_did(
    world: World, bundle: Bundle, kind: str
) -> None:
    functions = {*(f"{c}:decode" for c in bundle.config.chunks), bundle.config.lmhead}
    for n, got in zip(LENGTHS, consume(bundle, getattr(world, kind)), strict=True):
        want = world.produced[n]
        first = firsts(bundle, n, kind)
        assert got["reused"] == n and tuple(got["covered"]) == first, n
        assert got["restored_rows"] == want.at_save[first], n
        assert tuple(got["tokens"]) == want.tokens and got["finish"] == want.finish, n
        assert got["position"] == want.position and got["rows"] == want.at_end[first], n
        assert got["nonzero_outside"] == 0 and set(got["functions"]) <= functions, n


@every_family_slow
def test_the_matrix_itself_is_not_trivial(world: World) -> None:
    """As many tokens as the context allows, the right reasons to stop, and varied tokens."""
    for n, made in world.produced.items():
        room = max(0, CTX - n - 8)
        assert len(made.tokens) == min(32, room) or made.finish == "eos", n
        if made.finish != "eos":
            assert made.finish == ("cap" if room >= 32 else "contextFull"), n
        assert len(made.tokens) < 32 or len(set(made.tokens)) >= 8, n
        assert made.position == n + max(0, len(made.tokens) - 1), n
    assert [len(world.produced[n].tokens) for n in (2008, 2009, 2039, 2040, 2047)] == [32, 31, 1, 0, 0]
    assert len({made.tokens for made in world.produced.values()}) > 12


@every_family_slow
def test_receipts_prove_the_continuation_in_a_trimmed_store(
    world: World, bundle: Bundle, engine: PortableEngine
) -> None:
    with Store.open(world.trimmed) as device:
        session = Session.open(bundle, engine, store=device)
        for n in RECEIPTS:
            receipt = session.restore(str(n)).match.snapshot.receipt
            assert receipt is not None and receipt.tokens == world.produced[n].tokens and receipt.asked == 32
            assert session.verify_receipt(receipt).identical, n


def test_a_full_context_is_refused_and_the_longest_prompt_is_not(
    bundle: Bundle, engine: PortableEngine, ids: list[int]
) -> None:
    session = Session.open(bundle, engine)
    with pytest.raises(ContextOverflow):
        session.feed(ids[:2048])
    assert session.position == 0


# prefixes: shorter than what was saved


@pytest.fixture
def stores(world: World) -> Iterator[tuple[Store, Store]]:
    with Store.open(world.whole) as whole, Store.open(world.trimmed) as trimmed:
        yield whole, trimmed


def rows(session: Session) -> str:
    return rows_digest(session, session.kv.covered)


@every_family_slow
def test_every_prefix_at_and_beside_a_block_edge_is_the_rewound_original(
    stores: tuple[Store, Store], bundle: Bundle, engine: PortableEngine, ids: list[int]
) -> None:
    """restore(m) = what the producer itself has after rewinding to m: rows, pending token and the tokens after it."""
    original = Session.open(bundle, engine)
    original.feed(ids[:1500])
    consumer = Session.open(bundle, engine, store=stores[0])
    edges = range(BLOCK, 1500, BLOCK)
    places = sorted({1, 2, 1499, *(m + d for m in edges for d in (-1, 0, 1))}, reverse=True)
    assert len(places) == 3 + 3 * 23
    for m in places:
        original.rollback(m - 1)
        original.feed(ids[m - 1 : m])
        restored = consumer.restore("1500", at=m)
        assert (restored.n, restored.reused_tokens) == (m, m - 1)
        assert consumer.items == original.items and consumer.pending == original.pending, m
        assert rows(consumer) == rows(original) and nonzero_outside(consumer) == 0, m
        original.rollback(m - 1)  # row m - 1 is now decode's: the next, shorter prefix doesn't hold it


@pytest.mark.parametrize("m", [1, 40, 63, 64, 65, 200, 511, 512, 513, 900])
def test_restore_a_prefix_then_feed_equals_feed_then_feed(
    stores: tuple[Store, Store], bundle: Bundle, engine: PortableEngine, ids: list[int], m: int
) -> None:
    rest = ids[m : m + 75]
    original = Session.open(bundle, engine)
    original.feed(ids[:1024])
    original.rollback(m - 1)
    original.feed(ids[m - 1 : m])
    original.feed(rest)
    consumer = Session.open(bundle, engine, store=stores[0])
    consumer.restore("1024", at=m)
    consumer.feed(rest)
    assert consumer.lineage == original.lineage and rows(consumer) == rows(original)
    assert consumer.generate(8).tokens == original.generate(8).tokens and rows(consumer) == rows(original)


def test_with_row_exact_functions_any_split_gives_the_same_bytes(
    bundle: Bundle, tiny_bundle: Path, tmp_path: Path, ids: list[int]
) -> None:
    engine = PortableEngine(tiny_bundle)

    def decoder(store: Store) -> Session:
        return Session.open(bundle, engine, store=store, decode_only=True)

    with Store.open(tmp_path / "store") as store:
        producer = decoder(store)
        producer.feed(ids[:200])
        producer.save("200")
        straight = producer.generate(8)
        for m in (1, 64, 127, 150, 199):
            consumer = decoder(store)
            consumer.restore("200", at=m)
            consumer.feed(ids[m:200])
            assert consumer.generate(8).tokens == straight.tokens and rows(consumer) == rows(producer), m


# growing


def test_what_grew_after_a_trimmed_restore_is_saved_and_restored_again(
    stores: tuple[Store, Store], bundle: Bundle, engine: PortableEngine, tmp_path: Path, ids: list[int]
) -> None:
    original = Session.open(bundle, engine)
    original.feed(ids[:1500])
    original.feed(ids[1600:1750])
    with Store.open(tmp_path / "device") as device:
        copy_trimmed(stores[0], "1500", device)
        consumer = Session.open(bundle, engine, store=device)
        consumer.restore("1500")
        first = kept_from(1500)
        assert consumer.kv.covered == (0, first) and len(consumer.known) == 1500 // BLOCK
        consumer.feed(ids[1600:1750])
        saved = consumer.save("grown", receipt=consumer.receipt())
        # Blocks 0 to 22 were known; 23 grew, 24 and 25 are new; the sliding blocks that were never here are still named.
        assert saved.written_objects == 2 * 3 and saved.coverage is not None and saved.snapshot is not None
        assert saved.coverage.runs == (((0, 26),), ((first // BLOCK, 26),))
        assert saved.snapshot.blocks[:23] == stores[0].match("1500").snapshot.blocks[:23]
        assert saved.snapshot.receipt is not None and len(set(saved.snapshot.receipt.tokens)) >= 8

        again = Session.open(bundle, engine, store=device)
        restored = again.restore("grown")
        assert restored.n == 1650 and again.kv.covered == (0, first) == consumer.kv.covered
        assert rows(again) == rows(consumer) == rows_digest(original, (0, first)) and nonzero_outside(again) == 0
        assert again.items == original.items and again.pending == original.pending
        assert again.verify_receipt(saved.snapshot.receipt).identical
        tokens = original.generate(12).tokens
        assert again.generate(12).tokens == tokens == consumer.generate(12).tokens
        # From the first covered row on, every position whose window is there can be had; none before.
        lowest = first + WINDOW - 1
        assert first_read(WINDOW, lowest) == first
        assert again.restore("grown", at=lowest + 1).n == lowest + 1
        with pytest.raises(NotCovered):
            again.restore("grown", at=lowest)
        # Trimmed once more, from the new end, and grown once more.
        with Store.open(tmp_path / "second") as second:
            copy_trimmed(device, "grown", second)
            last = Session.open(bundle, engine, store=second)
            last.restore("grown")
            assert last.kv.covered == (0, kept_from(1650))
            last.generate(12)
            last.save("grown")
            last.restore("grown")
            assert last.position == 1661 and rows(last) == rows_digest(original, (0, kept_from(1650)))


# two producers of one text


def functions(session: Session) -> list[str]:
    return [dict(lineage.fields)["functions"] for lineage in session.lineage]


def test_two_lineages_of_one_prefix_stay_two_chains(
    bundle: Bundle, engine: PortableEngine, tiny_bundle: Path, tmp_path: Path, ids: list[int]
) -> None:
    prompt = ids[:300]
    with Store.open(tmp_path / "store") as store:
        wide = Session.open(bundle, engine, store=store)
        narrow = Session.open(bundle, PortableEngine(tiny_bundle), store=store, decode_only=True)
        wide.feed(prompt)
        narrow.feed(prompt)
        assert rows(wide) != rows(narrow) and wide.items == narrow.items
        saved_wide = wide.save("wide")
        # Unnamed, the second is dropped from the first block on that has other bytes; named, it forks.
        dropped = narrow.save()
        assert dropped.dropped_from is not None and dropped.written_objects == 0
        saved_narrow = narrow.save("narrow")
        assert (
            saved_narrow.snapshot is not None and saved_wide.snapshot is not None and saved_narrow.dropped_from is None
        )
        differs = [a != b for a, b in zip(saved_narrow.snapshot.blocks, saved_wide.snapshot.blocks, strict=True)]
        assert differs.index(True) == dropped.dropped_from

        reader = Session.open(bundle, engine, store=store)
        for name, producer in (("wide", wide), ("narrow", narrow)):
            reader.restore(name)
            assert rows(reader) == rows(producer) and functions(reader) == functions(producer)
            continued = producer.receipt()
            assert reader.verify_receipt(continued).identical and len(set(continued.tokens)) >= 8
        assert set(functions(reader)) == {"decode"}

        # Each grows on its own chain, and its blocks say so.
        for name, producer in (("wide", wide), ("narrow", narrow)):
            producer.feed(ids[300:400])
            producer.save(name)
            reader.restore(name)
            assert rows(reader) == rows(producer)
            assert functions(reader) == functions(producer)
        assert functions(reader)[-1] == "decode" and "prefill_32" in functions(wide)[-1]
        # An unnamed save of a known chain that goes on with new tokens is no fork.
        reader.feed(ids[800:870])
        grown = reader.save()
        assert grown.dropped_from is None and grown.snapshot is not None and grown.snapshot.tokens == 470


def test_dropping_an_unnamed_save_keeps_the_session_saveable(
    bundle: Bundle, engine: PortableEngine, tiny_bundle: Path, tmp_path: Path, ids: list[int]
) -> None:
    with Store.open(tmp_path / "a") as first, Store.open(tmp_path / "b") as device:
        wide = Session.open(bundle, engine, store=first)
        wide.feed(ids[:1200])
        wide.save("book")
        copy_trimmed(first, "book", device)
        consumer = Session.open(bundle, engine, store=device)
        consumer.restore("book")
        device.shelf.records.move_ref("book", device.resolve("book"), None)
        for file in (tmp_path / "b" / "snapshots").iterdir():
            file.unlink()
        # Somebody else's chain: the same two first blocks, then the same tokens with other bytes.
        other = Session.open(bundle, PortableEngine(tiny_bundle), store=first, decode_only=True)
        other.restore("book", at=129)
        other.rollback(128)
        other.feed(ids[128:200])
        other.save("other")
        copy_trimmed(first, "other", device)
        dropped = consumer.save()
        assert dropped.dropped_from == 2 and kept_from(1200) > 2 * BLOCK
        assert len(consumer.known) == 1200 // BLOCK
        consumer.feed(ids[1200:1210])
        consumer.save("mine")
        assert consumer.restore("mine").n == 1210
