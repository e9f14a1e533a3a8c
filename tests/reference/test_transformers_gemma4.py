"""tiny-gemma4 through our runtime and through Hugging Face transformers' Gemma 4: every layer, the cache, the tokens; and five mistakes, each noticed.

A second reference beside mlx-lm's: a misreading that mlx-lm and we had in common would be seen here. The build is the one with fp16 weights and tables.
Transformers has the weights as that build keeps them and, for its head, the rows of ours; or all as drawn, its head tied to the embedding and its
logits capped, as in a published folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from closeness import Distance, bound, compare_heads, distance, worst
from gemma4_folder import write_folder
from measured import Figures
from optional import opted_in
from recorded import TINY_TOKENS as TOKENS
from recorded import Run, record
from test_gemma4 import PACKINGS, apart, as_kept, build, head_matrix, mutated, outside

from runtime.build.gemma4 import graph
from runtime.build.gemma4.model import Gemma4Model
from runtime.build.gemma4.tiny import tiny_config, tiny_gemma4

FP16 = PACKINGS["fp16"]
KEPT = bound(rms=1.2e-2, row=7e-2, peak=4e-2)
"""The residual stream against the weights as the build keeps them, in every layer. Bounds are about twice what was measured."""
KEPT_ROWS = bound(rms=4e-3, row=2e-2, peak=1.2e-2)
"""The same of K, after RoPE, and V, after its norm."""
DRAWN = bound(rms=3e-2, row=2.5e-1, peak=1.5e-1)
"""Everything against the weights as they were drawn."""
NEAR_TIE = 0.12
"""Where transformers leads by more than this, our token is the same."""
LOGITS = 0.3
"""How far apart a logit may be."""
SAME_AS_DRAWN = 0.95
"""The least share of positions with the token of the weights as drawn."""


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    opted_in("torch", "transformers")
    import transformers_models

    return transformers_models


@pytest.fixture(scope="module")
def model() -> Gemma4Model:
    return tiny_gemma4(0)


@pytest.fixture(scope="module")
def tokens(transformers: ModuleType, model: Gemma4Model, prose: str) -> list[int]:
    from tokenizers import Tokenizer

    content = model.tokenizer["tokenizer.json"]
    assert isinstance(content, str)
    found: list[int] = Tokenizer.from_str(content).encode(prose).ids[:TOKENS]
    return found


@pytest.fixture(scope="module")
def ours(model: Gemma4Model, tokens: list[int], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """815 tokens through every width, 303 of them past the window."""
    return record(build(model, FP16, tmp_path_factory.mktemp("ours") / "bundle"), tokens)


@pytest.fixture(scope="module")
def kept(
    transformers: ModuleType, model: Gemma4Model, tokens: list[int], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    folder = write_folder(
        tmp_path_factory.mktemp("kept"),
        model,
        config={**tiny_config(), "tie_word_embeddings": False, "final_logit_softcapping": None},
        tensors=as_kept(model, FP16),
        extra={"lm_head.weight": head_matrix(model, FP16)},
    )
    return transformers.run(transformers.load(folder), tokens)


@pytest.fixture(scope="module")
def drawn(
    transformers: ModuleType, model: Gemma4Model, tokens: list[int], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    return transformers.run(transformers.load(write_folder(tmp_path_factory.mktemp("drawn"), model)), tokens)


def strange(found: Mapping[str, Distance]) -> list[str]:
    """What is outside its bound against the weights as kept, in the order in which a model computes it."""
    return [name for name, one in found.items() if not one.within(KEPT if name.startswith("residual") else KEPT_ROWS)]


def test_every_layer_and_cache_row(ours: Run, kept: Any, drawn: Any, figures: Figures) -> None:
    assert set(ours.functions) == {*ours.bundle.config.prefill_functions.values(), "decode"}
    assert len(kept.hidden) == 7 and len(kept.keys) == len(ours.keys) == 4
    against = {"kept": apart(ours, kept), "drawn": apart(ours, drawn)}
    for name, found in against.items():
        print(f"\ntiny-gemma4 fp16, {TOKENS} tokens, against transformers over the weights as {name}")
        for at, one in found.items():
            print(f"  {at}: {one}")
        kinds = {
            kind: worst([one for at, one in found.items() if at.startswith(kind)])
            for kind in ("keys", "values", "residual")
        }
        figures.note(name, kinds, found, keys_and_values=worst([kinds["keys"], kinds["values"]]))
    figures.note("kept", bound=KEPT, bound_rows=KEPT_ROWS)
    figures.note("drawn", bound=DRAWN)
    assert strange(against["kept"]) == []
    assert outside(against["drawn"], DRAWN) == []


def test_first_layer_is_the_same_but_for_roundings(ours: Run, kept: Any) -> None:
    found = apart(ours, kept)
    assert found["residual[0]"].rms <= 1.2e-3
    assert max(found[f"{which}[0]"].rms for which in ("keys", "values")) <= 6e-4


def test_tokens(ours: Run, kept: Any, drawn: Any, figures: Figures) -> None:
    heads = compare_heads(ours, kept.logits)
    print(f"\ntiny-gemma4 fp16, tokens against transformers over the weights as kept: {heads.described(NEAR_TIE)}")
    near = heads.near_ties(NEAR_TIE)
    assert heads.error.max() <= LOGITS
    assert set(heads.differing) <= set(near) and len(near) <= TOKENS // 2
    said = np.concatenate([tokens for _, tokens in ours.logits()])[:TOKENS]
    same = float((said == drawn.said.argmax(1)).mean())
    print(f"the same token as transformers' published head, tied and capped, over the weights as drawn: {same:.3f}")
    figures.note(
        "tokens", heads.figures(NEAR_TIE), logit_bound=LOGITS, same_as_drawn=same, same_as_drawn_bound=SAME_AS_DRAWN
    )
    assert np.abs(drawn.said).max() < 30, "capped"
    assert same >= SAME_AS_DRAWN
    assert len(set(said.tolist())) > 50


def test_by_decode_alone(model: Gemma4Model, tokens: list[int], kept: Any, tmp_path: Path, figures: Figures) -> None:
    """700 tokens: nearly 200 past the window, every one through decode."""
    run = record(build(model, FP16, tmp_path / "bundle"), tokens[:700], only_decode=True)
    assert run.functions == ("decode",)
    found = apart(run, kept.first(700))
    print(f"\ntiny-gemma4 fp16, 700 tokens, decode alone: {worst(list(found.values()))}")
    figures.note("decode_alone", worst(list(found.values())), tokens=700)
    assert strange(found) == []


def test_both_references_say_the_same(
    transformers: ModuleType, model: Gemma4Model, tokens: list[int], drawn: Any, tmp_path: Path, figures: Figures
) -> None:
    """mlx-lm and transformers over one folder: what they differ by is float32's."""
    opted_in("mlx_lm", "reference")
    import mlx_gemma4

    theirs = mlx_gemma4.run(write_folder(tmp_path, model), tokens)
    found: dict[str, Distance] = {}
    for which in ("hidden", "keys", "values"):
        arrays = zip(getattr(theirs, which), getattr(drawn, which), strict=True)
        found |= {f"{which}[{i}]": distance(a, b) for i, (a, b) in enumerate(arrays)}
    print(f"\ntiny-gemma4 as drawn, mlx-lm against transformers: {worst(list(found.values()))}")
    limit = bound(rms=5e-5, row=4e-4, peak=3e-4)
    figures.note("mlx_against_transformers", worst(list(found.values())), bound=limit)
    assert outside(found, limit) == []


