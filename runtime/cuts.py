"""Where a text may be cut so that the token ids of its parts, joined, are those of the whole.

A long text can then be tokenised part by part: only as far as it is needed, and with progress. Two kinds of byte-pair tokenizers
are understood; of any other nothing is cut:

- *Whole-text merging* (Gemma): the text is not split into words first. Every token is a piece of the vocabulary, so if no piece
  contains the two characters around a cut side by side, no merge ever reaches across it, and merges left and right of it do not
  touch. Both characters have to be pieces themselves: what stands for an unknown one may merge in ways that the text doesn't show.
- *Words of GPT-2* (byte level): every word that its pattern finds is blanks, or a blank at most and then no blanks. So a word ends
  between anything else and a blank, wherever one begins to look.

Added tokens are found in the text before either. None is cut in two, because none contains the two characters side by side.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

PART = 1 << 15
"""Characters of a part."""

_Allows = Callable[[str, str], bool]


def parts(inner: tokenizers.Tokenizer, text: str, size: int = PART) -> Iterator[str]:
    """The text in parts of ``size`` characters or a little less; of more where no cut is allowed."""
    allows = _rule(inner) if len(text) > size else None
    if allows is None:
        yield text
        return
    start, end = 0, size
    while end < len(text):
        at = next((i for i in range(end, max(start, end - size // 2), -1) if allows(text[i - 1], text[i])), None)
        if at is None:
            end += max(1, size // 2)
            continue
        yield text[start:at]
        start, end = at, at + size
    yield text[start:]


def _rule(inner: tokenizers.Tokenizer) -> _Allows | None:
    """Whether a text may be cut between two characters; None where it is not known of any."""
    from tokenizers import models

    if not isinstance(inner.model, models.BPE):
        return None
    added = inner.get_added_tokens_decoder().values()
    if any(token.single_word or token.lstrip or token.rstrip for token in added):
        return None  # what surrounds such a token decides about it
    splitter = _state(inner.pre_tokenizer)
    if inner.normalizer is None and _is_gpt2(splitter):
        contents = "\0".join(token.content for token in added)
        return lambda left, right: (
            right in " \n" and not left.isspace() and "\0" not in left and left + right not in contents
        )
    replaced = _replaced(_state(inner.normalizer))
    model = inner.model
    plain = not (model.continuing_subword_prefix or model.end_of_word_suffix or model.ignore_merges or model.dropout)
    return _apart(inner, replaced) if plain and replaced is not None and _splits_at_one(splitter) else None


def _apart(inner: tokenizers.Tokenizer, replaced: tuple[str, str]) -> _Allows:
    """No piece and no added token has the two characters side by side, all of them as normalising leaves them."""
    pieces = "\0".join(inner.get_vocab(with_added_tokens=True)).replace(*replaced)
    known: dict[str, bool] = {}

    def allows(left: str, right: str) -> bool:
        pair = left + right
        if pair not in known:
            normal = [c.replace(*replaced) for c in pair]
            known[pair] = (
                "\0" not in pair
                and all(inner.token_to_id(c) is not None for c in normal)
                and "".join(normal) not in pieces
            )
        return known[pair]

    return allows


def _state(part: Any) -> dict[str, Any] | None:
    """A normaliser or pre-tokenizer as `tokenizer.json` writes it."""
    if part is None:
        return None
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state


def _replaced(normalizer: dict[str, Any] | None) -> tuple[str, str] | None:
    """The one character that becomes another one; None for every other normaliser. Without one, NUL stays NUL."""
    match normalizer:
        case None:
            return "\0", "\0"
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(old) == len(new) == 1:
            return old, new
    return None


def _splits_at_one(splitter: dict[str, Any] | None) -> bool:
    """Whether nothing splits the text, or the place of one character alone does."""
    match splitter:
        case None:
            return True
        case {"type": "Split", "pattern": {"String": str(at)}}:
            return len(at) == 1
    return False


def _is_gpt2(splitter: dict[str, Any] | None) -> bool:
    match splitter:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return True
        case {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, last]}:
            return _is_gpt2(last) and last["type"] == "ByteLevel"
    return False
