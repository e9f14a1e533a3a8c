"""Which texts the gate runs on, and where it interrupts them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from families import every_family

from kvstore.errors import InputInvalid
from kvstore.layout import BLOCK
from runtime.bundle import Bundle
from runtime.gate.prompts import own_prompts, read_prompts, splits


@every_family
def test_our_own_prompts(bundle: Bundle) -> None:
    story, listed, word = own_prompts(bundle, 20)
    assert [p.name for p in (story, listed, word)] == ["story", "list", "word"]
    assert len(story.tokens) == 512 + 2 * BLOCK + 10, "past the window, or the widest step"
    assert BLOCK < len(listed.tokens) < 600 and len(word.tokens) == 1
    pieces = [listed.tokens[i : i + 3] for i in range(len(listed.tokens) - 2)]
    assert len(set(pieces)) < 0.7 * len(pieces), "it repeats itself"
    assert all(p.given == len(p.tokens) for p in (story, listed, word))


def test_a_prompt_is_cut_to_what_leaves_room(bundle: Bundle, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("word " * 4000 + "\n\n  \nshort\n")
    long, short = read_prompts(bundle, file, 20)
    assert len(long.tokens) == bundle.config.ctx - 8 - 20 < long.given
    assert long.name == "line 1" and short.name == "line 4" and short.given == len(short.tokens)
    assert long.tokens == tuple(bundle.tokenizer.encode("word " * 4000)[: len(long.tokens)])


def test_lines_of_json_hold_prompts_of_several_lines(bundle: Bundle, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "two\\nlines", "more": 1}\n{"text": "one"}\n')
    first, second = read_prompts(bundle, file, 20)
    assert first.tokens == tuple(bundle.tokenizer.encode("two\nlines"))
    assert second.tokens == tuple(bundle.tokenizer.encode("one"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\n \n", "expected one prompt a line, found none"),
        ("a.txt", b"\xff", "expected UTF-8 text, found invalid start byte at byte 0"),
        ("a.jsonl", b'{"text": "a"}\nhello\n', "line 2: expected a JSON object like"),
        ("a.jsonl", b'{"prompt": "a"}\n', 'line 1: expected a JSON object with a "text"'),
        ("a.jsonl", b'["a"]\n', 'line 1: expected a JSON object with a "text"'),
        ("a.jsonl", b'{"text": ""}\n', 'line 1: expected a JSON object with a "text"'),
    ],
)
def test_files_that_hold_no_prompts(bundle: Bundle, tmp_path: Path, name: str, content: bytes, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(InputInvalid, match=message.replace("[", r"\[")):
        read_prompts(bundle, file, 20)


def test_places_are_edges_that_fit(bundle: Bundle) -> None:
    config = bundle.config
    assert splits(config, 650, all_edges=True) == (63, 64, 65, 511, 512, 513, 576, 650)
    assert splits(config, 100, all_edges=True) == (63, 64, 65, 100)
    assert splits(config, 1, all_edges=True) == splits(config, 1, all_edges=False) == (1,)
    assert splits(config, 650, all_edges=False) == (64, 576, 650)
    everywhere = replace(config, sliding_window=None, prefill_widths=(256, 8))
    assert splits(everywhere, 300, all_edges=True) == (63, 64, 65, 255, 256, 257, 300)
