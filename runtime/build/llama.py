"""A Llama text model (SmolLM2 is one) from a GGUF file: every field that the graph depends on is checked, and refused by name.

Full attention in every layer, several KV heads, SiLU gate, plain RMSNorms before attention and feed-forward and none after. In such
files the rows of the query and key matrices are interleaved, rotary pairs being neighbours; here they are put back to (i, i + head_dim/2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from runtime.build.byte_pairs import BytePairs
from runtime.build.gguf_fields import CONTEXT, Fields, chunk_bounds, gguf_origin
from runtime.build.gguf_file import GgufFile, GgufWeights
from runtime.build.source import Source, Turns
from runtime.build.spec import FULL, LAYER_TENSORS, Spec, Weights
from runtime.build.vocabulary import PieceType

ARCHITECTURE = "llama"
LAYERS_PER_CHUNK = 10
#: How a file's ``tokenizer.ggml.pre`` cuts text: whether digits stand alone. Other ways of cutting have no tokenizer here.
PRE_TOKENIZERS = {"smollm": True, "gpt-2": False}
#: Ends a text in every vocabulary that has it; files name only one end token.
END_OF_TEXT = "<|endoftext|>"
CHATML = Turns("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n")
_USED_TYPES = (PieceType.NORMAL, PieceType.CONTROL, PieceType.USER_DEFINED)


def open_llama(file: GgufFile, name: str | None, sha256: str) -> Source:
    """The model in ``file``, a GGUF file of this architecture, which must stay open while the source is used. ``name`` None takes the
    file's own.

    Raises SourceFieldError for a field or tensor that is missing or can't be converted.
    """
    fields = Fields(file, ARCHITECTURE, "a Llama text model with a byte-level BPE vocabulary, such as SmolLM2")
    vocabulary = _vocabulary(fields)
    spec = _spec(fields, name or fields.name(), vocabulary)
    fields.check_tensors(spec)
    return Source(
        spec=spec,
        weights=HalfSplit(GgufWeights(file), {"attn_q.weight": spec.heads, "attn_k.weight": spec.kv_heads}),
        vocabulary=vocabulary,
        origin=gguf_origin(sha256),
        license=fields.license("unknown"),
        terms=None,
        turns=_turns(fields, vocabulary),
    )


class HalfSplit:
    """Weights whose matrices ``heads`` (by the end of their names, with their heads) have rows 2i and 2i + 1 of a head as rotary pairs,
    given out with pairs (i, i + head_dim/2)."""

    def __init__(self, inner: Weights, heads: dict[str, int]) -> None:
        self._inner = inner
        self._heads = heads

    def has(self, name: str) -> bool:
        return self._inner.has(name)

    def tensor(self, name: str) -> NDArray[np.float32]:
        tensor = self._inner.tensor(name)
        heads = self._heads.get(name.split(".", 2)[-1])
        if heads is None:
            return tensor
        pairs = tensor.reshape(heads, -1, 2, tensor.shape[-1])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(tensor.shape)

    def row_blocks(self, name: str, rows: int) -> Iterator[NDArray[np.float32]]:
        assert name.split(".", 2)[-1] not in self._heads, "these are read whole"
        return self._inner.row_blocks(name, rows)


def _spec(fields: Fields, name: str, vocabulary: BytePairs) -> Spec:
    key = fields.key
    layers = fields.integer(key("block_count"), 1, 256)
    hidden = fields.integer(key("embedding_length"), 32, 16384)
    heads, kv_heads = fields.heads()
    head_dim = _head_dim(fields, hidden, heads)
    fields.integer(key("context_length"), CONTEXT, 1 << 24)
    fields.absent(key("vocab_size"), len(vocabulary))
    fields.absent(key("expert_count"), 0)
    fields.absent(key("use_parallel_residual"), False)
    fields.absent(key("attention.causal"), True)
    fields.absent(key("rope.scale_linear"), 1.0)
    # What other models of this name change the graph by.
    for suffix in ("attention.scale", "attention.clamp_kqv", "attn_logit_softcapping", "final_logit_softcapping"):
        fields.absent(key(suffix), 0.0)
    for suffix in ("attention.sliding_window", "embedding_scale", "residual_scale", "logit_scale"):
        fields.absent(key(suffix))
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
        window=None,
        context=CONTEXT,
        layer_types=(FULL,) * layers,
        rope_base_full=fields.number(key("rope.freq_base"), 1.0, 1e9),
        rope_factor_full=fields.rope_factor(),
        rope_base_sliding=None,
        norm_epsilon=fields.number(key("attention.layer_norm_rms_epsilon"), 1e-12, 1e-2),
        attention_scale=1.0 / math.sqrt(head_dim),
        activation="silu",
        embedding_square=1,
        layer_tensors=LAYER_TENSORS,
        eos_token_ids=_eos(fields, vocabulary),
        chunk_bounds=chunk_bounds(layers, LAYERS_PER_CHUNK),
    )


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    """The file's, or the hidden width's share; keys, values and rotary positions all have it."""
    key = fields.key("attention.key_length")
    if fields.get(key) is not None:
        head_dim = fields.even(key)
    elif hidden % (2 * heads):
        raise fields.refuse(fields.key("attention.head_count"), f"heads that share {hidden} in even parts", heads)
    else:
        head_dim = hidden // heads
    fields.absent(fields.key("attention.value_length"), head_dim)
    fields.absent(fields.key("rope.dimension_count"), head_dim)
    return head_dim


def _eos(fields: Fields, vocabulary: BytePairs) -> tuple[int, ...]:
    """The end tokens: the file's, of a turn when it names one, and of the text."""
    found = [vocabulary.eos, fields.optional_token("eot", len(vocabulary))]
    if END_OF_TEXT in vocabulary.pieces:
        found.append(vocabulary.pieces.index(END_OF_TEXT))
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _turns(fields: Fields, vocabulary: BytePairs) -> Turns | None:
    """ChatML, if that is what the file's template writes."""
    template = fields.get("tokenizer.chat_template")
    marks = {"<|im_start|>", "<|im_end|>"}
    chatml = isinstance(template, str) and all(mark in template for mark in marks) and marks <= set(vocabulary.pieces)
    return CHATML if chatml else None


