"""tiny-llama and SmolLM2 through our runtime and through Hugging Face transformers' Llama: the same layers, cache rows and tokens, within bounds.

Of tiny-llama transformers loads a folder in the published form with the matrices as they were drawn, rounded to fp16: nothing of ours divides or
reorders them on the way, so what the packages fold in is compared too. Of SmolLM2 it reads the GGUF file itself: configuration, layers, the order of
rotary pairs, and the tokenizer. Embedding rows and head are the bundle's int8 ones, dequantised; once, for SmolLM2, they are the file's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from bundle_weights import MATRICES, constants_of, embedding_rows
from closeness import Bounds, bound, by_kind, compare_heads, largest_residual, table, violations
from measured import Figures
from numpy.typing import NDArray
from optional import opted_in
from recorded import TINY_TOKENS as TOKENS
from recorded import Run, record
from safetensors.numpy import save_file

from kvstore.cli import cache_folder
from runtime.build.sidecar import quantise_head
from runtime.build.smollm2 import smollm2_offer
from runtime.build.spec import OUTPUT, OUTPUT_NORM
from runtime.build.tiny import tiny_llama_source
from runtime.bundle import Bundle

F32 = np.float32
Tensors = dict[str, NDArray[F32]]

TINY = Bounds.same(bound(rms=2.5e-3, row=6e-3, peak=4e-3))
SMOLLM2 = Bounds.same(bound(rms=2e-3, row=1.2e-2, peak=7e-3))
SMOLLM2_FILE = Bounds.same(bound(rms=2e-2, row=1.6e-1, peak=5.2e-2))
"""The same with the file's embedding on the other side: what the int8 table costs is in it."""
SMOLLM2_TOKENS = 719
LOGITS = {"tiny": 0.03, "smollm2": 0.1}
"""How far apart a logit may be; the largest are about 3 and 30."""
NEAR_TIE = {"tiny": 0.01, "smollm2": 0.03}
"""Where transformers leads by more than this, our token is the same."""
SAME_AS_FILE = 0.96
"""The least share of positions where our token is that of the file's own embedding and head."""
HEADS = 9
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "attention_bias": False,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"},
    "tie_word_embeddings": False,
    "vocab_size": 896,
}
"""tiny-llama's, but for the query heads: its 9 are given when the model is made."""
NAMES = MATRICES | {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    opted_in("torch", "transformers")
    import transformers_models

    return transformers_models


@pytest.fixture(scope="module")
def ours(transformers: ModuleType, tiny_llama_bundle: Path, prose: str) -> Run:
    return record(tiny_llama_bundle, Bundle.open(tiny_llama_bundle).tokenizer.encode(prose)[:TOKENS])


@pytest.fixture(scope="module")
def tensors(ours: Run) -> Tensors:
    """By transformers' names."""
    source = tiny_llama_source(0)
    drawn = source.weights.tensor
    found = {
        f"model.layers.{i}.{public}.weight": drawn(f"blk.{i}.{own}.weight").astype(np.float16).astype(F32)
        for i in range(source.spec.layers)
        for own, public in NAMES.items()
    }
    head, steps = quantise_head(drawn(OUTPUT))
    found["model.norm.weight"] = drawn(OUTPUT_NORM)
    found["model.embed_tokens.weight"] = embedding_rows(ours.bundle, range(source.spec.vocabulary))
    found["lm_head.weight"] = head.astype(F32) * steps.astype(F32)
    return found


def write_llama(root: Path, tensors: Tensors, config: Mapping[str, Any] = CONFIG) -> Path:
    (root / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, root / "model.safetensors")
    return root


def test_tiny_every_layer_cache_row_and_token(
    transformers: ModuleType, ours: Run, tensors: Tensors, tmp_path: Path, figures: Figures
) -> None:
    theirs = transformers.run(transformers.load(write_llama(tmp_path, tensors), heads=HEADS), ours.tokens)
    print(f"\ntiny-llama, {TOKENS} tokens, every width, against transformers\n{table(ours, theirs, TINY)}")
    figures.note("tiny", by_kind(ours, theirs, TINY), bound=TINY.keys, tokens=TOKENS)
    assert set(ours.functions) == {*ours.bundle.config.prefill_functions.values(), "decode"}
    assert len(theirs.hidden) == len(theirs.keys) == 3
    assert violations(ours, theirs, TINY) == []
    heads = compare_heads(ours, theirs.logits)
    near = heads.near_ties(NEAR_TIE["tiny"])
    print(f"tokens: {heads.described(NEAR_TIE['tiny'])}")
    most = TOKENS // 8
    figures.note("tiny_tokens", heads.figures(NEAR_TIE["tiny"]), logit_bound=LOGITS["tiny"], most_near_ties=most)
    assert len(heads.error) == TOKENS and heads.error.max() <= LOGITS["tiny"]
    assert set(heads.differing) <= set(near) and len(near) <= most


@pytest.mark.parametrize(
    ("config", "rows", "first"),
    [
        pytest.param({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, None, "keys[0]", id="RoPE base"),
        pytest.param({"rms_norm_eps": 1e-2}, None, "keys[0]", id="epsilon"),
        pytest.param({}, "neighbours", "keys[0]", id="rotary pairs are neighbours"),
        pytest.param({}, "another KV head", "residual[0]", id="query heads read another KV head"),
    ],
)
def test_a_mistake_is_noticed(
    config: dict[str, Any],
    rows: str | None,
    first: str,
    transformers: ModuleType,
    ours: Run,
    tensors: Tensors,
    tmp_path: Path,
) -> None:
    """Made on the other side. At the first array that it can reach, and not before."""
    wrong = dict(tensors)
    for name in wrong:
        if rows == "neighbours" and name.endswith(("q_proj.weight", "k_proj.weight")):
            wrong[name] = wrong[name].reshape(-1, 2, 8, 64).swapaxes(1, 2).reshape(-1, 64)
        elif rows == "another KV head" and name.endswith("q_proj.weight"):
            wrong[name] = np.roll(wrong[name], 3 * 16, axis=0)
    theirs = transformers.run(
        transformers.load(write_llama(tmp_path, wrong, CONFIG | config), heads=HEADS), ours.tokens
    )
    assert violations(ours, theirs, TINY)[0] == first


@pytest.mark.real_model
def test_smollm2_every_layer_cache_row_and_token(
    transformers: ModuleType, smollm2_bundle: Path, prose: str, tmp_path: Path, figures: Figures
) -> None:
    opted_in("accelerate", "transformers")
    bundle = Bundle.open(smollm2_bundle)
    ids = bundle.tokenizer.encode(prose)
    ours = record(smollm2_bundle, ids[:SMOLLM2_TOKENS])
    with smollm2_offer(cache_folder() / "downloads").open(tmp_path):
        model = transformers.load(tmp_path, gguf="smollm2.gguf")
        theirs_ids = transformers.gguf_ids(tmp_path, "smollm2.gguf", prose)
    assert theirs_ids == ids, "the same tokens by the tokenizer that transformers makes of the file"
    file = transformers.run(model, ours.tokens)
    head = constants_of(bundle.package_path(bundle.config.lmhead))
    model = transformers.with_head(model, head["output_rows"].astype(F32) * head["output_scales"].astype(F32))
    theirs = transformers.run(model, ours.tokens, embedding_rows(bundle, ours.tokens))

    print(
        f"\nsmollm2, {SMOLLM2_TOKENS} tokens, against transformers over the GGUF file\n{table(ours, theirs, SMOLLM2)}"
    )
    print(f"the same over the file's own embedding\n{table(ours, file, SMOLLM2_FILE)}")
    figures.note(
        "smollm2",
        by_kind(ours, theirs, SMOLLM2),
        bound=SMOLLM2.keys,
        tokens=SMOLLM2_TOKENS,
        largest_residual=largest_residual(theirs),
    )
    figures.note("smollm2_file", by_kind(ours, file, SMOLLM2_FILE), bound=SMOLLM2_FILE.keys)
    assert violations(ours, theirs, SMOLLM2) == []
    assert violations(ours, file, SMOLLM2_FILE) == []
    heads = compare_heads(ours, theirs.logits)
    near = heads.near_ties(NEAR_TIE["smollm2"])
    said = np.concatenate([tokens for _, tokens in ours.logits()])[:SMOLLM2_TOKENS]
    same = float((said == file.said.argmax(1)).mean())
    print(f"tokens: {heads.described(NEAR_TIE['smollm2'])}; the same as with the file's embedding and head: {same:.3f}")
    most = SMOLLM2_TOKENS // 20
    figures.note(
        "smollm2_tokens",
        heads.figures(NEAR_TIE["smollm2"]),
        logit_bound=LOGITS["smollm2"],
        most_near_ties=most,
        same_as_file=same,
        same_as_file_bound=SAME_AS_FILE,
    )
    assert heads.error.max() <= LOGITS["smollm2"]
    assert set(heads.differing) <= set(near) and len(near) <= most
    assert same >= SAME_AS_FILE
    assert heads.nll_ours.mean() < 4, "a model that reads English"
