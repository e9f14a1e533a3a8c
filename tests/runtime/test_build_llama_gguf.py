"""Building from a Llama GGUF: the model in it, or a refusal that names the field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest

from runtime.build import SourceFieldError, build_bundle, estimate_build
from runtime.build.gguf_file import GgufFile
from runtime.build.llama import open_llama
from runtime.build.spec import FULL
from runtime.build.tiny import tiny_llama_source
from runtime.bundle import Bundle

Make = Callable[..., Path]
SOURCE = tiny_llama_source(0)
FIELDS, TENSORS = gguf_files.llama_fields(SOURCE), gguf_files.llama_tensors(SOURCE)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes the tiny-llama model's GGUF with fields and tensors changed (None leaves out)."""

    def made(fields: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Path:
        kept = {name: tensor for name, tensor in (TENSORS | (tensors or {})).items() if tensor is not None}
        return gguf_files.write(tmp_path / "model.gguf", FIELDS | (fields or {}), kept)

    return made


def test_a_gguf_of_tiny_llama_builds_tiny_llama(make: Make, tmp_path: Path, tiny_llama_bundle: Path) -> None:
    """Interleaved query and key rows included: the weights are the seeded ones, digest by digest."""
    path = make()
    built = build_bundle(None, tmp_path / "bundle", source=path)
    record = json.loads((tiny_llama_bundle / "kvferry.json").read_bytes())
    assert (built.weights, built.heads) == (record["weights"], record["heads"])
    assert built.terms is None and not (built.path / "NOTICE").exists()
    for name in ("embed_int8.bin", "embed_scale_f32.bin", "tokenizer.json", "tokenizer_config.json"):
        assert (built.path / name).read_bytes() == (tiny_llama_bundle / name).read_bytes()
    bundle = Bundle.open(built.path)
    assert bundle.identity() == Bundle.open(tiny_llama_bundle).identity()
    assert bundle.config.name == "tiny-llama" and bundle.config.chunk_bounds == ((0, 3),)
    assert bundle.config.eos_token_ids == {0, 2} and bundle.config.prompt_prefix == "<|im_start|>user\n"
    assert not build_bundle(None, tmp_path / "bundle", source=path).made
    assert estimate_build(None, source=path).bundle >= built.bytes


def test_rows_that_were_left_interleaved_are_another_model(make: Make, tmp_path: Path, tiny_llama_bundle: Path) -> None:
    path = make(tensors=gguf_files.tiny_tensors(SOURCE))
    record = json.loads((tiny_llama_bundle / "kvferry.json").read_bytes())
    assert build_bundle(None, tmp_path / "bundle", source=path).weights != record["weights"]


OPTIONAL = (
    "general.architecture", "general.name", "general.license", "llama.attention.value_length", "llama.rope.dimension_count",
    "llama.vocab_size", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.padding_token_id",
    "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix", "tokenizer.chat_template", "llama.attention.key_length",
)  # fmt: skip
PIECES = FIELDS["tokenizer.ggml.tokens"]
BROKEN: list[tuple[str, Any]] = [
    *((key, None) for key in FIELDS if key not in OPTIONAL),
    ("llama.block_count", 0),
    ("llama.attention.head_count_kv", 4),
    ("llama.attention.key_length", 17),
    ("llama.attention.value_length", 8),
    ("llama.rope.dimension_count", 8),
    ("llama.vocab_size", 1024),
    ("llama.context_length", 1024),
    ("llama.rope.freq_base", 0.5),
    ("llama.rope.scaling.type", "yarn"),
    ("llama.rope.scale_linear", 4.0),
    ("llama.attention.layer_norm_rms_epsilon", 0.0),
    ("llama.attention.sliding_window", 4096),
    ("llama.attention.causal", False),
    ("llama.attention.scale", 0.5),
    ("llama.attention.clamp_kqv", 8.0),
    ("llama.attn_logit_softcapping", 50.0),
    ("llama.final_logit_softcapping", 30.0),
    ("llama.expert_count", 8),
    ("llama.use_parallel_residual", True),
    ("llama.embedding_scale", 12.0),
    ("llama.residual_scale", 0.22),
    ("llama.logit_scale", 8.0),
    ("tokenizer.ggml.model", "llama"),
    ("tokenizer.ggml.pre", "llama-bpe"),
    ("tokenizer.ggml.add_space_prefix", True),
    ("tokenizer.ggml.add_eos_token", True),
    ("tokenizer.ggml.eos_token_id", 896),
    ("tokenizer.ggml.tokens", [*PIECES[:-1], PIECES[5]]),
    ("tokenizer.ggml.tokens", PIECES[:200]),
    ("tokenizer.ggml.token_type", [*FIELDS["tokenizer.ggml.token_type"][:-1], 6]),
    ("tokenizer.ggml.token_type", [1] * 895),
    ("tokenizer.ggml.merges", [*FIELDS["tokenizer.ggml.merges"], "qq zz"]),
    ("tokenizer.ggml.merges", [*FIELDS["tokenizer.ggml.merges"], "nothing"]),
]


@pytest.mark.parametrize(("key", "value"), BROKEN, ids=[f"{key}={str(value)[:12]}" for key, value in BROKEN])
def test_every_field_that_matters_is_checked_and_named(make: Make, key: str, value: Any) -> None:
    with pytest.raises(SourceFieldError) as caught, GgufFile(make({key: value})) as file:
        open_llama(file, None, "")
    assert caught.value.details["field"] == key
    assert all(word in str(caught.value) for word in (key, "expected", "found", "Llama"))


def test_heads_that_share_the_width_unevenly_are_refused(make: Make) -> None:
    """Without a key length a head is its share of the hidden width."""
    with (
        pytest.raises(SourceFieldError, match=r"llama\.attention\.head_count: .*share 64"),
        GgufFile(make({"llama.attention.key_length": None})) as file,
    ):
        open_llama(file, None, "")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("blk.2.ffn_up.weight", np.zeros((64, 128), np.float32)),
        ("blk.0.attn_norm.weight", None),
        ("rope_freqs.weight", np.zeros(8, np.float32)),
        ("blk.1.attn_q.bias", np.zeros(144, np.float32)),
        ("blk.0.attn_q_norm.weight", np.zeros(16, np.float32)),
    ],
)
def test_every_tensor_is_checked_and_named(make: Make, name: str, tensor: Any) -> None:
    with (
        pytest.raises(SourceFieldError, match=re.escape(name)),
        GgufFile(make(tensors={name: tensor})) as file,
    ):
        open_llama(file, None, "")


