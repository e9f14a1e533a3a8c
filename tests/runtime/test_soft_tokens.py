"""Soft tokens: rows instead of embeddings, wherever a span lies; named by their digests in everything that a session keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_folder import HIDDEN, convert_config, write_bundle, write_json
from feeding import Feeder
from trimming import copy_trimmed

from kvstore import SoftToken, Store
from kvstore.digest import soft_row_digest
from kvstore.errors import InputInvalid, Refused
from runtime import SoftSpan
from runtime.bundle import Bundle
from runtime.chain import Chain, schedule
from runtime.decoding import ContextOverflow
from runtime.portable import PortableEngine
from runtime.session import Session
from runtime.soft import Half, Input

IMAGE, AUDIO = 1000, 1001


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


@pytest.fixture(scope="module")
def media(bundle: Bundle) -> Half:
    """800 rows as large as the embeddings, and no token's."""
    random = np.random.default_rng(7)
    size = float(bundle.embed.take(range(100)).astype(np.float32).std())
    return (random.standard_normal((800, bundle.config.hidden)) * size).astype(np.float16)


def image(rows: Half) -> SoftSpan:
    return SoftSpan(IMAGE, rows)


def one_bit_off(rows: Half, row: int) -> Half:
    bits = rows.copy().view(np.uint16)
    bits[row, 5] ^= 1
    return bits.view(np.float16)


def rows_of(session: Session, first: Sequence[int] | None = None) -> list[bytes]:
    """Rows below the position, of each group from ``first`` on (by default those that are covered)."""
    starts = session.kv.covered if first is None else first
    return [bytes(span) for g, start in enumerate(starts) for span in session.kv.spans(g, start, session.position)]


def everything(session: Session) -> tuple[Any, ...]:
    return session.items, session.pending, session.emitted, session.lineage, session.kv.covered, rows_of(session)


# what the chunks get


SHAPES = [
    (0, 1, 0),
    (5, 1, 1),
    (1, 63, 2),
    (0, 64, 0),
    (9, 65, 3),
    (64, 128, 0),
    (500, 40, 20),
    (511, 2, 0),
    (512, 9, 0),
    (0, 800, 5),
]


@pytest.mark.parametrize(("before", "n", "after"), SHAPES)
def test_the_given_rows_are_what_an_independent_host_feeds(
    bundle: Bundle,
    tiny_bundle: Path,
    engine: PortableEngine,
    ids: list[int],
    media: Half,
    before: int,
    n: int,
    after: int,
) -> None:
    """`feeding.Feeder` is the published rules written down once more, over rows alone."""
    session = Session.open(bundle, engine)
    fed = session.feed([*ids[:before], image(media[:n]), *ids[before : before + after]])
    feeder = Feeder(tiny_bundle, engine)
    rows = np.concatenate([bundle.embed.take(ids[:before]), media[:n], bundle.embed.take(ids[before : before + after])])
    config = bundle.config
    steps = schedule(0, len(rows), config.ctx, config.prefill_widths, config.plain_width)
    for step in steps:
        name = config.decode_function if step.kind == "decode" else config.prefill_functions[step.width]
        feeder.feed(name, rows[step.start : step.start + step.width], step.start)
    assert fed.tokens == session.position == before + n + after
    assert session.items[before : before + n] == tuple(
        SoftToken(IMAGE, soft_row_digest(row.astype("<f2").tobytes())) for row in media[:n]
    )
    for layer in session.kv.layers:
        for part, array in zip("kv", session.kv.inputs(layer), strict=True):
            assert array.tobytes() == feeder.kv[f"{part}_{layer}"].tobytes(), (part, layer)


def test_the_shapes_straddle_every_kind_of_step_and_block_edges(bundle: Bundle) -> None:
    config = bundle.config
    cut: set[tuple[str, int]] = set()
    blocks = 0
    for before, n, after in SHAPES:
        steps = schedule(0, before + n + after, config.ctx, config.prefill_widths, config.plain_width)
        inside = range(before + 1, before + n)
        for a, b in pairwise(steps):
            if b.start in inside:
                cut |= {(a.kind, a.width), (b.kind, b.width)}
        blocks += sum(edge % 64 == 0 for edge in inside)
    assert cut == {("plain", 512), ("decode", 1), *(("offset", w) for w in (256, 32, 8, 4))} and blocks > 10


