"""mlx-lm's Llama in float32 on the CPU, over a bundle's weights or a GGUF file's, with everything kept that a layer returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from bundle_weights import MATRICES, RESIDUAL_SCALE, constants_of
from mlx_gemma3 import Reference
from mlx_lm.models.cache import KVCache
from mlx_lm.models.llama import Model, ModelArgs
from numpy.typing import NDArray

from runtime.bundle import Bundle

F32 = np.float32
Tensors = Mapping[str, NDArray[F32]]
EPSILON, ROPE_BASE = 1.0e-5, 1.0e5
NAMES = MATRICES | {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def bundle_tensors(bundle: Bundle, *, residual_undone: bool = True) -> dict[str, NDArray[F32]]:
    """By checkpoint name, what the packages folded in undone: the residual stream divided by 32, and the attention scale in the query matrix.

    ``residual_undone`` False leaves the first: a control, not a model.
    """
    config = bundle.config
    found: dict[str, NDArray[F32]] = {}
    for package, (first, stop) in zip(config.chunks, config.chunk_bounds, strict=True):
        constants = constants_of(bundle.package_path(package))
        for i in range(first, stop):
            for own, public in NAMES.items():
                tensor = constants[f"blk_{i}_{own}_weight"].astype(F32)
                if own in ("attn_output", "ffn_down") and residual_undone:
                    tensor *= F32(RESIDUAL_SCALE)
                if own == "attn_q":
                    tensor /= F32(config.global_head_dim**-0.5)
                found[f"model.layers.{i}.{public}.weight"] = tensor
    head = constants_of(bundle.package_path(config.lmhead))
    found["model.norm.weight"] = head["output_norm"].astype(F32)
    found["lm_head.weight"] = head["output_rows"].astype(F32) * head["output_scales"].astype(F32)
    return found


@contextmanager
def gguf_tensors(path: Path, bundle: Bundle) -> Iterator[dict[str, NDArray[F32]]]:
    """The layers of a GGUF file as the gguf package reads and dequantises them, rotary pairs interleaved as they lie; the head is the bundle's."""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}

    def plain(name: str) -> NDArray[F32]:
        return np.asarray(gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type), F32)

    found = {
        f"model.layers.{i}.{public}.weight": plain(f"blk.{i}.{own}.weight")
        for i in range(bundle.config.num_layers)
        for own, public in NAMES.items()
    }
    ours = bundle_tensors(bundle)
    yield found | {name: ours[name] for name in ("model.norm.weight", "lm_head.weight")}


def build(
    bundle: Bundle, tensors: Tensors, *, interleaved: bool = False, rope: float = ROPE_BASE, epsilon: float = EPSILON
) -> Model:
    """The model. ``interleaved``: rotary pairs are neighbours. The others exist for negative controls."""
    config = bundle.config
    mx.set_default_device(mx.cpu)
    model = Model(
        ModelArgs(
            model_type="llama",
            hidden_size=config.hidden,
            num_hidden_layers=config.num_layers,
            intermediate_size=len(tensors["model.layers.0.mlp.gate_proj.weight"]),
            num_attention_heads=len(tensors["model.layers.0.self_attn.q_proj.weight"]) // config.global_head_dim,
            head_dim=config.global_head_dim,
            rms_norm_eps=epsilon,
            vocab_size=config.vocab_size,
            num_key_value_heads=config.kv_heads,
            rope_theta=rope,
            rope_traditional=interleaved,
            tie_word_embeddings=False,
        )
    )
    model.load_weights([(name, mx.array(tensor)) for name, tensor in tensors.items()], strict=False)
    return model


class _Kept(nn.Module):
    """A decoder layer, and what it last returned."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.use_sliding = False
        self.returned: list[Any] = []

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.returned = [self.layer(*args, **named)]
        return self.returned[0]


def run(model: Model, rows: NDArray[F32]) -> Reference:
    """One forward pass over embedding rows [T, hidden] (as they enter the first layer) from an empty cache."""
    kept = [_Kept(layer) for layer in model.model.layers]
    layers, model.model.layers = model.model.layers, kept
    caches = [KVCache() for _ in kept]
    try:
        normed = model.model(None, caches, input_embeddings=mx.array(rows)[None])
    finally:
        model.model.layers = layers
    mx.eval(normed)
    n = len(rows)

    def flat(array: Any) -> NDArray[F32]:
        return np.array(array[0, :, :n].transpose(1, 0, 2).reshape(n, -1))

    return Reference(
        model,
        tuple(np.array(layer.returned[0][0]) for layer in kept),
        tuple(flat(cache.keys) for cache in caches),
        tuple(flat(cache.values) for cache in caches),
        np.array(normed[0]),
    )


def neighbours_to_halves(keys: NDArray[F32], head_dim: int) -> NDArray[F32]:
    """Cache rows whose rotary pairs are neighbours as rows whose pairs are half a head apart."""
    pairs = keys.reshape(len(keys), -1, head_dim // 2, 2)
    return np.ascontiguousarray(pairs.swapaxes(2, 3)).reshape(keys.shape)
