"""A bundle's weights in the conventions of Gemma 3's published checkpoints, read from its packages and its embedding table.

The packages hold them folded: the residual stream is carried divided by 32, so the embedding scale and the gains of the two norms that feed
it are divided by 32, and the query norm's gain carries the attention scale. Here all of that is undone, so that an implementation that
knows nothing of it computes the same function from the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.bundle import Bundle, BundleConfig
from runtime.mlpackage import Package

F32 = np.float32
RESIDUAL_SCALE = 32.0
"""What the residual stream is divided by. A power of two: dividing and multiplying by it are exact."""

MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GAINS = {
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""The packages' names of a layer's tensors, and the checkpoints'."""


@dataclass(frozen=True)
class BundleWeights:
    """``layers[i]`` by checkpoint name without ``.weight``: float32 matrices [out, in] and gains [n]. Gains include the +1."""

    config: BundleConfig
    layers: tuple[dict[str, NDArray[F32]], ...]
    final_gain: NDArray[F32]
    head_rows: NDArray[np.int8]
    head_steps: NDArray[np.float16]

    def head(self, rows: int | None = None) -> NDArray[F32]:
        """The output matrix [vocabulary, hidden], or its first ``rows`` rows, dequantised: new memory, 4 bytes an element."""
        return self.head_rows[:rows].astype(F32) * self.head_steps[:rows].astype(F32)


def read_weights(bundle: Bundle, *, residual_gains_undone: bool = True) -> BundleWeights:
    """``residual_gains_undone`` False leaves the division by 32 in the two gains that carry it: a control, not a model."""
    config = bundle.config
    scale = F32(RESIDUAL_SCALE if residual_gains_undone else 1.0)
    layers: list[dict[str, NDArray[F32]]] = []
    for package, (first, stop) in zip(config.chunks, config.chunk_bounds, strict=True):
        constants = constants_of(bundle.package_path(package))
        for i in range(first, stop):
            layer = {
                public: constants[f"blk_{i}_{own}_weight"].astype(F32) for own, public in (MATRICES | GAINS).items()
            }
            layer["post_attention_layernorm"] *= scale
            layer["post_feedforward_layernorm"] *= scale
            layer["self_attn.q_norm"] /= F32(config.head_dim**-0.5)
            layers.append(layer)
    head = constants_of(bundle.package_path(config.lmhead))
    return BundleWeights(
        config, tuple(layers), head["output_norm"].astype(F32), head["output_rows"], head["output_scales"]
    )


def embedding_rows(bundle: Bundle, tokens: Sequence[int]) -> NDArray[F32]:
    """What enters the first layer, [n, hidden] float32, undivided: the table's fp16 rows times 32.

    Computed from the two files themselves: factor = f32(f32(scale / 127) · f32(√hidden)), element = fp16(f32(q · factor)).
    """
    spec = bundle.config.embed
    rows = np.memmap(bundle.root / spec.file, np.int8, "r", shape=(spec.rows, spec.cols))[list(tokens)]
    scales = np.fromfile(bundle.root / spec.scale_file, "<f4")[list(tokens)]
    factors = scales / F32(127) * F32(np.sqrt(spec.scale_square))
    return (rows.astype(F32) * factors[:, None]).astype(np.float16).astype(F32) * F32(RESIDUAL_SCALE)


def constants_of(path: Path) -> dict[str, NDArray[np.generic]]:
    """Every constant of the package's first function, as stored, by name. Compressed ones give their parts."""
    package = Package.open(path)
    found: dict[str, NDArray[np.generic]] = {}
    for op in package.function().ops:
        if op.type == "const":
            found[op.name] = package.array(op.attributes["val"])
        elif op.type == "constexpr_blockwise_shift_scale":
            for part, name in (("data", "output_rows"), ("scale", "output_scales")):
                (value,) = op.inputs[part]
                found[name] = found[value.name] if hasattr(value, "name") else package.array(value)
    return found
