"""Built packages on the numpy executor against Gemma 3 written directly, and what each numerical precaution is for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from built_models import Runner, direct, hot_source, relative_error, tiny_like
from text import KITCHEN

from runtime.build.assembly import assemble
from runtime.build.emitter import Numerics
from runtime.build.source import Source
from runtime.build.tiny import tiny_source
from runtime.engine import Fp16Overflow
from runtime.portable import PortableEngine

pytestmark = pytest.mark.slow

#: fp16 rows and hidden states between chunks; a wrong epsilon, scale or rotation is tens of times more.
TOLERANCE = 1e-2


def build(source: Source, out: Path, numerics: Numerics | None = None) -> Path:
    return assemble(source, out, progress=lambda *_: None, numerics=numerics).path


def check_against_direct(
    source: Source, root: Path, tokens: list[int], *, by_decode: bool, engine: PortableEngine
) -> None:
    """Hidden state, K and V of every layer, after all ``tokens``."""
    expected = direct(source)
    hidden = expected.feed(tokens)[-1]
    runner = Runner(root, engine)
    found = runner.feed(tokens, by_decode=by_decode).astype(np.float32) * 32.0
    assert np.isfinite(found).all()
    assert relative_error(found, hidden) < TOLERANCE
    for layer in range(source.spec.layers):
        k, v = runner.rows(layer)
        assert relative_error(k, np.stack(expected.keys[layer]).reshape(k.shape)) < TOLERANCE
        assert relative_error(v, np.stack(expected.values[layer]).reshape(v.shape)) < TOLERANCE


@pytest.mark.parametrize("length", [1, 2, 44, 511, 512, 525, 1400])
def test_prefill_computes_gemma3(tiny_bundle: Path, ids: list[int], length: int) -> None:
    engine = PortableEngine(tiny_bundle)
    check_against_direct(tiny_source(0), tiny_bundle, ids[:length], by_decode=False, engine=engine)


def test_decode_computes_gemma3_beyond_the_window(tiny_bundle: Path, ids: list[int]) -> None:
    check_against_direct(tiny_source(0), tiny_bundle, ids[:560], by_decode=True, engine=PortableEngine(tiny_bundle))


def test_greedy_text_is_the_direct_models(tiny_bundle: Path, ids: list[int]) -> None:
    engine = PortableEngine(tiny_bundle)
    for start, length in ((0, 9), (40, 70), (100, 600)):
        prompt = [2, *ids[start : start + length]]
        assert Runner(tiny_bundle, engine).greedy(prompt, 32) == direct(tiny_source(0)).greedy(prompt, 32)


def test_several_kv_heads_and_groups(tmp_path: Path, ids: list[int]) -> None:
    source = tiny_like(heads=6, kv_heads=3, head_dim=16, attention_scale=0.25)
    root = build(source, tmp_path / "bundle")
    engine = PortableEngine(root)
    check_against_direct(source, root, ids[:47], by_decode=False, engine=engine)
    check_against_direct(source, root, ids[:530], by_decode=False, engine=engine)
    check_against_direct(source, root, ids[:12], by_decode=True, engine=engine)


def test_linear_rope_scaling_is_for_full_layers(tmp_path: Path, ids: list[int]) -> None:
    source = tiny_like(rope_factor_full=8.0)
    check_against_direct(
        source, root := build(source, tmp_path / "b"), ids[:70], by_decode=False, engine=PortableEngine(root)
    )


@pytest.mark.parametrize(
    ("factors", "epsilon"),
    [
        ({}, 0.3),
        ({"token_embd.weight": 0.03}, 1e-3),
        ({"attn_q.weight": 0.01, "attn_k.weight": 0.01, "ffn_down.weight": 0.01}, 1e-4),
    ],
    ids=["large epsilon", "small residual", "small projections"],
)
def test_epsilon_counts_as_much_as_in_the_plain_norm(
    tmp_path: Path, ids: list[int], factors: dict[str, float], epsilon: float
) -> None:
    # A norm that takes epsilon as relative to the row's maximum is off by far where epsilon is as large as the mean square.
    source = tiny_like(factors=factors, norm_epsilon=epsilon)
    root = build(source, tmp_path / "bundle")
    check_against_direct(source, root, ids[:45], by_decode=False, engine=PortableEngine(root))


@pytest.fixture(scope="module")
def hot(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Numerics | None], Path]:
    folder = tmp_path_factory.mktemp("hot")

    def made(numerics: Numerics | None = None) -> Path:
        return build(hot_source(), folder / f"{hash(numerics)}", numerics)

    return made


def test_a_residual_stream_above_fp16_is_carried(hot: Callable[[Numerics | None], Path], ids: list[int]) -> None:
    root, source = hot(None), hot_source()
    expected = direct(source)
    expected.feed(ids[:40])
    assert expected.largest_hidden > 65_504, "the model must be one that needs it"
    for compute in ("fp32", "fp16-rounding"):
        engine = PortableEngine(root, compute=compute)  # type: ignore[arg-type]
        runner = Runner(root, engine)
        assert np.isfinite(runner.feed(ids[:40])).all()
    check_against_direct(source, root, ids[:40], by_decode=False, engine=PortableEngine(root))


@pytest.mark.parametrize(
    "undone", [Numerics(residual_scale=1.0), Numerics(norm_by_maximum=False)], ids=["whole residual", "plain norm"]
)
def test_each_precaution_undone_overflows(
    hot: Callable[[Numerics | None], Path], ids: list[int], undone: Numerics
) -> None:
    root = hot(undone)
    with pytest.raises(Fp16Overflow) as caught:
        Runner(root, PortableEngine(root, compute="fp16-rounding")).feed(ids[:40])
    assert caught.value.details["largest"] > 65_504


@pytest.mark.parametrize("compute", ["fp32", "fp16-rounding"])
def test_an_all_zero_row_stays_zero(tiny_bundle: Path, compute: str) -> None:
    engine = PortableEngine(tiny_bundle, compute=compute)  # type: ignore[arg-type]
    function = engine.function("chunk_0.mlpackage", "prefill_4")
    inputs = {name: np.zeros(spec.shape, np.float16) for name, spec in function.inputs.items()}
    inputs["mask_s"][:] = -4e4  # as for rows of padding: nothing is visible
    outputs = function(inputs)
    assert all(np.isfinite(array).all() for array in outputs.values())
    assert not outputs["hidden"].any()
    head = engine.function("lmhead.mlpackage", None)
    assert 0 <= int(head({"hidden": np.zeros(64, np.float16)})["token"][0]) < 1024


def test_fp16_rounding_finds_no_overflow_in_tiny(tiny_bundle: Path) -> None:
    runner = Runner(tiny_bundle, PortableEngine(tiny_bundle, compute="fp16-rounding"))
    tokens = runner.bundle.tokenizer.encode(KITCHEN)[:560]
    assert np.isfinite(runner.feed(tokens)).all()
