"""The texts that the gate runs on: three of our own, or those of a file, as tokens that fit a bundle's context."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from kvstore.errors import InputInvalid
from kvstore.layout import BLOCK
from runtime.bundle import Bundle, BundleConfig
from runtime.reports import MARGIN

LIST = """\
Timetable of the island ferry. One line a crossing: day, from, to, departs, arrives.

crossings = [
    ("Monday", "Holm", "Skerry Point", "06:00", "07:10"),
    ("Monday", "Skerry Point", "Holm", "07:40", "08:50"),
    ("Tuesday", "Holm", "Skerry Point", "06:00", "07:10"),
    ("Tuesday", "Skerry Point", "Holm", "07:40", "08:50"),
    ("Wednesday", "Holm", "Skerry Point", "06:00", "07:10"),
    ("Wednesday", "Skerry Point", "Holm", "07:40", "08:50"),
    ("Thursday", "Holm", "Skerry Point", "06:00", "07:10"),
    ("Thursday", "Skerry Point", "Holm", "07:40", "08:50"),
"""
"""Repeats itself, so that prompt lookup has drafts and a model is likely to go on as they say."""

SHORTEST = "The"
"""Cut to its first token: the beginning-of-sequence token where the tokenizer puts one in front."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """``tokens``: 1 or more, what the gate feeds. ``given``: how many the text has; more where it was cut to fit."""

    name: str
    tokens: tuple[int, ...]
    given: int


def room(config: BundleConfig, continued: int) -> int:
    """The longest prompt that leaves ``continued`` tokens to generate; 1 at least."""
    return max(1, config.ctx - MARGIN - continued)


def edge(config: BundleConfig) -> int:
    """The length that a long prompt has to pass: the window, or where nothing slides the widest step."""
    return config.sliding_window or max(config.prefill_widths, default=BLOCK)


def own_prompts(bundle: Bundle, continued: int) -> tuple[Prompt, ...]:
    """A story two blocks and a bit longer than the window, a list that repeats itself, and one token."""
    story = resources.files("kvstore").joinpath("data", "ferry.txt").read_text("utf-8")
    long = edge(bundle.config) + 2 * BLOCK + 10
    texts = (("story", story, long), ("list", LIST, None), ("word", SHORTEST, 1))
    return tuple(_prompt(bundle, name, text, continued, cut=cut) for name, text, cut in texts)


def read_prompts(bundle: Bundle, file: Path, continued: int) -> tuple[Prompt, ...]:
    """One prompt a line, empty lines left out; of a file called ``….jsonl`` each line is a JSON object whose ``text`` it is.

    A prompt longer than fits is cut. Raises `InputInvalid`, naming the line.
    """
    try:
        lines = file.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputInvalid(f"{file}: expected UTF-8 text, found {error.reason} at byte {error.start}") from error
    found = [(at, line) for at, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise InputInvalid(f"{file}: expected one prompt a line, found none. Leave --prompts out for kvferry's own.")
    texts = [(at, _text(file, at, line) if file.suffix == ".jsonl" else line) for at, line in found]
    return tuple(_prompt(bundle, f"line {at}", text, continued) for at, text in texts)


def _text(file: Path, at: int, line: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputInvalid(f'{file}: line {at}: expected a JSON object like {{"text": "…"}}, found {error}') from error
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str) or not text:
        raise InputInvalid(f'{file}: line {at}: expected a JSON object with a "text", found {line:.80}')
    return text


def _prompt(bundle: Bundle, name: str, text: str, continued: int, cut: int | None = None) -> Prompt:
    tokens: Sequence[int] = bundle.tokenizer.encode(text)
    if not tokens:
        raise InputInvalid(f"prompt {name}: expected a text of at least one token, found {text!r:.80}")
    wanted = tokens[:cut]
    return Prompt(name, tuple(wanted[: room(bundle.config, continued)]), len(wanted))


def splits(config: BundleConfig, length: int, *, all_edges: bool) -> tuple[int, ...]:
    """Where a prompt of ``length`` tokens is interrupted, ascending, its end included: one token before, at and after the first block's end
    and the window's (or widest step's), and a block behind the window, where a trimmed snapshot begins to be less than a whole one."""
    far = edge(config)
    if all_edges:
        places = {*(place + d for place in (BLOCK, far) for d in (-1, 0, 1)), far + BLOCK, length}
    else:
        places = {BLOCK, far + BLOCK, length}
    return tuple(sorted(p for p in places if 1 <= p <= length))
