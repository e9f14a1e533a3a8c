"""mlx-lm's Gemma 3 over a bundle's weights, in float32 on the CPU, with everything kept that a layer returns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from bundle_weights import RESIDUAL_SCALE, BundleWeights
from mlx_lm.models.cache import KVCache
from mlx_lm.models.gemma3_text import Model, ModelArgs
from numpy.typing import NDArray

F32 = np.float32
ROPE_BASE_FULL = 1.0e6
ROPE_BASE_SLIDING = 1.0e4
FULL_EVERY = 6
EPSILON = 1.0e-6


@dataclass(frozen=True)
class Reference:
    """What mlx computed for T tokens, float32. ``hidden[i]`` [T, hidden] after layer i; ``keys[i]`` (after RoPE), ``values[i]`` [T, kv width].

    ``normed`` [T, hidden]: after the final norm.
    """

    model: Model
    hidden: tuple[NDArray[F32], ...]
    keys: tuple[NDArray[F32], ...]
    values: tuple[NDArray[F32], ...]
    normed: NDArray[F32]

    def first(self, n: int) -> Reference:
        """The first ``n`` tokens: nothing in them depends on later ones."""
        parts = (tuple(array[:n] for array in arrays) for arrays in (self.hidden, self.keys, self.values))
        return Reference(self.model, *parts, self.normed[:n])

    def logits(self, start: int, stop: int) -> NDArray[F32]:
        """[stop − start, rows of the output matrix that the model was built with]."""
        return np.array(self.model.lm_head(mx.array(self.normed[start:stop])))


class _Kept(nn.Module):
    """A decoder layer, and what it last returned. ``halved``: the next layer gets that as fp16 of a 32nd, as from chunk to chunk."""

    def __init__(self, layer: nn.Module, halved: bool) -> None:
        super().__init__()
        self.layer = layer
        self.halved = halved
        self.returned: list[Any] = []

    def __call__(self, *args: Any) -> Any:
        out = self.layer(*args)
        self.returned = [out]
        return _half(out / RESIDUAL_SCALE) * RESIDUAL_SCALE if self.halved else out


class _HalfCache(KVCache):
    """A cache of fp16 rows."""

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        return super().update_and_fetch(_half(keys), _half(values))


class _HalfRope(nn.Module):
    """Rotary positions by cosines and sines that were rounded to fp16."""

    def __init__(self, dims: int, base: float) -> None:
        super().__init__()
        self.inverse = base ** (-np.arange(0, dims, 2) / dims)

    def __call__(self, x: Any, offset: int = 0) -> Any:
        angles = np.arange(offset, offset + x.shape[2])[:, None] * self.inverse
        cos, sin = (mx.array(f(angles).astype(np.float16).astype(F32)) for f in (np.cos, np.sin))
        low, high = mx.split(x, 2, axis=-1)
        return mx.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _half(x: Any) -> Any:
    return x.astype(mx.float16).astype(mx.float32)


def build(
    weights: BundleWeights,
    *,
    window: int | None = None,
    rope_full: float = ROPE_BASE_FULL,
    rope_sliding: float = ROPE_BASE_SLIDING,
    query_norm: bool = True,
    layers: int | None = None,
    head_rows: int | None = None,
) -> Model:
    """The model, or its first ``layers`` layers, and ``head_rows`` rows of its output matrix.

    The keywords between exist for negative controls: each is a mistake that somebody could make.
    """
    config = weights.config
    layers = config.num_layers if layers is None else layers
    first = weights.layers[0]
    args = ModelArgs(
        model_type="gemma3_text",
        hidden_size=config.hidden,
        num_hidden_layers=layers,
        intermediate_size=len(first["mlp.gate_proj"]),
        num_attention_heads=len(first["self_attn.q_proj"]) // config.head_dim,
        head_dim=config.head_dim,
        rms_norm_eps=EPSILON,
        vocab_size=1,  # embeddings are given as rows, and the head is put in below
        num_key_value_heads=config.kv_heads,
        rope_theta=rope_full,
        rope_local_base_freq=rope_sliding,
        query_pre_attn_scalar=config.head_dim,
        sliding_window=config.sliding_window if window is None else window,
        sliding_window_pattern=FULL_EVERY,
    )
    mx.set_default_device(mx.cpu)
    model = Model(args)
    named = {
        f"model.layers.{i}.{name}.weight": value
        for i, layer in enumerate(weights.layers[:layers])
        for name, value in layer.items()
    }
    named["model.norm.weight"] = weights.final_gain
    # mlx's norm multiplies by 1 + weight
    model.load_weights(
        [(name, mx.array(gain - F32(1))) for name, gain in named.items() if "norm" in name], strict=False
    )
    model.load_weights([(name, _turned(matrix)) for name, matrix in named.items() if "norm" not in name], strict=False)
    model.lm_head.weight = _turned(weights.head(head_rows))
    if not query_norm:
        for layer in model.layers:
            layer.self_attn.q_norm = nn.Identity()
    return model


def round_positions(model: Model) -> None:
    """From now on ``model`` rotates by cosines and sines that were rounded to fp16."""
    args = model.args
    for layer in model.layers:
        attention = layer.self_attn
        attention.rope = _HalfRope(
            args.head_dim, args.rope_local_base_freq if attention.is_sliding else args.rope_theta
        )


def run(model: Model, rows: NDArray[F32], *, chunk_ends: Collection[int] | None = None) -> Reference:
    """One forward pass over embedding rows [T, hidden] (as they enter the first layer) from an empty cache.

    With ``chunk_ends``, the layers that end a chunk, K and V are rounded to fp16, and so is the residual stream after those layers.
    """
    kept = [_Kept(layer, i in (chunk_ends or ())) for i, layer in enumerate(model.model.layers)]
    layers, model.model.layers = model.model.layers, kept
    # mlx-lm looks at the first full layer's cache, so a model cut short gets caches for layers that it doesn't have
    caches = [KVCache() if chunk_ends is None else _HalfCache() for _ in range(max(len(kept), FULL_EVERY))]
    try:
        normed = model.model(None, caches, input_embeddings=scaled_down(rows)[None])
    finally:
        model.model.layers = layers
    mx.eval(normed)
    n, held = len(rows), caches[: len(kept)]

    def flat(array: Any) -> NDArray[F32]:
        return np.array(array[0, :, :n].transpose(1, 0, 2).reshape(n, -1))

    return Reference(
        model,
        tuple(np.array(layer.returned[0][0]) for layer in kept),
        tuple(flat(cache.keys) for cache in held),
        tuple(flat(cache.values) for cache in held),
        np.array(normed[0]),
    )


def greedy(
    model: Model, head: NDArray[F32], embed: Callable[[Sequence[int]], NDArray[F32]], tokens: Sequence[int], count: int
) -> list[int]:
    """``count`` tokens after ``tokens``, one at a time over mlx-lm's own caches, by the output matrix ``head``."""
    caches = model.make_cache()
    fed, said = tokens, list[int]()
    while len(said) < count:
        normed = model.model(None, caches, input_embeddings=scaled_down(embed(fed))[None])
        fed = [int((head @ np.array(normed[0, -1])).argmax())]
        said += fed
    return said


def _turned(matrix: NDArray[F32]) -> Any:
    """``matrix`` laid out as its transpose: mlx's CPU product with such a weight takes 0.4 of the time."""
    return mx.array(np.ascontiguousarray(matrix.T)).T


def scaled_down(rows: NDArray[F32]) -> Any:
    """Rows that become ``rows`` once mlx has multiplied them by √hidden, which it rounds to bfloat16 first."""
    root = mx.array(rows.shape[1] ** 0.5, mx.bfloat16).astype(mx.float32)
    return mx.array(rows) / root
