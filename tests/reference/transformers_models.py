"""Hugging Face transformers' models, loaded by its own loader from folders as they would be published, in float32 on the CPU, with everything kept that a layer returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

F32 = np.float32
logging.disable_progress_bar()


@dataclass(frozen=True)
class Reference:
    """What transformers computed for T tokens, float32. ``hidden[i]`` [T, hidden] after layer i; ``keys[i]`` (after RoPE) and ``values[i]`` (after their
    norm, where there is one) [T, kv width] of the layers that own them. ``said`` [T, vocabulary]: its logits."""

    hidden: tuple[NDArray[F32], ...]
    keys: tuple[NDArray[F32], ...]
    values: tuple[NDArray[F32], ...]
    said: NDArray[F32]

    def logits(self, start: int, stop: int) -> NDArray[F32]:
        return self.said[start:stop]

    def first(self, n: int) -> Reference:
        """The first ``n`` tokens: nothing in them depends on later ones."""
        parts = (tuple(array[:n] for array in arrays) for arrays in (self.hidden, self.keys, self.values))
        return Reference(*parts, self.said[:n])


def load(root: Path, *, heads: int | None = None, gguf: str | None = None) -> Any:
    """The model in the folder ``root``, or in its GGUF file ``gguf``. Every tensor is used, and none is made up.

    ``heads`` takes the place of the configuration's query heads after it was checked: Llama's check refuses a number that doesn't divide the hidden
    width, though the model, given the width of a head, doesn't mind.
    """
    named = {} if gguf is None else {"gguf_file": gguf}
    config = AutoConfig.from_pretrained(root, local_files_only=True, **named)
    if heads is not None:
        config.num_attention_heads = heads
    model, info = AutoModelForCausalLM.from_pretrained(
        root,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
        **named,
    )
    assert not any(info.values()), info
    return model.eval()


def gguf_ids(root: Path, gguf: str, text: str) -> list[int]:
    """``text`` in tokens, by the tokenizer that transformers makes of a GGUF file's vocabulary."""
    found: list[int] = AutoTokenizer.from_pretrained(root, gguf_file=gguf, local_files_only=True).encode(text)
    return found


def with_head(model: Any, rows: NDArray[F32]) -> Any:
    """``model``, whose head from now on has ``rows`` of its own."""
    model.lm_head.weight = torch.nn.Parameter(torch.from_numpy(rows), requires_grad=False)
    return model


def run(model: Any, tokens: Sequence[int], rows: NDArray[F32] | None = None) -> Reference:
    """One forward pass over ``tokens``, or over embedding ``rows`` [T, hidden] in their place, from an empty cache that keeps every row, also those that
    have left the window."""
    hidden: list[NDArray[F32]] = []
    hooks = [
        # The list that `output_hidden_states` gives has the last layer's only after the final norm.
        layer.register_forward_hook(lambda module, given, out: hidden.append(out[0].numpy().copy()))
        for layer in model.model.layers
    ]
    cache = DynamicCache()
    given = {"input_ids": torch.tensor([list(tokens)])} if rows is None else {"inputs_embeds": torch.tensor(rows)[None]}
    with torch.inference_mode():
        said = model(**given, cache=cache, use_cache=True).logits[0].numpy()
    for hook in hooks:
        hook.remove()

    def flat(array: Any) -> NDArray[F32]:
        return np.ascontiguousarray(array[0].transpose(0, 1).reshape(len(tokens), -1).numpy())

    return Reference(
        tuple(hidden),
        tuple(flat(layer.keys) for layer in cache.layers),
        tuple(flat(layer.values) for layer in cache.layers),
        said,
    )
