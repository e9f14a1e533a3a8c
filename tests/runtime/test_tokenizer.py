"""Text to ids and back on the three kinds of tokenizer there are: byte fallback, byte level, blanks as a mark."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from bundle_folder import write_json, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Inner

from runtime.tokenizer import Tokenizer, TokenizerError

TRAINING = ["hello world, hello word", "the old red door", "日本語の文字", "naïve café", "🙂🙃🙂"] * 4


def byte_fallback(root: Path) -> None:
    write_tokenizer(root)


def byte_level(root: Path) -> None:
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<bos>", "<end>"])
    inner.train_from_iterator(TRAINING, trainer)
    inner.save(str(root / "tokenizer.json"))
    write_json(root / "tokenizer_config.json", {"bos_token": {"content": "<bos>", "special": True}})


def metaspace(root: Path) -> None:
    pieces = [("<unk>", 0.0), ("<bos>", 0.0), *((c, -5.0) for c in "▁abcdehlorwt日本")]
    pieces += [("▁hello", -2.0), ("▁wor", -2.5), ("ld", -2.0), ("▁the", -2.0)]
    inner = Inner(models.Unigram(pieces, unk_id=0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<unk>", special=True)])
    inner.save(str(root / "tokenizer.json"))


MAKERS: list[Callable[[Path], None]] = [byte_fallback, byte_level, metaspace]


@pytest.fixture(scope="module", params=MAKERS, ids=lambda m: m.__name__)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    root = tmp_path_factory.mktemp("tokenizer")
    request.param(root)
    return Tokenizer.open(root)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    root = tmp_path_factory.mktemp("fallback")
    write_tokenizer(root)
    return Tokenizer.open(root)


def pieces_of(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.feed(t) for t in tokens), stream.finish()]


TEXTS = [
    "",
    " ",
    "hello world",
    "  two  blanks ",
    "日本語",
    "🙂🙃",
    "e\u0301",
    "a\0b",
    "x" * 3000,
    "<end>",
    "\n\t",
    "é🙂é",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(fallback: Tokenizer, text: str) -> None:
    ids = fallback.encode(text, bos=False)
    assert fallback.decode(ids) == ("" if text == "<end>" else text)
    assert "".join(pieces_of(fallback, ids)) == fallback.decode(ids)


def test_ids_are_those_of_the_vocabulary(fallback: Tokenizer) -> None:
    pieces = json.loads((fallback._root / "tokenizer.json").read_text())["model"]["vocab"]
    expected = [pieces[p] for p in ("hello", "▁w", "or", "l", "d")]
    assert fallback.encode("hello world", bos=False) == expected
    assert fallback.encode("é", bos=False) == [pieces["<0xC3>"], pieces["<0xA9>"]]
    assert fallback.vocab_size == len(pieces)


def test_the_beginning_token_is_added_once(fallback: Tokenizer) -> None:
    assert fallback.bos_id == 2
    assert fallback.encode("") == [2]
    assert fallback.encode("hello")[:1] == [2]
    assert fallback.encode("hello")[1:] == fallback.encode("hello", bos=False)
    assert fallback.encode("<bos>hello") == fallback.encode("hello")
    assert fallback.encode("<bos><bos>hello") == [2, *fallback.encode("hello")]
    assert fallback.encode("", bos=False) == []


def test_special_tokens_written_out_become_their_ids(fallback: Tokenizer) -> None:
    ids = fallback.encode("hello<end>hello", bos=False)
    hello = fallback.encode("hello", bos=False)
    assert ids == [*hello, 3, *hello]
    assert fallback.decode(ids) == "hellohello"


def test_a_beginning_token_given_as_an_object_counts(tmp_path: Path) -> None:
    byte_level(tmp_path)
    opened = Tokenizer.open(tmp_path)
    assert opened.bos_id == 0
    assert opened.encode("hello")[0] == 0


@pytest.mark.parametrize("config", [None, {}, {"bos_token": None}])
def test_without_a_beginning_token_none_is_added(tmp_path: Path, config: dict[str, object] | None) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    if config is not None:
        write_json(tmp_path / "tokenizer_config.json", config)
    opened = Tokenizer.open(tmp_path)
    assert opened.bos_id is None
    assert opened.encode("") == []
    assert opened.encode("hello") == opened.encode("hello", bos=False)


@pytest.mark.parametrize("text", ["\ud800", "hello \udfff world", "\ud83d", "\ude42\ud83d"])
def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(TokenizerError, match=r"half a surrogate pair, U\+D[89A-F]") as caught:
        tokenizer.encode(text)
    assert caught.value.field == "text"
    assert pickle.loads(pickle.dumps(caught.value)).found == caught.value.found


@pytest.mark.parametrize("token", [-1, 10**6, 2**32, 2**64])
def test_an_id_that_no_token_has_is_refused(tokenizer: Tokenizer, token: int) -> None:
    with pytest.raises(TokenizerError, match=f"found {token}") as caught:
        tokenizer.decode([0, token])
    assert caught.value.field == "token"
    stream = tokenizer.stream()
    with pytest.raises(TokenizerError):
        stream.feed(token)
    assert stream.finish() == ""


def test_truncation_and_padding_in_the_file_do_not_touch_the_ids(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    plain = Tokenizer.open(tmp_path).encode("hello world")
    inner = Inner.from_file(str(tmp_path / "tokenizer.json"))
    inner.enable_truncation(2)
    inner.enable_padding(length=64, pad_token="<pad>")
    inner.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.open(tmp_path).encode("hello world") == plain


def test_the_files_own_template_does_not_touch_the_ids(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    write_tokenizer(tmp_path)
    before = Tokenizer.open(tmp_path)
    inner = Inner.from_file(str(tmp_path / "tokenizer.json"))
    inner.post_processor = TemplateProcessing("<bos> $A <eos>", special_tokens=[("<bos>", 2), ("<eos>", 1)])
    inner.save(str(tmp_path / "tokenizer.json"))
    after = Tokenizer.open(tmp_path)
    assert after.encode("hello") == before.encode("hello")
    assert after.digest == before.digest


# Streams


@given(text=st.text(max_size=40))
def test_streamed_pieces_join_to_the_decoded_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in p for p in pieces)


@given(data=st.data())
def test_any_tokens_stream_to_whole_characters(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Also tokens that no text has: then the joined pieces may differ from the decoded text in U+FFFD only."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    joined, decoded = "".join(pieces_of(tokenizer, ids)), tokenizer.decode(ids)
    if "\ufffd" not in decoded:
        assert joined == decoded
    joined.encode()  # no half of a surrogate pair either


def test_a_character_of_four_tokens_comes_with_the_last(fallback: Tokenizer) -> None:
    ids = fallback.encode("a🙂b", bos=False)
    assert len(ids) == 6
    assert pieces_of(fallback, ids) == ["a", "", "", "", "🙂", "b", ""]


def test_an_unfinished_character_comes_at_the_end_only(fallback: Tokenizer) -> None:
    ids = fallback.encode("é🙂", bos=False)[:-1]
    pieces = pieces_of(fallback, ids)
    assert pieces[:5] == ["", "é", "", "", ""]
    assert set(pieces[5]) == {"\ufffd"}


def test_broken_bytes_do_not_take_back_what_was_given(fallback: Tokenizer) -> None:
    byte = {b: fallback.encode("<unk>", bos=False)[0] + 1 + b for b in range(256)}
    ids = [byte[0xC3], byte[0xA9], byte[0xFF], *fallback.encode("a", bos=False)]
    assert fallback.decode(ids) == "\ufffd\ufffd\ufffda"  # the library rejects the run of bytes whole
    assert pieces_of(fallback, ids) == ["", "é", "", "\ufffda", ""]


def test_blanks_between_words_are_not_lost(tmp_path: Path) -> None:
    metaspace(tmp_path)
    opened = Tokenizer.open(tmp_path)
    ids = opened.encode("hello the world", bos=False)
    assert pieces_of(opened, ids) == ["hello", " the", " wor", "ld", ""]


def test_special_tokens_in_a_stream_give_nothing(fallback: Tokenizer) -> None:
    ids = fallback.encode("<bos>hello<end> world<eos>", bos=False)
    assert "".join(pieces_of(fallback, ids)) == "hello world"
    assert pieces_of(fallback, ids)[0] == ""


def test_a_stream_can_be_used_again_after_its_end(fallback: Tokenizer) -> None:
    stream = fallback.stream()
    for token in fallback.encode("é", bos=False)[:1]:
        stream.feed(token)
    stream.finish()
    assert [stream.feed(t) for t in fallback.encode("é", bos=False)] == ["", "é"]


def test_a_long_stream_keeps_few_tokens(fallback: Tokenizer) -> None:
    stream = fallback.stream()
    for token in fallback.encode("hello world " * 200, bos=False):
        stream.feed(token)
        assert len(stream._tokens) < 8


# Files that cannot be used


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"", "tokenizer.json"),
        (b"[]", "tokenizer.json"),
        (b"{}", "tokenizer.json"),
        (b'{"model": {"type": "Unheard"}}', "tokenizer.json"),
        (b'{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}', "tokenizer.json"),
        (b'{"model": {"type": "BPE", "dropout": 0.1, "vocab": {}, "merges": []}}', "tokenizer.json: model.dropout"),
        (b"\xff", "tokenizer.json"),
    ],
)
def test_a_tokenizer_file_that_cannot_be_used_is_refused(tmp_path: Path, data: bytes, field: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.open(tmp_path)
    assert caught.value.field.startswith(field)
    assert caught.value.expected and caught.value.found


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: expected a file, found none"):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize("bos", [5, "", [], {}, {"content": 7}, "<nowhere>"])
def test_a_beginning_token_that_cannot_be_is_refused(tmp_path: Path, bos: object) -> None:
    write_tokenizer(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {"bos_token": bos})
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.open(tmp_path)
    assert caught.value.field == "tokenizer_config.json: bos_token"
