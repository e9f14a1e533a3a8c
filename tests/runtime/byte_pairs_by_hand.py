"""Byte-level BPE from its definition, with the standard library: how a text is cut into words, and which neighbours merge first."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

BLANKS = set("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {chr(c) for c in range(0x2000, 0x200B)}
ENDINGS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")


def kind(character: str) -> str:
    """L, N, blank or other."""
    if character in BLANKS:
        return "blank"
    major = unicodedata.category(character)[0]
    return major if major in "LN" else "other"


def pieces_between_digits(text: str) -> Iterator[str]:
    """Each numeric character alone, and what stands between them."""
    start = 0
    for i, character in enumerate(text):
        if kind(character) == "N":
            yield from filter(None, (text[start:i], character))
            start = i + 1
    yield from filter(None, (text[start:],))


def words(text: str) -> Iterator[str]:
    """GPT-2's words: English endings; a run of letters, numbers or other marks, with one space before it if there is one; blanks."""
    i = 0
    while i < len(text):
        ending = next((e for e in ENDINGS if text.startswith(e, i)), None)
        if ending is not None:
            stop = i + len(ending)
        else:
            first = i + (text[i] == " " and i + 1 < len(text) and text[i + 1] not in BLANKS)
            stop = first + 1
            while stop < len(text) and kind(text[stop]) == kind(text[first]):
                stop += 1
            # Of several blanks before something, the last one is left to it.
            if kind(text[first]) == "blank" and stop < len(text) and stop - first > 1:
                stop -= 1
        yield text[i:stop]
        i = stop


def letter(byte: int) -> str:
    """The printable stand-in of a byte."""
    if chr(byte).isprintable() and chr(byte) != " ":
        return chr(byte)
    others = [b for b in range(256) if not chr(b).isprintable() or chr(b) == " "]
    return chr(256 + others.index(byte))


def merged(symbols: Sequence[str], ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """The best-ranked pair of neighbours is joined wherever it stands, until no neighbours are a pair."""
    found = list(symbols)
    while pairs := [pair for pair in pairwise(found) if pair in ranks]:
        best = min(pairs, key=ranks.__getitem__)
        joined: list[str] = []
        for symbol in found:
            # a symbol that was just joined can't be one half of the same pair again
            if joined and (joined[-1], symbol) == best:
                joined[-1] += symbol
            else:
                joined.append(symbol)
        found = joined
    return found


class ByHand:
    """Ids of a text, without special tokens. A symbol without an id is left out."""

    def __init__(self, pieces: Sequence[str], merges: Sequence[tuple[str, str]], *, single_digits: bool) -> None:
        self._ids = {piece: token for token, piece in enumerate(pieces)}
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._single_digits = single_digits

    def encode(self, text: str) -> list[int]:
        parts = pieces_between_digits(text) if self._single_digits else [text]
        symbols = (
            symbol
            for part in parts
            for word in words(part)
            for symbol in merged([letter(b) for b in word.encode() if letter(b) in self._ids], self._ranks)
        )
        return [self._ids[symbol] for symbol in symbols]