def test_rows_that_equal_embeddings_give_the_tokens_kv_under_another_name(
    session: Session, other: Session, bundle: Bundle, ids: list[int]
) -> None:
    session.prompt(ids[:600])
    session.save("tokens")
    same = other.prompt([*ids[:40], image(bundle.embed.take(ids[40:600]))])
    assert (same.reused, same.source) == (40, "store"), "a row is never taken for the token that has it"
    other.rollback(0)
    other.feed([image(bundle.embed.take(ids[:600]))])
    assert rows_of(other) == rows_of(session) and other.pending == session.pending
    assert not set(other.items) & set(session.items)


def test_with_per_layer_embeddings_a_row_is_token_0_to_them_and_nothing_else(
    tiny_gemma4_bundle: Path, store: Store
) -> None:
    """A bundle of the published shape: PLE, shared layers, rows as they are."""
    bundle, engine = Bundle.open(tiny_gemma4_bundle), PortableEngine(tiny_gemma4_bundle)
    assert bundle.ple is not None and bundle.config.embed_divisor == 1
    sessions = {}
    for name, fed in {
        "zeros": [0] * 44,
        "rows of zero": [SoftSpan.of(bundle, IMAGE, bundle.embed.take([0] * 44))],
        "fives": [5] * 44,
        "rows of five": [image(bundle.embed.take([5] * 44))],
    }.items():
        sessions[name] = Session.open(bundle, engine)
        sessions[name].feed(fed)
    assert rows_of(sessions["zeros"]) == rows_of(sessions["rows of zero"])
    assert sessions["zeros"].pending == sessions["rows of zero"].pending
    assert rows_of(sessions["fives"]) != rows_of(sessions["rows of five"]), "token 5 has a PLE row of its own"
    # Restored and continued through decode alone; the span lies over the edge of the plain width.
    rows = np.random.default_rng(3).standard_normal((540, bundle.config.hidden)).astype(np.float16)
    producer = Session.open(bundle, engine, store=store)
    producer.feed([5, image(rows), 6])
    producer.save("seen")
    decoder = PortableEngine(tiny_gemma4_bundle)
    consumer = Session.open(bundle, decoder, store=store, decode_only=True)
    assert consumer.restore("seen").n == 542 and consumer.items == producer.items
    assert consumer.generate(12).tokens == producer.generate(12).tokens
    assert rows_of(consumer) == rows_of(producer)


