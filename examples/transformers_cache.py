"""A transformers DynamicCache in a kvferry store: a Llama is prefilled, saved, and continued from a fresh cache.

    pip install 'kvferry[transformers]'
    python examples/transformers_cache.py

Nothing is downloaded: the model is a small Llama with random weights. No bundle and no kvferry runtime takes part, only `kvstore`.
What an engine has to say is its `Layout` (how its rows lie), its `Identity` (whose KV it is), and where its rows are (`ArrayRows`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvstore import ArrayRows, Group, Identity, Layout, Lineage, Match, Store
from kvstore.layout import blocks_of

Half = NDArray[np.float16]

CONFIG: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    # Larger than usual, so that attention and not only the last token decides what comes next.
    "initializer_range": 0.15,
}
PROMPT = [(17 * i * i + 31 * i) % 1000 for i in range(201)]
OTHER = [*PROMPT[:150], *reversed(PROMPT[:40])]
GENERATED = 24

# What the store has to know. All layers see everything, so there is one group. `heads` side by side make a row.

GROUP = Group(
    name="full",
    window=None,
    layers=tuple(range(CONFIG["num_hidden_layers"])),
    kv_heads=CONFIG["num_key_value_heads"],
    head_dim=CONFIG["head_dim"],
)
LAYOUT = Layout((GROUP,))


def identity(weights: Mapping[str, NDArray[Any]]) -> Identity:
    """Everything that decides a KV byte: the geometry, the weights, and what turns text into ids."""
    digest = blake3()
    for name in sorted(weights):
        digest.update(f"{name} {weights[name].dtype} {weights[name].shape} ".encode())
        digest.update(np.ascontiguousarray(weights[name]).tobytes())
    parts = {name: str(value) for name, value in CONFIG.items()}
    return Identity.of({**parts, "weights": digest.hexdigest(), "tokenizer": "none: the prompt is given as ids"})


# Between a cache layer's arrays, [1, heads, tokens, head_dim], and rows, [tokens, heads * head_dim].


def to_rows(cache: Half) -> Half:
    """A new array of rows."""
    return np.ascontiguousarray(cache[0].transpose(1, 0, 2)).reshape(cache.shape[2], -1)


def from_rows(rows: Half) -> Half:
    """A new array as the cache has it."""
    return np.ascontiguousarray(rows.reshape(len(rows), GROUP.kv_heads, -1).transpose(1, 0, 2))[np.newaxis]


# The engine: torch and transformers, imported only here.


class Engine:
    """The model in fp16 on the CPU, and greedy decoding over a DynamicCache."""

    def __init__(self) -> None:
        import torch
        from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

        torch.manual_seed(3)
        self._torch, self._cache = torch, DynamicCache
        self._model = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(torch.float16).eval()
        self.weights = {name: value.numpy() for name, value in self._model.state_dict().items()}

    def empty(self) -> Any:
        """A fresh cache."""
        return self._cache(config=self._model.config)

    def feed(self, cache: Any, tokens: Sequence[int]) -> int:
        """Runs ``tokens`` and returns the next one, which is not fed yet: the pending token."""
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([list(tokens)]), cache=cache, use_cache=True).logits
        return int(logits[0, -1].argmax())

    def decode(self, cache: Any, pending: int) -> Iterator[int]:
        """The pending token, then what follows it, without end."""
        while True:
            yield pending
            pending = self.feed(cache, [pending])

    def export(self, cache: Any) -> ArrayRows:
        """The rows of every layer, copied out. K is as attention uses it, after its rotation."""
        pairs = {
            i: (to_rows(layer.keys.numpy()), to_rows(layer.values.numpy())) for i, layer in enumerate(cache.layers)
        }
        return ArrayRows(LAYOUT, pairs)

    def restored(self, store: Store, match: Match) -> Any:
        """A fresh cache with the first ``match.n`` tokens' rows. The store verifies every byte; what it refuses is an error, not a miss."""
        shape = (match.n, GROUP.row_elements)
        pairs = {layer: (np.empty(shape, np.float16), np.empty(shape, np.float16)) for layer in GROUP.layers}
        store.load(match, into=ArrayRows(LAYOUT, pairs))
        cache = self.empty()
        for layer, (k, v) in pairs.items():
            cache.update(*(self._torch.from_numpy(from_rows(a)) for a in (k, v)), layer)
        return cache


def take(tokens: Iterator[int]) -> list[int]:
    return [next(tokens) for _ in range(GENERATED)]


def main() -> None:
    engine = Engine()
    mine = identity(engine.weights)
    head = mine.digest.hex  # what chose the pending token; here the head is part of the weights
    made_by = Lineage.of({"engine": "transformers", "version": version("transformers"), "device": "cpu"})

    cache = engine.empty()
    pending = engine.feed(cache, PROMPT)
    with tempfile.TemporaryDirectory() as folder:
        with Store.open(Path(folder)) as store:
            saved = store.save(
                LAYOUT, mine, PROMPT, engine.export(cache), namespace="default", name="prompt",
                lineage=[made_by] * blocks_of(len(PROMPT)), pending=pending, head=head, model="random llama",
            )  # fmt: skip
        print(f"saved       {len(PROMPT)} tokens, {saved.written_bytes:,} bytes, as {saved.digest}")
        uninterrupted = take(engine.decode(cache, pending))

        with Store.open(Path(folder)) as store:
            match = store.find(LAYOUT, mine, PROMPT, namespace="default", head=head)
            assert match is not None and match.pending is not None
            continued = take(engine.decode(engine.restored(store, match), match.pending))
            print(f"restored    {match.n} of {len(PROMPT)} tokens; prefilled 0")
            print(f"continued   {continued}")
            if continued != uninterrupted:
                raise SystemExit(f"not what the uninterrupted run gives: {uninterrupted}")
            print("identical   to the uninterrupted run")

            # Another prompt, which begins like the first: reused to the token, in the middle of a block.
            match = store.find(LAYOUT, mine, OTHER, namespace="default", head=head)
            assert match is not None
            cache = engine.restored(store, match)
            engine.feed(cache, OTHER[match.n :])
            print(f"another     {match.n} of {len(OTHER)} tokens reused, {len(OTHER) - match.n} prefilled")


if __name__ == "__main__":
    main()
