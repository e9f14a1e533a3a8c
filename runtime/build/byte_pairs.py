"""A byte-level BPE vocabulary, as GPT-2 made it common, and the ``tokenizer.json`` that gives the same ids.

Text is cut into words by GPT-2's pattern, in some families into single digits before that; a word's UTF-8 bytes, each spelled as a printable
letter, are merged pair by pair in the order of the list of merges. A byte that has no piece of its own, as some rare ones in SmolLM2, is left
out of the ids: so llama.cpp and the published tokenizer have it too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from runtime.build.vocabulary import PieceType, added_token


def byte_letters() -> tuple[str, ...]:
    """The letter that stands for each of the 256 bytes: itself where it is printable Latin-1, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


@dataclass(frozen=True, slots=True)
class BytePairs:
    """Pieces by token id, in byte letters but for control and user-defined ones, and the merges, best first.

    ``bos`` None: nothing is put before a text. ``single_digits``: a digit never shares a word with another.
    """

    pieces: tuple[str, ...]
    types: tuple[PieceType, ...]
    merges: tuple[tuple[str, str], ...]
    single_digits: bool
    bos: int | None
    eos: int
    pad: int
    unknown: int

    def __len__(self) -> int:
        return len(self.pieces)

    def tokenizer_json(self) -> str:
        """The content of ``tokenizer.json``."""
        words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        digits = {"type": "Digits", "individual_digits": True}
        document: dict[str, Any] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                added_token(token, piece, special=kind is not PieceType.USER_DEFINED)
                for token, (piece, kind) in enumerate(zip(self.pieces, self.types, strict=True))
                if kind is not PieceType.NORMAL
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, words]} if self.single_digits else words,
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {piece: token for token, piece in enumerate(self.pieces)},
                "merges": [list(pair) for pair in self.merges],
            },
        }
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n"

    def tokenizer_config_json(self) -> str:
        """The content of ``tokenizer_config.json``; it names a beginning-of-sequence token only where one is put in front."""
        config = {
            "add_bos_token": self.bos is not None,
            "add_prefix_space": False,
            "bos_token": None if self.bos is None else self.pieces[self.bos],
            "clean_up_tokenization_spaces": False,
            "eos_token": self.pieces[self.eos],
            "pad_token": self.pieces[self.pad],
            "tokenizer_class": "GPT2Tokenizer",
            "unk_token": self.pieces[self.unknown],
        }
        return json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
