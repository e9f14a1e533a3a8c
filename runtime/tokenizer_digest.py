"""Names a tokenizer by what decides its token ids, without loading it.

Two bundles whose `tokenizer.json` differ in spacing, key order or in how text is decoded give the same ids and share
KV; two whose vocabulary, merges, normaliser, splitting, added tokens or beginning-of-sequence token differ do not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvstore.errors import KVError
from kvstore.jsonfile import MAX_INT, JsonInvalid, read_object

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
LIMIT = 256 << 20
CONFIG_LIMIT = 64 << 20
# Published configurations say "no limit" with the float 1e30 written as an integer, in a field that nobody reads here.
_UNLIMITED = 10**40
_CONTEXT = "kvferry 2026-11-30 tokenizer 1"
# Not here: decoder (ids to text only), post_processor (only adds special tokens, which we never ask for), truncation
# and padding (switched off when we load).
_PARTS = ("model", "normalizer", "pre_tokenizer", "added_tokens")


class TokenizerError(KVError):
    """A tokenizer file, a text or a token id that cannot be used. ``field`` names which."""

    exit_code = 4

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message, **details)
        self.field: str = details.get("field", "")
        self.expected: str = details.get("expected", "")
        self.found: str = details.get("found", "")


def tokenizer_error(field: str, expected: str, found: str, fix: str) -> TokenizerError:
    """``expected`` and ``found`` are phrases; ``fix`` is what to do, a sentence without its full stop."""
    message = f"{field}: expected {expected}, found {found}. {fix}."
    return TokenizerError(message, field=field, expected=expected, found=found)


def _read(root: Path, name: str, limit: int, largest: int = MAX_INT) -> dict[str, Any] | None:
    """The object in one of the two files, or None where it is not there.

    Raises `TokenizerError` for a file that is not one well-defined JSON object.
    """
    try:
        return read_object(root / name, limit=limit, largest=largest)[0]
    except FileNotFoundError:
        return None
    except JsonInvalid as error:
        raise tokenizer_error(
            f"{name}: {error.field}", error.expected, error.found, "Take the file from its source again"
        ) from error


def bos_text(root: Path) -> str | None:
    """The beginning-of-sequence token that `tokenizer_config.json` names, or None."""
    config = _read(root, CONFIG, CONFIG_LIMIT, _UNLIMITED)
    value = None if config is None else config.get("bos_token")
    if isinstance(value, dict):
        value = value.get("content")
        if value is None:
            value = 0
    if value is None or (isinstance(value, str) and value):
        return value
    raise tokenizer_error(
        f"{CONFIG}: bos_token", "a string, an object with content, or null", f"{value!r:.60}", "Correct the file"
    )


def tokenizer_digest(root: Path) -> bytes:
    """32 bytes: the digest of the canonical content of the bundle's tokenizer. Raises `TokenizerError`."""
    if (value := _read(root, TOKENIZER, LIMIT)) is None:
        raise tokenizer_error(TOKENIZER, "a file", "none", "Copy the tokenizer into the bundle")
    parts = {name: _without_null(value.get(name)) for name in _PARTS}
    model = parts["model"]
    if not isinstance(model, dict):
        raise tokenizer_error(
            f"{TOKENIZER}: model", "an object", f"{model!r:.60}", "Take the file from its source again"
        )
    merges = model.get("merges")
    if isinstance(merges, list):
        model["merges"] = [m.split(" ") if isinstance(m, str) and m.count(" ") == 1 else m for m in merges]
    canonical = json.dumps([parts, bos_text(root)], sort_keys=True, separators=(",", ":"), allow_nan=False)
    hasher = blake3(derive_key_context=_CONTEXT)
    hasher.update(canonical.encode())
    return hasher.digest()


def _without_null(value: Any) -> Any:
    """``value`` without object members that are null: to every reader of the format that is the same as absent."""
    if isinstance(value, dict):
        return {k: _without_null(v) for k, v in value.items() if v is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_null(v) for v in value]
    return value
