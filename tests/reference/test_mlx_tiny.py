"""The tiny bundle through our runtime and its weights through mlx-lm's Gemma 3: the same layers, cache rows and tokens, within bounds.

Two references. *Plain* is mlx-lm as it is, float32 throughout. *Rounded* rounds to fp16 what the bundle's interface holds in fp16: cosines and sines, K and V
rows, the residual stream between chunks. The first says that it is the same model; the second, ten times closer, that nothing but those roundings
lies between. The controls are held to the second. Bounds are two to four times what was measured; ``pytest -s`` prints the figures.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from bundle_weights import RESIDUAL_SCALE, BundleWeights, embedding_rows, read_weights
from closeness import Bounds, bound, by_kind, compare_heads, distance, table, violations
from measured import Figures
from numpy.typing import NDArray
from recorded import TINY_TOKENS as TOKENS
from recorded import Run, record

from runtime.bundle import Bundle
from runtime.portable import PortableEngine
from runtime.session import Session

DECODED = 544
PLAIN = Bounds.same(bound(rms=4e-3, row=2e-2, peak=1.2e-2))
ROUNDED = Bounds.same(bound(rms=1e-3, row=3e-3, peak=2e-3))
LOGITS = {"plain": 0.08, "rounded": 0.015}
"""How far apart a logit may be; the largest are about 3."""
NEAR_TIE = {"plain": 0.015, "rounded": 0.003}
"""Where the reference's token leads by more than this, ours is the same."""


@pytest.fixture(scope="module")
def ours(tiny_run: Run) -> Run:
    return tiny_run


@pytest.fixture(scope="module")
def bundle(ours: Run) -> Bundle:
    return ours.bundle


@pytest.fixture(scope="module")
def tokens(ours: Run) -> list[int]:
    return list(ours.tokens)


@pytest.fixture(scope="module")
def weights(bundle: Bundle) -> BundleWeights:
    return read_weights(bundle)


@pytest.fixture(scope="module")
def mlx(require: Callable[[str], ModuleType]) -> ModuleType:
    require("mlx_lm")
    return require("mlx_gemma3")


@pytest.fixture(scope="module")
def rows(bundle: Bundle, tokens: list[int]) -> NDArray[np.float32]:
    return embedding_rows(bundle, tokens)


@pytest.fixture(scope="module")
def plain(mlx: ModuleType, weights: BundleWeights, rows: NDArray[np.float32]) -> Any:
    return mlx.run(mlx.build(weights), rows)


@pytest.fixture(scope="module")
def rounded(mlx: ModuleType, bundle: Bundle, rows: NDArray[np.float32]) -> Callable[[BundleWeights], Any]:
    """Makes the rounded reference of given weights, or a wrong one."""

    def run(weights: BundleWeights, **mistake: Any) -> Any:
        model = mlx.build(weights, **mistake)
        mlx.round_positions(model)
        return mlx.run(model, rows, chunk_ends=[stop - 1 for _, stop in bundle.config.chunk_bounds])

    return run


@pytest.fixture(scope="module")
def theirs(rounded: Callable[..., Any], weights: BundleWeights) -> Any:
    return rounded(weights)


def test_every_layer_and_cache_row(ours: Run, plain: Any, theirs: Any, figures: Figures) -> None:
    assert set(ours.functions) == {*ours.bundle.config.prefill_functions.values(), "decode"}
    for name, reference, bounds in (("plain", plain, PLAIN), ("rounded", theirs, ROUNDED)):
        print(f"\ntiny, {TOKENS} tokens, every width, against mlx {name}\n{table(ours, reference, bounds)}")
        figures.note(f"every_width_{name}", by_kind(ours, reference, bounds), bound=bounds.keys, tokens=TOKENS)
        assert violations(ours, reference, bounds) == []


def test_every_layer_and_cache_row_by_decode_alone(
    tiny_bundle: Path, tokens: list[int], plain: Any, theirs: Any, figures: Figures
) -> None:
    decoded = record(tiny_bundle, tokens[:DECODED], only_decode=True)
    assert decoded.functions == ("decode",)
    for name, reference, bounds in (
        ("plain", plain.first(DECODED), PLAIN),
        ("rounded", theirs.first(DECODED), ROUNDED),
    ):
        print(f"\ntiny, {DECODED} tokens, decode alone, against mlx {name}\n{table(decoded, reference, bounds)}")
        figures.note(f"decode_alone_{name}", by_kind(decoded, reference, bounds), bound=bounds.keys, tokens=DECODED)
        assert violations(decoded, reference, bounds) == []


