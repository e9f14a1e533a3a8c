"""The geometry of a text decoder, and where its weights come from.

A :class:`Spec` is everything the graph, the sidecars and ``convert_config.json`` need besides the weights themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, localcontext
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

SLIDING = "sliding_attention"
FULL = "full_attention"
Activation = Literal["gelu_tanh", "silu"]

#: What a mask holds where a slot is invisible: finite, because inf - inf is NaN.
NEG = -4.0e4
OFFSET_WIDTHS = (256, 32, 8, 4)
PLAIN_WIDTH = 512
VERIFY_WIDTH = 4


@dataclass(frozen=True, slots=True)
class Spec:
    """A text decoder. Lengths in tokens, widths in elements, RoPE bases dimensionless.

    What families differ in: ``layer_tensors`` are what each layer has, and a norm that isn't among them is left out of the graph;
    ``activation`` is the gate's; an embedding row is multiplied by the square root of ``embedding_square``. ``window`` and
    ``rope_base_sliding`` are None exactly where no layer is sliding.

    ``attention_scale`` multiplies q·k; ``rope_factor_full`` divides the full layers' rotary frequencies. ``layer_types`` has one of :data:`SLIDING`, :data:`FULL` per layer.
    ``chunk_bounds`` are half-open layer ranges that cover 0..layers without gaps.
    """

    name: str
    architecture: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    window: int | None
    context: int
    layer_types: tuple[str, ...]
    rope_base_full: float
    rope_factor_full: float
    rope_base_sliding: float | None
    norm_epsilon: float
    attention_scale: float
    activation: Activation
    embedding_square: int
    layer_tensors: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    chunk_bounds: tuple[tuple[int, int], ...]

    @property
    def kv_width(self) -> int:
        """Elements of one K (or V) row of one layer: all KV heads side by side."""
        return self.kv_heads * self.head_dim

    def rope_frequencies(self, kind: str) -> tuple[float, ...]:
        """The head_dim/2 angular frequencies of an attention kind, radians a token, for pairs (i, i + head_dim/2).

        Correctly rounded: they are part of a model's identity, and ``pow`` differs in the last bit between machines.
        """
        base, factor = (self.rope_base_full, self.rope_factor_full) if kind == FULL else (self.rope_base_sliding, 1.0)
        assert base is not None, "a model without sliding layers has no frequencies of theirs"
        with localcontext(prec=50):
            exponents = [Decimal(-2 * i) / self.head_dim for i in range(self.head_dim // 2)]
            return tuple(float(Decimal(base) ** exponent / Decimal(factor)) for exponent in exponents)

    def kinds(self, bounds: tuple[int, int]) -> tuple[str, ...]:
        """The attention kinds that layers ``bounds`` have, sliding first."""
        present = set(self.layer_types[bounds[0] : bounds[1]])
        return tuple(kind for kind in (SLIDING, FULL) if kind in present)


class Weights(Protocol):
    """Source tensors by their GGUF names: norm gains are what rows are multiplied by (Gemma's include the +1), and rotary pairs are
    (i, i + head_dim/2) of each head."""

    def tensor(self, name: str) -> NDArray[np.float32]:
        """The whole tensor, [out, in] or [n], float32, owned by the caller."""
        ...

    def row_blocks(self, name: str, rows: int) -> Iterator[NDArray[np.float32]]:
        """The tensor in order, at most ``rows`` rows at a time: the embedding is too large to hold as float32."""
        ...

    def has(self, name: str) -> bool: ...


EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
OUTPUT_NORM = "output_norm.weight"
#: What a layer of every family has.
LAYER_TENSORS = (
    "attn_k.weight",
    "attn_norm.weight",
    "attn_output.weight",
    "attn_q.weight",
    "attn_v.weight",
    "ffn_down.weight",
    "ffn_gate.weight",
    "ffn_norm.weight",
    "ffn_up.weight",
)
#: Norms that some families have: of each head's query and key, and of what attention and feed-forward add to the residual stream.
HEAD_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")
POST_NORMS = ("post_attention_norm.weight", "post_ffw_norm.weight")


def layer_shape(spec: Spec, tensor: str) -> tuple[int, ...]:
    """The shape of one of :data:`LAYER_TENSORS`, :data:`HEAD_NORMS` or :data:`POST_NORMS`."""
    attention = spec.heads * spec.head_dim
    return {
        "attn_k.weight": (spec.kv_width, spec.hidden),
        "attn_k_norm.weight": (spec.head_dim,),
        "attn_norm.weight": (spec.hidden,),
        "attn_output.weight": (spec.hidden, attention),
        "attn_q.weight": (attention, spec.hidden),
        "attn_q_norm.weight": (spec.head_dim,),
        "attn_v.weight": (spec.kv_width, spec.hidden),
        "ffn_down.weight": (spec.hidden, spec.ffn),
        "ffn_gate.weight": (spec.ffn, spec.hidden),
        "ffn_norm.weight": (spec.hidden,),
        "ffn_up.weight": (spec.ffn, spec.hidden),
        "post_attention_norm.weight": (spec.hidden,),
        "post_ffw_norm.weight": (spec.hidden,),
    }[tensor]
