"""Another engine's KV cache in a kvferry store: an mlx-lm model is prefilled, saved, and continued from a fresh cache.

    pip install 'kvferry[reference]'
    python examples/mlx_cache.py

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
Pair = tuple[Half, Half]

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1000,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
PROMPT = [(17 * i * i + 31 * i) % 1000 for i in range(201)]
GENERATED = 24

# What the store has to know. All layers see everything, so there is one group. `heads` side by side make a row.

LAYOUT = Layout(
    (
        Group(
            name="full",
            window=None,
            layers=tuple(range(CONFIG["num_hidden_layers"])),
            kv_heads=CONFIG["num_key_value_heads"],
            head_dim=CONFIG["head_dim"],
        ),
    )
)


def identity(weights: Mapping[str, NDArray[Any]]) -> Identity:
    """Everything that decides a KV byte: the geometry, the weights, and what turns text into ids."""
    digest = blake3()
    for name in sorted(weights):
        digest.update(f"{name} {weights[name].dtype} {weights[name].shape} ".encode())
        digest.update(np.ascontiguousarray(weights[name]).tobytes())
    return Identity.of({**CONFIG, "weights": digest.hexdigest(), "tokenizer": "none: the prompt is given as ids"})


# Between the engine's arrays, [1, heads, tokens, head_dim], and rows, [tokens, heads * head_dim].


def to_rows(cache: Half) -> Half:
    """A new array of rows."""
    return np.ascontiguousarray(cache[0].transpose(1, 0, 2)).reshape(cache.shape[2], -1)


def from_rows(rows: Half, heads: int) -> Half:
    """A new array as the engine has it."""
    return np.ascontiguousarray(rows.reshape(len(rows), heads, -1).transpose(1, 0, 2))[np.newaxis]


# The engine: mlx-lm, imported only here.


class Engine:
    """The model, and greedy decoding over a list of mlx-lm caches."""

    def __init__(self) -> None:
        import mlx.core as mx
        from mlx.utils import tree_flatten, tree_map
        from mlx_lm.models import cache, llama

        mx.set_default_device(mx.cpu)
        mx.random.seed(3)
        self._mx, self._cache = mx, cache
        self._model = llama.Model(llama.ModelArgs(**CONFIG))
        # Larger than usual, so that attention and not only the last token decides what comes next.
        self._model.update(tree_map(lambda w: w * 3 if w.ndim == 2 else w, self._model.parameters()))
        self._model.set_dtype(mx.float16)
        mx.eval(self._model.parameters())
        self.weights = {name: np.array(value) for name, value in tree_flatten(self._model.parameters())}

    def empty(self) -> list[Any]:
        """A fresh cache: one for each layer."""
        return [self._cache.KVCache() for _ in range(CONFIG["num_hidden_layers"])]

    def feed(self, caches: list[Any], tokens: Sequence[int]) -> int:
        """Runs ``tokens`` and returns the next one, which is not fed yet: the pending token."""
        logits = self._model(self._mx.array([list(tokens)]), cache=caches)
        return int(self._mx.argmax(logits[0, -1]))

    def decode(self, caches: list[Any], pending: int) -> Iterator[int]:
        """The pending token, then what follows it, without end."""
        while True:
            yield pending
            pending = self.feed(caches, [pending])

    def export(self, caches: list[Any]) -> ArrayRows:
        """The rows of every layer, copied out. K is as attention uses it, after its rotation."""
        pairs: dict[int, Pair] = {}
        for layer, one in enumerate(caches):
            k, v = one.keys[:, :, : one.offset], one.values[:, :, : one.offset]
            pairs[layer] = (to_rows(np.array(k)), to_rows(np.array(v)))
        return ArrayRows(LAYOUT, pairs)

    def restored(self, store: Store, match: Match) -> list[Any]:
        """A fresh cache with the first ``match.n`` tokens' rows. The store verifies every byte; what it refuses is an error, not a miss."""
        group = LAYOUT.groups[0]
        pairs = {
            layer: (
                np.empty((match.n, group.row_elements), np.float16),
                np.empty((match.n, group.row_elements), np.float16),
            )
            for layer in group.layers
        }
        store.load(match, into=ArrayRows(LAYOUT, pairs))
        caches = self.empty()
        for layer, (k, v) in pairs.items():
            caches[layer].update_and_fetch(*(self._mx.array(from_rows(a, group.kv_heads)) for a in (k, v)))
        return caches


def take(tokens: Iterator[int]) -> list[int]:
    return [next(tokens) for _ in range(GENERATED)]


def main() -> None:
    engine = Engine()
    mine = identity(engine.weights)
    head = mine.digest.hex  # what chose the pending token; here the head is part of the weights
    made_by = Lineage.of({"engine": "mlx-lm", "version": version("mlx-lm"), "device": "cpu"})

    caches = engine.empty()
    pending = engine.feed(caches, PROMPT)
    with tempfile.TemporaryDirectory() as folder:
        with Store.open(Path(folder)) as store:
            saved = store.save(
                LAYOUT, mine, PROMPT, engine.export(caches), namespace="default", name="prompt",
                lineage=[made_by] * blocks_of(len(PROMPT)), pending=pending, head=head, model="random llama",
            )  # fmt: skip
        print(f"saved       {len(PROMPT)} tokens, {saved.written_bytes:,} bytes, as {saved.digest}")
        uninterrupted = take(engine.decode(caches, pending))

        with Store.open(Path(folder)) as store:
            match = store.find(LAYOUT, mine, PROMPT, namespace="default", head=head)
            assert match is not None and match.pending is not None
            again = engine.restored(store, match)
            continued = take(engine.decode(again, match.pending))
            print(f"restored    {match.n} of {len(PROMPT)} tokens; prefilled 0")
            print(f"continued   {continued}")
            if continued != uninterrupted:
                raise SystemExit(f"not what the uninterrupted run gives: {uninterrupted}")
            print("identical   to the uninterrupted run")

            # Another prompt, which begins like the first: reused to the token, in the middle of a block.
            other = [*PROMPT[:150], *reversed(PROMPT[:40])]
            match = store.find(LAYOUT, mine, other, namespace="default", head=head)
            assert match is not None
            caches = engine.restored(store, match)
            engine.feed(caches, other[match.n :])
            print(f"another     {match.n} of {len(other)} tokens reused, {len(other) - match.n} prefilled")

            # Other weights have another identity: their KV is not found.
            foreign = identity({**engine.weights, "lm_head": np.zeros(1, np.float16)})
            found = store.find(LAYOUT, foreign, PROMPT, namespace="default")
            print(f"other model {0 if found is None else found.n} of {len(PROMPT)} tokens reused")


if __name__ == "__main__":
    main()