def test_first_layer_is_the_same_but_for_the_last_bit(ours: Run, theirs: Any, figures: Figures) -> None:
    equal = [float((a == b).mean()) for a, b in ((ours.keys[0], theirs.keys[0]), (ours.values[0], theirs.values[0]))]
    apart = distance(ours.residual[0] * RESIDUAL_SCALE, theirs.hidden[0])
    print(f"\ntiny, layer 0 against mlx rounded: bit-equal K {equal[0]:.4f} V {equal[1]:.4f}; residual {apart}")
    figures.note("first_layer_rounded", equal_keys=equal[0], equal_values=equal[1], residual=apart)
    assert min(equal) >= 0.995
    assert apart.rms <= 2e-5


def test_tokens(ours: Run, plain: Any, theirs: Any, figures: Figures) -> None:
    for name, reference in (("plain", plain), ("rounded", theirs)):
        heads = compare_heads(ours, reference.logits)
        near = heads.near_ties(NEAR_TIE[name])
        print(f"\ntiny, tokens against mlx {name}: {heads.described(NEAR_TIE[name])}")
        figures.note(f"tokens_{name}", heads.figures(NEAR_TIE[name]), logit_bound=LOGITS[name])
        assert len(heads.error) == TOKENS
        assert heads.error.max() <= LOGITS[name]
        assert set(heads.differing) <= set(near) and len(near) <= TOKENS // 8
        assert abs(heads.nll_ours.mean() - heads.nll_reference.mean()) <= 1e-3


def test_both_heads_say_the_same(ours: Run) -> None:
    batched = np.concatenate([tokens for _, tokens in ours.logits()])[:TOKENS]
    assert [ours.token(p) for p in range(TOKENS)] == batched.tolist()
    assert len(set(batched.tolist())) > 50


def test_showing_values_changes_none(tiny_bundle: Path, bundle: Bundle, tokens: list[int], ours: Run) -> None:
    session = Session.open(bundle, PortableEngine(tiny_bundle))
    session.feed(tokens)
    assert session.pending == ours.token(TOKENS - 1)
    for layer in session.kv.layers:
        for held, recorded in zip(session.kv.inputs(layer), (ours.keys[layer], ours.values[layer]), strict=True):
            assert held[0, :TOKENS].tobytes() == recorded.tobytes()


# Controls: each mistake is noticed, at the first array that it can reach and not before.


@pytest.mark.parametrize("window", [511, 513])
def test_a_window_off_by_one_is_noticed(
    window: int, rounded: Callable[..., Any], weights: BundleWeights, ours: Run
) -> None:
    wrong = rounded(weights, window=window)
    assert violations(ours, wrong, ROUNDED, slice(0, 511)) == []
    assert violations(ours, wrong, ROUNDED, slice(512, None))[0] == "residual[0]"


@pytest.mark.parametrize(
    ("bases", "first"),
    [
        ({"rope_sliding": 1e6, "rope_full": 1e4}, "keys[0]"),
        ({"rope_full": 1e4}, "keys[5]"),
    ],
)
def test_a_swapped_rope_base_is_noticed(
    bases: dict[str, float], first: str, rounded: Callable[..., Any], weights: BundleWeights, ours: Run
) -> None:
    assert violations(ours, rounded(weights, **bases), ROUNDED)[0] == first


def test_a_missing_query_norm_is_noticed(rounded: Callable[..., Any], weights: BundleWeights, ours: Run) -> None:
    assert violations(ours, rounded(weights, query_norm=False), ROUNDED)[0] == "residual[0]"


def test_norm_gains_left_divided_are_noticed(
    mlx: ModuleType, rounded: Callable[..., Any], bundle: Bundle, rows: NDArray[np.float32], ours: Run
) -> None:
    divided = read_weights(bundle, residual_gains_undone=False)
    found = violations(ours, rounded(divided), ROUNDED)
    assert found[0] == "residual[0]" and "keys[1]" in found
    # Divided throughout, embeddings too, every norm undoes it: K and V come out right. The residual stream does not.
    found = violations(ours, mlx.run(mlx.build(divided), rows / np.float32(RESIDUAL_SCALE)), PLAIN)
    assert found == [f"residual[{i}]" for i in range(bundle.config.num_layers)]
