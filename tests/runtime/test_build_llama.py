"""The Llama graph: a built bundle computes Llama written directly, stays inside fp16, and `tiny-llama` has something to say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from built_models import Changed, Runner, as_kept, relative_error
from llama_direct import DirectLlama
from text import FERRY, KITCHEN

from runtime.build.assembly import assemble
from runtime.build.emitter import Numerics
from runtime.build.source import Source
from runtime.build.tiny import TinyWeights, tiny_llama_source
from runtime.bundle import Bundle
from runtime.engine import Fp16Overflow
from runtime.portable import PortableEngine

SOURCE = tiny_llama_source(0)
TOLERANCE = 1e-2
"""fp16 rows and hidden states between chunks; a wrong epsilon, scale or rotation is tens of times more."""


def direct(source: Source) -> DirectLlama:
    return DirectLlama(source.spec, *as_kept(source.weights))


def llama_like(factors: Mapping[str, float], **geometry: Any) -> Source:
    """tiny-llama with another geometry, or with tensors multiplied."""
    spec = replace(SOURCE.spec, **geometry)
    origin = {"kind": "test", "what": repr((factors, geometry))}
    return replace(SOURCE, spec=spec, weights=Changed(TinyWeights(spec, 0), factors), origin=origin)


def build(source: Source, out: Path, numerics: Numerics | None = None) -> Path:
    return assemble(source, out, progress=lambda *_: None, numerics=numerics).path


@pytest.fixture(scope="module")
def ids(tiny_llama_bundle: Path) -> list[int]:
    tokens = Bundle.open(tiny_llama_bundle).tokenizer.encode(KITCHEN.strip() + "\n" + FERRY.strip())
    assert len(tokens) > 2100
    return tokens


def check_against_direct(source: Source, root: Path, tokens: list[int], *, by_decode: bool = False) -> None:
    """Hidden state, K, V and next token, after all ``tokens``."""
    expected = direct(source)
    hidden = expected.feed(tokens)[-1]
    runner = Runner(root)
    found = runner.feed(tokens, by_decode=by_decode)
    assert relative_error(found.astype(np.float32) * 32, hidden) < TOLERANCE
    for layer in range(source.spec.layers):
        for rows, other in zip(runner.rows(layer), (expected.keys[layer], expected.values[layer]), strict=True):
            assert relative_error(rows, np.stack(other).reshape(rows.shape)) < TOLERANCE
    assert runner.chain.token(found) == int(expected.logits(hidden[None]).argmax())


@pytest.mark.parametrize("length", [1, 44, 512, 815])
def test_prefill_computes_llama(tiny_llama_bundle: Path, ids: list[int], length: int) -> None:
    check_against_direct(SOURCE, tiny_llama_bundle, ids[:length])


def test_decode_computes_llama(tiny_llama_bundle: Path, ids: list[int]) -> None:
    check_against_direct(SOURCE, tiny_llama_bundle, ids[:130], by_decode=True)


def test_another_geometry(tmp_path: Path, ids: list[int]) -> None:
    """One KV head for each head; a scale that is no power of two; a RoPE base and an epsilon that matter."""
    source = llama_like({"token_embd.weight": 0.05}, heads=5, kv_heads=5, head_dim=12, attention_scale=12**-0.5, rope_base_full=50.0, norm_epsilon=1e-3)  # fmt: skip
    check_against_direct(source, build(source, tmp_path / "bundle"), ids[:60])


@pytest.mark.parametrize(
    "wrong",
    [
        {"rope_base_full": 1e4},
        {"attention_scale": 0.2},
        {"activation": "gelu_tanh"},
        {"embedding_square": 4},
        {"norm_epsilon": 0.1},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_part_is_noticed(tmp_path: Path, ids: list[int], wrong: dict[str, Any]) -> None:
    root = build(replace(SOURCE, spec=replace(SOURCE.spec, **wrong)), tmp_path / "bundle")
    with pytest.raises(AssertionError):
        check_against_direct(SOURCE, root, ids[:44])


def test_greedy_text_is_the_direct_models_and_never_settles(tiny_llama_bundle: Path, ids: list[int]) -> None:
    engine = PortableEngine(tiny_llama_bundle)
    for start, length in ((0, 9), (40, 70), (100, 600)):
        said = Runner(tiny_llama_bundle, engine).greedy(ids[start : start + length], 32)
        assert said == direct(SOURCE).greedy(ids[start : start + length], 32)
        assert len(set(said)) >= 8 and min(said) >= 3 + 256, "no control token, and no half of a character"


def test_one_other_token_far_back_changes_what_is_said(tiny_llama_bundle: Path, ids: list[int]) -> None:
    engine = PortableEngine(tiny_llama_bundle)
    for length in (20, 60, 150, 300):
        other = list(ids[:length])
        other[length // 2] = 300 + (other[length // 2] + 77) % 500
        first, second = (Runner(tiny_llama_bundle, engine).greedy(tokens, 32) for tokens in (ids[:length], other))
        assert first != second


@pytest.fixture(scope="module")
def hot(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Callable[[Numerics | None], Path]]:
    """What SmolLM2 does to fp16, more of it: a residual stream above 65,504."""
    source = llama_like({"ffn_down.weight": 3000.0, "ffn_up.weight": 30.0})
    folder = tmp_path_factory.mktemp("hot")
    return source, lambda numerics: build(source, folder / f"{hash(numerics)}", numerics)


def test_a_residual_stream_above_fp16_is_carried(
    hot: tuple[Source, Callable[[Numerics | None], Path]], ids: list[int]
) -> None:
    source, made = hot
    expected = direct(source)
    expected.feed(ids[:40])
    assert expected.largest_hidden > 65_504, "the model must be one that needs it"
    root = made(None)
    assert np.isfinite(Runner(root, PortableEngine(root, compute="fp16-rounding")).feed(ids[:40])).all()
    check_against_direct(source, root, ids[:40])


@pytest.mark.parametrize(
    "undone", [Numerics(residual_scale=1.0), Numerics(norm_by_maximum=False)], ids=["whole residual", "plain norm"]
)
def test_each_precaution_undone_overflows(
    hot: tuple[Source, Callable[[Numerics | None], Path]], ids: list[int], undone: Numerics
) -> None:
    root = hot[1](undone)
    with pytest.raises(Fp16Overflow):
        Runner(root, PortableEngine(root, compute="fp16-rounding")).feed(ids[:40])


def test_the_seed_gives_these_weights_and_this_identity(tiny_llama_bundle: Path) -> None:
    """Stores hold KV under this identity: another one makes it useless, so it changes with a reason only."""
    identity = Bundle.open(tiny_llama_bundle).identity()
    assert dict(identity.fields)["weights"] == "4517405e7e288adf4d6f97ccb3e18071dd619401a01731e80c72a8aa8e54a68d"
    assert identity.digest.hex == "dbd0d093f5de27f208375682013ed4ee464f384669be38c0fda3db1f6098bac0"


def test_the_bundle_has_one_group_without_a_window(tiny_llama_bundle: Path) -> None:
    bundle = Bundle.open(tiny_llama_bundle)
    (group,) = bundle.layout().groups
    assert (group.name, group.window, group.layers) == ("full", None, (0, 1, 2))
    assert (group.kv_heads, group.head_dim, bundle.layout().bytes_per_token) == (3, 16, 2 * 2 * 3 * 3 * 16)
    config = bundle.config
    assert (config.architecture, config.sliding_window, config.inv_slide) == ("llama", None, None)
    assert config.embed.scale_square == 1 and bundle.tokenizer.bos_id is None
    assert config.prompt_prefix == "<|im_start|>user\n" and config.eos_token_ids == {0, 2}