# Mistakes: each is made on our side, and the comparison notices it, at the first array that it can reach and not before.

Mistake = Callable[[Gemma4Model, pytest.MonkeyPatch], Gemma4Model]


def _no_per_layer_embedding(model: Gemma4Model, patch: pytest.MonkeyPatch) -> Gemma4Model:
    return mutated(model, lambda name, t: t * 0 if name.endswith("per_layer_projection.weight") else t)


def _no_layer_scalar(model: Gemma4Model, patch: pytest.MonkeyPatch) -> Gemma4Model:
    return mutated(model, lambda name, t: t * 0 + 1 if name.endswith("layer_scalar") else t)


def _no_value_norm(model: Gemma4Model, patch: pytest.MonkeyPatch) -> Gemma4Model:
    def plain(self: graph.ChunkFunction, value: Any, name: str) -> Any:
        return self.emit.mb.identity(x=value, name=name)

    patch.setattr(graph.ChunkFunction, "_value_norm", plain)
    return model


def _all_pairs_turning(model: Gemma4Model, patch: pytest.MonkeyPatch) -> Gemma4Model:
    return replace(model, spec=replace(model.spec, rope_share_full=1.0))


def _window(tokens: int) -> Mistake:
    return lambda model, patch: replace(model, spec=replace(model.spec, window=tokens))


@pytest.mark.parametrize(
    ("wrong", "first"),
    [
        pytest.param(_no_per_layer_embedding, "residual[0]", id="no per-layer embedding"),
        pytest.param(_no_layer_scalar, "residual[0]", id="no layer scalar"),
        pytest.param(_no_value_norm, "values[0]", id="no value norm"),
        pytest.param(_all_pairs_turning, "keys[2]", id="all pairs of a full layer turning"),
        pytest.param(_window(448), "residual[0]", id="window 448"),
        pytest.param(_window(576), "residual[0]", id="window 576"),
        pytest.param(_window(2048), "residual[0]", id="no window"),
    ],
)
def test_a_mistake_is_noticed(
    wrong: Mistake,
    first: str,
    model: Gemma4Model,
    tokens: list[int],
    kept: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    figures: Figures,
    request: pytest.FixtureRequest,
) -> None:
    run = record(build(wrong(model, monkeypatch), FP16, tmp_path / "wrong"), tokens)
    found = apart(run, kept)
    seen = strange(found)[0]
    figures.note("mistakes", {request.node.callspec.id: {"noticed_at": seen, "there": found[seen]}})
    assert seen == first
