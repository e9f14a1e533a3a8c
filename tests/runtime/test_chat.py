"""A conversation without a terminal: what is reused, what is saved, and where it stands after a turn that did not go well."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import Watched, fail_at
from families import every_family
from text import FERRY
from trimming import copy_trimmed

from kvstore import Store
from kvstore.errors import InputInvalid, RefConflict, SnapshotMissing
from runtime import SoftSpan
from runtime.bundle import Bundle
from runtime.chat import Conversation, Reply, problem
from runtime.engine import Engine, FunctionNotAllowed
from runtime.portable import PortableEngine
from runtime.session import Session
from runtime.tokenizer import TextStream, TokenizerError

MESSAGES = ("What is fog?", "And mist — “thin” fog 😀?", "Where is the ferry now?", "Who waits?", "Why?", "Then what?")
SYSTEM = "You are a pilot. Be brief."
N = 12


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as made:
        yield made


Begin = Callable[..., Conversation]


@pytest.fixture
def begin(bundle: Bundle, engine: PortableEngine, store: Store) -> Begin:
    """``begin(name)``: a new conversation in the store, saved under the name if one is given."""

    def made(name: str | None = None, *, system: str = "", engine: Engine = engine) -> Conversation:
        conversation = Conversation(Session.open(bundle, engine, store=store), store, system=system)
        if name is not None:
            conversation.claim(name)
        return conversation

    return made


@pytest.fixture
def resume(bundle: Bundle, engine: PortableEngine, store: Store) -> Begin:
    """``resume(name)`` in a session of its own, as another process would."""

    def made(name: str, *, system: str | None = None, store: Store = store) -> Conversation:
        return Conversation.resume(Session.open(bundle, engine, store=store), store, name, system=system)[0]

    return made


def say_all(conversation: Conversation, messages: Sequence[str] = MESSAGES) -> list[Reply]:
    return [conversation.say(message, N) for message in messages]


def state(conversation: Conversation) -> tuple[Any, ...]:
    """All that decides how it goes on: tokens and their rows."""
    session = conversation.session
    rows = [bytes(s) for g in range(len(session.kv.covered)) for s in session.kv.spans(g, 0, session.kv.ctx)]
    return conversation.tokens, conversation.name, session.items, rows


def said(reply: Reply) -> tuple[Any, ...]:
    return reply.text, reply.tokens, reply.finish


@every_family
def test_resumed_after_every_turn_it_is_the_unbroken_conversation(
    begin: Begin, resume: Begin, bundle: Bundle, engine: PortableEngine, tmp_path: Path
) -> None:
    with Store.open(tmp_path / "another") as another:
        unbroken = Conversation(Session.open(bundle, engine, store=another), another, system=SYSTEM)
        expected = say_all(unbroken)
    conversation = begin("talk", system=SYSTEM)
    saved = 0
    for message, once in zip(MESSAGES, expected, strict=True):
        reply = conversation.say(message, N)
        assert said(reply) == said(once) and len(reply.tokens) > 0
        assert reply.reused == saved, "all that the turn before saved, and nothing twice"
        assert reply.reused + reply.fed + len(reply.tokens) + 2 == len(conversation.tokens), "2 end the turn"
        assert reply.saved is not None and reply.saved.snapshot is not None
        saved = reply.saved.snapshot.tokens
        assert saved == len(conversation.tokens)
        told = conversation.turns
        conversation = resume("talk")
        assert conversation.turns == told and conversation.name == "talk"
    assert state(conversation)[0] == unbroken.tokens
    assert [t.text for t in told if t.role == "user"] == list(MESSAGES)
    assert [t.text for t in told if t.role == "assistant"] == [reply.text for reply in expected]
    assert [t.text for t in told if t.role == "system"] == [SYSTEM]


@every_family
def test_a_reply_is_what_the_session_says_to_the_written_prompt(
    begin: Begin, bundle: Bundle, engine: PortableEngine
) -> None:
    conversation = begin("talk")
    replies = say_all(conversation, MESSAGES[:2])
    config, encode = bundle.config, bundle.tokenizer.encode
    tokens: list[int] = []
    session = Session.open(bundle, engine)
    for message, reply in zip(MESSAGES, replies, strict=False):
        tokens += encode(f"{config.prompt_prefix}{message}{config.prompt_suffix}", bos=not tokens)
        session.feed(tokens[session.position :])
        made = session.generate(N)
        assert reply.tokens == made.tokens and reply.finish == made.finish == "cap"
        assert reply.text == bundle.tokenizer.decode(made.tokens) and len(reply.token_seconds) == N
        tokens += [*made.tokens, *encode(config.assistant_suffix or "", bos=False)]
        session.feed(tokens[session.position :])
    assert conversation.tokens == tuple(tokens)


def test_a_reply_keeps_its_tokens_where_encoding_its_text_gives_others(
    begin: Begin, resume: Begin, bundle: Bundle
) -> None:
    conversation = begin("talk")
    reply = conversation.say("What is fog?", 40)
    encoded = bundle.tokenizer.encode(reply.text, bos=False)
    assert list(reply.tokens) != encoded, "choose another message: this reply proves nothing"
    again = resume("talk")
    second = again.say("Why?", N)
    assert again.tokens[: second.reused] == conversation.tokens
    start = second.reused - len(reply.tokens) - 2
    assert again.tokens[start : second.reused - 2] == reply.tokens


def test_characters_come_whole_and_make_the_reply(begin: Begin) -> None:
    pieces: list[str] = []
    reply = begin().say("Some bytes 😀", 200, pieces.append)
    assert len(pieces) > 20 and "".join(pieces).replace("\ufffd", "") == reply.text.replace("\ufffd", "")
    assert all("\ufffd" not in piece for piece in pieces[:-1]) or "\ufffd" in reply.text


def test_an_end_token_is_no_part_of_the_reply(begin: Begin, bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = begin().say("What is fog?", N)
    end = next(t for i, t in enumerate(plain.tokens) if i > 2 and t not in plain.tokens[:i])
    monkeypatch.setattr(bundle, "config", replace(bundle.config, eos_token_ids=frozenset({end})))
    conversation = begin("talk")
    reply = conversation.say("What is fog?", N)
    assert reply.finish == "eos" and reply.tokens == plain.tokens[: plain.tokens.index(end)]
    assert conversation.turns[-1].text == reply.text and end not in conversation.tokens[-len(reply.tokens) - 2 :]
    held = conversation.tokens
    assert conversation.say("Why?", N).reused == len(held)


# Ctrl-C


@pytest.mark.parametrize("how", ["while it is shown", "while it is computed", "between the two"])
def test_ctrl_c_keeps_the_reply_so_far(
    begin: Begin, resume: Begin, bundle: Bundle, engine: PortableEngine, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = begin().say(MESSAGES[0], N)
    shown: list[str] = []

    def show(piece: str) -> None:
        shown.append(piece)
        if how == "while it is shown" and len(shown) == 4:
            raise KeyboardInterrupt

    calls = [0]

    def look(package: str, *_: object) -> None:
        calls[0] += package == bundle.config.lmhead
        if how == "while it is computed" and calls[0] == 6 and package != bundle.config.lmhead:
            calls[0] += 100
            raise KeyboardInterrupt

    real, pieces = TextStream.feed, [0]

    def feed(self: TextStream, token: int) -> str:
        pieces[0] += 1
        if how == "between the two" and pieces[0] == 6:
            raise KeyboardInterrupt
        return real(self, token)

    monkeypatch.setattr(TextStream, "feed", feed)
    conversation = begin("talk", engine=Watched(engine, look))
    reply = conversation.say(MESSAGES[0], N, show)
    assert reply.finish == "cancelled" and reply.taken and reply.saved is not None and reply.error is None
    assert 2 < len(reply.tokens) < N and reply.tokens == whole.tokens[: len(reply.tokens)]
    assert reply.text == "".join(shown) and whole.text.startswith(reply.text)
    assert conversation.turns[-1].text == reply.text
    again = resume("talk")
    assert again.tokens == conversation.tokens
    assert said(again.say(MESSAGES[1], N)) == said(conversation.say(MESSAGES[1], N))


@pytest.mark.parametrize("first", [True, False])
def test_ctrl_c_before_the_first_token_takes_the_message_back(
    begin: Begin, engine: PortableEngine, first: bool
) -> None:
    armed = [False]

    def look(*_: object) -> None:
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt

    conversation = begin("talk", engine=Watched(engine, look))
    if not first:
        conversation.say(MESSAGES[0], N)
    before = state(conversation)
    armed[0] = True
    reply = conversation.say(MESSAGES[1], N)
    assert (reply.finish, reply.taken, reply.tokens, reply.saved) == ("cancelled", False, (), None)
    assert state(conversation) == before
    undisturbed = begin()
    if not first:
        undisturbed.say(MESSAGES[0], N)
    assert said(conversation.say(MESSAGES[1], N)) == said(undisturbed.say(MESSAGES[1], N))


def test_ctrl_c_while_saving_loses_nothing(begin: Begin, resume: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = begin("talk")
    first = conversation.say(MESSAGES[0], N)
    with monkeypatch.context() as patched:
        patched.setattr(Store, "_heal", interrupt)
        second = conversation.say(MESSAGES[1], N)
    assert second.taken and second.saved is None and isinstance(second.unsaved, KeyboardInterrupt)
    assert problem(second.unsaved) == "interrupted"
    assert first.saved is not None and resume("talk").tokens == first.saved.snapshot.items  # type: ignore[union-attr]
    third = conversation.say(MESSAGES[2], N)
    assert third.saved is not None and resume("talk").tokens == conversation.tokens


def interrupt(*_: object, **__: object) -> Any:
    raise KeyboardInterrupt


# errors


@pytest.mark.parametrize("call", [0, 1, 4, 9, 20])
def test_a_turn_that_fails_is_taken_back_whole(begin: Begin, resume: Begin, engine: PortableEngine, call: int) -> None:
    """The engine fails in the second turn: in its feed or in its reply."""
    armed: list[Watched] = []

    class Switch:
        def __getattr__(self, name: str) -> Any:
            return getattr(armed[0] if armed else engine, name)

    conversation = begin("talk", engine=Switch())
    first = conversation.say(MESSAGES[0], N)
    before = state(conversation)
    armed.append(fail_at(engine, call, RuntimeError("the device went away")))
    reply = conversation.say(MESSAGES[1], N)
    assert reply.finish == "error" and not reply.taken and str(reply.error) == "the device went away"
    assert state(conversation) == before and first.saved is not None
    assert resume("talk").tokens == before[0]
    undisturbed = begin()
    assert said(undisturbed.say(MESSAGES[0], N)) == said(first)
    assert said(conversation.say(MESSAGES[1], N)) == said(undisturbed.say(MESSAGES[1], N))


def test_the_callers_own_error_is_raised(begin: Begin) -> None:
    conversation = begin()
    conversation.say(MESSAGES[0], N)
    before = state(conversation)

    def broken(_: str) -> None:
        raise BrokenPipeError("nobody reads")

    with pytest.raises(BrokenPipeError):
        conversation.say(MESSAGES[1], N, broken)
    assert state(conversation) == before


def test_text_that_cannot_be_encoded_is_an_error_of_its_turn(begin: Begin) -> None:
    conversation = begin()
    reply = conversation.say("half \ud83d", N)
    assert reply.finish == "error" and isinstance(reply.error, TokenizerError) and conversation.tokens == ()
    assert conversation.say("whole", N).taken


def test_a_full_disk_leaves_the_reply_and_what_was_saved(
    begin: Begin, resume: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = begin("talk")
    conversation.say(MESSAGES[0], N)
    kept = conversation.tokens

    def full(*_: object, **__: object) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "_contents", full)
        reply = conversation.say(MESSAGES[1], N)
    assert reply.taken and reply.finish == "cap" and reply.saved is None and "No space left" in str(reply.unsaved)
    assert resume("talk").tokens == kept
    conversation.save()
    assert resume("talk").tokens == conversation.tokens


# the context


def filled(begin: Begin, bundle: Bundle, left: int) -> Conversation:
    """A conversation after a first turn, with ``left`` positions for a message."""
    conversation = begin("talk")
    tokens = bundle.tokenizer.encode(FERRY * 2, bos=False)
    size = 2048 - 9 - left - 1 - 2 - 12  # the reply of 1, what ends it, markers and BOS
    text = bundle.tokenizer.decode(tokens[:size])
    while conversation.room != left:
        conversation.reset()
        reply = conversation.say(text, 1)
        assert reply.taken, reply
        difference = conversation.room - left
        size += difference
        text = bundle.tokenizer.decode(tokens[:size])
    conversation.save("talk")
    return conversation


def test_a_message_that_does_not_fit_is_refused_with_what_to_do(begin: Begin, resume: Begin, bundle: Bundle) -> None:
    conversation = filled(begin, bundle, 14)
    before = state(conversation)
    reply = conversation.say("this is far too long for the room that is left", N)
    assert (reply.finish, reply.taken, reply.text, reply.error) == ("contextFull", False, "", None)
    assert reply.notice is not None and "and 14 of 2,048 are left" in reply.notice
    assert "A shorter one may fit. /reset begins a new conversation; talk stays saved as it is." in reply.notice
    assert state(conversation) == before
    short = conversation.say("a", N)
    assert short.finish == "contextFull" and short.taken and 0 < len(short.tokens) < N
    assert short.notice is not None and short.notice.startswith("The context is full: the reply ends here. /reset")
    assert short.saved is not None and resume("talk").tokens == conversation.tokens
    assert conversation.room == 0 and len(conversation.tokens) < 2048
    assert conversation.say("a", N).notice == (
        "The context is full: the message takes 12 positions with its markers, and 0 of 2,048 are left for one. /reset begins a new "
        "conversation; talk stays saved as it is."
    )
    conversation.reset()
    assert conversation.say("a", N).taken and resume("talk").turns[-1].text == short.text


# names


def test_a_name_is_not_taken_from_another_conversation(begin: Begin, resume: Begin) -> None:
    one = begin("talk")
    one.say(MESSAGES[0], N)
    with pytest.raises(RefConflict, match=r"name 'talk': expected a free one .*--resume"):
        begin("talk")
    two = resume("talk")
    two.say(MESSAGES[1], N)
    lost = one.say(MESSAGES[2], N)
    assert isinstance(lost.unsaved, RefConflict) and "/save OTHER" in str(lost.unsaved) and lost.taken
    assert resume("talk").tokens == two.tokens
    one.save("other")
    assert one.name == "other" and resume("other").tokens == one.tokens
    assert one.say(MESSAGES[3], N).saved is not None and resume("other").tokens == one.tokens
    with pytest.raises(RefConflict):
        one.save("talk")
    assert one.name == "other"


def test_without_a_name_nothing_is_saved_until_one_is_given(begin: Begin, resume: Begin, store: Store) -> None:
    conversation = begin()
    with pytest.raises(InputInvalid, match="expected at least one turn"):
        conversation.save("talk")
    assert conversation.say(MESSAGES[0], N).saved is None
    assert list(store.shelf.records.refs()) == []
    assert conversation.session.items == conversation.tokens, "its end is fed all the same, in the same steps"
    conversation.save("talk")
    assert conversation.say(MESSAGES[1], N).saved is not None
    assert resume("talk").tokens == conversation.tokens


def test_a_reset_begins_anew_and_keeps_what_was_saved(begin: Begin, resume: Begin) -> None:
    conversation = begin("talk", system=SYSTEM)
    first = conversation.say(MESSAGES[0], N)
    kept = conversation.tokens
    conversation.reset()
    assert conversation.turns == () and conversation.name is None
    again = conversation.say(MESSAGES[0], N)
    assert said(again) == said(first) and again.reused > 10, "the same tokens are still at hand"
    other = conversation.say(MESSAGES[1], N)
    assert other.saved is None and resume("talk").tokens == kept


def test_a_conversation_goes_on_under_another_name_or_from_a_digest(begin: Begin, resume: Begin, store: Store) -> None:
    conversation = begin("talk")
    conversation.say(MESSAGES[0], N)
    fork = resume("talk")
    fork.claim("fork")
    fork.say(MESSAGES[1], N)
    assert resume("talk").tokens == conversation.tokens != fork.tokens == resume("fork").tokens
    digest = store.resolve("talk").hex
    assert resume(digest).name is None
    with pytest.raises(SnapshotMissing):
        resume("absent")


# another system text


@every_family
def test_another_system_text_is_told_by_its_first_token_and_fed_from_there(
    begin: Begin, bundle: Bundle, engine: PortableEngine, store: Store
) -> None:
    conversation = begin("talk", system="You are a pilot. Be brief.")
    conversation.say(MESSAGES[0], N)
    held, turns = conversation.tokens, conversation.turns
    session = Session.open(bundle, engine, store=store)
    other, restored, change = Conversation.resume(session, store, "talk", system="You are a pilot. Be rude.")
    assert change is not None and restored.reused_tokens == len(held)
    at = change.at
    assert other.tokens[:at] == held[:at] and other.tokens[at] != held[at]
    ids = [held[at], other.tokens[at]]
    assert [change.before, change.now] == [bundle.tokenizer.decode([i]) for i in ids if isinstance(i, int)]
    assert change.before.strip()[0] == "b" and change.now.strip()[0] == "r"
    assert [t.text for t in other.turns if t.role != "system"] == [t.text for t in turns if t.role != "system"]
    reply = other.say(MESSAGES[1], N)
    assert reply.reused == at and reply.fed == len(other.tokens) - at - len(reply.tokens) - 2
    assert other.turns[0].text == "You are a pilot. Be rude."
    same = Conversation.resume(
        Session.open(bundle, engine, store=store), store, "talk", system="You are a pilot. Be rude."
    )
    assert same[2] is None and same[0].tokens == other.tokens


def test_a_failure_under_another_system_text_leaves_it_usable(
    begin: Begin, bundle: Bundle, engine: PortableEngine, store: Store
) -> None:
    begin("talk", system=SYSTEM).say(MESSAGES[0], N)
    results = []
    for broken in (True, False):
        with Store.open(store.shelf.path) as own:
            used = fail_at(engine, 5, RuntimeError("gone")) if broken else engine
            session = Session.open(bundle, used, store=own)
            conversation, _, _ = Conversation.resume(session, own, "talk", system="Be kind.")
            conversation.claim(f"{broken}")
            if broken:
                assert conversation.say(MESSAGES[1], N).finish == "error"
            results.append((conversation.say(MESSAGES[1], N).text, conversation.tokens))
    assert results[0] == results[1]


# elsewhere


def test_a_prefilled_text_is_talked_about(
    begin: Begin, resume: Begin, bundle: Bundle, engine: PortableEngine, store: Store
) -> None:
    session = Session.open(bundle, engine, store=store)
    book = bundle.tokenizer.encode(FERRY)[:600]
    session.prompt(book)
    session.save("book")
    conversation = resume("book", system=SYSTEM)
    conversation.claim("talk")
    reply = conversation.say(MESSAGES[0], N)
    assert reply.reused == 600 and conversation.tokens[:600] == tuple(book)
    assert [t.role for t in conversation.turns] == ["context", "system", "user", "assistant"]
    assert resume("talk").say(MESSAGES[1], N).reused == len(conversation.tokens)


@every_family
def test_a_trimmed_copy_goes_on_through_decode_alone(
    begin: Begin, bundle: Bundle, store: Store, tmp_path: Path, engine: PortableEngine
) -> None:
    conversation = begin("talk")
    conversation.say(FERRY[:3000].replace("\n", " "), N)
    with Store.open(tmp_path / "there") as there:
        copy_trimmed(store, "talk", there)
        session = Session.open(bundle, PortableEngine(bundle.root), store=there, decode_only=True)
        away, restored, _ = Conversation.resume(session, there, "talk")
        assert restored.reused_tokens == len(conversation.tokens)
        replies = say_all(away, MESSAGES[:2])
        assert replies[0].saved is not None and replies[1].reused == replies[0].saved.snapshot.tokens  # type: ignore[union-attr]
        assert {name.rpartition(":")[2] for name in session.engine.ledger.names()} == {"decode", bundle.config.lmhead}
        with pytest.raises(FunctionNotAllowed):
            session.engine.function(bundle.config.chunks[0], next(iter(bundle.config.prefill_functions.values())))
        assert [t.text for t in away.turns][:2] == [t.text for t in conversation.turns]


def test_a_token_that_is_decoded_again_does_not_count_as_reused(begin: Begin, resume: Begin) -> None:
    conversation = begin("talk")
    conversation.say(MESSAGES[0], N)
    held = len(conversation.tokens)
    conversation.session.feed([7])
    conversation.session.rollback(held)  # and so without a pending token
    conversation.save()
    reply = resume("talk").say(MESSAGES[1], N)
    same = conversation.say(MESSAGES[1], N)
    assert (reply.reused, reply.fed) == (same.reused - 1, same.fed + 1) == (held - 1, same.fed + 1)
    assert said(reply) == said(same)


def test_a_conversation_with_an_image_goes_on_but_not_under_another_system_text(
    begin: Begin, resume: Begin, bundle: Bundle, engine: PortableEngine, store: Store
) -> None:
    rows = bundle.embed.take(range(100, 104))
    session = Session.open(bundle, engine, store=store)
    tokenizer = bundle.tokenizer
    session.prompt(
        [
            *tokenizer.encode("<start_of_turn>user\nSee "),
            SoftSpan(1000, rows),
            *tokenizer.encode("this?<end_of_turn>\n<start_of_turn>model\n", bos=False),
        ]
    )
    session.generate(5)
    session.save("talk")
    with pytest.raises(InputInvalid, match="images or audio"):
        resume("talk", system=SYSTEM)
    conversation = resume("talk")
    held = len(conversation.tokens)
    reply = conversation.say("And?", N)
    assert reply.taken and len(conversation.tokens) > held
    assert [t.text for t in conversation.turns if t.role == "user"] == ["See \ufffc\ufffc\ufffc\ufffcthis?", "And?"]


def test_without_markers_it_goes_on_as_text(
    begin: Begin, resume: Begin, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"prompt_prefix": None, "prompt_suffix": None, "assistant_suffix": None}
    monkeypatch.setattr(bundle, "config", replace(bundle.config, **plain))
    conversation = begin("talk")
    assert not conversation.marked
    first = conversation.say("The ferry is", N)
    again = resume("talk")
    assert [turn.role for turn in again.turns] == ["context"] and again.turns[0].text == f"The ferry is{first.text}"
    reply = again.say(" late", N)
    assert reply.reused == len(conversation.tokens)
    conversation.reset()
    assert said(conversation.say("The ferry is", N)) == said(first) and said(conversation.say(" late", N)) == said(
        reply
    )


def test_what_makes_the_reply_can_be_given(bundle: Bundle, engine: PortableEngine) -> None:
    session = Session.open(bundle, engine)
    asked = []

    def short(n: int, on_token: Callable[[int], None]) -> Any:
        asked.append(n)
        return session.generate(2, on_token)

    reply = Conversation(session, generate=short).say("Hi", 50)
    assert asked == [50] and len(reply.tokens) == 2
