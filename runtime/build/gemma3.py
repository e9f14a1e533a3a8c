"""A Gemma 3 text model from a GGUF file: every field that the graph depends on is checked, and refused by name."""

from __future__ import annotations

import math

from runtime.build.gguf_fields import CONTEXT, Fields, chunk_bounds, gguf_origin
from runtime.build.gguf_file import GgufFile, GgufWeights
from runtime.build.source import Source, Turns
from runtime.build.spec import FULL, HEAD_NORMS, LAYER_TENSORS, POST_NORMS, SLIDING, Spec
from runtime.build.vocabulary import SPACE, PieceType, Vocabulary

ARCHITECTURE = "gemma3"
GEMMA3_TENSORS = (*LAYER_TENSORS, *HEAD_NORMS, *POST_NORMS)
#: Gemma 3's local layers; GGUF files of it record only the base of the full layers.
SLIDING_ROPE_BASE = 1.0e4
FULL_EVERY = 6
LAYERS_PER_CHUNK = 6
#: Snapshots keep sliding layers in whole blocks of this many tokens.
WINDOW_MULTIPLE = 64
#: The 27B model scales scores by its hidden width per head, the others by the head width.
_LAYERS_27B = 62
TURNS = Turns("<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>\n")
TERMS = "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"


def open_gemma3(file: GgufFile, name: str | None, sha256: str) -> Source:
    """The model in ``file``, a GGUF file of this architecture, which must stay open while the source is used. ``name`` None takes the
    file's own.

    Raises SourceFieldError for a field or tensor that is missing or can't be converted.
    """
    fields = Fields(file, ARCHITECTURE, "a Gemma 3 text model")
    vocabulary = _vocabulary(fields)
    spec = _spec(fields, name or fields.name(), vocabulary)
    fields.check_tensors(spec)
    return Source(
        spec=spec,
        weights=GgufWeights(file),
        vocabulary=vocabulary,
        origin=gguf_origin(sha256),
        license=fields.license("gemma"),
        terms=TERMS,
        turns=None if fields.get("tokenizer.chat_template") is None else TURNS,
    )


def _spec(fields: Fields, name: str, vocabulary: Vocabulary) -> Spec:
    key = fields.key
    layers = fields.integer(key("block_count"), 1, 256)
    hidden = fields.integer(key("embedding_length"), 32, 16384)
    heads, kv_heads = fields.heads()
    head_dim = fields.even(key("attention.key_length"))
    value_dim = fields.integer(key("attention.value_length"), 2, 1024)
    if value_dim != head_dim:
        raise fields.refuse(key("attention.value_length"), f"the key length {head_dim}", value_dim)
    window = fields.integer(key("attention.sliding_window"), WINDOW_MULTIPLE, CONTEXT)
    if window % WINDOW_MULTIPLE:
        raise fields.refuse(key("attention.sliding_window"), f"a multiple of {WINDOW_MULTIPLE}", window)
    fields.integer(key("context_length"), CONTEXT, 1 << 24)
    fields.absent(key("attn_logit_softcapping"), 0.0)
    fields.absent(key("final_logit_softcapping"), 0.0)
    scaled_width = hidden / heads if layers == _LAYERS_27B else head_dim
    kinds = _layer_types(fields, layers)
    sliding = SLIDING in kinds
    return Spec(
        name=name,
        architecture=ARCHITECTURE,
        layers=layers,
        hidden=hidden,
        ffn=fields.integer(key("feed_forward_length"), 32, 1 << 17),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=len(vocabulary),
        window=window if sliding else None,
        context=CONTEXT,
        layer_types=kinds,
        rope_base_full=fields.number(key("rope.freq_base"), 1.0, 1e9),
        rope_factor_full=fields.rope_factor(),
        rope_base_sliding=SLIDING_ROPE_BASE if sliding else None,
        norm_epsilon=fields.number(key("attention.layer_norm_rms_epsilon"), 1e-12, 1e-2),
        attention_scale=1.0 / math.sqrt(scaled_width),
        activation="gelu_tanh",
        embedding_square=hidden,
        layer_tensors=GEMMA3_TENSORS,
        eos_token_ids=_eos(fields, vocabulary),
        chunk_bounds=chunk_bounds(layers, LAYERS_PER_CHUNK),
    )


def _layer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    key = fields.key("attention.sliding_window_pattern")
    pattern = fields.get(key)
    if isinstance(pattern, tuple) and len(pattern) == layers and all(type(flag) is bool for flag in pattern):
        return tuple(SLIDING if flag else FULL for flag in pattern)
    if pattern is None:
        pattern = FULL_EVERY
    if type(pattern) is not int or pattern < 1:
        raise fields.refuse(key, f"a period, or {layers} booleans", pattern)
    return tuple(FULL if i % pattern == pattern - 1 else SLIDING for i in range(layers))


def _eos(fields: Fields, vocabulary: Vocabulary) -> tuple[int, ...]:
    """The end tokens: of the text, and of a turn when the file names one."""
    turn = fields.optional_token("eot", len(vocabulary))
    return (vocabulary.eos,) if turn is None else tuple(dict.fromkeys((vocabulary.eos, turn)))


def _vocabulary(fields: Fields) -> Vocabulary:
    prefix = "tokenizer.ggml."
    if fields.get(prefix + "model") != "llama":
        raise fields.refuse(prefix + "model", "'llama' (SentencePiece)", fields.get(prefix + "model"))
    if fields.get(prefix + "add_space_prefix") is not False:
        raise fields.refuse(prefix + "add_space_prefix", "False", fields.get(prefix + "add_space_prefix"))
    if fields.get(prefix + "add_bos_token") is not True:
        raise fields.refuse(prefix + "add_bos_token", "True", fields.get(prefix + "add_bos_token"))
    pieces = fields.pieces()
    scores = fields.array(prefix + "scores", float, len(pieces))
    types = fields.array(prefix + "token_type", int, len(pieces))
    special = {name: fields.token(name, len(pieces)) for name in ("bos", "eos", "unknown")}
    pad = fields.optional_token("padding", len(pieces))
    return _checked(fields, pieces, scores, types, special, special["eos"] if pad is None else pad)


def _checked(
    fields: Fields,
    pieces: tuple[str, ...],
    scores: tuple[float, ...],
    types: tuple[int, ...],
    special: dict[str, int],
    pad: int,
) -> Vocabulary:
    key = "tokenizer.ggml.token_type"
    unusable = sorted(set(types) - set(PieceType))
    if unusable:
        raise fields.refuse(key, f"piece types {[int(kind) for kind in PieceType]}", unusable)
    kinds = [PieceType(kind) for kind in types]
    kinds[special["unknown"]] = PieceType.UNKNOWN  # converted files list it among the control tokens
    bytes_found = {piece for piece, kind in zip(pieces, kinds, strict=True) if kind is PieceType.BYTE}
    missing = [name for name in (f"<0x{byte:02X}>" for byte in range(256)) if name not in bytes_found]
    if missing:
        raise fields.refuse(key, "a byte piece for each of the 256 bytes", f"no {missing[0]}")
    # Converted files spell the user-defined pieces with plain spaces; the text has U+2581 by the time they are looked for.
    spelled = tuple(
        piece.replace(" ", SPACE) if kind is PieceType.USER_DEFINED else piece
        for piece, kind in zip(pieces, kinds, strict=True)
    )
    fields.different(spelled)
    return Vocabulary(spelled, scores, tuple(kinds), special["bos"], special["eos"], pad, special["unknown"])
