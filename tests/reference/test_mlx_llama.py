"""tiny-llama and SmolLM2 through our runtime and through mlx-lm's Llama: the same layers, cache rows and tokens, within bounds.

tiny-llama has the bundle's own numbers on both sides. SmolLM2's layers are on mlx's side the GGUF file's, read and dequantised by the gguf
package, with rotary pairs as they lie in the file: so the bundle's reordering of rows, its rounding to fp16 and its division by 32 are checked
too. Embedding rows and head are the bundle's on both sides. Bounds are about twice what was measured; ``pytest -s`` prints the figures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from bundle_weights import embedding_rows
from closeness import Bounds, bound, by_kind, compare_heads, largest_residual, table, violations
from measured import Figures
from recorded import TINY_TOKENS, Run, record

from kvstore.cli import cache_folder
from runtime.build.smollm2 import smollm2_offer
from runtime.bundle import Bundle

SMOLLM2_TOKENS = 719
TINY = Bounds.same(bound(rms=2.5e-3, row=6e-3, peak=4e-3))
SMOLLM2 = Bounds.same(bound(rms=2e-3, row=1.2e-2, peak=7e-3))
LOGITS = {"tiny": 0.03, "smollm2": 0.1}
"""How far apart a logit may be; the largest are about 3 and 30."""
NEAR_TIE = {"tiny": 0.01, "smollm2": 0.03}
"""Where mlx's token leads by more than this, ours is the same."""


@pytest.fixture(scope="module")
def mlx(require: Callable[[str], ModuleType]) -> ModuleType:
    require("mlx_lm")
    return require("mlx_llama")


@pytest.fixture(scope="module")
def tiny(mlx: ModuleType, tiny_llama_bundle: Path, prose: str) -> Run:
    return record(tiny_llama_bundle, Bundle.open(tiny_llama_bundle).tokenizer.encode(prose)[:TINY_TOKENS])


def test_tiny_every_layer_cache_row_and_token(mlx: ModuleType, tiny: Run, figures: Figures) -> None:
    theirs = mlx.run(mlx.build(tiny.bundle, mlx.bundle_tensors(tiny.bundle)), embedding_rows(tiny.bundle, tiny.tokens))
    print(f"\ntiny-llama, {TINY_TOKENS} tokens, every width, against mlx\n{table(tiny, theirs, TINY)}")
    figures.note("tiny", by_kind(tiny, theirs, TINY), bound=TINY.keys, tokens=TINY_TOKENS)
    assert set(tiny.functions) == {*tiny.bundle.config.prefill_functions.values(), "decode"}
    assert violations(tiny, theirs, TINY) == []
    heads = compare_heads(tiny, theirs.logits)
    near = heads.near_ties(NEAR_TIE["tiny"])
    print(f"tokens: {heads.described(NEAR_TIE['tiny'])}")
    most = TINY_TOKENS // 8
    figures.note("tiny_tokens", heads.figures(NEAR_TIE["tiny"]), logit_bound=LOGITS["tiny"], most_near_ties=most)
    assert len(heads.error) == TINY_TOKENS and heads.error.max() <= LOGITS["tiny"]
    assert set(heads.differing) <= set(near) and len(near) <= most


@pytest.mark.parametrize(
    ("mistake", "first"),
    [
        ({"rope": 1e4}, "keys[0]"),
        ({"interleaved": True}, "keys[0]"),
        ({"epsilon": 1e-2}, "keys[0]"),
        ({"heads": "swapped"}, "residual[0]"),
        ({"residual": "divided"}, "residual[0]"),
    ],
    ids=str,
)
def test_a_mistake_is_noticed(mlx: ModuleType, tiny: Run, mistake: dict[str, Any], first: str) -> None:
    """At the first array that it can reach, and not before."""
    tensors = mlx.bundle_tensors(tiny.bundle, residual_undone="residual" not in mistake)
    if "heads" in mistake:  # each query head reads another KV head
        for name in [name for name in tensors if name.endswith("q_proj.weight")]:
            tensors[name] = np.roll(tensors[name], 3 * 16, axis=0)
    model = mlx.build(tiny.bundle, tensors, **{k: v for k, v in mistake.items() if k not in ("heads", "residual")})
    assert violations(tiny, mlx.run(model, embedding_rows(tiny.bundle, tiny.tokens)), TINY)[0] == first


@pytest.mark.real_model
def test_smollm2_every_layer_cache_row_and_token(
    mlx: ModuleType, smollm2_bundle: Path, prose: str, tmp_path: Path, figures: Figures
) -> None:
    ours = record(smollm2_bundle, Bundle.open(smollm2_bundle).tokenizer.encode(prose)[:SMOLLM2_TOKENS])
    rows = embedding_rows(ours.bundle, ours.tokens)
    with (
        smollm2_offer(cache_folder() / "downloads").open(tmp_path),
        mlx.gguf_tensors(tmp_path / "smollm2.gguf", ours.bundle) as tensors,
    ):
        theirs = mlx.run(mlx.build(ours.bundle, tensors, interleaved=True), rows)
    theirs = replace(theirs, keys=tuple(mlx.neighbours_to_halves(keys, 64) for keys in theirs.keys))
    print(f"\nsmollm2, {SMOLLM2_TOKENS} tokens, against mlx over the GGUF file\n{table(ours, theirs, SMOLLM2)}")
    largest = largest_residual(theirs)
    figures.note(
        "smollm2",
        by_kind(ours, theirs, SMOLLM2),
        bound=SMOLLM2.keys,
        tokens=SMOLLM2_TOKENS,
        largest_residual=largest,
    )
    assert ours.functions == ("prefill_512", "prefill_32", "prefill_8", "prefill_4", "decode")
    assert violations(ours, theirs, SMOLLM2) == []
    heads = compare_heads(ours, theirs.logits)
    near = heads.near_ties(NEAR_TIE["smollm2"])
    print(f"tokens: {heads.described(NEAR_TIE['smollm2'])}")
    most = SMOLLM2_TOKENS // 20
    figures.note(
        "smollm2_tokens", heads.figures(NEAR_TIE["smollm2"]), logit_bound=LOGITS["smollm2"], most_near_ties=most
    )
    assert heads.error.max() <= LOGITS["smollm2"]
    assert set(heads.differing) <= set(near) and len(near) <= most
    assert abs(heads.nll_ours.mean() - heads.nll_reference.mean()) <= 1e-3
    assert heads.nll_ours.mean() < 4, "a model that reads English"
