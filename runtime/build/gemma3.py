"""A Gemma 3 text model from a GGUF file: every field that the graph depends on is checked, and refused by name."""

from __future__ import annotations

import math
import re
from itertools import pairwise

from runtime.build.errors import ArchitectureUnsupported, field_error
from runtime.build.gguf_file import GgufFile, GgufWeights, Value
from runtime.build.source import Origin, Source
from runtime.build.spec import EMBEDDING, FULL, LAYER_TENSORS, OUTPUT, OUTPUT_NORM, SLIDING, Spec, layer_shape
from runtime.build.vocabulary import SPACE, PieceType, Vocabulary

ARCHITECTURE = "gemma3"
CONTEXT = 2048
#: Gemma 3's local layers; GGUF files of it record only the base of the full layers.
SLIDING_ROPE_BASE = 1.0e4
FULL_EVERY = 6
LAYERS_PER_CHUNK = 6
#: Snapshots keep sliding layers in whole blocks of this many tokens.
WINDOW_MULTIPLE = 64
#: The 27B model scales scores by its hidden width per head, the others by the head width.
_LAYERS_27B = 62
TERMS = "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms"


class _Fields:
    """Typed access to the metadata; absent or mistyped fields are refused by name."""

    def __init__(self, file: GgufFile) -> None:
        self.path = str(file.path)
        self._metadata = file.metadata

    def get(self, key: str) -> Value | None:
        return self._metadata.get(key)

    def refuse(self, key: str, expected: str, found: object) -> Exception:
        return field_error(self.path, key, expected, found, "Give the GGUF file of a Gemma 3 text model")

    def integer(self, key: str, low: int, high: int) -> int:
        value = self.get(key)
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(key, f"an integer from {low} to {high}", value)
        return value

    def number(self, key: str, low: float, high: float) -> float:
        value = self.get(key)
        if type(value) is not float or not low <= value <= high:
            raise self.refuse(key, f"a number from {low:g} to {high:g}", value)
        return value

    def absent(self, key: str, neutral: Value) -> None:
        if self.get(key) not in (None, neutral):
            raise self.refuse(key, f"no such field, or {neutral!r}", self.get(key))


def open_gemma3(file: GgufFile, name: str | None, sha256: str) -> Source:
    """The model in ``file``, which must stay open while the source is used. ``name`` None takes the file's own.

    Raises ArchitectureUnsupported for another architecture, SourceFieldError for a field or tensor that is missing or can't be converted.
    """
    fields = _Fields(file)
    architecture = fields.get("general.architecture")
    if architecture != ARCHITECTURE:
        fix = "Only Gemma 3 text models can be built: give another file"
        raise field_error(
            file.path, "general.architecture", repr(ARCHITECTURE), architecture, fix, ArchitectureUnsupported
        )
    vocabulary = _vocabulary(fields)
    spec = _spec(fields, name or _own_name(file), vocabulary)
    _check_tensors(file, fields, spec)
    license_name = fields.get("general.license")
    return Source(
        spec=spec,
        weights=GgufWeights(file),
        vocabulary=vocabulary,
        origin=gguf_origin(sha256),
        license=license_name if isinstance(license_name, str) else "gemma",
        terms=TERMS,
        chat=fields.get("tokenizer.chat_template") is not None,
    )


def gguf_origin(sha256: str) -> Origin:
    """What a bundle of the file with this SHA-256 (hex) is made from."""
    return {"kind": "gguf", "sha256": sha256}


def _own_name(file: GgufFile) -> str:
    given = file.metadata.get("general.name")
    words = re.findall(r"[a-z0-9.]+", (given if isinstance(given, str) else file.path.stem).lower())
    return "-".join(words) or ARCHITECTURE


def _spec(fields: _Fields, name: str, vocabulary: Vocabulary) -> Spec:
    def key(suffix: str) -> str:
        return f"{ARCHITECTURE}.{suffix}"

    layers = fields.integer(key("block_count"), 1, 256)
    hidden = fields.integer(key("embedding_length"), 32, 16384)
    heads = fields.integer(key("attention.head_count"), 1, 256)
    kv_heads = fields.integer(key("attention.head_count_kv"), 1, heads)
    if heads % kv_heads:
        raise fields.refuse(key("attention.head_count_kv"), f"a divisor of the {heads} heads", kv_heads)
    head_dim = fields.integer(key("attention.key_length"), 2, 1024)
    if head_dim % 2:
        raise fields.refuse(key("attention.key_length"), "an even number, for rotary pairs", head_dim)
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
    return Spec(
        name=name,
        layers=layers,
        hidden=hidden,
        ffn=fields.integer(key("feed_forward_length"), 32, 1 << 17),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=len(vocabulary),
        window=window,
        context=CONTEXT,
        layer_types=_layer_types(fields, layers),
        rope_base_full=fields.number(key("rope.freq_base"), 1.0, 1e9),
        rope_factor_full=_rope_factor(fields),
        rope_base_sliding=SLIDING_ROPE_BASE,
        norm_epsilon=fields.number(key("attention.layer_norm_rms_epsilon"), 1e-12, 1e-2),
        attention_scale=1.0 / math.sqrt(scaled_width),
        eos_token_ids=_eos(fields, vocabulary),
        chunk_bounds=_chunk_bounds(layers),
    )


