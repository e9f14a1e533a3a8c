"""Gemma 3 270M's ``decode``, ``prefill_32`` and heads in onnxruntime, on the inputs of a real run, one package at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from closeness import bound, worst
from measured import Figures
from recorded import GEMMA_TOKENS as TOKENS
from recorded import Run

pytestmark = pytest.mark.real_model

LIMIT = bound(rms=6e-4, row=3e-3, peak=1.5e-3)
EQUAL = 0.6
LOGITS = 2e-4


@pytest.fixture(scope="module")
def onnx_peer(require: Callable[[str], ModuleType]) -> ModuleType:
    require("onnx")
    require("onnxruntime")
    return require("onnx_peer")


@pytest.fixture(scope="module")
def ours(onnx_peer: ModuleType, gemma_run: Run) -> Run:
    return gemma_run


@pytest.mark.parametrize("name", ["decode", "prefill_32"])
@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_function(
    name: str, chunk: int, ours: Run, gemma_bundle: Path, onnx_peer: ModuleType, figures: Figures
) -> None:
    package = ours.bundle.config.chunks[chunk]
    inputs, results = ours.calls[package, name]
    theirs = onnx_peer.Peer(gemma_bundle / package, name)(inputs)
    if name == "decode":
        theirs = onnx_peer.without_cache(theirs, inputs)
    assert all(np.array_equal(a, a.astype(np.float16)) for n, a in theirs.items() if n != "hidden")
    found = onnx_peer.agreements(results, theirs)
    assert len(found) == 13
    print(
        f"\ngemma3-270m {package}:{name}: least equal {min(a.equal for a in found):.3f}; {worst([a.apart for a in found])}"
    )
    figures.function(name, [a.equal for a in found], [a.apart for a in found])
    figures.note("bound", LIMIT, equal=EQUAL)
    assert [str(a) for a in found if a.equal < EQUAL or not a.apart.within(LIMIT)] == []


def test_heads(ours: Run, gemma_bundle: Path, onnx_peer: ModuleType, figures: Figures) -> None:
    config = ours.bundle.config
    peer = onnx_peer.Peer(gemma_bundle / config.lmhead_batched[4], None)
    error = 0.0
    for start, (logits, tokens) in zip(range(0, 16, 4), ours.logits(), strict=False):
        theirs = peer({"hidden": ours.final[start : start + 4]})
        assert tokens.tolist() == theirs["token"].tolist()
        error = max(error, float(np.abs(logits - theirs["logits"]).max()))
    print(f"\ngemma3-270m head of four: largest logit difference {error:.1e}")
    figures.note("heads", largest_logit_difference=error, logit_bound=LOGITS)
    assert error <= LOGITS
    del peer
    peer = onnx_peer.Peer(gemma_bundle / config.lmhead, None)
    for position in (0, 100, TOKENS - 1):
        assert peer({"hidden": ours.final[position]})["token"].tolist() == [ours.token(position)]
