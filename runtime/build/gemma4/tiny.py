"""The ``tiny-gemma4`` model: Gemma 4's architecture at toy size, with weights drawn from a seed.

As with ``tiny``, what it says depends on everything it has read and doesn't fall into a loop. Gemma 4 ties its head to the embedding, and with random
weights such a head repeats the last token, unless what the layers add outweighs the embedding; here it does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.build.gemma4.config import CONTEXT, read_config
from runtime.build.gemma4.model import Gemma4Model
from runtime.build.gemma4.spec import EMBEDDING, PLE_EMBEDDING, Gemma4Spec
from runtime.build.source import Turns
from runtime.build.spec import FULL, SLIDING
from runtime.build.tiny import tiny_vocabulary

NAME = "tiny-gemma4"
_KINDS = (SLIDING, SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL)
_SHARED = 3
#: Control tokens and bytes come first in the vocabulary. Their embeddings are small, so that the tied head never says them.
_UNSAID, _SMALL = 6 + 256, 0.25
#: Means of gains that are not 1. Attention is sharp enough to keep what is said out of loops, and the feed-forward part small enough; sharper, or with
#: a larger feed-forward part, each layer would double the numerical noise of the one before.
_GAINS = {
    "q_norm.weight": 0.7,
    "k_norm.weight": 0.75,
    "post_feedforward_layernorm.weight": 0.5,
    "post_per_layer_input_norm.weight": 1.2,
    "layer_scalar": 0.75,
}
#: How far gains stray from their mean: a builder that forgets one is found out.
_SPREAD = 0.3
_TURNS = Turns("<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>\n")


def tiny_config() -> dict[str, Any]:
    """``config.json`` of the model: 7 layers, of which 4 own K and V (store layers 3 and 2), 2 heads of 32 or 64, window 512."""
    return {
        "model_type": "gemma4_text",
        "attention_bias": False,
        "attention_k_eq_v": False,
        "bos_token_id": 2,
        "enable_moe_block": False,
        "eos_token_id": [1, 5],
        "final_logit_softcapping": 30.0,
        "global_head_dim": 64,
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 64,
        "hidden_size_per_layer_input": 16,
        "intermediate_size": 128,
        "layer_types": list(_KINDS),
        "max_position_embeddings": CONTEXT,
        "num_attention_heads": 2,
        "num_hidden_layers": len(_KINDS),
        "num_key_value_heads": 1,
        "num_kv_shared_layers": _SHARED,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            SLIDING: {"rope_theta": 1e4, "rope_type": "default"},
        },
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "use_double_wide_mlp": True,
        "vocab_size": 1024,
        "vocab_size_per_layer_input": 1024,
    }


@dataclass(frozen=True, slots=True)
class SeededWeights:
    """Seeded tensors, each drawn from a stream of its own. Raw generator output is used, because numpy promises its stability."""

    spec: Gemma4Spec
    seed: int

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return MappingProxyType(self.spec.tensors())

    def has(self, name: str) -> bool:
        return name in self.shapes

    def tensor(self, name: str) -> NDArray[np.float32]:
        shape = self.shapes[name]
        drawn = self._draw(name, shape)
        if len(shape) == 1:
            mean = next((gain for end, gain in _GAINS.items() if name.endswith(end)), 1.0)
            return np.float32(mean) * (1 + np.float32(_SPREAD / 3**0.5) * drawn)
        if name in (EMBEDDING, PLE_EMBEDDING):
            # the host multiplies rows by the square root of their width
            width = shape[1] if name == EMBEDDING else self.spec.ple
            rows = drawn / np.float32(width**0.5)
            if name == EMBEDDING:
                rows[:_UNSAID] *= np.float32(_SMALL)
            return rows
        return drawn / np.float32(shape[1] ** 0.5)

    def _draw(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Uniform with variance 1."""
        raw = np.random.PCG64([self.seed, *name.encode()]).random_raw(math.prod(shape))
        unit = (raw >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)
        return (unit * np.float32(3**0.5)).reshape(shape)

    def row_blocks(self, name: str, rows: int) -> Iterator[NDArray[np.float32]]:
        whole = self.tensor(name)
        for start in range(0, len(whole), rows):
            yield whole[start : start + rows]


def tiny_gemma4(seed: int) -> Gemma4Model:
    """The model for ``seed``."""
    vocabulary = tiny_vocabulary()
    spec = read_config(tiny_config(), NAME)
    return Gemma4Model(
        spec=spec,
        weights=SeededWeights(spec, seed),
        tokenizer={
            "tokenizer.json": vocabulary.tokenizer_json(),
            "tokenizer_config.json": vocabulary.tokenizer_config_json(),
        },
        turns=_TURNS,
        origin={"kind": "seed", "seed": seed},
        license="Apache-2.0",
        terms=None,
    )
