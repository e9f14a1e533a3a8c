"""Models the builder's tests make themselves, and running a bundle on the portable engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gemma3_direct import Direct
from numpy.typing import NDArray

from runtime.build.sidecar import quantise_head, quantise_sidecar
from runtime.build.source import Source
from runtime.build.spec import EMBEDDING, OUTPUT, Weights
from runtime.build.tiny import TinyWeights, tiny_source
from runtime.bundle import Bundle
from runtime.chain import Chain, decode_only, schedule
from runtime.hostkv import HostKV
from runtime.portable import PortableEngine

Array = NDArray[np.float32]

Kept = tuple[Callable[[str], Array], Callable[[int], Array]]


class Changed:
    """Weights with some tensors multiplied: ``factors`` by the end of the tensor's name."""

    def __init__(self, inner: Weights, factors: Mapping[str, float]) -> None:
        self._inner = inner
        self._factors = factors

    def has(self, name: str) -> bool:
        return self._inner.has(name)

    def tensor(self, name: str) -> Array:
        return self._inner.tensor(name) * np.float32(self._factor(name))

    def row_blocks(self, name: str, rows: int) -> Iterator[Array]:
        for block in self._inner.row_blocks(name, rows):
            yield block * np.float32(self._factor(name))

    def _factor(self, name: str) -> float:
        return next((by for end, by in self._factors.items() if f".{name}".endswith(f".{end}")), 1.0)


def tiny_like(*, seed: int = 0, factors: Mapping[str, float] | None = None, **geometry: Any) -> Source:
    """The tiny model with another geometry, or with tensors multiplied."""
    source = tiny_source(seed)
    spec = replace(source.spec, **geometry)
    weights = Changed(TinyWeights(spec, seed), factors or {})
    return replace(source, spec=spec, weights=weights, origin={"kind": "test", "what": repr((seed, factors, geometry))})


def hot_source() -> Source:
    """Tiny with what a real Gemma does to fp16: a residual stream above 65,504, and projections whose squares are."""
    return tiny_like(factors={"post_ffw_norm.weight": 30_000.0, "attn_q.weight": 300.0, "attn_v.weight": 100.0})


def direct(source: Source) -> Direct:
    """The plain numpy model of the weights as a bundle of ``source`` keeps them: fp16 layers, int8 embedding and head."""
    return Direct(source.spec, *as_kept(source.weights))


def as_kept(weights: Weights) -> Kept:
    """Tensors by GGUF name (``output`` is the head's matrix), and unscaled embedding rows by token."""
    rows, magnitudes = quantise_sidecar(weights.tensor(EMBEDDING))
    head_rows, steps = quantise_head(weights.tensor(OUTPUT if weights.has(OUTPUT) else EMBEDDING))
    kept: dict[str, Array] = {"output": head_rows * steps.astype(np.float32)}

    def tensor(name: str) -> Array:
        if name not in kept:
            kept[name] = weights.tensor(name).astype(np.float16).astype(np.float32)
        return kept[name]

    return tensor, lambda token: rows[token].astype(np.float32) * (magnitudes[token] / np.float32(127.0))


class Runner:
    """A bundle on an engine, from position 0."""

    def __init__(self, root: Path, engine: PortableEngine | None = None) -> None:
        self.bundle = Bundle.open(root)
        self.kv = HostKV(self.bundle.layout(), self.bundle.config.ctx)
        self.chain = Chain(self.bundle, engine or PortableEngine(root), self.kv)

    def feed(self, tokens: Sequence[int], *, by_decode: bool = False) -> NDArray[np.float16]:
        """Process ``tokens`` in the runtime's own schedule, or one by one; the last hidden row, [hidden]."""
        config = self.bundle.config
        steps = (
            decode_only(self.kv.position, len(tokens))
            if by_decode
            else schedule(self.kv.position, len(tokens), config.ctx, config.prefill_widths, config.plain_width)
        )
        at = 0
        for step in steps:
            hidden = self.chain.run(step, tokens[at : at + step.width])
            at += step.width
            self.kv.advance(step.start + step.width)
        return hidden

    def greedy(self, tokens: Sequence[int], count: int, *, by_decode: bool = False) -> list[int]:
        """``count`` tokens after ``tokens``; the last one is not fed."""
        said = [self.chain.token(self.feed(tokens, by_decode=by_decode))]
        while len(said) < count:
            said.append(self.chain.token(self.feed(said[-1:])))
        return said

    def rows(self, layer: int) -> tuple[Array, Array]:
        """K and V of the positions so far, [position, width]."""
        k, v = self.kv.inputs(layer)
        return tuple(a.reshape(self.bundle.config.ctx, -1)[: self.kv.position].astype(np.float32) for a in (k, v))  # type: ignore[return-value]


def relative_error(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Root mean square of the difference over that of ``expected``."""
    difference = found.astype(np.float64) - expected.astype(np.float64)
    return float(np.sqrt(np.mean(difference**2) / np.mean(expected.astype(np.float64) ** 2)))
