"""Gemma 3 270M through our runtime and, with the same numbers, through mlx-lm: layers, cache rows, tokens, likelihood and text.

mlx-lm as it is, float32 throughout; ours rounds to fp16 what the bundle holds in fp16. The product with the output matrix of 262,144 rows is numpy's on
mlx's side, because mlx's takes minutes on a CPU; it is held to mlx's own on a part. Bounds are about twice what was measured; ``pytest -s`` prints it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from bundle_weights import BundleWeights, embedding_rows, read_weights
from closeness import Bounds, bound, by_kind, compare_heads, largest_residual, table, violations
from measured import Figures
from numpy.typing import NDArray
from recorded import GEMMA_TOKENS as TOKENS
from recorded import Run

from runtime.session import Session

pytestmark = pytest.mark.real_model

BOUNDS = Bounds(
    keys=bound(rms=1.2e-3, row=4e-3, peak=2e-3),
    values=bound(rms=1.6e-3, row=5e-3, peak=2e-3),
    residual=bound(rms=8e-4, row=3e-3, peak=1e-3),
)
FIRST_LAYER = Bounds(
    keys=bound(rms=1e-4, row=1e-3, peak=1e-3),
    values=bound(rms=1e-4, row=1e-3, peak=2e-3),
    residual=bound(rms=1e-5, row=2e-4, peak=1e-5),
)
LOGITS = 0.08
"""How far apart a logit may be; the largest are about 30."""
NEAR_TIE = 0.05
"""Where mlx's token leads by more than this, ours is the same."""
NLL = 1e-3
"""How far apart the mean negative log likelihoods may be, in nats a token."""
HEAD_PART = 16384
PROMPT, CONTINUATION = "Water boils at a temperature of", " 100 degrees Celsius."


@pytest.fixture(scope="module")
def mlx(require: Callable[[str], ModuleType]) -> ModuleType:
    require("mlx_lm")
    return require("mlx_gemma3")


@pytest.fixture(scope="module")
def ours(mlx: ModuleType, gemma_run: Run) -> Run:
    return gemma_run


@pytest.fixture(scope="module")
def weights(ours: Run) -> BundleWeights:
    return read_weights(ours.bundle)


@pytest.fixture(scope="module")
def model(mlx: ModuleType, weights: BundleWeights) -> Any:
    return mlx.build(weights, head_rows=HEAD_PART)


@pytest.fixture(scope="module")
def theirs(mlx: ModuleType, model: Any, ours: Run) -> Any:
    return mlx.run(model, embedding_rows(ours.bundle, ours.tokens))


@pytest.fixture(scope="module")
def head(weights: BundleWeights) -> NDArray[np.float32]:
    return weights.head()


def test_every_layer_and_cache_row(ours: Run, theirs: Any, figures: Figures) -> None:
    assert ours.functions == ("prefill_512", "prefill_32", "prefill_8", "prefill_4", "decode")
    print(f"\ngemma3-270m, {TOKENS} tokens, against mlx plain\n{table(ours, theirs, BOUNDS)}")
    found = by_kind(ours, theirs, BOUNDS)
    figures.note("plain", found, bounds=BOUNDS, tokens=TOKENS, largest_residual=largest_residual(theirs))
    assert violations(ours, theirs, BOUNDS) == []


def test_tokens_and_likelihood(ours: Run, theirs: Any, head: NDArray[np.float32], figures: Figures) -> None:
    part = theirs.logits(TOKENS - 8, TOKENS)
    assert part.shape == (8, HEAD_PART)
    assert np.abs(part - theirs.normed[-8:] @ head[:HEAD_PART].T).max() <= 1e-3
    heads = compare_heads(ours, lambda start, stop: theirs.normed[start:stop] @ head.T)
    near = heads.near_ties(NEAR_TIE)
    print(f"\ngemma3-270m, tokens against mlx plain: {heads.described(NEAR_TIE)}")
    figures.note("tokens_plain", heads.figures(NEAR_TIE), logit_bound=LOGITS)
    assert len(heads.error) == TOKENS
    assert heads.error.max() <= LOGITS
    assert set(heads.differing) <= set(near) and len(near) <= TOKENS // 20
    assert abs(heads.nll_ours.mean() - heads.nll_reference.mean()) <= NLL
    assert heads.nll_ours.mean() < 4, "a model that reads English"


def test_both_heads_say_the_same(ours: Run) -> None:
    batched = [tokens for _, (_, tokens) in zip(range(4), ours.logits(), strict=False)]
    assert [ours.token(p) for p in range(16)] == np.concatenate(batched).tolist()


def test_greedy_text(mlx: ModuleType, model: Any, ours: Run, head: NDArray[np.float32]) -> None:
    tokenizer = ours.bundle.tokenizer
    tokens = tokenizer.encode(PROMPT)
    count = len(tokenizer.encode(PROMPT + CONTINUATION)) - len(tokens)
    session = Session.open(ours.bundle, ours.engine)
    session.feed(tokens)
    said = list(session.generate(count).tokens)
    assert tokenizer.decode([*tokens, *said]) == PROMPT + CONTINUATION
    assert mlx.greedy(model, head, lambda fed: embedding_rows(ours.bundle, fed), tokens, count) == said


@pytest.mark.parametrize("window", [511, 512, 513])
def test_a_window_off_by_one_is_noticed(
    window: int, mlx: ModuleType, weights: BundleWeights, ours: Run, figures: Figures
) -> None:
    """One layer is enough to see it, rounded as the bundle's interface rounds."""
    short = mlx.build(weights, window=window, layers=1, head_rows=1)
    mlx.round_positions(short)
    seen = mlx.run(short, embedding_rows(ours.bundle, ours.tokens), chunk_ends=())
    print(f"\ngemma3-270m, layer 0, window {window}, against mlx rounded\n{table(ours, seen, FIRST_LAYER)}")
    if window == 512:
        figures.note("first_layer_rounded", by_kind(ours, seen, FIRST_LAYER), bounds=FIRST_LAYER, tokens=TOKENS)
    assert violations(ours, seen, FIRST_LAYER, slice(0, 511)) == []
    found = violations(ours, seen, FIRST_LAYER, slice(513, None))
    assert found == [] if window == 512 else found[0] == "residual[0]"
