"""mlx-lm's Gemma 4, loaded by its own loader from a folder as it would be published, in float32 on the CPU, with everything kept that a layer returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.utils import load_model
from numpy.typing import NDArray

F32 = np.float32


@dataclass(frozen=True)
class Reference:
    """What mlx computed for T tokens, float32. ``hidden[i]`` [T, hidden] after layer i; ``keys[i]`` (after RoPE) and ``values[i]`` (after their norm)
    [T, head_dim] of the layers that own them. ``normed`` [T, hidden]: after the final norm."""

    hidden: tuple[NDArray[F32], ...]
    keys: tuple[NDArray[F32], ...]
    values: tuple[NDArray[F32], ...]
    normed: NDArray[F32]


class _Kept(nn.Module):
    """A decoder layer, and what it last returned."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.layer_type = layer.layer_type
        self.returned: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.layer(*args, **kwargs)
        self.returned = [out]
        return out


def run(root: Path, tokens: Sequence[int]) -> Reference:
    """One forward pass over ``tokens`` through the model in the folder ``root``, without a cache. Every tensor of the folder is used, and none is made up."""
    mx.set_default_device(mx.cpu)
    model, _ = load_model(root, strict=True)
    decoder = model.model
    kept = [_Kept(layer) for layer in decoder.layers]
    decoder.layers = kept
    normed = decoder(mx.array([tokens]))
    mx.eval(normed)
    owning = len(kept) - decoder.config.num_kv_shared_layers

    def rows(array: Any) -> NDArray[F32]:
        return np.array(array[0, 0])

    pairs = [layer.returned[0][1] for layer in kept[:owning]]
    return Reference(
        tuple(np.array(layer.returned[0][0][0]) for layer in kept),
        tuple(rows(keys) for keys, _ in pairs),
        tuple(rows(values) for _, values in pairs),
        np.array(normed[0]),
    )


def logits(root: Path, tokens: Sequence[int]) -> NDArray[F32]:
    """mlx-lm's own logits [T, vocabulary], with its soft-cap."""
    mx.set_default_device(mx.cpu)
    model, _ = load_model(root, strict=True)
    return np.array(model(mx.array([tokens]))[0])
