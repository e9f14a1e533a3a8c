"""A SentencePiece BPE vocabulary, and the ``tokenizer.json`` that gives the same ids.

SentencePiece merges the neighbouring pair whose joined piece scores highest; ``tokenizer.json`` wants an explicit list of merges in order
of preference. User-defined pieces are cut out of the text before any merging, which is what a non-special added token does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

SPACE = "▁"


class PieceType(IntEnum):
    """Types as both SentencePiece and GGUF number them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Pieces by token id, with score and type. Spaces are written as U+2581 in every piece. No space is put before the text."""

    pieces: tuple[str, ...]
    scores: tuple[float, ...]
    types: tuple[PieceType, ...]
    bos: int
    eos: int
    pad: int
    unknown: int

    def __len__(self) -> int:
        return len(self.pieces)

    def tokenizer_json(self) -> str:
        """The content of ``tokenizer.json``: BPE with byte fallback, control pieces as special tokens, the same text every time."""
        bos = self.pieces[self.bos]
        document: dict[str, Any] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                added_token(token, piece, special=kind is not PieceType.USER_DEFINED)
                for token, (piece, kind) in enumerate(zip(self.pieces, self.types, strict=True))
                if kind in (PieceType.CONTROL, PieceType.UNKNOWN, PieceType.USER_DEFINED)
            ],
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            "pre_tokenizer": None,
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [
                    {"SpecialToken": {"id": bos, "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                    {"SpecialToken": {"id": bos, "type_id": 1}},
                    {"Sequence": {"id": "B", "type_id": 1}},
                ],
                "special_tokens": {bos: {"id": bos, "ids": [self.bos], "tokens": [bos]}},
            },
            "decoder": {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                ],
            },
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": self.pieces[self.unknown],
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": True,
                "byte_fallback": True,
                "ignore_merges": False,
                "vocab": {piece: token for token, piece in enumerate(self.pieces)},
                "merges": [list(pair) for pair in merges(self)],
            },
        }
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n"

    def tokenizer_config_json(self) -> str:
        """The content of ``tokenizer_config.json``."""
        config = {
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": self.pieces[self.bos],
            "clean_up_tokenization_spaces": False,
            "eos_token": self.pieces[self.eos],
            "legacy": None,
            "pad_token": self.pieces[self.pad],
            "tokenizer_class": "GemmaTokenizer",
            "unk_token": self.pieces[self.unknown],
        }
        return json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to join two normal pieces into a normal piece, best score first (then by id, then shorter left part)."""
    normal = {
        piece: token
        for token, (piece, kind) in enumerate(zip(vocabulary.pieces, vocabulary.types, strict=True))
        if kind is PieceType.NORMAL
    }
    found: list[tuple[str, str]] = []
    for piece in sorted(normal, key=lambda p: (-vocabulary.scores[normal[p]], normal[p])):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in normal and right in normal:
                found.append((left, right))
    return found


def added_token(token: int, content: str, *, special: bool) -> dict[str, Any]:
    """An entry of ``added_tokens``."""
    # A user-defined piece is looked for in the text after spaces became U+2581, a control token before.
    return {
        "id": token,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": not special,
        "special": special,
    }
