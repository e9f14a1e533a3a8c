"""A tokenizer's digest: the same for what gives the same ids, another for what may not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from bundle_folder import write_json, write_tokenizer

from runtime.tokenizer import Tokenizer, TokenizerError
from runtime.tokenizer_digest import tokenizer_digest

Content = dict[str, Any]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def changed(root: Path, change: Callable[[Content], object]) -> bytes:
    content = json.loads((root / "tokenizer.json").read_text())
    change(content)
    write_json(root / "tokenizer.json", content)
    return tokenizer_digest(root)


def reverse_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: reverse_keys(v) for k, v in reversed(value.items())}
    return [reverse_keys(v) for v in value] if isinstance(value, list) else value


SAME: dict[str, Callable[[Content], object]] = {
    "nothing": lambda c: None,
    "key order": lambda c: c.update(reverse_keys({k: c.pop(k) for k in list(c)})),
    "merges as strings": lambda c: c["model"].update(merges=[" ".join(m) for m in c["model"]["merges"]]),
    "null or absent": lambda c: c["model"].pop("dropout"),
    "decoder": lambda c: c.update(decoder={"type": "ByteLevel"}),
    "post-processor": lambda c: c.update(post_processor={"type": "ByteLevel", "add_prefix_space": True}),
    "truncation": lambda c: c.update(truncation={"max_length": 5}),
    "padding": lambda c: c.update(padding={"pad_id": 0}),
    "version": lambda c: c.update(version="2.0"),
}
OTHER: dict[str, Callable[[Content], object]] = {
    "a piece more": lambda c: c["model"]["vocab"].update(zebra=500),
    "two ids swapped": lambda c: c["model"]["vocab"].update(a=c["model"]["vocab"]["b"], b=c["model"]["vocab"]["a"]),
    "merge order": lambda c: c["model"]["merges"].reverse(),
    "a merge less": lambda c: c["model"]["merges"].pop(),
    "byte fallback": lambda c: c["model"].update(byte_fallback=False),
    "ignore merges": lambda c: c["model"].update(ignore_merges=True),
    "normaliser": lambda c: c.update(normalizer={"type": "NFC"}),
    "no normaliser": lambda c: c.pop("normalizer"),
    "pre-tokenizer": lambda c: c.update(pre_tokenizer={"type": "Whitespace"}),
    "an added token": lambda c: c["added_tokens"].append({"id": 501, "content": "<new>"}),
    "an added token's flag": lambda c: c["added_tokens"][0].update(lstrip=True),
    "an added token's id": lambda c: c["added_tokens"][0].update(id=77),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_what_changes_no_id_keeps_the_digest(root: Path, change: Callable[[Content], object]) -> None:
    before, ids = tokenizer_digest(root), Tokenizer.open(root).encode("hello world é")
    assert changed(root, change) == before
    if "truncation" not in str(change) and ids:
        assert len(before) == 32


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER)
def test_what_may_change_an_id_changes_the_digest(root: Path, change: Callable[[Content], object]) -> None:
    before = tokenizer_digest(root)
    assert changed(root, change) != before


def test_the_formatting_of_the_file_does_not_count(root: Path) -> None:
    before = tokenizer_digest(root)
    content = json.loads((root / "tokenizer.json").read_text())
    for text in (json.dumps(content), json.dumps(content, indent=7, ensure_ascii=False), json.dumps(content) + "\n\n"):
        (root / "tokenizer.json").write_text(text, encoding="utf-8")
        assert tokenizer_digest(root) == before


def test_the_beginning_token_counts_and_its_spelling_does_not(root: Path) -> None:
    before = tokenizer_digest(root)
    write_json(root / "tokenizer_config.json", {"bos_token": {"content": "<bos>", "lstrip": False}, "other": 1})
    assert tokenizer_digest(root) == before
    write_json(root / "tokenizer_config.json", {"bos_token": "<eos>"})
    assert tokenizer_digest(root) != before
    (root / "tokenizer_config.json").unlink()
    without = tokenizer_digest(root)
    assert without != before
    write_json(root / "tokenizer_config.json", {"bos_token": None})
    assert tokenizer_digest(root) == without


def test_no_length_limit_as_published_files_write_it_is_no_error(root: Path) -> None:
    """1e30 as an integer, beyond the 64 bits that other files are held to."""
    before = tokenizer_digest(root)
    write_json(
        root / "tokenizer_config.json", {"bos_token": "<bos>", "model_max_length": 1000000000000000019884624838656}
    )
    assert tokenizer_digest(root) == before
    write_json(root / "tokenizer_config.json", {"bos_token": "<bos>", "model_max_length": 10**41})
    with pytest.raises(TokenizerError, match="a number"):
        tokenizer_digest(root)


def test_the_opened_tokenizer_has_the_same_digest(root: Path) -> None:
    assert Tokenizer.open(root).digest == tokenizer_digest(root)


def test_the_digest_does_not_depend_on_the_process(root: Path) -> None:
    import subprocess

    code = (
        "import sys, pathlib; from runtime.tokenizer_digest import tokenizer_digest\n"
        "print(tokenizer_digest(pathlib.Path(sys.argv[1])).hex(), 'tokenizers' in sys.modules)"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code, root], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        assert done.stdout.split() == [tokenizer_digest(root).hex(), "False"]


def test_a_file_without_a_model_has_no_digest(root: Path) -> None:
    with pytest.raises(TokenizerError, match="model"):
        changed(root, lambda c: c.pop("model"))


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"", "tokenizer.json: line 1"),
        (b"[]", "tokenizer.json: the file"),
        (b'{"model": {"vocab": {"a": 0, "a": 1}}}', "tokenizer.json: a"),
        (b'{"model": {"vocab": {"a": NaN}}}', "tokenizer.json: a number"),
        (b'{"model": {"vocab": {"\\udc00": 1}}}', "tokenizer.json: \\udc00"),
        (b"\xff", "tokenizer.json: byte 0"),
    ],
)
def test_a_file_with_two_readings_has_no_digest(root: Path, data: bytes, field: str) -> None:
    (root / "tokenizer.json").write_bytes(data)
    with pytest.raises(TokenizerError) as caught:
        tokenizer_digest(root)
    assert caught.value.field.startswith(field)
    assert caught.value.expected and caught.value.found


def test_a_whole_surrogate_pair_in_an_escape_is_a_character(root: Path) -> None:
    before = changed(root, lambda c: c["model"]["vocab"].update({"\U0001f642": 400}))
    text = (root / "tokenizer.json").read_text()
    assert "\\ud83d\\ude42" in text
    (root / "tokenizer.json").write_text(text.replace("\\ud83d\\ude42", "\U0001f642"), encoding="utf-8")
    assert tokenizer_digest(root) == before


def test_the_digest_is_the_documented_one(root: Path) -> None:
    """Computed here from `docs/bundle.md`, not with the code under test."""
    content = json.loads((root / "tokenizer.json").read_text())
    parts = {k: content[k] for k in ("added_tokens", "model", "normalizer")}  # pre_tokenizer is null here
    parts["model"] = {k: v for k, v in parts["model"].items() if v is not None}
    parts["pre_tokenizer"] = content["pre_tokenizer"]
    text = json.dumps([parts, "<bos>"], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    hasher = blake3(derive_key_context="kvferry 2026-11-30 tokenizer 1")
    hasher.update(text.encode("ascii"))
    assert tokenizer_digest(root) == hasher.digest()