def test_with_embeddings_in_place_of_rows_these_tests_fail(
    session: Session, other: Session, bundle: Bundle, ids: list[int], media: Half, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: a chain that looks the placeholder, or row 0, up in the table."""
    session.feed([*ids[:10], image(media[:70]), *ids[10:14]])
    run = Chain.run
    for token in (0, IMAGE):
        other.rollback(0)
        monkeypatch.setattr(
            Chain,
            "run",
            lambda self, step, fed, t=token: run(self, step, [x if isinstance(x, int) else t for x in fed]),
        )
        other.feed([*ids[:10], image(media[:70]), *ids[10:14]])
        assert other.items == session.items and rows_of(other) != rows_of(session)


def test_a_span_may_be_fed_in_parts_and_by_several_spans(
    bundle: Bundle, tiny_bundle: Path, ids: list[int], media: Half
) -> None:
    engine = PortableEngine(tiny_bundle)
    one = Session.open(bundle, engine, decode_only=True)
    parts = Session.open(bundle, engine, decode_only=True)
    one.feed([*ids[:7], image(media[:100]), SoftSpan(AUDIO, media[100:130]), *ids[7:9]])
    seen: list[tuple[int, int]] = []
    parts.feed([*ids[:7], image(media[:30])])
    parts.feed([image(media[30:100]), SoftSpan(AUDIO, media[100:101])])
    parts.feed([SoftSpan(AUDIO, media[101:130]), *ids[7:9]], lambda done, total: seen.append((done, total)))
    assert everything(one) == everything(parts)
    assert seen == [(i, 31) for i in range(1, 32)]


# the value


def test_a_span_keeps_its_own_copy_of_the_rows(session: Session, other: Session, media: Half) -> None:
    mine = media[:20].copy()
    span = image(mine[::2])  # not contiguous
    mine[:] = 0
    session.feed([span])
    other.feed([image(media[:20:2])])
    assert everything(session) == everything(other) and len(span) == 10
    with pytest.raises(ValueError, match="read-only"):
        span.rows[0, 0] = 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((2, 64), np.float32), "expected float16, found float32"),
        (np.zeros((2, 64), ">f2"), "expected float16, found >f2"),
        (np.zeros(64, np.float16), r"expected \[n, hidden\].*found \[64\]"),
        (np.zeros((0, 64), np.float16), r"n of 1 or more, found \[0, 64\]"),
        (np.array([[0.0] * 3, [0, np.inf, 0]], np.float16), "finite fp16 values, found others in row 1 of 2"),
        (np.array([[np.nan] * 3], np.float16), "finite fp16 values, found others in row 0 of 1"),
    ],
)
def test_rows_that_cannot_be_fed_are_refused_by_name(rows: Any, message: str) -> None:
    with pytest.raises(InputInvalid, match=message):
        SoftSpan(IMAGE, rows)


@pytest.mark.parametrize("placeholder", [-1, 2**31])
def test_a_placeholder_that_has_no_encoding_is_refused(media: Half, placeholder: int) -> None:
    with pytest.raises(InputInvalid, match=f"placeholder: expected an id of 0 to {2**31 - 1}, found {placeholder}"):
        SoftSpan(placeholder, media[:1])
    SoftSpan(2**31 - 1, media[:1])


def test_spans_are_checked_before_anything_changes(session: Session, ids: list[int], media: Half) -> None:
    session.feed(ids[:9])
    before = everything(session)
    for call in (session.feed, session.prompt):
        with pytest.raises(
            InputInvalid, match=r"span at position 12: rows: expected \[5, 64\].*found \[5, 63\]"
        ) as caught:
            call([*ids[:2], image(media[:10]), image(media[:5, :63])])
        assert caught.value.details == {"position": 12, "expected": 64, "found": 63}
    with pytest.raises(ContextOverflow, match="found 2048"):
        session.prompt([*ids[:1248], image(media)])
    assert everything(session) == before
    assert session.prompt([*ids[:1247], image(media)]).fed.tokens == 2047 - 9


# the unit of the rows


def test_an_encoders_rows_are_divided_as_the_bundle_says(
    session: Session, other: Session, bundle: Bundle, ids: list[int]
) -> None:
    """Tiny carries the residual stream divided by 32: what a model adds to its scaled embeddings has to be divided too."""
    assert bundle.config.embed_divisor == 32
    undivided = bundle.embed.take(ids[:80]).astype(np.float32) * 32
    span = SoftSpan.of(bundle, IMAGE, undivided)
    assert span.rows.tobytes() == bundle.embed.take(ids[:80]).tobytes()
    session.feed(ids[:80])
    other.feed([span])
    assert rows_of(other) == rows_of(session) and other.pending == session.pending
    # The mistake is silent in layer 0, whose norm undoes a factor, and shows in the layers above.
    wrong = Session.open(bundle, session.engine)
    wrong.feed([image(undivided.astype(np.float16))])
    apart = [
        float(np.abs(wrong.kv.inputs(i)[0][0, :80].astype(np.float32) - session.kv.inputs(i)[0][0, :80]).max())
        for i in wrong.kv.layers
    ]
    assert apart[0] < 0.02 and max(apart[1:]) > 0.3


def test_the_published_contract_feeds_an_encoders_rows_as_they_are(tmp_path: Path) -> None:
    published = Bundle.open(write_bundle(tmp_path / "published"))
    values = np.random.default_rng(1).standard_normal((3, HIDDEN)).astype(np.float16)
    assert published.config.embed_divisor == 1
    assert SoftSpan.of(published, IMAGE, values).rows.tobytes() == values.tobytes()
    assert SoftSpan.of(published, IMAGE, values.astype(np.float64)).rows.tobytes() == values.tobytes()
    with pytest.raises(InputInvalid, match="finite"):
        SoftSpan.of(published, IMAGE, np.full((1, HIDDEN), 65_520.0))


def test_a_bundle_of_ours_that_does_not_say_its_divisor_is_not_guessed(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "ours", "ours")
    assert Bundle.open(folder).config.embed_divisor is None
    with pytest.raises(Refused, match=r"hostio\.EMBED_DIVISOR.*Build the bundle again"):
        SoftSpan.of(Bundle.open(folder), IMAGE, np.zeros((1, HIDDEN)))
    for form in ("ours", "published"):
        convert = convert_config(form)
        convert["hostio"]["EMBED_DIVISOR"] = 8
        folder = write_bundle(tmp_path / f"{form} said", form)
        write_json(folder / "convert_config.json", convert)
        assert SoftSpan.of(Bundle.open(folder), IMAGE, np.full((1, HIDDEN), 4.0)).rows[0, 0] == 0.5


# reuse


@pytest.mark.parametrize("where", ["session", "store"])
@pytest.mark.parametrize(
    ("before", "at"), [(0, 0), (30, 0), (30, 1), (30, 33), (30, 34), (30, 35), (480, 40), (30, 299)]
)
def test_media_that_differ_in_one_bit_part_there_to_the_token(
    session: Session, other: Session, ids: list[int], media: Half, where: str, before: int, at: int
) -> None:
    prompt: list[Input] = [*ids[:before], image(media[:300]), *ids[before : before + 9]]
    changed: list[Input] = [*ids[:before], image(one_bit_off(media[:300], at)), *ids[before : before + 9]]
    session.prompt(prompt)
    session.save()
    asker = session if where == "session" else other
    made = asker.prompt(changed)
    assert (made.reused, made.source) == ((before + at, where) if before + at else (0, "nothing"))
    assert made.fed.tokens == 300 - at + 9
    assert asker.items[: before + at] == session.items[: before + at]
    assert asker.items[before + at] != session.items[before + at] or asker is session
    # What was reused and fed again is what was asked for and nothing else.
    if where == "store":
        fresh = Session.open(asker.bundle, asker.engine)
        fresh.feed(prompt)
        fresh.rollback(before + at)
        fresh.feed([image(one_bit_off(media[:300], at)[at:]), *ids[before : before + 9]])
        assert rows_of(fresh) == rows_of(other) and fresh.items == other.items and fresh.pending == other.pending
        assert other.prompt(prompt).reused == before + 300 + 9, "both are told apart, and both can be had"


def test_the_same_media_are_reused_whole_and_another_placeholder_is_another_medium(
    session: Session, other: Session, ids: list[int], media: Half
) -> None:
    prompt: list[Input] = [*ids[:50], image(media[:200])]
    session.prompt(prompt)
    session.save()
    made = other.prompt(prompt)
    assert (made.reused, made.source, made.fed.tokens) == (250, "store", 0)
    assert everything(other) == everything(session)
    assert session.prompt(prompt).fed.tokens == 0
    assert other.prompt([*ids[:50], SoftSpan(AUDIO, media[:200])]).reused == 50
    # A prefix that ends inside the span: its last row is at hand here, so it is decoded again.
    made = other.prompt([*ids[:50], image(media[:120])])
    assert (made.reused, made.fed.tokens) == (169, 1) and other.pending is not None


# restore


MIXED = (250, 300, 200)


@pytest.fixture
def mixed(ids: list[int], media: Half) -> list[Input]:
    """750 positions: text, 300 rows over the edge at 512, text."""
    return [*ids[: MIXED[0]], image(media[: MIXED[1]]), *ids[MIXED[0] : MIXED[0] + MIXED[2]]]


@pytest.mark.parametrize("kind", ["whole", "trimmed"])
def test_restore_through_decode_alone_continues_as_the_producer_did(
    session: Session, bundle: Bundle, tiny_bundle: Path, store: Store, tmp_path: Path, mixed: list[Input], kind: str
) -> None:
    session.feed(mixed)
    session.save("seen", receipt=session.receipt(24))
    with Store.open(tmp_path / "device") as device:
        copy_trimmed(store, "seen", device)
        engine = PortableEngine(tiny_bundle)
        consumer = Session.open(bundle, engine, store=store if kind == "whole" else device, decode_only=True)
        restored = consumer.restore("seen")
        assert restored.reused_tokens == 750 and consumer.items == session.items
        assert consumer.kv.covered == ((0, 0) if kind == "whole" else (0, 192))
        receipt = restored.match.snapshot.receipt
        assert receipt is not None and consumer.verify_receipt(receipt).identical
        made = session.generate(24)
        assert consumer.generate(24).tokens == made.tokens == receipt.tokens and len(set(made.tokens)) > 8
        assert rows_of(consumer) == rows_of(session, consumer.kv.covered)
        assert {name.rpartition(":")[2] for name in engine.ledger.names()} == {"decode", "lmhead.mlpackage"}
        # What it grew by is saved and found again, by the media that it holds.
        consumer.save("grown")
        again = Session.open(bundle, session.engine, store=store if kind == "whole" else device)
        assert again.prompt([*mixed, *made.tokens[:-1]]).reused == 773
        assert rows_of(again) == rows_of(consumer)


def test_decode_only_a_prefix_restored_and_media_fed_is_the_uninterrupted_run(
    bundle: Bundle, tiny_bundle: Path, store: Store, ids: list[int], media: Half
) -> None:
    engine = PortableEngine(tiny_bundle)
    straight, consumer = (Session.open(bundle, engine, store=store, decode_only=True) for _ in range(2))
    straight.feed([*ids[:40], image(media[:90])])
    straight.save("first")
    straight.feed([*ids[40:50], image(media[90:160]), *ids[50:53]])
    consumer.restore("first")
    consumer.feed([*ids[40:50], image(media[90:160]), *ids[50:53]])
    assert everything(consumer) == everything(straight)
    assert consumer.generate(8).tokens == straight.generate(8).tokens
    # From the middle of the first span, by asking for all of it: what is there is reused, the rest is decoded.
    late = Session.open(bundle, engine, store=store, decode_only=True)
    made = late.prompt([*ids[:40], image(media[:70]), *ids[40:44]])
    assert (made.reused, made.source, made.fed.functions) == (110, "store", ("decode",))
    fresh = Session.open(bundle, engine, decode_only=True)
    fresh.feed([*ids[:40], image(media[:70]), *ids[40:44]])
    assert everything(late) == everything(fresh)


def test_restoring_to_inside_a_span_needs_its_rows_and_says_how_to_give_them(
    session: Session, other: Session, ids: list[int], media: Half
) -> None:
    session.feed([*ids[:40], image(media[:90]), *ids[40:44]])
    session.save("seen")
    other.feed(ids[:5])
    before = everything(other)
    with pytest.raises(InputInvalid, match=r"item 99 is a soft token.*Session\.prompt"):
        other.restore("seen", at=100)
    assert everything(other) == before
    assert other.prompt([*ids[:40], image(media[:60])]).reused == 99
    session.rollback(99)
    session.feed([image(media[59:60])])
    assert everything(other) == everything(session)
    assert other.restore("seen", at=131).n == 131, "a token at the end of the prefix is decoded again as ever"


# rollback, receipts, state


def test_after_a_rollback_into_a_span_generation_asks_for_the_row(
    session: Session, other: Session, ids: list[int], media: Half
) -> None:
    session.feed([*ids[:40], image(media[:90])])
    expected = everything(session)
    receipt = session.receipt(6)
    assert everything(session) == expected and session.items[-1] != receipt.tokens[-1]
    session.rollback(100)
    assert session.items == expected[0][:100] and session.pending is None
    with pytest.raises(InputInvalid, match=r"item 99, the last, is a soft token.*Roll back to 99 and feed its row"):
        session.generate(3)
    assert session.position == 100
    session.rollback(99)
    session.feed([image(media[59:90])])
    other.feed([*ids[:40], image(media[:90])])
    other.rollback(99)
    other.feed([image(media[59:90])])
    assert everything(session) == everything(other)


def test_saving_names_soft_items_and_only_new_blocks_are_written(
    session: Session, store: Store, ids: list[int], media: Half
) -> None:
    session.feed([*ids[:40], image(media[:90])])
    first = session.save("seen").snapshot
    assert (
        first is not None and first.items == session.items and sum(isinstance(i, SoftToken) for i in first.items) == 90
    )
    session.feed([image(media[90:100]), *ids[40:90]])
    saved = session.save("seen")
    assert saved.written_objects == 2 * 1 and saved.snapshot is not None and saved.snapshot.items == session.items
    assert saved.snapshot.blocks[:2] == first.blocks[:2] and len(session.known) == 2
