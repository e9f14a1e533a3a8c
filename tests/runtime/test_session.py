"""Feeding and generating: what is pending, what was emitted, where it ends, and what a failed step leaves behind."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import Watched, fail_at
from families import every_family

from kvstore.errors import InputInvalid
from runtime.bundle import Bundle, TokenOutOfRange
from runtime.decoding import ContextOverflow
from runtime.engine import FunctionNotAllowed
from runtime.portable import PortableEngine
from runtime.reports import Finish, budget
from runtime.session import Session
from runtime.state import made_by, merge


@pytest.fixture
def session(bundle: Bundle, engine: PortableEngine) -> Session:
    return Session.open(bundle, engine)


def opened(bundle: Bundle, engine: Any, tokens: list[int]) -> Session:
    made = Session.open(bundle, engine)
    made.feed(tokens)
    return made


def everything(session: Session) -> tuple[Any, ...]:
    """All that a session holds, rows and the zeros beyond them included."""
    rows = [bytes(s) for group in range(len(session.kv.covered)) for s in session.kv.spans(group, 0, session.kv.ctx)]
    return session.items, session.pending, session.emitted, session.lineage, session.known, session.kv.covered, rows


@pytest.fixture(scope="module")
def with_eos(tiny_bundle: Path, engine: PortableEngine, ids: list[int]) -> Iterator[tuple[Bundle, list[int], int]]:
    """A bundle whose EOS is the sixth token, first seen there, that the plain one generates after the 40 first tokens."""
    plain = Bundle.open(tiny_bundle)
    tokens = opened(plain, engine, ids[:40]).generate(32).tokens
    at = next(i for i in range(3, 32) if tokens[i] not in tokens[:i])
    plain.config = replace(plain.config, eos_token_ids=frozenset({tokens[at]}))
    yield plain, list(tokens[: at + 1]), at


# feed


def test_feed_holds_the_tokens_and_chooses_the_next_once(session: Session, ids: list[int]) -> None:
    seen: list[tuple[int, int]] = []
    fed = session.feed(ids[:77], lambda done, total: seen.append((done, total)))
    assert session.items == tuple(ids[:77]) and session.position == session.kv.position == 77
    assert session.pending is not None and not session.emitted
    assert fed.tokens == 77 and fed.functions == ("prefill_32", "prefill_8", "prefill_4", "decode")
    assert seen == [(32, 77), (64, 77), (72, 77), (76, 77), (77, 77)]


def test_feeding_nothing_changes_nothing(session: Session, ids: list[int]) -> None:
    assert session.feed([]).tokens == 0 and session.pending is None and session.position == 0
    session.feed(ids[:5])
    before = everything(session)
    assert session.feed(()).functions == ()
    assert everything(session) == before


def test_feeding_in_parts_is_feeding_at_once_where_the_functions_are_row_exact(
    bundle: Bundle, tiny_bundle: Path, ids: list[int]
) -> None:
    one = Session.open(bundle, PortableEngine(tiny_bundle), decode_only=True)
    parts = Session.open(bundle, PortableEngine(tiny_bundle), decode_only=True)
    one.feed(ids[:70])
    for start in range(0, 70, 23):
        parts.feed(ids[start : min(start + 23, 70)])
    assert everything(one) == everything(parts)


def test_the_context_keeps_one_position_free(session: Session, ids: list[int]) -> None:
    with pytest.raises(ContextOverflow, match=r"expected at most 2047.*found 2048") as caught:
        session.feed(ids[:2048])
    assert caught.value.details == {"expected": 2047, "found": 2048} and session.position == 0
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), ContextOverflow)
    session.feed(ids[:2047])
    before = everything(session)
    with pytest.raises(ContextOverflow):
        session.feed([7])
    assert everything(session) == before
    assert session.generate(32).finish == "contextFull" and everything(session) == before


@pytest.mark.parametrize("bad", [-1, 1024])
def test_a_token_without_an_embedding_is_refused_before_anything_runs(
    session: Session, ids: list[int], bad: int
) -> None:
    session.feed(ids[:3])
    before = everything(session)
    with pytest.raises(TokenOutOfRange):
        session.feed([*ids[3:600], bad])
    assert everything(session) == before


# generate


@pytest.mark.parametrize(
    ("asked", "prompt", "expected"),
    [
        (32, 1500, (32, "cap")),
        (32, 2008, (32, "cap")),
        (32, 2009, (31, "contextFull")),
        (31, 2009, (31, "cap")),
        (32, 2039, (1, "contextFull")),
        (1, 2039, (1, "cap")),
        (1, 2040, (0, "contextFull")),
        (0, 2040, (0, "cap")),
        (32, 2047, (0, "contextFull")),
        (0, 5, (0, "cap")),
    ],
)
def test_budget(asked: int, prompt: int, expected: tuple[int, Finish]) -> None:
    assert budget(asked, 2048, prompt) == expected


def test_the_last_token_is_pending_and_never_fed(session: Session, ids: list[int]) -> None:
    session.feed(ids[:40])
    chosen = session.pending
    heard: list[int] = []
    made = session.generate(10, heard.append)
    assert len(made.tokens) == len(made.seconds) == 10 and made.finish == "cap" and made.prompt == 40
    assert made.tokens[0] == chosen and heard == list(made.tokens)
    assert session.position == 49 and session.items[40:] == made.tokens[:-1]
    assert session.pending == made.tokens[-1] and session.emitted


@every_family
def test_generate_in_parts_is_generate_at_once(bundle: Bundle, engine: PortableEngine, ids: list[int]) -> None:
    one, parts = opened(bundle, engine, ids[:40]), opened(bundle, engine, ids[:40])
    whole = one.generate(12)
    pieces = [parts.generate(k) for k in (1, 0, 5, 2, 4)]
    assert tuple(t for g in pieces for t in g.tokens) == whole.tokens
    # Where a later part starts: behind the token that was emitted before, which is fed first.
    assert [g.prompt for g in pieces] == [40, 41, 41, 46, 48]
    assert everything(one) == everything(parts)


def test_asking_for_no_tokens_gives_none_and_feeds_none(session: Session, ids: list[int]) -> None:
    session.feed(ids[:9])
    before = everything(session)
    assert session.generate(0).tokens == () and everything(session) == before
    session.generate(2)
    before = everything(session)
    assert session.generate(0).finish == "cap" and everything(session) == before


def test_eos_is_the_last_token_and_stays_pending(
    with_eos: tuple[Bundle, list[int], int], engine: PortableEngine, ids: list[int]
) -> None:
    bundle, tokens, at = with_eos
    session = opened(bundle, engine, ids[:40])
    made = session.generate(32)
    assert made.finish == "eos" and list(made.tokens) == tokens
    assert session.position == 40 + at and session.pending == tokens[-1]
    # With the budget used up exactly there, it is still EOS that ended it.
    assert opened(bundle, engine, ids[:40]).generate(at + 1).finish == "eos"
    assert opened(bundle, engine, ids[:40]).generate(at).finish == "cap"


def test_generation_ends_eight_positions_before_the_context(session: Session, ids: list[int]) -> None:
    session.feed(ids[:2035])
    made = session.generate(32)
    assert len(made.tokens) == 5 and made.finish == "contextFull" and session.position == 2039
    # Going on would start behind the pending token, at 2040: nothing is left, and nothing is fed.
    again = session.generate(32)
    assert again.tokens == () and again.finish == "contextFull" and session.position == 2039


def test_generating_needs_a_token_fed_before(session: Session) -> None:
    with pytest.raises(InputInvalid, match="position 0"):
        session.generate(1)
    with pytest.raises(InputInvalid, match="n=-1"):
        session.generate(-1)


def test_feeding_after_generating_drops_the_pending_token(session: Session, ids: list[int]) -> None:
    session.feed(ids[:40])
    made = session.generate(3)
    session.feed(ids[40:44])
    assert session.items == (*ids[:40], *made.tokens[:2], *ids[40:44]) and not session.emitted


# rollback


@every_family
def test_after_a_rollback_other_tokens_give_what_a_fresh_session_gives(
    bundle: Bundle, engine: PortableEngine, ids: list[int]
) -> None:
    # 700 tokens run as 512, 5 x 32, ...: the boundary at 608 is one of 608 = 512 + 3 x 32 too, so the functions are the same.
    session = opened(bundle, engine, ids[:700])
    session.rollback(608)
    assert session.position == 608 and session.pending is None
    session.feed(ids[1000:1100])
    fresh = opened(bundle, engine, ids[:608])
    fresh.feed(ids[1000:1100])
    assert everything(session) == everything(fresh)
    assert session.generate(8).tokens == fresh.generate(8).tokens


def test_generating_after_a_rollback_decodes_the_last_token_again(
    bundle: Bundle, tiny_bundle: Path, ids: list[int]
) -> None:
    session = Session.open(bundle, PortableEngine(tiny_bundle), decode_only=True)
    session.feed(ids[:50])
    before = everything(session)
    expected = session.generate(6).tokens
    session.rollback(50)
    assert session.pending is None
    made = session.generate(6)
    assert made.tokens == expected and made.prompt == 50
    session.rollback(49)
    session.feed(ids[49:50])
    assert everything(session) == before


def test_rollback_to_here_keeps_the_pending_token_and_beyond_is_refused(session: Session, ids: list[int]) -> None:
    session.feed(ids[:50])
    before = everything(session)
    session.rollback(50)
    assert everything(session) == before
    for position in (51, -1):
        with pytest.raises(InputInvalid, match="expected 0 to 50"):
            session.rollback(position)
    session.rollback(0)
    assert everything(session)[:3] == ((), None, False) and session.kv.position == 0


# lineage


def test_lineage_says_which_functions_computed_each_block(session: Session, ids: list[int]) -> None:
    session.feed(ids[:512])
    session.feed(ids[512:593])
    functions = [dict(x.fields)["functions"] for x in session.lineage]
    assert functions == ["prefill_512"] * 8 + ["prefill_32", "decode,prefill_8"]
    session.rollback(590)
    assert dict(session.lineage[-1].fields)["functions"] == "prefill_8"
    assert dict(session.lineage[0].fields)["engine"] == "portable"


def test_a_block_of_two_engines_names_both() -> None:
    a = made_by({"engine": "portable", "os": "Linux"}, ["prefill_4", "decode"])
    b = made_by({"engine": "coreml", "os": "Linux"}, ["prefill_4"])
    both = merge([a, b, a])
    assert dict(both.fields) == {"engine": "portable + coreml", "functions": "decode,prefill_4", "os": "Linux"}
    assert merge([both, a]) == both and merge([a, a]) == a


# failures


@every_family
@pytest.mark.parametrize("error", [RuntimeError("engine"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", [0, 1, 2, 3, 4, 5, 6])
def test_an_interrupted_feed_keeps_whole_steps_only(
    bundle: Bundle, engine: PortableEngine, ids: list[int], call: int, error: BaseException
) -> None:
    # 41 tokens: 32, 8, decode; every chunk each, then the head.
    session = Session.open(bundle, fail_at(engine, call, error))
    with pytest.raises(type(error)):
        session.feed(ids[:41])
    assert session.position == (0, 32, 40)[min(call // len(bundle.config.chunks), 2)]
    same = Session.open(bundle, engine)
    same.feed(ids[: session.position])
    assert everything(session)[3:] == everything(same)[3:] and session.pending is None
    session.feed(ids[session.position : 41])
    same.feed(ids[same.position : 41])
    assert everything(session) == everything(same)


@pytest.mark.parametrize("call", range(3))
def test_an_interrupted_generation_goes_on_where_it_was(
    bundle: Bundle, engine: PortableEngine, ids: list[int], call: int
) -> None:
    expected = opened(bundle, engine, ids[:40])
    tokens = expected.generate(9).tokens
    session = opened(bundle, engine, ids[:40])
    session.engine = watched = fail_at(engine, 3 * 4 + call, KeyboardInterrupt())
    session._chain._engine = watched
    heard: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        session.generate(9, heard.append)
    assert heard == list(tokens[:5]) and session.emitted
    heard += session.generate(4).tokens
    assert heard == list(tokens) and everything(session) == everything(expected)


def test_an_error_in_the_callers_own_function_loses_no_state(
    bundle: Bundle, engine: PortableEngine, ids: list[int]
) -> None:
    expected = opened(bundle, engine, ids[:40])
    tokens = expected.generate(3).tokens
    session = opened(bundle, engine, ids[:40])

    def broken_pipe(token: int) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        session.generate(3, broken_pipe)
    assert session.generate(2).tokens == tokens[1:]
    assert everything(session) == everything(expected)


def test_an_interrupt_between_a_commits_two_assignments_heals(session: Session, ids: list[int]) -> None:
    session.feed(ids[:20])
    before = everything(session)
    session.kv.advance(21)  # as if interrupted right after
    session.feed(ids[20:22])
    session.rollback(20)
    assert everything(session)[3:] == before[3:]


# decode-only


def test_decode_only_loads_decode_and_the_head_and_refuses_the_rest(
    bundle: Bundle, tiny_bundle: Path, ids: list[int]
) -> None:
    engine = PortableEngine(tiny_bundle)
    session = Session.open(bundle, engine, decode_only=True)
    session.feed(ids[:20])
    session.generate(4)
    expected = [*(f"{c}:decode" for c in bundle.config.chunks), bundle.config.lmhead]
    assert engine.ledger.names() == expected
    for package, function in ((bundle.config.chunks[0], "prefill_4"), ("lmhead_v4.mlpackage", None)):
        with pytest.raises(FunctionNotAllowed, match="decode-only"):
            engine.function(package, function)
    # Another session over the same engine is bound by it too, and stays consistent.
    other = Session.open(bundle, engine)
    with pytest.raises(FunctionNotAllowed, match="prefill_8"):
        other.feed(ids[:9])
    assert other.position == 0 and engine.ledger.names() == expected


def test_a_session_can_run_over_any_engine(bundle: Bundle, engine: PortableEngine, ids: list[int]) -> None:
    calls: list[str | None] = []
    session = Session.open(bundle, Watched(engine, lambda package, function, inputs, rows: calls.append(function)))
    session.feed(ids[:5])
    assert calls == ["prefill_4", "prefill_4", "decode", "decode", None]


def test_importing_runtime_loads_nothing_and_its_names_load_no_build_tool() -> None:
    code = """
import sys
import runtime
heavy = {"numpy", "tokenizers", "coremltools", "google.protobuf", "threadpoolctl"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
for name in runtime.__all__:
    assert getattr(runtime, name).__name__ == name
assert not {"tokenizers", "coremltools", "gguf", "torch"} & sys.modules.keys()
try:
    runtime.Nothing
except AttributeError as error:
    assert "Nothing" in str(error)
"""
    root = str(Path(__file__).resolve().parents[2])
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
