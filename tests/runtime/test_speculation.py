"""With speculation and without: the same tokens, rows, pending token and ends, whatever is drafted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafters import RIGHT, WRONG, Guess, Oracle
from engines import Lying, Watched
from families import every_family_slow
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvstore import Store
from kvstore.errors import InputInvalid
from kvstore.items import Item
from kvstore.snapshot import Lineage
from runtime import SoftSpan
from runtime.bundle import Bundle
from runtime.engine import Engine, FunctionNotAllowed
from runtime.portable import PortableEngine
from runtime.reports import Generation
from runtime.session import Session
from runtime.speculation import Choice, Speculation, SpeculationStats, Tally, choose, drafts_at
from runtime.verifier import accepted, settled
from runtime.verify_head import HeadRefused, WidthUnknown

BATCHED = "lmhead_v4.mlpackage"

STARTS = (3, 4, 40, 60, 504, 508, 509, 510, 511, 512, 513, 1000, 2030, 2034, 2035, 2038, 2039, 2040, 2043, 2044, 2047)
"""Around a block's end, the window's, and the context's: generation ends 8 positions before the last."""

property_test = settings(
    max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
guesses = st.lists(st.tuples(st.integers(0, 6), st.none() | st.integers(0, 3)), min_size=1, max_size=6)

Held = tuple[Any, ...]


def held(session: Session) -> Held:
    """All that a session holds, rows and the zeros beyond them included; not who computed them."""
    rows = [bytes(s) for group in range(len(session.kv.covered)) for s in session.kv.spans(group, 0, session.kv.ctx)]
    return session.items, session.pending, session.emitted, session.known, session.kv.position, session.kv.covered, rows


class Texts:
    """Sessions at any position of one text, from a store that has it whole, and what plain decoding gives there."""

    def __init__(self, bundle: Bundle, engine: Engine, store: Store, ids: Sequence[int]) -> None:
        self.bundle, self.engine, self.store = bundle, engine, store
        whole = self.session()
        whole.feed(ids[:2047])
        whole.save("whole")
        self.plain = cache(self._plain)

    def session(self, engine: Engine | None = None) -> Session:
        return Session.open(self.bundle, engine or self.engine, store=self.store)

    def at(self, start: int, engine: Engine | None = None) -> Session:
        session = self.session(engine)
        session.restore("whole", start)
        return session

    def _plain(self, start: int, n: int) -> tuple[tuple[Item, ...], str, Held]:
        """(everything fed, and what follows; why it ended; what the session holds then)."""
        session = self.at(start)
        fed = session.items
        made = session.generate(n)
        return (*fed, *made.tokens), made.finish, held(session)

    def oracle(self, start: int, plan: Sequence[Guess], n: int = 24) -> Oracle:
        return Oracle(self.plain(start, n)[0], plan)


@pytest.fixture(scope="module")
def texts(
    bundle: Bundle, engine: PortableEngine, ids: list[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Texts]:
    with Store.open(tmp_path_factory.mktemp("speculation") / "store") as store:
        yield Texts(bundle, engine, store, ids)


# what is drafted changes nothing


@every_family_slow
@property_test
@example(start=40, n=24, plan=RIGHT)
@example(start=40, n=24, plan=WRONG)
@example(start=508, n=24, plan=[(3, 1), (2, None)])
@example(start=510, n=24, plan=[(2, 0), (3, 2)])
@example(start=2030, n=24, plan=RIGHT)
@example(start=60, n=5, plan=[(9, None)])
@given(start=st.sampled_from(STARTS), n=st.sampled_from((1, 4, 5, 24)), plan=guesses)
def test_any_draft_gives_what_plain_decoding_gives(texts: Texts, start: int, n: int, plan: list[Guess]) -> None:
    known, finish, expected = texts.plain(start, n)
    session = texts.at(start)
    heard: list[int] = []
    made = session.generate(n, heard.append, speculate=Speculation(draft=texts.oracle(start, plan)))
    assert (*known[:start], *made.tokens) == known and heard == list(made.tokens)
    assert made.finish == finish and held(session) == expected
    stats = made.speculation
    assert stats is not None and sum(stats.step_tokens) == len(made.tokens) == len(made.seconds)
    assert len(stats.step_tokens) == len(stats.step_drafts)


@every_family_slow
def test_right_drafts_give_four_tokens_a_step_and_wrong_ones_one(texts: Texts) -> None:
    made = texts.at(40).generate(17, speculate=Speculation(draft=texts.oracle(40, RIGHT)))
    assert made.speculation == SpeculationStats(
        4, 0, 12, 12, step_tokens=(1, 4, 4, 4, 4), step_drafts=(0, 3, 3, 3, 3), corrected=0, unsettled=0, refusal=None
    )
    made = texts.at(40).generate(9, speculate=Speculation(draft=texts.oracle(40, WRONG)))
    assert made.speculation is not None
    assert made.speculation.step_tokens == (1,) * 9
    # The last three tokens are decode's: less than a full round is left, which is no fallback.
    assert made.speculation.step_drafts == (0, 3, 3, 3, 3, 3, 0, 0, 0) and made.speculation.fallback_rounds == 0


def test_one_draft_is_not_worth_a_round_and_counts_as_a_fallback(texts: Texts) -> None:
    made = texts.at(40).generate(9, speculate=Speculation(draft=texts.oracle(40, [(1, None), (0, None), (2, None)])))
    assert made.speculation is not None
    assert made.speculation.step_tokens == (1, 1, 1, 3, 1, 1, 1)
    assert (made.speculation.rounds, made.speculation.fallback_rounds) == (1, 2)


def test_a_round_is_tried_only_where_all_its_tokens_are_wanted(texts: Texts) -> None:
    """So a round never gives more than what is left, and `n` tokens are the same steps whoever asks for more later."""
    for n, rounds in ((4, 0), (5, 1), (8, 1), (9, 2)):
        oracle = texts.oracle(40, RIGHT)
        made = texts.at(40).generate(n, speculate=Speculation(draft=oracle))
        assert made.speculation is not None and made.speculation.rounds == rounds
        assert [tokens for tokens, _ in oracle.asked] == [41 + 4 * r for r in range(rounds)]


@pytest.mark.parametrize(("position", "most"), [(2040, 3), (2044, 3), (2045, 2), (2046, 1), (2047, 0)])
def test_no_draft_reaches_past_the_context(position: int, most: int) -> None:
    asked: list[int] = []

    def draft(tokens: Sequence[Item], most: int) -> list[int]:
        asked.append(most)
        return [1] * 9

    drafts = drafts_at(draft, [1] * (position + 1), 2048)
    assert asked == [most] and len(drafts) == (most if most >= 2 else 0)


@pytest.mark.parametrize("start", [2030, 2034, 2035, 2036, 2039, 2040])
def test_near_the_contexts_end_it_ends_where_plain_decoding_does(texts: Texts, start: int) -> None:
    known, finish, expected = texts.plain(start, 32)
    session = texts.at(start)
    made = session.generate(32, speculate=Speculation(draft=texts.oracle(start, RIGHT)))
    assert finish == made.finish == "contextFull" and (*known[:start], *made.tokens) == known
    assert held(session) == expected


@every_family_slow
def test_prompt_lookup_finds_drafts_in_a_text(bundle: Bundle, engine: PortableEngine, ids: list[int]) -> None:
    """A text in which two tokens are followed by each of many others, and which ends with the two: most likely the model's next token is one of
    those. Its own words never repeat, so the drafts are wrong."""
    rounds = 0
    for first, second in ((5, 9), (17, 40), (300, 301), (30, 31), (77, 99)):
        text = [*(token for third in range(400, 880) for token in (first, second, third)), first, second]
        plain, other = Session.open(bundle, engine), Session.open(bundle, engine)
        plain.feed(text)
        other.feed(text)
        expected = plain.generate(9)
        made = other.generate(9, speculate=Speculation())
        assert made.tokens == expected.tokens and held(other) == held(plain) and made.speculation is not None
        rounds += made.speculation.rounds
        if rounds:
            return
    raise AssertionError("no draft was found")


def test_soft_tokens_in_the_text_do_no_harm(bundle: Bundle, engine: PortableEngine, ids: list[int]) -> None:
    rows = np.random.default_rng(7).standard_normal((40, bundle.config.hidden)).astype(np.float16)
    plain, other = Session.open(bundle, engine), Session.open(bundle, engine)
    for session in (plain, other):
        session.feed([*ids[:20], SoftSpan(1000, rows), *ids[20:24]])
    known = (*plain.items, *plain.generate(16).tokens)
    made = other.generate(16, speculate=Speculation(draft=Oracle(known, [(3, None), (3, 1)])))
    assert made.speculation is not None and made.speculation.rounds > 2 and held(other) == held(plain)
    session = Session.open(bundle, engine)
    session.feed([*ids[:20], SoftSpan(1000, rows), *ids[20:24]])
    assert (*session.items, *session.generate(16, speculate=Speculation()).tokens) == known


# ends and interruptions


@every_family_slow
@pytest.mark.parametrize("plan", [RIGHT, [(3, 1)], [(2, None)]], ids=["right", "half right", "two"])
@pytest.mark.parametrize("place", range(1, 9))
def test_eos_ends_it_where_plain_decoding_would(texts: Texts, place: int, plan: Sequence[Guess]) -> None:
    """At each place of two rounds: as a draft, as the target at the first difference, and behind the last draft."""
    known, _, _ = texts.plain(40, 24)
    bundle = texts.bundle
    ending = known[40 + place]
    if ending in known[40 : 40 + place]:
        pytest.skip("the model says this token before that place")
    config = bundle.config
    try:
        bundle.config = replace(config, eos_token_ids=frozenset({int(ending)}))  # type: ignore[call-overload]
        one, other = texts.at(40), texts.at(40)
        expected = one.generate(24)
        made = other.generate(24, speculate=Speculation(draft=Oracle(known, plan)))
        assert made.finish == expected.finish == "eos" and made.tokens == expected.tokens
        assert held(other) == held(one) and other.position == 40 + place and other.pending == ending
        # And it goes on from there in the same way.
        assert other.generate(9, speculate=Speculation()).tokens == one.generate(9).tokens and held(other) == held(one)
    finally:
        bundle.config = config


@pytest.mark.parametrize("token", range(10))
def test_a_caller_that_stops_at_any_token_finds_the_session_as_without(texts: Texts, token: int) -> None:
    def stopping(session: Session, seen: list[Held]) -> Any:
        def stop(_: int) -> None:
            seen.append((session.items, session.pending, session.emitted))
            if len(seen) == token + 1:
                raise BrokenPipeError

        return stop

    plain, other = texts.at(40), texts.at(40)
    seen: list[list[Held]] = [[], []]
    with pytest.raises(BrokenPipeError):
        plain.generate(16, stopping(plain, seen[0]))
    with pytest.raises(BrokenPipeError):
        other.generate(16, stopping(other, seen[1]), speculate=Speculation(draft=texts.oracle(40, RIGHT)))
    assert held(other) == held(plain) and seen[0] == seen[1]
    rest = other.generate(15 - token, speculate=Speculation(draft=texts.oracle(40, RIGHT)))
    assert (*other.items, other.pending) == texts.plain(40, 16)[0] and len(rest.tokens) == 15 - token


@every_family_slow
@pytest.mark.parametrize("error", [RuntimeError("engine"), KeyboardInterrupt()])
def test_a_round_that_fails_anywhere_changes_nothing(texts: Texts, error: BaseException) -> None:
    known, _, _ = texts.plain(40, 24)
    calls = len(texts.bundle.config.chunks) + 1  # and the batched head

    def look(*_: object) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise error

    for call in range(calls):
        left = [10**9]
        session = texts.at(40, Watched(texts.engine, look))
        how = Speculation(draft=Oracle(known, RIGHT))
        first = session.generate(5, speculate=how)  # a round that succeeds, and so proves the head
        before = held(session)
        left[0] = call
        with pytest.raises(type(error)):
            session.generate(8, speculate=how)
        assert left[0] == -1 and held(session) == before
        assert (*known[:40], *first.tokens, *session.generate(19, speculate=how).tokens) == known


def test_in_parts_is_at_once(texts: Texts) -> None:
    parts = texts.at(40)
    how = Speculation(draft=texts.oracle(40, [(3, None), (3, 1), (2, None)]))
    tokens = [t for n in (1, 6, 0, 3, 14) for t in parts.generate(n, speculate=how).tokens]
    known, _, expected = texts.plain(40, 24)
    assert (*known[:40], *tokens) == known and held(parts) == expected


def test_after_a_rollback_the_last_token_is_decoded_again_first(texts: Texts) -> None:
    plain, other = texts.at(60), texts.at(60)
    for session in (plain, other):
        session.rollback(50)
    expected = plain.generate(12).tokens
    made = other.generate(12, speculate=Speculation(draft=Oracle((*plain.items[:50], *expected), RIGHT)))
    assert made.tokens == expected and held(other) == held(plain)


# stores


@every_family_slow
def test_a_save_after_it_names_the_same_bytes(texts: Texts, tmp_path: Path) -> None:
    """Blocks and their content digests are equal; the snapshot's own digest says besides which functions computed them."""
    saves = []
    for name, how in (("off", None), ("on", Speculation(draft=texts.oracle(40, [(3, None), (3, 2)], 40)))):
        with Store.open(tmp_path / name) as store:
            session = texts.at(40)
            session._store = store
            session.generate(40, speculate=how)
            saves.append(session.save("x").snapshot)
    off, on = saves
    assert off is not None and on is not None and list(on.chain()) == list(off.chain())
    assert replace(on, lineages=off.lineages, lineage=off.lineage) == off
    last = dict(on.lineages[on.lineage[-1]].fields)
    assert "prefill_4" in last["functions"].split(",")
    here = Lineage.of({**dict(last), "functions": dict(off.lineages[off.lineage[-1]].fields)["functions"]})
    assert here == off.lineages[off.lineage[-1]], "nothing else differs"


@every_family_slow
def test_speculate_save_restore_roll_back_and_speculate_again(texts: Texts, tmp_path: Path) -> None:
    known, _, expected = texts.plain(500, 40)
    session = texts.at(500)
    session.generate(20, speculate=Speculation(draft=Oracle(known, [(3, None), (3, 1)])))
    name = f"part-{texts.bundle.config.name}"
    session.save(name)
    elsewhere = Session.open(
        texts.bundle, PortableEngine(texts.bundle.root), store=texts.store, decode_only=True, allow_verify=True
    )
    elsewhere.restore(name)
    elsewhere.generate(9, speculate=Speculation(draft=Oracle(known, RIGHT)))
    elsewhere.rollback(511)
    made = elsewhere.generate(29, speculate=Speculation(draft=Oracle(known, [(2, None), (3, 2)])))
    assert (*known[:511], *made.tokens) == known and made.speculation is not None and made.speculation.rounds
    items, pending, emitted, _, position, covered, rows = held(elsewhere)
    assert (items, pending, emitted, position, covered, rows) == (*expected[:3], *expected[4:])


# what may be loaded, and when


def test_what_verifies_loads_at_the_first_round(bundle: Bundle, ids: list[int]) -> None:
    engine = PortableEngine(bundle.root)
    session = Session.open(bundle, engine)
    session.feed(ids[:33])
    session.generate(9, speculate=Speculation(draft=lambda tokens, most: ()))
    assert "lmhead_v4.mlpackage" not in engine.ledger.names() and not any(
        "prefill_4" in name for name in engine.ledger.names()
    )
    session.generate(9, speculate=Speculation(draft=lambda tokens, most: (1, 2)))
    late = [BATCHED, *(f"{chunk}:prefill_4" for chunk in bundle.config.chunks)]
    assert engine.ledger.names()[-len(late) :] == late


def test_a_decode_only_session_refuses_unless_it_may_verify(bundle: Bundle, ids: list[int]) -> None:
    engine = PortableEngine(bundle.root)
    session = Session.open(bundle, engine, decode_only=True)
    session.feed(ids[:20])
    before = held(session)
    with pytest.raises(FunctionNotAllowed, match=r"prefill_4.*--allow-verify"):
        session.generate(8, speculate=Speculation())
    assert held(session) == before
    plain = [*(f"{chunk}:decode" for chunk in bundle.config.chunks), bundle.config.lmhead]
    assert engine.ledger.names() == plain
    session = Session.open(bundle, engine, decode_only=True, allow_verify=True)
    session.feed(ids[:20])  # still through decode
    session.generate(8, speculate=Speculation(draft=lambda tokens, most: (1, 2)))
    assert engine.ledger.names() == [*plain, BATCHED, *(f"{chunk}:prefill_4" for chunk in bundle.config.chunks)]
    with pytest.raises(FunctionNotAllowed, match="prefill_8"):
        engine.function(bundle.config.chunks[0], "prefill_8")


def test_a_bundle_without_verification_is_refused_by_name(
    tiny_bundle: Path, engine: PortableEngine, ids: list[int]
) -> None:
    bundle = Bundle.open(tiny_bundle)
    bundle.config = replace(bundle.config, verify_functions={}, lmhead_batched={})
    session = Session.open(bundle, engine)
    session.feed(ids[:20])
    with pytest.raises(WidthUnknown, match="batched head of width 4"):
        session.generate(8, speculate=Speculation())


def test_what_auto_means(bundle: Bundle) -> None:
    able = bundle.config
    unable = replace(able, lmhead_batched={})
    small = Choice(False, "below 7 GiB")

    def on(asked: Any, config: Any = able, *, only: bool = False, allowed: bool = False, device: Any = None) -> bool:
        return choose(asked, config, decode_only=only, allow_verify=allowed, device=device).on

    assert on("auto") and not on("auto", unable) and not on("auto", only=True) and on("auto", only=True, allowed=True)
    assert not on("auto", device=small) and on("on", device=small) and on("on", unable, only=True) and not on("off")
    assert not on("auto", unable, device=Choice(True, "12 GiB"))
    assert choose("auto", able, decode_only=False, allow_verify=False, device=small).reason == "below 7 GiB"


# heads that lie


def test_a_head_that_fails_its_check_is_never_asked(texts: Texts) -> None:
    lying = Lying(texts.engine, BATCHED, np.zeros_like)
    session = texts.at(40, lying)
    with pytest.raises(HeadRefused, match="expected the sequential"):
        session.generate(9, speculate=Speculation(draft=texts.oracle(40, RIGHT)))
    assert session.items == texts.plain(40, 1)[0][:40] and session.emitted  # the token at hand was given out
    known, _, expected = texts.plain(40, 24)
    session = texts.at(40, lying)
    made = session.generate(24, speculate=Speculation(refused="decode", draft=texts.oracle(40, RIGHT)))
    assert (*known[:40], *made.tokens) == known and held(session) == expected
    assert made.speculation is not None and made.speculation.rounds == 0
    assert made.speculation.refusal is not None and BATCHED in made.speculation.refusal


@every_family_slow
def test_recheck_overrules_a_batched_head_that_lies_after_its_check(texts: Texts) -> None:
    known, _, expected = texts.plain(40, 24)
    told: list[int] = []

    def later(tokens: Any) -> Any:
        told.append(1)
        return tokens if len(told) == 1 else np.where(np.arange(4) == 1, tokens ^ 1, tokens)

    lying = Lying(texts.engine, BATCHED, later)
    draft = Oracle(known, RIGHT, strict=False)
    trusting = texts.at(40, lying).generate(24, speculate=Speculation(draft=draft))
    assert (*known[:40], *trusting.tokens) != known, "the lie matters"
    told.clear()
    session = texts.at(40, lying)
    made = session.generate(24, speculate=Speculation("recheck", draft=texts.oracle(40, RIGHT)))
    assert (*known[:40], *made.tokens) == known and held(session) == expected
    assert made.speculation is not None and made.speculation.corrected == made.speculation.rounds == 5
    assert made.speculation.step_tokens == (1, 4, 4, 4, 4, 4, 1, 1, 1), "where the draft was right, the round goes on"


@every_family_slow
def test_recheck_with_an_honest_head_corrects_nothing(texts: Texts) -> None:
    _, _, expected = texts.plain(40, 24)
    session = texts.at(40)
    made = session.generate(
        24, speculate=Speculation("recheck", draft=texts.oracle(40, [(3, None), (3, 0), (2, 1), (3, 2)]))
    )
    assert held(session) == expected and made.speculation is not None
    assert made.speculation.corrected == 0 and made.speculation.rounds > 3


# parts


@pytest.mark.parametrize(
    ("drafts", "targets", "tokens"),
    [
        ((1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4)),
        ((1, 2, 3), (9, 2, 3, 4), (9,)),
        ((1, 2, 3), (1, 9, 3, 4), (1, 9)),
        ((1, 2), (1, 2, 7), (1, 2, 7)),
    ],
)
def test_the_drafts_up_to_the_first_difference_and_the_target_there(
    drafts: tuple[int, ...], targets: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    assert accepted(drafts, targets) == tokens


@pytest.mark.parametrize(
    ("margins", "tokens", "is_settled"),
    [
        ((1, 1, 1, 1), (1, 2, 9), True),
        ((1, 1, 0.51, 0), (1, 2, 9), True),  # the row behind the difference does not matter
        ((1, 1, 0.5, 1), (1, 2), False),
        ((0.1, 1, 1, 1), (), False),
        ((1, float("nan"), 1, 1), (1,), False),
    ],
)
def test_a_near_tie_ends_a_round_before_it(
    margins: tuple[float, ...], tokens: tuple[int, ...], is_settled: bool
) -> None:
    verdict = settled((1, 2, 3), (1, 2, 9, 4), np.array(margins, np.float16), 0.5)
    assert (verdict.tokens, verdict.settled) == (tokens, is_settled)


def test_statistics_both_ways() -> None:
    """The write-up's 0.775: 26 of 35 drafts accepted in 5 rounds."""
    stats = SpeculationStats(5, 9, 35, 26, (), (), 0, 0, None)
    assert (stats.accepted_with_pending, stats.drafted_with_pending) == (31, 40)
    assert stats.acceptance_with_pending == 0.775 and stats.acceptance == 26 / 35
    empty = Tally().stats()
    assert empty.acceptance is None and empty.acceptance_with_pending is None and empty.rounds == 0


@pytest.mark.parametrize(
    ("verify", "threshold"),
    [("margin", None), ("margin", -1.0), ("margin", float("nan")), ("trust", 0.5), ("recheck", 0.0)],
)
def test_a_threshold_belongs_to_margin(verify: Any, threshold: float | None) -> None:
    with pytest.raises(InputInvalid, match="threshold"):
        Speculation(verify, threshold)


def test_the_time_of_a_round_is_shared_by_its_tokens() -> None:
    stats = replace(Tally().stats(), step_tokens=(1, 4, 0, 1))
    made = Generation(tuple(range(6)), "cap", 0, (9.0, 4.0, 0.0, 0.0, 0.0, 3.0), stats)
    assert made.token_seconds == 1.0 and replace(made, speculation=None).token_seconds == 0.0
    assert replace(made, tokens=(1,), seconds=(9.0,), speculation=None).token_seconds is None
