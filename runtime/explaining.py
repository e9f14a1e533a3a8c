"""`find --explain`: the nearest snapshot told with the text where it parts from what was asked for, and why it serves no further."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.explain import Nearest
from kvstore.identity import difference_text
from kvstore.items import Item
from kvstore.plaintext import counted

from .tokenizer import Tokenizer

AROUND = 8
"""Tokens of text before and after the place where two texts part."""


def explanation(nearest: Nearest, asked: Sequence[Item], tokenizer: Tokenizer) -> dict[str, Any]:
    """Plain values, for --json. Texts of the snapshot's tokens are None where it has another tokenizer's ids."""
    snapshot, match = nearest.snapshot, nearest.match
    theirs = tokenizer if nearest.same_tokenizer else None
    at = match.common
    return {
        "snapshot": match.digest.hex,
        "names": list(nearest.names),
        "model": snapshot.model,
        "namespace": snapshot.namespace,
        "tokens": snapshot.tokens,
        "common_tokens": at,
        "usable_tokens": nearest.usable,
        "differences": [
            {"field": name, "asked": _plain(want), "found": _plain(found)} for name, want, found in nearest.differences
        ],
        "before": _text(asked[max(0, at - AROUND) : at], tokenizer),
        "asked": _side(asked, at, tokenizer),
        "stored": _side(snapshot.items, at, theirs),
        "why": _why(nearest, len(asked)),
    }


def _side(items: Sequence[Item], at: int, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """The item at ``at`` and what follows it; None where the items end before."""
    if at >= len(items):
        return None
    item = items[at]
    return {
        "token": item if isinstance(item, int) else item.placeholder,
        "soft": not isinstance(item, int),
        "text": _text(items[at : at + 1], tokenizer),
        "after": _text(items[at + 1 : at + 1 + AROUND], tokenizer),
    }


def _text(items: Sequence[Item], tokenizer: Tokenizer | None) -> str | None:
    """Positions of images and audio, which have no text, are left out."""
    return None if tokenizer is None else tokenizer.decode([item for item in items if isinstance(item, int)])


def _plain(value: object) -> object:
    """For JSON: digests as hex."""
    if isinstance(value, bytes):
        return value.hex()
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _why(nearest: Nearest, asked: int) -> str:
    """Why no more of it can be reused, as a sentence."""
    match = nearest.match
    if nearest.differences:
        told = "; ".join(f"{name}: {difference_text(want, found)}" for name, want, found in nearest.differences)
        only = len(nearest.differences) == 1 and nearest.differences[0][0] == "namespace"
        return f"{'it is in another namespace' if only else 'its KV is of another model'} ({told})."
    if match.n < min(match.common, asked - 1):
        return f"it has {counted(match.common, 'token')} in common, but {match.reason}; `kvferry pull REMOTE NAME` fetches them."
    return f"{match.reason}."


def explanation_text(value: dict[str, Any]) -> str:
    """The same for people, three or four lines."""
    name = ", ".join(value["names"]) or value["snapshot"][:12]
    lines = [
        f"nearest: {name} ({value['model'] or 'no model name'}, namespace {value['namespace']}, {value['tokens']:,} tokens): "
        f"{value['common_tokens']:,} tokens in common, {value['usable_tokens']:,} usable: {value['why']}"
    ]
    if value["before"] and (value["asked"] or value["stored"]):
        lines.append(f"  after   {value['before']!r}")
    for whose, side in (("asked", value["asked"]), ("stored", value["stored"])):
        if side is None:
            lines.append(f"  {whose:<6}  ends here")
        elif side["text"] is None:
            lines.append(f"  {whose:<6}  token {side['token']} of another tokenizer")
        else:
            text = "an image or audio" if side["soft"] else repr(side["text"])
            lines.append(f"  {whose:<6}  token {side['token']} {text}, then {side['after']!r}")
    return "\n".join(lines)
