"""Text to token ids and back, with the `tokenizers` library, in the published app's way."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from .cuts import PART, parts
from .tokenizer_digest import (
    CONFIG,
    TOKENIZER,
    TokenizerError,
    bos_text,
    tokenizer_digest,
    tokenizer_error,
)

if TYPE_CHECKING:
    import tokenizers

__all__ = ["TextStream", "Tokenizer", "TokenizerError"]

REPLACEMENT = "\ufffd"


class Tokenizer:
    """The tokenizer of a bundle. Immutable; may be shared between threads."""

    def __init__(self, root: Path, inner: tokenizers.Tokenizer, bos_id: int | None) -> None:
        """Use `Tokenizer.open`."""
        self._root = root
        self._inner = inner
        self.bos_id = bos_id

    @classmethod
    def open(cls, bundle_root: Path) -> Tokenizer:
        """From `tokenizer.json` and, if it is there, `tokenizer_config.json`. Raises `TokenizerError`."""
        from tokenizers import Tokenizer as Inner

        path = bundle_root / TOKENIZER
        if not path.is_file():
            raise tokenizer_error(TOKENIZER, "a file", "none", "Copy the tokenizer into the bundle")
        try:
            inner = Inner.from_buffer(path.read_bytes())
        except Exception as error:  # the library raises this very class, for anything it cannot read
            raise tokenizer_error(
                TOKENIZER, "a tokenizer that the tokenizers library can load", f"{error}"[:200], "Correct the file"
            ) from error
        if dropout := getattr(inner.model, "dropout", None):
            raise tokenizer_error(
                f"{TOKENIZER}: model.dropout",
                "null or 0 (token ids have to be the same each time)",
                f"{dropout:g}",
                "Save the tokenizer without dropout",
            )
        # Both are settings for batches of a fixed length; neither may touch our ids.
        inner.no_truncation()
        inner.no_padding()
        name = bos_text(bundle_root)
        bos_id = None if name is None else inner.token_to_id(name)
        if name is not None and bos_id is None:
            raise tokenizer_error(
                f"{CONFIG}: bos_token", f"a token of {TOKENIZER}", f"{name[:60]!r}, which has no id", "Correct the file"
            )
        return cls(bundle_root, inner, bos_id)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that name what decides the ids: `tokenizer_digest.tokenizer_digest`."""
        return tokenizer_digest(self._root)

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """The token ids of ``text``; special tokens written out in it become their ids.

        ``bos``: begin with the beginning-of-sequence token, if this tokenizer has one and the text does not begin with
        it already. Empty text gives that token alone, or nothing. Raises `TokenizerError` for text that is not valid
        Unicode.
        """
        self._check(text)
        return self._with_bos(self._inner.encode(text, add_special_tokens=False).ids, bos)

    def encode_parts(self, text: str, *, size: int = PART) -> Iterator[tuple[list[int], int]]:
        """The ids of `encode` in parts, each with how many characters of the text it stands for; whoever has enough stops asking.

        Joined they are `encode`'s, exactly: `cuts` says why. ``size``: characters of a part.
        """
        self._check(text)
        for number, part in enumerate(parts(self._inner, text, size)):
            ids = self._inner.encode(part, add_special_tokens=False).ids
            yield self._with_bos(ids, number == 0), len(part)

    def _with_bos(self, ids: list[int], bos: bool) -> list[int]:
        if bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def _check(self, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise tokenizer_error(
                "text",
                "valid Unicode",
                f"half a surrogate pair, U+{ord(text[error.start]):04X}, at character {error.start}",
                "Decode the text with errors='replace', or send whole characters",
            ) from error

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens`` without special tokens. Bytes that make no character come out as U+FFFD.

        Raises `TokenizerError` for an id that no token has.
        """
        return self._inner.decode([self._checked(t) for t in tokens], skip_special_tokens=True)

    def written(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens`` with special tokens spelled out, as `encode` reads them. Otherwise as `decode`."""
        return self._inner.decode([self._checked(t) for t in tokens], skip_special_tokens=False)

    def stream(self) -> TextStream:
        """A decoder for tokens that come one at a time."""
        return TextStream(self)

    def _checked(self, token: int) -> int:
        value = operator.index(token)
        if 0 <= value < 1 << 32 and self._inner.id_to_token(value) is not None:
            return value
        raise tokenizer_error(
            "token",
            f"an id of this tokenizer ({self.vocab_size} tokens)",
            f"{value}",
            "Decode ids with the tokenizer that made them",
        )


class TextStream:
    """Decodes tokens as they come and gives out whole characters only.

    A character may take several tokens; until its last one nothing of it is given. The pieces, with `finish`'s, joined
    are what `Tokenizer.decode` gives for all the tokens. Only where bytes make no character may the two differ in what
    U+FFFD stands for, because what is given out is never taken back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        # Tokens [0, _given) are already text, and come again because a piece may depend on its left neighbours (a
        # leading blank, a run of bytes); the rest is not given out yet.
        self._given = 0

    def feed(self, token: int) -> str:
        """The characters that ``token`` completes; often one word, sometimes nothing. Raises `TokenizerError`."""
        piece = self._piece([*self._tokens, token])
        self._tokens.append(token)
        if piece.endswith(REPLACEMENT):
            return ""
        return self._give(piece)

    def finish(self) -> str:
        """What is left, an unfinished character as U+FFFD. The stream can then be used anew."""
        piece = self._piece(self._tokens)
        self._tokens, self._given = [], 0
        return piece

    def _piece(self, tokens: list[int]) -> str:
        before = self._tokenizer.decode(tokens[: self._given])
        after = self._tokenizer.decode(tokens)
        if after.startswith(before):
            return after[len(before) :]
        # The new bytes made the decoder read the whole run anew; what they mean by themselves is what comes next.
        return self._tokenizer.decode(tokens[self._given :])

    def _give(self, piece: str) -> str:
        if piece:
            del self._tokens[: self._given]
            self._given = len(self._tokens)
        return piece
