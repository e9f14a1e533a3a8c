"""The geometry of a Gemma 4 text decoder, and the tensors it has.

Tensors go by the names of a published checkpoint, without what stands before ``layers.``, ``norm.`` or ``embed_tokens.`` there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, localcontext
from itertools import pairwise

from runtime.build.spec import FULL, SLIDING

EMBEDDING = "embed_tokens.weight"
PLE_EMBEDDING = "embed_tokens_per_layer.weight"
PLE_PROJECTION = "per_layer_model_projection.weight"
PLE_NORM = "per_layer_projection_norm.weight"
FINAL_NORM = "norm.weight"


@dataclass(frozen=True, slots=True)
class Gemma4Spec:
    """A Gemma 4 text decoder with one KV head. Lengths in tokens, widths in elements, RoPE bases dimensionless.

    ``head_dim`` is a sliding layer's, ``global_head_dim`` a full layer's. Layers from ``first_shared`` on own no K and V. ``ple`` is the width of one layer's
    per-layer embedding. ``rope_share_full`` is the share of a full layer's pairs that turn. ``double_wide``: shared layers have twice the feed-forward width.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    head_dim: int
    global_head_dim: int
    ple: int
    vocabulary: int
    window: int
    context: int
    first_shared: int
    layer_types: tuple[str, ...]
    rope_base_sliding: float
    rope_base_full: float
    rope_share_full: float
    norm_epsilon: float
    double_wide: bool
    bos_token_id: int
    eos_token_ids: tuple[int, ...]

    def head_dim_of(self, layer: int) -> int:
        return self.global_head_dim if self.layer_types[layer] == FULL else self.head_dim

    def ffn_of(self, layer: int) -> int:
        return self.ffn * (2 if self.double_wide and not self.owns(layer) else 1)

    def owns(self, layer: int) -> bool:
        """Whether the layer has K and V of its own."""
        return layer < self.first_shared

    def store_layer(self, kind: str) -> int:
        """The layer whose K and V the shared layers of a kind read: the last one of that kind that owns any."""
        return max(i for i in range(self.first_shared) if self.layer_types[i] == kind)

    @property
    def chunk_bounds(self) -> tuple[tuple[int, int], ...]:
        """Half-open layer ranges: all layers that own K and V, then the shared ones in two halves. In E2B the three weigh about the same."""
        middle = self.first_shared + (self.layers - self.first_shared + 1) // 2
        cuts = (0, self.first_shared, middle, self.layers)
        return tuple((a, b) for a, b in pairwise(cuts) if a < b)

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(2 * 2 * self.head_dim_of(i) for i in range(self.first_shared))

    def kinds(self, bounds: tuple[int, int]) -> tuple[str, ...]:
        """The attention kinds that layers ``bounds`` have, sliding first."""
        present = set(self.layer_types[bounds[0] : bounds[1]])
        return tuple(kind for kind in (SLIDING, FULL) if kind in present)

    def rope_frequencies(self, kind: str) -> tuple[float, ...]:
        """The head_dim/2 angular frequencies of a kind, radians a token, for pairs (i, i + head_dim/2).

        A full layer's are those of its whole head dimension, of which all but the first share are 0: those pairs don't turn. Correctly
        rounded: they are part of a model's identity, and ``pow`` differs in the last bit between machines.
        """
        width = self.global_head_dim if kind == FULL else self.head_dim
        base = self.rope_base_full if kind == FULL else self.rope_base_sliding
        turning = int(self.rope_share_full * width) // 2 if kind == FULL else width // 2
        with localcontext(prec=50):
            found = [float(Decimal(base) ** (Decimal(-2 * i) / width)) for i in range(turning)]
        return (*found, *[0.0] * (width // 2 - turning))

    def matrices(self, layer: int) -> Mapping[str, tuple[int, int]]:
        """The layer's matrices [out, in]: what is compressed."""
        attention, ffn = self.heads * self.head_dim_of(layer), self.ffn_of(layer)
        at = f"layers.{layer}."
        own = (
            {
                f"{at}self_attn.k_proj.weight": (self.head_dim_of(layer), self.hidden),
                f"{at}self_attn.v_proj.weight": (self.head_dim_of(layer), self.hidden),
            }
            if self.owns(layer)
            else {}
        )
        return own | {
            f"{at}self_attn.q_proj.weight": (attention, self.hidden),
            f"{at}self_attn.o_proj.weight": (self.hidden, attention),
            f"{at}mlp.gate_proj.weight": (ffn, self.hidden),
            f"{at}mlp.up_proj.weight": (ffn, self.hidden),
            f"{at}mlp.down_proj.weight": (self.hidden, ffn),
            f"{at}per_layer_input_gate.weight": (self.ple, self.hidden),
            f"{at}per_layer_projection.weight": (self.hidden, self.ple),
        }

    def vectors(self, layer: int) -> Mapping[str, tuple[int]]:
        """The layer's gains, and its scalar: fp16 whatever the matrices are."""
        at = f"layers.{layer}."
        own = {f"{at}self_attn.k_norm.weight": (self.head_dim_of(layer),)} if self.owns(layer) else {}
        return own | {
            f"{at}self_attn.q_norm.weight": (self.head_dim_of(layer),),
            f"{at}input_layernorm.weight": (self.hidden,),
            f"{at}post_attention_layernorm.weight": (self.hidden,),
            f"{at}pre_feedforward_layernorm.weight": (self.hidden,),
            f"{at}post_feedforward_layernorm.weight": (self.hidden,),
            f"{at}post_per_layer_input_norm.weight": (self.hidden,),
            f"{at}layer_scalar": (1,),
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor by name."""
        found: dict[str, tuple[int, ...]] = {
            EMBEDDING: (self.vocabulary, self.hidden),
            PLE_EMBEDDING: (self.vocabulary, self.layers * self.ple),
            PLE_PROJECTION: (self.layers * self.ple, self.hidden),
            PLE_NORM: (self.ple,),
            FINAL_NORM: (self.hidden,),
        }
        for i in range(self.layers):
            found |= self.matrices(i)
            found |= self.vectors(i)
        return found

    def dropped(self) -> frozenset[str]:
        """Tensors that checkpoints carry for shared layers although nothing reads them."""
        stray = ("k_proj.weight", "v_proj.weight", "k_norm.weight")
        return frozenset(
            f"layers.{i}.self_attn.{name}" for i in range(self.first_shared, self.layers) for name in stray
        )