def _vocabulary(fields: Fields) -> BytePairs:
    prefix = "tokenizer.ggml."
    if fields.get(prefix + "model") != "gpt2":
        raise fields.refuse(prefix + "model", "'gpt2' (byte-level BPE)", fields.get(prefix + "model"))
    pre = fields.get(prefix + "pre")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise fields.refuse(prefix + "pre", f"one of {sorted(PRE_TOKENIZERS)}", pre)
    fields.absent(prefix + "add_space_prefix", False)
    fields.absent(prefix + "add_eos_token", False)
    fields.absent(prefix + "add_bos_token", False, True)
    pieces = fields.pieces()
    fields.different(pieces)
    types = fields.array(prefix + "token_type", int, len(pieces))
    unusable = sorted(set(types) - set(_USED_TYPES))
    if unusable:
        raise fields.refuse(prefix + "token_type", f"piece types {[int(kind) for kind in _USED_TYPES]}", unusable)
    eos, pad = fields.token("eos", len(pieces)), fields.optional_token("padding", len(pieces))
    unknown = fields.optional_token("unknown", len(pieces))
    return BytePairs(
        pieces=pieces,
        types=tuple(PieceType(kind) for kind in types),
        merges=_merges(fields, set(pieces)),
        single_digits=PRE_TOKENIZERS[pre],
        bos=fields.token("bos", len(pieces)) if fields.get(prefix + "add_bos_token") is True else None,
        eos=eos,
        pad=eos if pad is None else pad,
        unknown=eos if unknown is None else unknown,
    )


def _merges(fields: Fields, pieces: set[str]) -> tuple[tuple[str, str], ...]:
    key = "tokenizer.ggml.merges"
    found: list[tuple[str, str]] = []
    for line in fields.array(key, str):
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= pieces:
            raise fields.refuse(key, "pairs of pieces, divided by a blank, that join to a piece", line)
        found.append((left, right))
    return tuple(found)
