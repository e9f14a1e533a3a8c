"""A run of our own runtime with everything kept: what each layer returns, the rows in the cache, what the heads saw.

Values inside a function are shown by adding them to its outputs before the engine plans it; they leave as float32, unrounded. The engine
computes them in any case, so what it returns otherwise is the same, and a test holds it to that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.bundle import Bundle
from runtime.engine import Engine, LoadLedger
from runtime.engine import Function as Runnable
from runtime.mlpackage import Function, Package, TensorSpec
from runtime.portable import PortableEngine
from runtime.session import Session

TINY_TOKENS = 815
"""One step of every width: 512 at the start, 256, 32, 8, 4, and three through decode."""
GEMMA_TOKENS = 719
"""The same without 256: 512 at the start, six of 32, 8, 4 and three through decode. 207 tokens past the window."""

RESIDUAL = re.compile(r"l(\d+)_(after_ffn|out)")
"""What graphs call the residual stream after a layer: Gemma 3's, whose layers end with the feed-forward part, and Gemma 4's."""

Arrays = dict[str, NDArray[Any]]


@contextmanager
def shown() -> Iterator[None]:
    """Inside, packages that are opened also return each layer's residual stream (:data:`RESIDUAL`), and a head's ``logits``."""
    original = Package.function

    def function(self: Package, name: str | None = None) -> Function:
        found = original(self, name)
        specs = {out: spec for op in found.ops for out, spec in op.outputs}
        extra = {n: TensorSpec(s.shape, "fp32") for n, s in specs.items() if RESIDUAL.fullmatch(n) or n == "logits"}
        return replace(found, outputs={**found.outputs, **extra})

    Package.function = function  # type: ignore[method-assign]
    try:
        yield
    finally:
        Package.function = original  # type: ignore[method-assign]


@dataclass
class RecordingEngine:
    """An engine over another one that keeps every result, and of the last call of each function its inputs."""

    inner: Engine
    results: dict[str, list[Arrays]] = field(default_factory=dict)
    calls: dict[tuple[str, str | None], tuple[Arrays, Arrays]] = field(default_factory=dict)

    @property
    def ledger(self) -> LoadLedger:
        return self.inner.ledger

    def describe(self) -> dict[str, str]:
        return self.inner.describe()

    def function(self, package: str, function: str | None) -> _Recording:
        return _Recording(self, package, function, self.inner.function(package, function))


@dataclass
class _Recording:
    engine: RecordingEngine
    package: str
    function: str | None
    inner: Runnable

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        return self.inner.inputs

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        return self.inner.outputs

    def __call__(self, inputs: Mapping[str, NDArray[Any]], *, kv_rows: tuple[int, int] | None = None) -> Arrays:
        results = self.inner(inputs, kv_rows=kv_rows)
        self.engine.results.setdefault(self.package, []).append(results)
        key = (self.package, self.function)
        # The cache is copied by the next function's turn only: until then it is still what this call read.
        self.engine.calls[key] = ({name: array.copy() for name, array in inputs.items()}, results)
        return results


@dataclass(frozen=True)
class Run:
    """Everything about ``tokens`` fed to an empty session, T of them.

    ``residual[i]`` float32 [T, hidden]: after layer i, divided by 32 as the packages carry it. ``keys[i]``, ``values[i]`` fp16 [T, kv width]: the cache
    of the layers that own one.
    ``final`` fp16 [T, hidden]: what a head is given. ``calls``: the last inputs and results of each (package, function).
    """

    bundle: Bundle
    engine: PortableEngine
    tokens: tuple[int, ...]
    functions: tuple[str, ...]
    residual: tuple[NDArray[np.float32], ...]
    keys: tuple[NDArray[np.float16], ...]
    values: tuple[NDArray[np.float16], ...]
    final: NDArray[np.float16]
    calls: dict[tuple[str, str | None], tuple[Arrays, Arrays]]

    def logits(self) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int32]]]:
        """(logits [4, vocabulary], tokens [4]) of four positions after four, by the head of width 4; the last rows may be padding."""
        head = self.engine.function(self.bundle.config.lmhead_batched[4], None)
        padded = np.concatenate([self.final, np.zeros((-len(self.final) % 4, self.final.shape[1]), np.float16)])
        for start in range(0, len(padded), 4):
            out = head({"hidden": padded[start : start + 4]})
            yield out["logits"], out["token"]

    def token(self, position: int) -> int:
        """The sequential head's token at ``position``."""
        head = self.engine.function(self.bundle.config.lmhead, None)
        return int(head({"hidden": self.final[position]})["token"].reshape(()))


def record(root: Path, tokens: Sequence[int], *, only_decode: bool = False) -> Run:
    """Feed ``tokens`` to a new session over the bundle in ``root``, as its schedule has it or through decode alone."""
    bundle = Bundle.open(root)
    config = bundle.config
    with shown():
        engine = PortableEngine(root)
        recording = RecordingEngine(engine)
        session = Session.open(bundle, recording, decode_only=only_decode)
        fed = session.feed(tokens)
        for package in {config.lmhead, *config.lmhead_batched.values()} - (
            {*config.lmhead_batched.values()} if only_decode else set()
        ):
            engine.function(package, None)
    width = config.hidden

    def joined(package: str, name: str) -> NDArray[Any]:
        return np.concatenate([results[name].reshape(-1, width) for results in recording.results[package]])

    residual = [
        joined(package, name)
        for package in config.chunks
        for name in sorted(
            filter(RESIDUAL.fullmatch, recording.results[package][0]), key=lambda name: int(RESIDUAL.sub(r"\1", name))
        )
    ]
    assert len(residual) == config.num_layers
    n = len(tokens)
    pairs = [session.kv.inputs(i) for i in range(config.first_shared)]
    return Run(
        bundle,
        engine,
        tuple(tokens),
        fed.functions,
        tuple(residual),
        tuple(k[0, :n] for k, _ in pairs),
        tuple(v[0, :n] for _, v in pairs),
        joined(config.chunks[-1], "hidden"),
        recording.calls,
    )
