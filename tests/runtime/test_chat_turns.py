"""How turns become tokens and are read back from them, with the tokenizers of the tiny models and with markers of the tests' own."""

from __future__ import annotations

from itertools import pairwise

import pytest
from families import every_family

from kvstore.items import SoftToken
from runtime.bundle import Bundle
from runtime.chat_turns import Turn, Writing, before_the_models_turn
from runtime.tokenizer import Tokenizer

SYSTEM = "You are a pilot. Be brief."
SAID = [("What is fog?", "Low cloud — “wet” air 😀."), ("  And\nmist? ", "<b>Thinner</b>\n"), ("7 + 8?", "15")]


@pytest.fixture
def writing(bundle: Bundle) -> Writing:
    return Writing.of(bundle)


@pytest.fixture
def tokenizer(bundle: Bundle) -> Tokenizer:
    return bundle.tokenizer


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens that nobody's encoder would choose for ``text``: each character alone."""
    return [token for character in text for token in tokenizer.encode(character, bos=False)]


def conversation(writing: Writing, tokenizer: Tokenizer, system: str) -> list[int]:
    """What `SAID` looks like when replies came letter by letter."""
    items: list[int] = []
    for i, (message, reply) in enumerate(SAID):
        items += writing.user(message, system=system if i == 0 else None, first=not items, after_reply=i > 0)
        items += [*spelled(tokenizer, reply), *writing.closing]
    return items


def roles(turns: tuple[Turn, ...]) -> list[tuple[str, str]]:
    return [(turn.role, turn.text) for turn in turns]


@every_family
@pytest.mark.parametrize("system", ["", SYSTEM])
def test_what_was_said_is_read_back_from_the_tokens(writing: Writing, tokenizer: Tokenizer, system: str) -> None:
    items = conversation(writing, tokenizer, system)
    turns = writing.read(items)
    said = [pair for message, reply in SAID for pair in (("user", message), ("assistant", reply))]
    assert roles(turns) == ([("system", system)] if system else []) + said
    assert writing.system_of(turns) == system
    assert writing.closed(items) and not writing.closed(items[:-1])
    assert all(a.stop == b.start for a, b in pairwise(turns)) and turns[-1].stop == len(items)
    for i, turn in enumerate(turns):  # a snapshot may end behind any of them
        if turn.start < turn.stop:
            assert roles(writing.read(items[: turn.stop])) == roles(turns[: i + 1])
    cut = writing.read(items[: turns[-1].start + 1])
    assert roles(cut) == [*roles(turns[:-1]), ("assistant", "1")], "a reply that has no end yet"


@every_family
def test_a_reply_of_canonical_tokens_is_what_encoding_the_text_gives(writing: Writing, tokenizer: Tokenizer) -> None:
    """So a program that only has the text finds all of it, whatever comes next: the end of a turn is a settled place."""
    items = writing.user("Where is the ferry?", system=SYSTEM, first=True, after_reply=False)
    items += [*tokenizer.encode("In the fog.", bos=False), *writing.closing]
    for then in ("", "\n", "?", "\nWhere?", "fog"):
        following = writing.user(then, system=None, first=False, after_reply=True)
        whole = tokenizer.encode(writing.text([*items, *following]))
        assert whole == [*items, *following]


def test_a_marker_that_grows_together_with_the_next_is_left_for_it(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("er", bos=False)) == 1
    writing = Writing(tokenizer, "r user: ", " -- ", "\ne")
    assert writing.closing == tuple(tokenizer.encode("\n", bos=False)), "`e` and `r` are one token"
    items = writing.user("why", system=None, first=True, after_reply=False) + spelled(tokenizer, "so")
    items += [*writing.closing, *writing.user("how", system=None, first=False, after_reply=True)]
    assert writing.text(items) == "<bos>r user: why -- so\ner user: how -- "
    end = tokenizer.encode("\ner user: how -- ", bos=False)
    assert items[-len(end) :] == end


@every_family
@pytest.mark.parametrize(("before", "now"), [("", SYSTEM), (SYSTEM, ""), (SYSTEM, "You are a pirate.")])
def test_another_system_text_leaves_every_other_turn_its_tokens(
    writing: Writing, tokenizer: Tokenizer, before: str, now: str
) -> None:
    items = conversation(writing, tokenizer, before)
    changed = writing.with_system(items, now)
    assert list(changed) == conversation(writing, tokenizer, now)
    assert list(writing.with_system(changed, before)) == items
    assert writing.with_system(items, before) == tuple(items)


def test_a_context_before_the_first_turn_is_kept(writing: Writing, tokenizer: Tokenizer) -> None:
    book = tokenizer.encode("It was a dark night.")
    assert roles(writing.read(book)) == [("context", "It was a dark night.")]
    assert writing.with_system(book, SYSTEM) == tuple(book), "nothing was said yet"
    items = book + writing.user("Why?", system=SYSTEM, first=False, after_reply=False)
    assert roles(writing.read(items)) == [("context", "It was a dark night."), ("system", SYSTEM), ("user", "Why?")]
    assert list(writing.with_system(items, "")) == book + writing.user(
        "Why?", system="", first=False, after_reply=False
    )


def test_a_soft_token_stands_in_the_text_for_a_medium(writing: Writing, tokenizer: Tokenizer) -> None:
    items = writing.user("See it?", system=None, first=True, after_reply=False)
    at = len(items) - len(tokenizer.encode("it?<end_of_turn>\n<start_of_turn>model\n", bos=False))
    soft = [*items[:at], SoftToken(10**6, b"d" * 32), *items[at:]]
    assert [t.text.count("\ufffc") for t in writing.read(soft)] == [1]


def test_without_markers_texts_follow_each_other(tokenizer: Tokenizer) -> None:
    writing = Writing(tokenizer, "", "", None)
    assert not writing.marked and writing.closing == ()
    items = writing.user("the f", system=None, first=True, after_reply=False) + spelled(tokenizer, "erry")
    items += writing.user(" left", system=None, first=False, after_reply=True)
    assert roles(writing.read(items)) == [("context", "the ferry left")]


@pytest.mark.parametrize(
    ("prefix", "suffix", "ends"),
    [
        ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n"),
        ("<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>\n"),
        ("<|turn>user\n", "<turn|>\n<|turn>model\n", "<turn|>\n"),
        ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
        ("<user>", "<end><model>", "<end>"),
        ("Q: ", "\nA: ", "\nA: "),
        ("", "", ""),
    ],
)  # fmt: skip
def test_what_ends_a_reply_where_the_manifest_does_not_say(bundle: Bundle, prefix: str, suffix: str, ends: str) -> None:
    assert before_the_models_turn(prefix, suffix) == ends
    assert (
        Writing(bundle.tokenizer, prefix, suffix, None).text(Writing(bundle.tokenizer, prefix, suffix, None).closing)
        in ends
    )


def test_a_family_with_a_turn_for_the_system_text_uses_it(bundle: Bundle) -> None:
    writing = Writing(bundle.tokenizer, "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n")
    assert writing.text(writing.user("Hi", system="S", first=True, after_reply=False)) == (
        "<bos><|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    gemma = Writing.of(bundle)
    assert gemma.text(gemma.user("Hi", system="S", first=True, after_reply=False)) == (
        "<bos><start_of_turn>user\nS\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    )
