"""The tiny model has something to say at every length, what it says depends on what it read, and its tokenizer takes any text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import sentencepiece_model as sp
from built_models import Runner, direct
from hypothesis import given, settings
from hypothesis import strategies as st
from text import FERRY, KITCHEN

from runtime.build.tiny import tiny_source, tiny_vocabulary
from runtime.portable import PortableEngine
from runtime.tokenizer import Tokenizer

SOURCE = tiny_source(0)
REFERENCE = sp.processor(SOURCE.vocabulary)
PROMPTS = (
    "Water boils at a temperature of",
    "Hello",
    "a",
    "The the the the the the the the the the",
    "def add(x, y):\n    return x + y\n",
    "1 2 3 4 5 6 7 8 9",
    "Was kostet die Fähre nach drüben?",
    "東京は日本の首都です。",
    "\n\n\n",
    "What is the answer to the question?",
)


def cases(tokenizer: Tokenizer) -> list[list[int]]:
    natural = tokenizer.encode(KITCHEN.strip() + "\n" + FERRY.strip(), bos=False)
    cuts = [(7 * n, n) for n in (1, 3, 20, 64, 127)]
    cuts += [(31 * i, 40 + 23 * i) for i in range(5)]
    return [tokenizer.encode(prompt) for prompt in PROMPTS] + [[2, *natural[a : a + n]] for a, n in cuts]


def test_greedy_text_never_settles(tiny_bundle: Path) -> None:
    for tokens in cases(Tokenizer.open(tiny_bundle)):
        said = direct(SOURCE).greedy(tokens, 32)
        assert len(set(said)) >= 8, (len(tokens), said)
        assert min(said) >= 6 + 256, "no control token, and no half of a character"


@pytest.mark.parametrize("length", [510, 1000, 1900])
def test_nor_in_a_long_context_on_the_engine(tiny_bundle: Path, ids: list[int], length: int) -> None:
    said = Runner(tiny_bundle, PortableEngine(tiny_bundle)).greedy(ids[:length], 32)
    assert len(set(said)) >= 8


def test_one_other_token_far_back_changes_what_is_said(tiny_bundle: Path, ids: list[int]) -> None:
    changed = 0
    for length in (20, 60, 150, 300):
        other = list(ids[:length])
        other[length // 2] = 300 + (other[length // 2] + 77) % 700
        changed += direct(SOURCE).greedy(ids[:length], 32) != direct(SOURCE).greedy(other, 32)
    assert changed == 4


def test_weights_do_not_depend_on_the_order_of_asking() -> None:
    names = [f"blk.{i}.attn_q.weight" for i in range(6)]
    forwards, backwards = tiny_source(5).weights, tiny_source(5).weights
    first = {name: forwards.tensor(name) for name in names}
    for name in reversed(names):
        assert np.array_equal(backwards.tensor(name), first[name])
    assert not np.array_equal(first[names[0]], first[names[1]])
    assert not np.array_equal(first[names[0]], tiny_source(6).weights.tensor(names[0]))


def test_the_vocabulary_is_what_it_says() -> None:
    vocabulary = tiny_vocabulary()
    assert len(vocabulary) == len(set(vocabulary.pieces)) == 1024
    assert [vocabulary.pieces[i] for i in (0, 1, 2, 3, 4, 5)] == [
        "<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>",
    ]  # fmt: skip
    assert vocabulary.tokenizer_json() == tiny_vocabulary().tokenizer_json()


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs",)) | st.sampled_from(" aeht\n<>▁"), max_size=60))
def test_any_text_comes_back_and_agrees_with_sentencepiece(tiny_tokenizer: Tokenizer, text: str) -> None:
    found = tiny_tokenizer.encode(text, bos=False)
    if not any(piece in text for piece in ("<pad>", "<eos>", "<bos>", "<unk>", "_of_turn>")):
        assert found == REFERENCE.encode(text)
        assert tiny_tokenizer.decode(found) == text.replace("▁", " ")


@pytest.fixture(scope="module")
def tiny_tokenizer(tiny_bundle: Path) -> Tokenizer:
    return Tokenizer.open(tiny_bundle)


def test_english_takes_a_few_letters_a_token(tiny_tokenizer: Tokenizer) -> None:
    assert len(KITCHEN) / len(tiny_tokenizer.encode(KITCHEN)) > 2.2
    tokens = tiny_tokenizer.encode("<start_of_turn>user\nHi<end_of_turn>\n")
    assert (tokens[0], tokens[1], tokens.count(5)) == (2, 4, 1)
