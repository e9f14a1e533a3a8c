"""Gemma 3 written straight from its definition in numpy, float32: no ML Program, no divided residual stream, no chunks.

It shares nothing with the builder's graph but the names and conventions of a Gemma GGUF's tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from runtime.build.spec import FULL, Spec

Array = NDArray[np.float32]


def rms_norm(x: Array, gain: Array, epsilon: float) -> Array:
    mean = np.mean(np.square(x.astype(np.float64)), axis=-1, keepdims=True)
    return (x / np.sqrt(mean + epsilon) * gain).astype(np.float32)


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


@dataclass
class Direct:
    """A model with a growing cache: ``tensor`` gives weights by GGUF name, ``embed`` the unscaled embedding row of a token."""

    spec: Spec
    tensor: Callable[[str], Array]
    embed: Callable[[int], Array]
    keys: list[list[Array]] = field(default_factory=list)
    values: list[list[Array]] = field(default_factory=list)
    largest_hidden: float = 0.0

    def __post_init__(self) -> None:
        self.keys = [[] for _ in range(self.spec.layers)]
        self.values = [[] for _ in range(self.spec.layers)]

    @property
    def position(self) -> int:
        return len(self.keys[0])

    def feed(self, tokens: Sequence[int]) -> Array:
        """Process ``tokens`` after what has been fed; the hidden rows [n, hidden] before the final norm."""
        spec = self.spec
        x = np.stack([self.embed(token) for token in tokens]) * np.float32(math.sqrt(spec.hidden))
        positions = np.arange(self.position, self.position + len(tokens))
        for i in range(spec.layers):
            x = self._layer(i, x, positions)
            self.largest_hidden = max(self.largest_hidden, float(np.abs(x).max()))
        return x

    def logits(self, hidden: Array) -> Array:
        """[n, vocabulary] from hidden rows."""
        x = rms_norm(hidden, self.tensor("output_norm.weight"), self.spec.norm_epsilon)
        return x @ self.tensor("output").T

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        """``count`` tokens after ``tokens``; the last one is not fed."""
        hidden = self.feed(tokens)
        said: list[int] = []
        while True:
            said.append(int(self.logits(hidden[-1:]).argmax()))
            if len(said) == count:
                return said
            hidden = self.feed(said[-1:])

    def _layer(self, i: int, x: Array, positions: NDArray[np.int64]) -> Array:
        spec = self.spec

        def weight(name: str) -> Array:
            return self.tensor(f"blk.{i}.{name}.weight")

        def norm(rows: Array, name: str) -> Array:
            return rms_norm(rows, weight(name), spec.norm_epsilon)

        n = len(x)
        full = spec.layer_types[i] == FULL
        inner = norm(x, "attn_norm")
        q = norm((inner @ weight("attn_q").T).reshape(n, spec.heads, spec.head_dim), "attn_q_norm")
        k = norm((inner @ weight("attn_k").T).reshape(n, spec.kv_heads, spec.head_dim), "attn_k_norm")
        v = (inner @ weight("attn_v").T).reshape(n, spec.kv_heads, spec.head_dim)
        q, k = (self._rope(rows, positions, full=full) for rows in (q, k))
        self.keys[i].extend(k)
        self.values[i].extend(v)
        keys, values = np.stack(self.keys[i]), np.stack(self.values[i])
        slots = np.arange(len(keys))
        visible = slots[None] <= positions[:, None]
        if not full:
            visible &= positions[:, None] - slots[None] < spec.window
        out = np.empty((n, spec.heads, spec.head_dim), np.float32)
        for head in range(spec.heads):
            group = head // (spec.heads // spec.kv_heads)
            scores = q[:, head] @ keys[:, group].T * np.float32(spec.attention_scale)
            scores = np.where(visible, scores, -np.inf)
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = scores / scores.sum(axis=1, keepdims=True) @ values[:, group]
        x = x + norm(out.reshape(n, -1) @ weight("attn_output").T, "post_attention_norm")
        inner = norm(x, "ffn_norm")
        gated = gelu_tanh(inner @ weight("ffn_gate").T) * (inner @ weight("ffn_up").T)
        return x + norm(gated @ weight("ffn_down").T, "post_ffw_norm")

    def _rope(self, rows: Array, positions: NDArray[np.int64], *, full: bool) -> Array:
        spec = self.spec
        half = spec.head_dim // 2
        base = spec.rope_base_full if full else spec.rope_base_sliding
        angles = positions[:, None] * base ** (-np.arange(half) / half) / (spec.rope_factor_full if full else 1.0)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        low, high = rows[..., :half], rows[..., half:]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(np.float32)
