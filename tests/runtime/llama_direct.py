"""Llama written directly in numpy, float32, from its definition: what a built bundle has to compute. Knows nothing of graphs or packages.

What it takes from `gemma3_direct` is the growing cache, the norm and the head; the layer, the embedding and the rotation are its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gemma3_direct import Array, Direct, rms_norm


@dataclass
class DirectLlama(Direct):
    """``tensor`` gives query and key rows with rotary pairs (i, i + head_dim/2)."""

    def feed(self, tokens: Sequence[int]) -> Array:
        x = np.stack([self.embed(token) for token in tokens])
        start = self.position
        for i in range(self.spec.layers):
            x = self._block(i, x, start)
            self.largest_hidden = max(self.largest_hidden, float(np.abs(x).max()))
        return x

    def _block(self, i: int, x: Array, start: int) -> Array:
        spec = self.spec

        def times(rows: Array, name: str) -> Array:
            return rows @ self.tensor(f"blk.{i}.{name}.weight").T

        def norm(rows: Array, name: str) -> Array:
            return rms_norm(rows, self.tensor(f"blk.{i}.{name}.weight"), spec.norm_epsilon)

        n, shared = len(x), spec.heads // spec.kv_heads
        inner = norm(x, "attn_norm")
        q, k = (
            turned(times(inner, name).reshape(n, -1, spec.head_dim), start, spec.rope_base_full)
            for name in ("attn_q", "attn_k")
        )
        self.keys[i].extend(k)
        self.values[i].extend(times(inner, "attn_v").reshape(n, spec.kv_heads, spec.head_dim))
        keys, values = np.stack(self.keys[i]), np.stack(self.values[i])
        out = np.zeros_like(q)
        for row in range(n):
            seen = start + row + 1
            for head in range(spec.heads):
                scores = keys[:seen, head // shared] @ q[row, head] / np.float32(math.sqrt(spec.head_dim))
                shares = np.exp(scores - scores.max())
                out[row, head] = shares @ values[:seen, head // shared] / shares.sum()
        x = x + times(out.reshape(n, -1), "attn_output")
        inner = norm(x, "ffn_norm")
        gate = times(inner, "ffn_gate")
        return x + times(gate / (1 + np.exp(-gate)) * times(inner, "ffn_up"), "ffn_down")


def turned(rows: Array, start: int, base: float) -> Array:
    """Each pair (i, i + width/2) as a complex number, turned by position · base^(−2i/width)."""
    half = rows.shape[-1] // 2
    angles = np.arange(start, start + len(rows))[:, None] * base ** (-np.arange(half) / half)
    z = (rows[..., :half] + 1j * rows[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([z.real, z.imag], axis=-1).astype(np.float32)