def test_what_the_fields_mean(make: Make) -> None:
    changes = {
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 4,
        "llama.attention.key_length": None,
        "llama.attention.value_length": None,
        "llama.rope.dimension_count": None,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 8.0,
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.eot_token_id": 1,
        "tokenizer.chat_template": "[INST] {{ messages }}",
    }
    shapes = {f"blk.{i}.attn_{part}.weight": np.zeros((64, 64), np.float32) for i in range(3) for part in ("q", "k", "v", "output")}  # fmt: skip
    with GgufFile(make(changes, shapes)) as file:
        source = open_llama(file, "mine", "")
    spec = source.spec
    assert spec.name == "mine" and (spec.heads, spec.kv_heads, spec.head_dim) == (4, 4, 16)
    assert spec.layer_types == (FULL,) * 3 and spec.window is None and spec.attention_scale == 0.25
    assert spec.rope_frequencies(FULL)[0] == 0.125
    assert spec.eos_token_ids == (2, 1, 0) and source.turns is None
    config = json.loads(source.vocabulary.tokenizer_config_json())
    assert (config["add_bos_token"], config["bos_token"]) == (True, "<|im_start|>")
    assert json.loads(source.vocabulary.tokenizer_json())["pre_tokenizer"]["type"] == "ByteLevel"
