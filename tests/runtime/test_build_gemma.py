"""The gemma3-270m bundle: SentencePiece's ids, Gemma's sentence, the direct model's numbers, and fp16 without overflow."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import sentencepiece_model as sp
from built_models import Kept, Runner, as_kept, relative_error
from gemma3_direct import Direct
from text import FERRY, KITCHEN
from tokenizer_texts import TEXTS

from runtime.build import build_bundle, estimate_build
from runtime.build.authoring import write_package
from runtime.build.emitter import Numerics
from runtime.build.graph import fold
from runtime.build.models import GEMMA_SHA256, packaged_gemma
from runtime.build.packages import chunk_recipes, read_layer
from runtime.build.source import Source
from runtime.bundle import Bundle
from runtime.engine import Fp16Overflow
from runtime.portable import PortableEngine

pytestmark = pytest.mark.real_model

BOILS = "Water boils at a temperature of"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    with packaged_gemma(tmp_path_factory.mktemp("gguf")) as source:
        yield source


@pytest.fixture(scope="module")
def engine(gemma_bundle: Path) -> PortableEngine:
    return PortableEngine(gemma_bundle)


def test_ids_are_sentencepieces(gemma_bundle: Path, source: Source) -> None:
    reference = sp.processor(source.vocabulary)
    tokenizer = Bundle.open(gemma_bundle).tokenizer
    assert len(TEXTS) >= 84
    for text in (*TEXTS, KITCHEN, FERRY):
        found = tokenizer.encode(text, bos=False)
        assert found == reference.encode(text), repr(text)
        assert tokenizer.decode(found) == text.replace("▁", " ")
    draw = random.Random(7)
    alphabets = [*TEXTS, "".join(map(chr, range(1, 128))), "ab ▁", "  \n\t", "a", "-=", "😀👩‍👧 "]
    for _ in range(1500):
        characters = "".join(draw.sample([a for a in alphabets if a], 2))
        text = "".join(draw.choice(characters) for _ in range(draw.randint(1, 60)))
        assert tokenizer.encode(text, bos=False) == reference.encode(text), repr(text)


def test_special_tokens_written_out_become_their_ids(gemma_bundle: Path, source: Source) -> None:
    tokenizer, reference = Bundle.open(gemma_bundle).tokenizer, sp.processor(source.vocabulary)
    pieces = source.vocabulary.pieces
    parts = ["<start_of_turn>", "user\n How are  you?", "<end_of_turn>", "\n", "<eos>", "text", "<unused7>", "<bos>"]
    expected: list[int] = []
    for part in parts:
        expected += [pieces.index(part)] if part.startswith("<") else reference.encode(part)
    assert tokenizer.encode("".join(parts), bos=False) == expected
    assert tokenizer.encode("<bos>x")[:2] == [2, *reference.encode("x")]
    assert tokenizer.encode("x")[0] == 2


def test_water_boils(gemma_bundle: Path, engine: PortableEngine) -> None:
    runner = Runner(gemma_bundle, engine)
    said = runner.greedy(runner.bundle.tokenizer.encode(BOILS), 7)
    assert runner.bundle.tokenizer.decode(said) == " 100 degrees Celsius."


@pytest.fixture(scope="module")
def kept(source: Source) -> Kept:
    return as_kept(source.weights)


def prompt(bundle: Path, length: int) -> list[int]:
    tokens = Bundle.open(bundle).tokenizer.encode(KITCHEN.strip() + "\n" + FERRY.strip())
    assert len(tokens) >= length
    return tokens[:length]


@pytest.mark.parametrize("length", [23, 570])
def test_the_executor_agrees_with_gemma3_written_directly(
    gemma_bundle: Path, engine: PortableEngine, source: Source, kept: Kept, length: int
) -> None:
    """One schedule of decode and narrow widths; one with the plain width, past the sliding window."""
    tokens = prompt(gemma_bundle, length)
    expected = Direct(source.spec, *kept)
    hidden = expected.feed(tokens)[-1]
    assert expected.largest_hidden > 65_504 / 2, "the real model's residual stream is what /32 is for"
    runner = Runner(gemma_bundle, engine)
    found = runner.feed(tokens)
    assert relative_error(found.astype(np.float32) * 32, hidden) < 1e-2
    for layer in range(source.spec.layers):
        for rows, other in zip(runner.rows(layer), (expected.keys[layer], expected.values[layer]), strict=True):
            assert relative_error(rows, np.stack(other).reshape(rows.shape)) < 1e-2
    assert runner.chain.token(found) == int(expected.logits(hidden[None]).argmax())


def test_fp16_everywhere_overflows_nowhere(gemma_bundle: Path) -> None:
    runner = Runner(gemma_bundle, PortableEngine(gemma_bundle, compute="fp16-rounding"))
    tokens = prompt(gemma_bundle, 560)
    assert np.isfinite(runner.feed(tokens)).all()
    assert max(float(np.abs(a).max()) for layer in range(18) for a in runner.rows(layer)) < 65_504
    boiling = Runner(gemma_bundle, PortableEngine(gemma_bundle, compute="fp16-rounding"))
    said = boiling.greedy(boiling.bundle.tokenizer.encode(BOILS), 7)
    assert boiling.bundle.tokenizer.decode(said) == " 100 degrees Celsius."


@pytest.mark.parametrize(
    "undone", [Numerics(residual_scale=1.0), Numerics(norm_by_maximum=False)], ids=["whole residual", "plain norm"]
)
def test_each_precaution_undone_overflows(gemma_bundle: Path, source: Source, tmp_path: Path, undone: Numerics) -> None:
    tokens = prompt(gemma_bundle, 32)
    fed = run_prefill_32(gemma_bundle, source, tmp_path / "kept", Numerics(), tokens)
    assert np.isfinite(fed).all()
    with pytest.raises(Fp16Overflow):
        run_prefill_32(gemma_bundle, source, tmp_path / "undone", undone, tokens)


def run_prefill_32(bundle: Path, source: Source, folder: Path, numerics: Numerics, tokens: Sequence[int]) -> np.ndarray:
    """Hidden rows after all layers, as one package in fp16-rounding mode."""
    bounds = (0, source.spec.layers)
    layers = {i: fold(source.spec, numerics, read_layer(source, i)) for i in range(*bounds)}
    recipe = next(r for r in chunk_recipes(source.spec, numerics, bounds, layers) if r.name == "prefill_32")
    write_package(folder / "all.mlpackage", [recipe])
    engine = PortableEngine(folder, compute="fp16-rounding")
    function = engine.function("all.mlpackage", None)
    inputs = {name: np.zeros(spec.shape, np.float16) for name, spec in function.inputs.items()}
    embeddings = Bundle.open(bundle).embed.take(tokens).astype(np.float32)
    inputs["hidden_in"] = (embeddings * 32 / numerics.residual_scale).astype(np.float16)
    rows = np.arange(32)
    inputs["onehot"][rows, rows] = 1
    for kind, frequencies in (("s", "sliding_attention"), ("f", "full_attention")):
        inputs[f"mask_{kind}"][:] = np.where(np.arange(2048)[None] <= rows[:, None], 0, -4e4)
        angles = np.outer(rows, source.spec.rope_frequencies(frequencies))
        inputs[f"cos_{kind}"] = np.tile(np.cos(angles), 2).astype(np.float16)
        inputs[f"sin_{kind}"] = np.tile(np.sin(angles), 2).astype(np.float16)
    return function(inputs)["hidden"]


def test_what_the_record_says(gemma_bundle: Path, source: Source) -> None:
    record = json.loads((gemma_bundle / "kvferry.json").read_bytes())
    assert record["license"] == "gemma"
    assert record["source"]["origin"] == {"kind": "gguf", "sha256": GEMMA_SHA256}
    config = Bundle.open(gemma_bundle).config
    assert config.chunk_bounds == ((0, 6), (6, 12), (12, 18)) and config.eos_token_ids == {1}
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    assert source.spec.attention_scale == 256**-0.5
    built = build_bundle("gemma3-270m", gemma_bundle)
    assert not built.made and built.terms is not None and "Gemma Terms of Use" in built.terms
    assert built.terms in (gemma_bundle / "NOTICE").read_text()
    assert 0.9 * estimate_build("gemma3-270m").bundle < built.bytes <= estimate_build("gemma3-270m").bundle
    layout = Bundle.open(gemma_bundle).layout()
    assert sum(2 * 2 * 256 * len(group.layers) for group in layout.groups) == 18_432


def test_a_local_file_of_the_same_bytes_is_the_same_bundle(
    gemma_bundle: Path, source: Source, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = next(tmp_path_factory.getbasetemp().rglob("gemma.gguf"))
    assert not build_bundle("gemma3-270m", gemma_bundle, source=path).made