def _layer_types(fields: _Fields, layers: int) -> tuple[str, ...]:
    key = f"{ARCHITECTURE}.attention.sliding_window_pattern"
    pattern = fields.get(key)
    if isinstance(pattern, tuple) and len(pattern) == layers and all(type(flag) is bool for flag in pattern):
        return tuple(SLIDING if flag else FULL for flag in pattern)
    if pattern is None:
        pattern = FULL_EVERY
    if type(pattern) is not int or pattern < 1:
        raise fields.refuse(key, f"a period, or {layers} booleans", pattern)
    return tuple(FULL if i % pattern == pattern - 1 else SLIDING for i in range(layers))


def _rope_factor(fields: _Fields) -> float:
    kind = fields.get(f"{ARCHITECTURE}.rope.scaling.type")
    if kind in (None, "none"):
        return 1.0
    if kind != "linear":
        raise fields.refuse(f"{ARCHITECTURE}.rope.scaling.type", "'none' or 'linear'", kind)
    return fields.number(f"{ARCHITECTURE}.rope.scaling.factor", 1.0, 1024.0)


def _chunk_bounds(layers: int) -> tuple[tuple[int, int], ...]:
    """As many chunks of at most LAYERS_PER_CHUNK layers as it takes, as equal as they can be."""
    chunks = -(-layers // LAYERS_PER_CHUNK)
    cuts = [layers * c // chunks for c in range(chunks + 1)]
    return tuple(pairwise(cuts))


def _eos(fields: _Fields, vocabulary: Vocabulary) -> tuple[int, ...]:
    """The end tokens: of the text, and of a turn when the file names one."""
    key = "tokenizer.ggml.eot_token_id"
    if fields.get(key) is None:
        return (vocabulary.eos,)
    return tuple(dict.fromkeys((vocabulary.eos, fields.integer(key, 0, len(vocabulary) - 1))))


def _vocabulary(fields: _Fields) -> Vocabulary:
    prefix = "tokenizer.ggml."
    if fields.get(prefix + "model") != "llama":
        raise fields.refuse(prefix + "model", "'llama' (SentencePiece)", fields.get(prefix + "model"))
    if fields.get(prefix + "add_space_prefix") is not False:
        raise fields.refuse(prefix + "add_space_prefix", "False", fields.get(prefix + "add_space_prefix"))
    if fields.get(prefix + "add_bos_token") is not True:
        raise fields.refuse(prefix + "add_bos_token", "True", fields.get(prefix + "add_bos_token"))
    pieces, scores, types = (fields.get(prefix + key) for key in ("tokens", "scores", "token_type"))
    if not isinstance(pieces, tuple) or not 256 < len(pieces) <= 1 << 20:
        raise fields.refuse(prefix + "tokens", "an array of 257 to 1,048,576 strings", type(pieces).__name__)
    for key, array, kind in (("scores", scores, float), ("token_type", types, int), ("tokens", pieces, str)):
        if not isinstance(array, tuple) or len(array) != len(pieces) or not all(type(item) is kind for item in array):
            raise fields.refuse(prefix + key, f"an array of {len(pieces)} of {kind.__name__}", type(array).__name__)
    special = {key: fields.integer(f"{prefix}{key}_token_id", 0, len(pieces) - 1) for key in ("bos", "eos", "unknown")}
    pad_key = prefix + "padding_token_id"
    pad = special["eos"] if fields.get(pad_key) is None else fields.integer(pad_key, 0, len(pieces) - 1)
    return _checked(fields, pieces, scores, types, special, pad)  # type: ignore[arg-type]


def _checked(
    fields: _Fields,
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
    if len(set(spelled)) != len(spelled):
        raise fields.refuse("tokenizer.ggml.tokens", "pieces that differ from one another", "a piece that occurs twice")
    return Vocabulary(spelled, scores, tuple(kinds), special["bos"], special["eos"], pad, special["unknown"])


def _check_tensors(file: GgufFile, fields: _Fields, spec: Spec) -> None:
    expected: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocabulary, spec.hidden), OUTPUT_NORM: (spec.hidden,)}
    if OUTPUT in file.entries:
        expected[OUTPUT] = expected[EMBEDDING]
    for i in range(spec.layers):
        expected |= {f"blk.{i}.{tensor}": layer_shape(spec, tensor) for tensor in LAYER_TENSORS}
    for name, shape in expected.items():
        entry = file.entries.get(name)
        if entry is None or entry.shape != shape:
            raise fields.refuse(f"tensor {name}", f"shape {list(shape)}", None if entry is None else list(entry.shape))
    unknown = sorted(set(file.entries) - set(expected))
    if unknown:
        raise fields.refuse("tensors", "only tensors of a Gemma 3 text decoder", unknown[:3])
