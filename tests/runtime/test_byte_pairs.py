"""The byte-level tokenizer gives the ids of byte-level BPE written by hand, and any text comes back."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from byte_pairs_by_hand import ByHand, letter, words
from hypothesis import example, given, settings
from hypothesis import strategies as st
from text import FERRY, KITCHEN
from tokenizer_texts import TEXTS

from runtime.build.byte_pairs import byte_letters
from runtime.build.tiny import tiny_llama_vocabulary
from runtime.build.vocabulary import PieceType
from runtime.tokenizer import Tokenizer

VOCABULARY = tiny_llama_vocabulary()
BY_HAND = ByHand(VOCABULARY.pieces, VOCABULARY.merges, single_digits=True)
SPECIAL = re.compile("|".join(map(re.escape, VOCABULARY.pieces[:3])))
# Assigned for long, so that every library's tables agree on what they are.
CHARACTERS = st.characters(max_codepoint=0x2FFF, exclude_categories=("Cs", "Cn", "Co")) | st.sampled_from(
    " \n\tthe'sld09²½,.–東京の😀"
)


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_bundle: Path) -> Tokenizer:
    return Tokenizer.open(tiny_llama_bundle)


def test_the_vocabulary_is_what_it_says() -> None:
    assert len(VOCABULARY) == len(set(VOCABULARY.pieces)) == 896
    assert byte_letters() == tuple(map(letter, range(256)))
    assert VOCABULARY.pieces[:3] == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    assert VOCABULARY.tokenizer_json() == tiny_llama_vocabulary().tokenizer_json()


def test_the_words_are_gpt_2s() -> None:
    text = "It's  the ferry's\n\n rope,they'll   see 12 'S\t!?  "
    assert list(words(text)) == [
        "It", "'s", " ", " the", " ferry", "'s", "\n\n", " rope", ",", "they", "'ll", "  ", " see", " 12", " '", "S", "\t", "!?", "  ",
    ]  # fmt: skip


@settings(max_examples=400)
@example(text="x  1  2\n 3")
@example(text="a 'll b's 'S")
@given(text=st.text(CHARACTERS, max_size=40))
def test_any_text_has_the_ids_of_byte_pairs_by_hand_and_comes_back(tokenizer: Tokenizer, text: str) -> None:
    if not SPECIAL.search(text):
        found = tokenizer.encode(text)
        assert found == BY_HAND.encode(text)
        assert tokenizer.decode(found) == text


def test_long_texts_too(tokenizer: Tokenizer) -> None:
    for text in (*TEXTS, KITCHEN, FERRY):
        plain = SPECIAL.sub("", text)
        found = tokenizer.encode(plain)
        assert found == BY_HAND.encode(plain), text
        assert tokenizer.decode(found) == plain
    assert len(KITCHEN) / len(tokenizer.encode(KITCHEN)) > 2.2


def test_special_tokens_written_out_become_their_ids(tokenizer: Tokenizer) -> None:
    inside = BY_HAND.encode("user\nHi")
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>") == [1, *inside, 2]
    assert tokenizer.decode([1, *inside, 2]) == "user\nHi"
    assert tokenizer.bos_id is None and tokenizer.encode("") == []


@pytest.mark.parametrize("single_digits", [True, False])
def test_single_digits_stand_alone_whatever_the_merges_say(tmp_path: Path, single_digits: bool) -> None:
    vocabulary = replace(
        VOCABULARY,
        pieces=(*VOCABULARY.pieces, "12", "\u01201"),
        types=(*VOCABULARY.types, PieceType.NORMAL, PieceType.NORMAL),
        merges=(("1", "2"), ("\u0120", "1"), *VOCABULARY.merges),
        single_digits=single_digits,
    )
    (tmp_path / "tokenizer.json").write_text(vocabulary.tokenizer_json())
    tokenizer = Tokenizer.open(tmp_path)
    by_hand = ByHand(vocabulary.pieces, vocabulary.merges, single_digits=single_digits)
    for text in ("12", "a 12 1", "2112", "²12  1x"):
        assert tokenizer.encode(text) == by_hand.encode(text)
    assert (896 in tokenizer.encode("12"), 897 in tokenizer.encode("a 1")) == (not single_digits, not single_digits)


def test_a_byte_without_a_piece_is_left_out(tmp_path: Path) -> None:
    """As SmolLM2's vocabulary lacks U+0004 and others."""
    document = json.loads(VOCABULARY.tokenizer_json())
    absent = VOCABULARY.pieces.index(letter(4))
    document["model"]["vocab"]["never"] = document["model"]["vocab"].pop(letter(4))
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    tokenizer = Tokenizer.open(tmp_path)
    assert tokenizer.encode("a\x04b") == tokenizer.encode("ab") != []
    assert absent not in tokenizer.encode("\x04\x05")
