"""The tokenizer of a Hugging Face folder, opened as the bundle's will be, so that a bundle that can't be opened or prompted is never begun."""

from __future__ import annotations

from pathlib import Path

from kvstore.jsonfile import JsonInvalid, read_object
from runtime.build.errors import SourceDamaged, field_error, tool_missing
from runtime.build.gemma4.spec import Gemma4Spec
from runtime.tokenizer import Tokenizer, TokenizerError
from runtime.tokenizer_digest import CONFIG, LIMIT, TOKENIZER

_FIX = "Give the model's own tokenizer files"


def check_tokenizer(root: Path, spec: Gemma4Spec) -> None:
    """Both files can be read, no id is beyond the vocabulary, and prompts begin with the configuration's token.

    Raises SourceDamaged for a file that can't be read, SourceFieldError for one of another model.
    """
    try:
        tokenizer = Tokenizer.open(root)
        document, _ = read_object(root / TOKENIZER, limit=LIMIT)
    except (TokenizerError, JsonInvalid) as error:
        file = CONFIG if str(error).startswith(CONFIG) else TOKENIZER
        raise SourceDamaged(str(error), **{**error.details, "file": file}) from error
    except ModuleNotFoundError as error:
        raise tool_missing(error, "Reading the folder's tokenizer", "runtime") from error
    _check_ids(tokenizer, document.get("model"), spec.vocabulary)
    if tokenizer.bos_id != spec.bos_token_id:
        expected = f"the token that config.json's bos_token_id names ({spec.bos_token_id})"
        raise field_error(CONFIG, "bos_token", expected, tokenizer.bos_id, _FIX)


def _check_ids(tokenizer: Tokenizer, model: object, vocabulary: int) -> None:
    # the library numbers added tokens from the count on, so these two bound every id
    pieces = model.get("vocab") if isinstance(model, dict) else None
    largest = max(pieces.values(), default=0) if isinstance(pieces, dict) else 0
    if tokenizer.vocab_size > vocabulary or largest >= vocabulary:
        found = max(largest, tokenizer.vocab_size - 1)
        raise field_error(TOKENIZER, "token ids", f"ids below config.json's vocab_size ({vocabulary})", found, _FIX)
