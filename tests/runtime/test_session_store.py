"""A session with a store: save, restore, prompt, receipts; and what each leaves behind when it fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import fail_at
from families import every_family
from text import FERRY
from trimming import copy_trimmed

from kvstore import Store
from kvstore.errors import (
    InputInvalid,
    NotCovered,
    ObjectCorrupt,
    ObjectMissing,
    SnapshotMissing,
    TokenizerMismatch,
    WeightsMismatch,
)
from kvstore.identity import Identity
from kvstore.items import SoftToken
from kvstore.objects import Objects
from kvstore.snapshot import Lineage, Receipt
from runtime.bundle import Bundle
from runtime.decoding import ContextOverflow
from runtime.engine import FunctionNotAllowed
from runtime.hostkv import HostKV
from runtime.portable import PortableEngine
from runtime.session import Session

FULL, SLIDING = 0, 1


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as made:
        yield made


@pytest.fixture
def session(bundle: Bundle, engine: PortableEngine, store: Store) -> Session:
    return Session.open(bundle, engine, store=store)


@pytest.fixture
def other(bundle: Bundle, engine: PortableEngine, store: Store) -> Session:
    return Session.open(bundle, engine, store=store)


def rows(session: Session) -> list[bytes]:
    """Covered rows below the position."""
    return [
        bytes(span)
        for group, first in enumerate(session.kv.covered)
        for span in session.kv.spans(group, first, session.position)
    ]


def everything(session: Session) -> tuple[Any, ...]:
    return (
        session.items,
        session.pending,
        session.emitted,
        session.lineage,
        session.known,
        session.kv.covered,
        rows(session),
    )


def is_empty(session: Session) -> bool:
    clear = not any(any(bytes(s)) for g in (FULL, SLIDING) for s in session.kv.spans(g, 0, session.kv.ctx))
    return clear and session.items == () and session.pending is None and session.kv.position == 0


def contents(store: Store, name: str) -> list[tuple[Any, ...]]:
    return list(store.shelf.records.snapshot(store.resolve(name)).blocks)


# save


def test_saving_again_hashes_and_writes_only_what_is_new(session: Session, store: Store, ids: list[int]) -> None:
    session.feed(ids[:200])
    first = session.save("book")
    assert first.written_objects == 2 * 4 and len(session.known) == 3 and first.dropped_from is None
    assert first.snapshot is not None and session.known == first.snapshot.blocks[:3]
    session.feed(ids[200:300])
    asked: list[tuple[int, int, int]] = []
    spans = HostKV.spans

    def watch(self: HostKV, group: int, start: int, stop: int) -> Any:
        asked.append((group, start, stop))
        return spans(self, group, start, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostKV, "spans", watch)
        second = session.save("book")
    assert second.written_objects == 2 * 2 and min(start for _, start, _ in asked) == 192
    assert second.snapshot is not None and second.snapshot.blocks[:3] == first.snapshot.blocks[:3]
    assert second.snapshot.model == "tiny" and second.snapshot.lineage[:3] == first.snapshot.lineage[:3]


def test_a_rollback_into_known_blocks_forgets_them(session: Session, store: Store, ids: list[int]) -> None:
    session.feed(ids[:200])
    session.save("one")
    session.rollback(100)
    assert len(session.known) == 1
    session.feed(ids[900:1000])
    session.save("two")
    one, two = contents(store, "one"), contents(store, "two")
    assert one[0] == two[0] and one[1] != two[1]


def test_what_is_saved_is_pending_head_lineage_and_model(session: Session, bundle: Bundle, ids: list[int]) -> None:
    session.feed(ids[:70])
    saved = session.save("a", model="for people").snapshot
    assert saved is not None and saved.pending == session.pending and saved.head == bundle.head_digest()
    assert [dict(saved.lineages[i].fields)["functions"] for i in saved.lineage] == ["prefill_32", "decode,prefill_4"]
    assert saved.model == "for people" and saved.items == tuple(ids[:70])
    session.rollback(64)
    unchosen = session.save("b").snapshot
    assert unchosen is not None and unchosen.pending is None and unchosen.head is None


def test_saving_without_a_store_or_without_tokens_is_refused(
    bundle: Bundle, engine: PortableEngine, session: Session
) -> None:
    with pytest.raises(InputInvalid, match="store="):
        Session.open(bundle, engine).save("x")
    with pytest.raises(InputInvalid, match="1 to"):
        session.save("x")


# restore


@every_family
@pytest.mark.parametrize("n", [1, 63, 64, 65, 130])
def test_restore_becomes_what_was_saved(session: Session, other: Session, ids: list[int], n: int) -> None:
    session.feed(ids[:n])
    session.save("book")
    other.feed(ids[500:800])
    other.generate(3)
    restored = other.restore("book")
    assert everything(other) == everything(session)
    assert (restored.n, restored.reused_tokens) == (
        n,
        n,
    ) and restored.bytes == n * other.bundle.layout().bytes_per_token
    assert restored.lineage == session.lineage[-1] and restored.seconds > 0
    assert other.generate(12).tokens == session.generate(12).tokens and rows(other) == rows(session)


def test_restore_loads_decode_functions_and_nothing_else(
    bundle: Bundle, tiny_bundle: Path, session: Session, ids: list[int]
) -> None:
    session.feed(ids[:600])
    session.save("book")
    engine = PortableEngine(tiny_bundle)
    consumer = Session.open(bundle, engine, store=session._store, decode_only=True)
    decode = tuple(f"{c}:decode" for c in bundle.config.chunks)
    assert consumer.restore("book").functions == decode
    consumer.generate(1)  # the pending token: chosen by the producer
    assert tuple(engine.ledger.names()) == decode
    consumer.generate(1)
    assert tuple(engine.ledger.names()) == (*decode, bundle.config.lmhead)
    with pytest.raises(FunctionNotAllowed):
        engine.function(bundle.config.chunks[0], "prefill_512")
    # What a prefix lacks is fed through decode.
    assert consumer.restore("book", at=599).n == 599
    assert tuple(engine.ledger.names()) == (*decode, bundle.config.lmhead)


def test_a_prefix_is_restored_to_the_token_and_its_last_one_decoded_again(
    session: Session, other: Session, ids: list[int]
) -> None:
    session.feed(ids[:200])
    session.save("book")
    restored = other.restore("book", at=150)
    assert (restored.n, restored.reused_tokens) == (150, 149) and other.pending is not None
    session.rollback(149)
    session.feed(ids[149:150])
    assert other.items == session.items and rows(other) == rows(session) and other.pending == session.pending
    assert len(other.known) == 2 and dict(other.lineage[-1].fields)["functions"] == "decode,prefill_32"


def test_an_interrupt_after_loading_keeps_the_loaded_rows_and_no_stale_pending_token(
    session: Session, bundle: Bundle, engine: PortableEngine, ids: list[int]
) -> None:
    session.feed(ids[:200])
    session.save("book")
    other = Session.open(bundle, fail_at(engine, 0, KeyboardInterrupt()), store=session._store)
    with pytest.raises(KeyboardInterrupt):
        other.restore("book", at=150)
    assert other.position == 149 and other.pending is None
    session.rollback(149)
    assert rows(other) == rows(session)
    assert other.generate(4).tokens == session.generate(4).tokens


def test_another_head_keeps_the_rows_and_chooses_again(
    session: Session, tiny_bundle: Path, engine: PortableEngine, store: Store, ids: list[int]
) -> None:
    session.feed(ids[:100])
    session.save("book")
    bundle = Bundle.open(tiny_bundle)
    bundle._head_digest = "0" * 64  # type: ignore[misc]
    other = Session.open(bundle, engine, store=store)
    assert other.restore("book").reused_tokens == 99 and other.pending == session.pending


def test_a_snapshot_without_a_pending_token_goes_on_from_its_last_one_decoded_again(
    session: Session, other: Session, ids: list[int]
) -> None:
    session.feed(ids[:100])
    session.rollback(70)
    saved = session.save("cut").snapshot
    assert saved is not None and saved.pending is None
    restored = other.restore("cut")
    assert (restored.n, restored.reused_tokens) == (70, 69) and other.items == tuple(ids[:70])
    session.rollback(69)
    session.feed(ids[69:70])
    assert other.pending == session.pending != 0 and rows(other) == rows(session)
    assert other.generate(8).tokens == session.generate(8).tokens


def test_a_soft_token_is_restored_but_cannot_be_decoded_again(
    session: Session, other: Session, store: Store, bundle: Bundle, ids: list[int]
) -> None:
    session.feed(ids[:70])
    items = (*ids[:69], SoftToken(9, bytes(32)))
    lineage = [Lineage.of({"engine": "app"})] * 2
    for name, pending in (("with", 5), ("without", None)):
        store.save(
            bundle.layout(), bundle.identity(), items, session.kv, namespace="default", name=name, lineage=lineage,
            pending=pending, head=None if pending is None else bundle.head_digest(),
        )  # fmt: skip
    assert other.restore("with").n == 70 and other.items == items
    before = everything(other)
    with pytest.raises(InputInvalid, match="soft token"):
        other.restore("without")
    assert everything(other) == before
    other.rollback(69)
    assert other.generate(2).prompt == 69
    other.restore("with")
    other._state = replace(other._state, pending=None)
    with pytest.raises(InputInvalid, match="soft token"):
        other.generate(1)
    assert other.position == 70


@pytest.mark.parametrize(("field", "error"), [("weights", WeightsMismatch), ("tokenizer", TokenizerMismatch)])
def test_another_models_snapshot_is_refused_before_anything_changes(
    session: Session, other: Session, store: Store, bundle: Bundle, ids: list[int], field: str, error: type[Exception]
) -> None:
    session.feed(ids[:70])
    foreign = Identity.of({**dict(bundle.identity().fields), field: "0" * 64})
    store.save(
        bundle.layout(), foreign, ids[:70], session.kv, namespace="default", name="theirs", lineage=session.lineage
    )
    other.feed(ids[:10])
    before = everything(other)
    with pytest.raises(error, match=f"{field}: expected .* found '0000"):
        other.restore("theirs")
    with pytest.raises(SnapshotMissing):
        other.restore("nothing")
    with pytest.raises(InputInvalid):
        other.restore("theirs", at=71)
    assert everything(other) == before


def test_more_tokens_than_this_context_are_refused_and_a_prefix_of_them_is_not(
    session: Session, other: Session, store: Store, bundle: Bundle, ids: list[int]
) -> None:
    session.feed(ids[:2047])
    whole = HostKV(bundle.layout(), 3000)  # another device, with a longer context
    for group in (FULL, SLIDING):
        for mine, theirs in zip(session.kv.spans(group, 0, 2047), whole.spans(group, 0, 2047), strict=True):
            theirs[:] = mine
    items = [*ids[:2047], *ids[:953]]
    lineage = [session.lineage[0]] * 47
    store.save(bundle.layout(), bundle.identity(), items, whole, namespace="default", name="long", lineage=lineage)
    before = everything(other)
    for at in (None, 2048):
        with pytest.raises(ContextOverflow):
            other.restore("long", at=at)
    assert everything(other) == before
    assert other.restore("long", at=2047).n == 2047 and other.pending == session.pending


@pytest.mark.parametrize("harm", ["flip", "cut", "delete"])
def test_a_damaged_or_missing_object_leaves_an_empty_session(
    session: Session, other: Session, store: Store, ids: list[int], harm: str
) -> None:
    session.feed(ids[:300])
    session.save("book")
    path = store.shelf.path / Objects.path(contents(store, "book")[3][SLIDING])
    data = bytearray(path.read_bytes())
    if harm == "delete":
        path.unlink()
    else:
        data[-1] ^= 1
        path.write_bytes(data if harm == "flip" else data[:-1])
    other.feed(ids[:10])
    with pytest.raises(ObjectMissing if harm == "delete" else ObjectCorrupt):
        other.restore("book")
    assert is_empty(other)
    other.feed(ids[:300])
    assert everything(other)[:-1] == (*everything(session)[:4], (), (0, 0)) and rows(other) == rows(session)


# prompt


def test_prompt_reuses_the_session_up_to_the_first_difference(session: Session, ids: list[int]) -> None:
    first = session.prompt(ids[:100])
    assert (first.reused, first.source, first.fed.tokens) == (0, "nothing", 100)
    pending = session.pending
    session.generate(5)
    longer = session.prompt(ids[:130])
    assert (longer.reused, longer.source, longer.fed.tokens) == (100, "session", 30)
    shorter = session.prompt(ids[:100])
    assert (shorter.reused, shorter.fed.tokens, shorter.fed.functions) == (99, 1, ("decode",))
    assert session.items == tuple(ids[:100]) and session.pending == pending
    other = session.prompt([*ids[:50], *ids[400:410]])
    assert other.reused == 50 and session.items == (*ids[:50], *ids[400:410])


def test_the_same_prompt_again_computes_nothing_and_emits_its_first_token_again(
    session: Session, ids: list[int]
) -> None:
    session.prompt(ids[:60])
    token = session.generate(1).tokens
    again = session.prompt(ids[:60])
    assert (again.reused, again.fed.tokens, again.fed.functions) == (60, 0, ())
    assert session.generate(1).tokens == token


def test_prompt_takes_from_the_store_what_is_longer_there(session: Session, other: Session, ids: list[int]) -> None:
    session.feed(ids[:300])
    session.save()
    other.feed(ids[:40])
    made = other.prompt(ids[:400])
    assert (made.reused, made.source, made.fed.tokens) == (300, "store", 100)
    assert made.match is not None and made.match.first_difference == 300
    exact = other.prompt(ids[:300])  # the session has 300 of them too, but no pending token there
    assert (exact.reused, exact.source, exact.fed.tokens) == (300, "store", 0) and other.pending == session.pending
    equal = other.prompt([*ids[:300], 7])
    assert (equal.reused, equal.source) == (300, "session")


def test_prompt_in_another_namespace_finds_nothing(
    session: Session, bundle: Bundle, engine: PortableEngine, store: Store, ids: list[int]
) -> None:
    session.feed(ids[:100])
    session.save()
    other = Session.open(bundle, engine, store=store, namespace="someone else")
    assert other.prompt(ids[:100]).reused == 0


def test_prompt_treats_a_collected_object_as_a_miss_and_a_damaged_one_as_damage(
    session: Session, other: Session, store: Store, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    session.feed(ids[:200])
    session.save("book")
    path = store.shelf.path / Objects.path(contents(store, "book")[1][FULL])
    data = bytearray(path.read_bytes())
    find = store.find

    def collected(*args: Any, **named: Any) -> Any:
        found = find(*args, **named)
        path.unlink()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(store, "find", collected)
        made = other.prompt(ids[:200])  # it goes between being found and being read
    assert (made.reused, made.source) == (0, "nothing") and everything(other)[-1] == rows(session)
    other.rollback(0)
    made = other.prompt(ids[:200])  # it went before: what is left of the snapshot serves
    assert (made.reused, made.source) == (64, "store") and everything(other)[-1] == rows(session)
    other.rollback(0)
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ObjectCorrupt):
        other.prompt(ids[:200])
    assert is_empty(other)


def test_prompt_is_refused_before_anything_changes(session: Session, ids: list[int]) -> None:
    session.feed(ids[:20])
    before = everything(session)
    with pytest.raises(ContextOverflow):
        session.prompt(ids[:2048])
    with pytest.raises(InputInvalid):
        session.prompt([])
    assert everything(session) == before


def test_a_trimmed_session_rewinds_as_far_as_its_rows_reach_and_starts_over_below(
    session: Session, bundle: Bundle, engine: PortableEngine, store: Store, tmp_path: Path, ids: list[int]
) -> None:
    session.feed(ids[:1000])
    session.save("book")
    with Store.open(tmp_path / "device") as device:
        copy_trimmed(store, "book", device)
        consumer = Session.open(bundle, engine, store=device)
        consumer.restore("book")
        assert consumer.kv.covered == (0, 448)
        # Rows from 448 on: 959 is the first place whose window of 512 begins there.
        assert consumer.prompt([*ids[:960], 7]).reused == 960
        assert consumer.prompt([*ids[:959], 8]).reused == 959
        before = everything(consumer)
        with pytest.raises(NotCovered, match="sliding"):
            consumer.rollback(958)
        with pytest.raises(NotCovered):
            consumer.restore("book", at=900)
        assert everything(consumer) == before
        made = consumer.prompt([*ids[:900], 9])
        assert (made.reused, made.source, made.fed.tokens) == (0, "nothing", 901)
        assert consumer.kv.covered == (0, 0)


# receipts


def test_a_receipt_is_the_continuation_and_leaves_the_session_as_it_was(
    session: Session, other: Session, ids: list[int]
) -> None:
    session.feed(ids[:150])
    session.save("book")
    before = everything(session)
    receipt = session.receipt()
    assert everything(session) == before and not any(
        any(bytes(s)) for g in (0, 1) for s in session.kv.spans(g, 150, 2048)
    )
    assert receipt.asked == 32 and len(set(receipt.tokens)) >= 8
    session.save("book", receipt=receipt)
    restored = other.restore("book")
    stored = restored.match.snapshot.receipt
    assert stored == receipt
    report = other.verify_receipt(receipt)
    assert report.identical and report.first_difference is None and everything(other) == before
    assert session.generate(32).tokens == receipt.tokens


def test_a_receipt_after_generating_starts_with_the_pending_token_again(
    session: Session, other: Session, ids: list[int]
) -> None:
    session.feed(ids[:40])
    session.generate(5)
    before = everything(session)
    receipt = session.receipt(6)
    assert everything(session) == before and receipt.tokens[0] == session.pending
    session.save("turn", receipt=receipt)
    other.restore("turn")
    assert other.verify_receipt(receipt).identical and session.generate(5).tokens == receipt.tokens[1:]


def test_a_differing_receipt_is_reported_with_its_first_difference(session: Session, ids: list[int]) -> None:
    session.feed(ids[:150])
    good = session.receipt(8)
    bad = Receipt((*good.tokens[:5], good.tokens[5] + 1, *good.tokens[6:]), 8, "cap")
    report = session.verify_receipt(bad)
    assert not report.identical and report.first_difference == 5
    assert (report.expected, report.found) == (good.tokens[5] + 1, good.tokens[5])
    cut = session.verify_receipt(Receipt(good.tokens[:3], 8, "eos"))
    assert (cut.identical, cut.first_difference, cut.expected, cut.found) == (False, 3, None, good.tokens[3])
    finish = session.verify_receipt(Receipt(good.tokens, 8, "eos"))
    assert (finish.identical, finish.first_difference, finish.expected, finish.found) == (False, 8, None, None)


def test_a_receipt_needs_a_pending_token_and_an_interrupted_one_changes_nothing(
    session: Session, ids: list[int]
) -> None:
    session.feed(ids[:50])
    before = everything(session)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session._chain, "token", lambda hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.receipt()
    assert everything(session) == before
    session.rollback(49)
    with pytest.raises(InputInvalid, match="pending"):
        session.receipt()


def test_text_of_another_kind_shares_nothing(session: Session, bundle: Bundle, ids: list[int]) -> None:
    session.feed(ids[:100])
    session.save()
    ferry = bundle.tokenizer.encode(FERRY.strip())
    # Both begin with BOS: one token in common is one token reused.
    assert session.prompt(ferry[:100]).reused == 1
