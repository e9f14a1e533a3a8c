"""A text tokenised in parts gives the ids of the whole: on every kind of tokenizer that is cut, and on those that are not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from bundle_folder import write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Inner

from runtime.cuts import parts
from runtime.tokenizer import Tokenizer

STORY = (Path(__file__).parents[2] / "kvstore" / "data" / "ferry.txt").read_text()
TRAINING = [STORY[i : i + 400] for i in range(0, len(STORY), 400)]


def across_words(root: Path) -> None:
    """Merges go across blanks, as they please: nothing splits the text."""
    inner = Inner(models.BPE(unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<unk>"], show_progress=False)
    inner.train_from_iterator(TRAINING, trainer)
    inner.add_tokens(["the ferry", "\n\n", "y c", "x v"])  # no piece has "x▁": only the last one says not to cut there
    inner.save(str(root / "tokenizer.json"))


def split_at_blanks(root: Path) -> None:
    across_words(root)
    inner = Inner.from_file(str(root / "tokenizer.json"))
    inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    inner.save(str(root / "tokenizer.json"))


def byte_level(root: Path, digits: bool = False) -> None:
    inner = Inner(models.BPE())
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digit = pre_tokenizers.Digits(individual_digits=True)
    inner.pre_tokenizer = pre_tokenizers.Sequence([digit, gpt2]) if digits else gpt2
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    blanks = ["one   two\n\n\n  three     four \n\n five"] * 50  # so that runs of blanks become tokens
    inner.train_from_iterator(TRAINING + blanks, trainer)
    inner.add_tokens(["<end>", "y c"])
    inner.save(str(root / "tokenizer.json"))


def byte_level_digits(root: Path) -> None:
    byte_level(root, digits=True)


def unigram(root: Path) -> None:
    pieces = [("<unk>", 0.0), *((c, -5.0) for c in "▁abcdehlorwtyf"), ("▁the", -2.0), ("ferr", -2.5)]
    inner = Inner(models.Unigram(pieces, unk_id=0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.save(str(root / "tokenizer.json"))


def greedy_added(root: Path) -> None:
    """An added token that takes the blanks around it."""
    across_words(root)
    inner = Inner.from_file(str(root / "tokenizer.json"))
    inner.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    inner.save(str(root / "tokenizer.json"))


CUT = [write_tokenizer, across_words, split_at_blanks, byte_level, byte_level_digits]
WHOLE = [unigram, greedy_added]


@pytest.fixture(scope="module", params=CUT + WHOLE, ids=lambda m: m.__name__)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, bool]:
    """A tokenizer, and whether texts are cut for it."""
    root = tmp_path_factory.mktemp("tokenizer")
    maker: Callable[[Path], object] = request.param
    maker(root)
    return Tokenizer.open(root), maker in CUT


def in_parts(tokenizer: Tokenizer, text: str, size: int) -> list[int]:
    return [token for ids, _ in tokenizer.encode_parts(text, size=size) for token in ids]


TEXTS = st.lists(
    st.one_of(
        st.sampled_from(["the ferry", " the", "  ", "   ", "\n", "\n\n", "y c", "x v", "<end>", "<mask>", "'s", "42", "é", "🙂", "\0", "▁"]),
        st.sampled_from(STORY.split()),
        st.integers(0, len(STORY) - 30).map(lambda at: STORY[at : at + 30]),
        st.text(max_size=6),
    ),
    max_size=30,
).map("".join)  # fmt: skip


@given(text=TEXTS, size=st.integers(2, 40))
def test_parts_join_to_the_whole(made: tuple[Tokenizer, bool], text: str, size: int) -> None:
    tokenizer, _ = made
    assert in_parts(tokenizer, text, size) == tokenizer.encode(text)
    assert "".join(parts(tokenizer._inner, text, size)) == text


def test_a_story_is_cut_often_or_not_at_all(made: tuple[Tokenizer, bool]) -> None:
    """Where nothing were ever cut, the test above would say nothing."""
    tokenizer, cut = made
    found = list(parts(tokenizer._inner, STORY, 200))
    assert len(found) > len(STORY) // 400 if cut else found == [STORY]
    assert in_parts(tokenizer, STORY, 200) == tokenizer.encode(STORY)


def test_a_cut_where_a_token_reaches_across_would_be_seen(tmp_path: Path) -> None:
    """The same comparison fails for cuts every 200 characters, wherever they fall."""
    across_words(tmp_path)
    tokenizer = Tokenizer.open(tmp_path)
    edges = [*range(0, len(STORY), 200), len(STORY)]
    joined = [token for a, b in pairwise(edges) for token in tokenizer.encode(STORY[a:b], bos=False)]
    assert joined != tokenizer.encode(STORY, bos=False)


def test_a_text_without_any_cut_is_one_part(tmp_path: Path) -> None:
    across_words(tmp_path)
    tokenizer = Tokenizer.open(tmp_path)
    inner = tokenizer._inner
    pair = next(piece for piece in inner.get_vocab() if len(piece) == 2 and piece[0] == piece[1] and piece.isalpha())
    text = pair[0] * 1001
    assert list(parts(inner, text, 10)) == [text]
    assert in_parts(tokenizer, text, 10) == tokenizer.encode(text)


def test_the_beginning_token_comes_once(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.open(tmp_path)
    first, second, *_ = (ids for ids, _ in tokenizer.encode_parts("hello world " * 9, size=12))
    assert first[0] == tokenizer.bos_id
    assert tokenizer.bos_id not in second
    assert sum(count for _, count in tokenizer.encode_parts(STORY, size=50)) == len(STORY)
