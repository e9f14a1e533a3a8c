"""A model of the published shape: what the app saves goes on here as there, and the other way round, to the bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import corellm_independent as independent
import numpy as np
import pytest
from corellm_models import Rows, app, export, manifest, same_rows, take
from text import FERRY, KITCHEN

from kvstore import SoftToken, Store
from kvstore.errors import NotCovered
from kvstore.snapshot import Receipt
from runtime.bundle import Bundle
from runtime.portable import PortableEngine
from runtime.session import Session
from runtime.soft import SoftSpan

LENGTHS = (1, 511, 512, 513, 2047)
NEXT = 12


@dataclass(frozen=True)
class Moment:
    """What a producer holds after some tokens: their rows, the next token, and what it would say."""

    tokens: list[int]
    rows: Rows
    pending: int
    receipt: Receipt


def rows_of(session: Session) -> Rows:
    return {
        layer: tuple(a[0, : session.position].copy() for a in session.kv.inputs(layer))  # type: ignore[misc]
        for layer in session.kv.layers
    }


@pytest.fixture(scope="session")
def produced(tiny_gemma4_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, dict[int, Moment]]:
    """One conversation, saved under its length at every one of `LENGTHS`."""
    bundle = Bundle.open(tiny_gemma4_bundle)
    store = Store.open(tmp_path_factory.mktemp("produced") / "store")
    session = Session.open(bundle, PortableEngine(bundle.root), store=store)
    ids = bundle.tokenizer.encode(KITCHEN.strip() + "\n" + FERRY.strip())
    moments: dict[int, Moment] = {}
    for count in LENGTHS:
        session.prompt(ids[:count])
        receipt = session.receipt(NEXT)
        session.save(str(count), receipt)
        assert session.pending is not None
        moments[count] = Moment(ids[:count], rows_of(session), session.pending, receipt)
    return store, moments


def consumer(bundle: Bundle, store: Store) -> Session:
    return Session.open(bundle, PortableEngine(bundle.root), store=store, decode_only=True)


@pytest.mark.parametrize("count", LENGTHS)
def test_the_app_s_checkpoint_goes_on_here(
    produced: tuple[Store, dict[int, Moment]], tiny_gemma4_bundle: Path, tmp_path: Path, count: int
) -> None:
    moment = produced[1][count]
    independent.write(tmp_path / "kv", tiny_gemma4_bundle, moment.tokens, moment.rows, pending=moment.pending)
    bundle = Bundle.open(tiny_gemma4_bundle)
    with Store.open(tmp_path / "store") as store:
        take(store, tmp_path / "kv", tiny_gemma4_bundle)
        session = consumer(bundle, store)
        restored = session.restore("taken")
        assert (restored.n, restored.reused_tokens) == (count, count)
        assert same_rows(rows_of(session), moment.rows)
        report = session.verify_receipt(moment.receipt)
        assert report.identical, report
        made = session.generate(NEXT)
        assert made.tokens == moment.receipt.tokens
        if count == 2047:
            assert (made.finish, made.tokens) == ("contextFull", ())
        assert all(name.endswith(("decode", "lmhead.mlpackage")) for name in session.engine.ledger.names())
        # By its tokens too: nothing is computed, and the pending token is the app's.
        prompted = consumer(bundle, store).prompt(moment.tokens)
        assert (prompted.reused, prompted.fed.tokens) == (count, 0)


@pytest.mark.parametrize("count", LENGTHS)
def test_the_app_s_reader_takes_ours(
    produced: tuple[Store, dict[int, Moment]], tiny_gemma4_bundle: Path, tmp_path: Path, count: int
) -> None:
    store, moments = produced
    moment = moments[count]
    export(store, str(count), tmp_path / "kv", app(tiny_gemma4_bundle))
    said, rows = independent.read(tmp_path / "kv", tiny_gemma4_bundle, expected=moment.tokens)
    assert same_rows(rows, moment.rows)
    assert said["pendingNextToken"] == moment.pending
    assert said["bundleName"] == tiny_gemma4_bundle.name
    theirs = independent.write(tmp_path / "x", tiny_gemma4_bundle, moment.tokens, moment.rows, pending=moment.pending)
    people = {key: said[key] for key in said if key.startswith("created")}
    assert said == theirs | people


def test_without_a_pending_token_the_same_one_is_chosen(
    produced: tuple[Store, dict[int, Moment]], tiny_gemma4_bundle: Path, tmp_path: Path
) -> None:
    moment = produced[1][513]
    independent.write(tmp_path / "kv", tiny_gemma4_bundle, moment.tokens, moment.rows, pending=None)
    with Store.open(tmp_path / "store") as store:
        take(store, tmp_path / "kv", tiny_gemma4_bundle)
        session = consumer(Bundle.open(tiny_gemma4_bundle), store)
        restored = session.restore("taken")
        assert (restored.n, restored.reused_tokens) == (513, 512)
        assert session.pending == moment.pending


def test_rows_out_of_the_window_may_be_zero(
    produced: tuple[Store, dict[int, Moment]], tiny_gemma4_bundle: Path, tmp_path: Path
) -> None:
    store, moments = produced
    count = 2000  # so that something is left to say
    bundle = Bundle.open(tiny_gemma4_bundle)
    session = Session.open(bundle, PortableEngine(bundle.root), store=store)
    session.restore("2047", count)
    receipt = session.receipt(NEXT)
    rows = rows_of(session)
    for layer in bundle.config.own_layers("sliding_attention"):
        for array in rows[layer]:
            array[: (count - 512) // 64 * 64] = 0
    tokens = moments[2047].tokens[:count]
    independent.write(tmp_path / "kv", tiny_gemma4_bundle, tokens, rows, pending=session.pending)
    with Store.open(tmp_path / "store") as other:
        assert take(other, tmp_path / "kv", tiny_gemma4_bundle).uncovered_rows == 1472
        there = consumer(bundle, other)
        there.restore("taken")
        assert there.generate(NEXT).tokens == receipt.tokens
        with pytest.raises(NotCovered):
            there.rollback(1900)


def test_an_image_goes_on_and_stays_nameless(tiny_gemma4_bundle: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(tiny_gemma4_bundle)
    ids = bundle.tokenizer.encode("What is in this picture?")
    values = np.random.default_rng(3).normal(0, 1, (5, bundle.config.hidden)).astype(np.float16)
    asked = [*ids, SoftSpan(258880, values), *ids[1:]]
    with Store.open(tmp_path / "a") as store, Store.open(tmp_path / "b") as other:
        producer = Session.open(bundle, PortableEngine(bundle.root), store=store)
        producer.prompt(asked)
        receipt = producer.receipt(NEXT)
        producer.save("seen")
        assert export(store, "seen", tmp_path / "kv", app(tiny_gemma4_bundle)).soft_tokens == 5
        assert manifest(tmp_path / "kv")["processedTokens"] == [*ids, *[258880] * 5, *ids[1:]]
        assert take(other, tmp_path / "kv", tiny_gemma4_bundle).soft_tokens == 5
        session = consumer(bundle, other)
        session.restore("taken")
        assert same_rows(rows_of(session), rows_of(producer))
        assert session.generate(NEXT).tokens == receipt.tokens
        known = [item for item in producer.items if isinstance(item, SoftToken)]
        assert not {item.row for item in known} & {i.row for i in session.items if isinstance(i, SoftToken)}
        # With the image at hand, the text before it is what the store knows.
        assert consumer(bundle, other).prompt(asked).reused == len(ids)
