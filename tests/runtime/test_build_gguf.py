"""Building from a GGUF file: the model in it, or a refusal that names the field; never a crash on a damaged file."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest
from built_models import Runner
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.build import (
    ArchitectureUnsupported,
    BuildError,
    SourceDamaged,
    SourceFieldError,
    build_bundle,
    estimate_build,
)
from runtime.build.gemma3 import open_gemma3
from runtime.build.gguf_file import GgufFile, GgufWeights
from runtime.build.spec import FULL, SLIDING
from runtime.build.tiny import tiny_source
from runtime.bundle import Bundle

Make = Callable[..., Path]
SOURCE = tiny_source(0)
FIELDS, TENSORS = gguf_files.tiny_fields(SOURCE), gguf_files.tiny_tensors(SOURCE)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes the tiny model's GGUF with fields and tensors changed (None leaves out)."""

    def made(
        fields: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None, matrices: str = "F32"
    ) -> Path:
        kept = {name: tensor for name, tensor in (TENSORS | (tensors or {})).items() if tensor is not None}
        return gguf_files.write(tmp_path / "model.gguf", FIELDS | (fields or {}), kept, matrices=matrices)

    return made


def test_a_gguf_of_tiny_builds_tiny(make: Make, tmp_path: Path, tiny_bundle: Path) -> None:
    path = make()
    built = build_bundle(None, tmp_path / "bundle", source=path)
    record = json.loads((tiny_bundle / "kvferry.json").read_bytes())
    assert (built.weights, built.heads) == (record["weights"], record["heads"])
    assert built.terms is not None and "ai.google.dev/gemma/terms" in built.terms
    assert "ai.google.dev/gemma/terms" in (built.path / "NOTICE").read_text()
    for name in ("embed_int8.bin", "embed_scale_f32.bin", "tokenizer.json"):
        assert (built.path / name).read_bytes() == (tiny_bundle / name).read_bytes()
    bundle = Bundle.open(built.path)
    assert bundle.config.name == "tiny-gemma"
    assert bundle.config.chunk_bounds == ((0, 6),)
    assert bundle.config.eos_token_ids == {1, 5}
    assert bundle.config.prompt_prefix is None, "no chat template in the file: a base model"
    prompt = bundle.tokenizer.encode("The ferry leaves at")
    assert Runner(built.path).greedy(prompt, 8) == Runner(tiny_bundle).greedy(prompt, 8)
    assert not build_bundle(None, tmp_path / "bundle", source=path).made
    assert estimate_build(None, source=path).bundle >= built.bytes


def test_an_eight_bit_gguf_is_another_model_that_is_nearly_the_same(make: Make) -> None:
    with GgufFile(make(matrices="Q8_0")) as file:
        source = open_gemma3(file, None, "")
        for name in ("blk.3.ffn_down.weight", "blk.0.attn_k.weight", "token_embd.weight"):
            exact, found = TENSORS[name], source.weights.tensor(name)
            assert found.dtype == np.float32 and found.shape == exact.shape
            steps = np.abs(exact.reshape(-1, 32)).max(axis=1) / 127
            assert (np.abs(found - exact).reshape(-1, 32) <= 0.51 * steps[:, None] + 1e-3).all()
            assert not np.array_equal(found, exact)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q6_K", "Q5_0", "Q4_K"])
def test_any_block_format_is_read_as_the_gguf_package_reads_it(tmp_path: Path, kind: str) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quantization]
    raw = np.random.default_rng(1).integers(0, 60, (37, 512 // block * size), np.uint8)  # small exponents: no NaN
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", arch="x")
    plain = {"F32": np.float32, "F16": np.float16}.get(kind)
    writer.add_tensor("a", raw if plain is None else raw.view(plain), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = gguf.quants.dequantize(raw.reshape(37, -1), quantization).reshape(37, 512).astype(np.float32)
    with GgufFile(tmp_path / "m.gguf") as file:
        weights = GgufWeights(file)
        assert np.array_equal(weights.tensor("a"), expected)
        blocks = list(weights.row_blocks("a", 10))
        assert [len(b) for b in blocks] == [10, 10, 10, 7]
        assert np.array_equal(np.concatenate(blocks), expected)


@pytest.mark.parametrize("architecture", ["llama4", "gemma2", "gemma3n", "qwen3", None, 7])
def test_another_architecture_is_refused_by_name(make: Make, tmp_path: Path, architecture: Any) -> None:
    with pytest.raises(ArchitectureUnsupported) as caught:
        build_bundle(None, tmp_path / "out", source=make({"general.architecture": architecture}))
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.details["field"] == "general.architecture" and error.details["expected"] == "'gemma3' or 'llama'"
    assert str(architecture) in str(error) or architecture is None
    assert not (tmp_path / "out").exists()


BROKEN: list[tuple[str, Any]] = [
    *((key, None) for key in FIELDS if key not in (
        "general.architecture", "general.name", "general.license", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.padding_token_id",
    )),
    ("gemma3.block_count", 0),
    ("gemma3.block_count", "6"),
    ("gemma3.attention.head_count_kv", 3),
    ("gemma3.attention.head_count_kv", 0),
    ("gemma3.attention.key_length", 33),
    ("gemma3.attention.value_length", 64),
    ("gemma3.attention.sliding_window", 500),
    ("gemma3.attention.sliding_window", 4096),
    ("gemma3.attention.sliding_window_pattern", 0),
    ("gemma3.attention.sliding_window_pattern", [True, False]),
    ("gemma3.context_length", 1024),
    ("gemma3.rope.freq_base", float("nan")),
    ("gemma3.rope.freq_base", 1000000),
    ("gemma3.rope.scaling.type", "yarn"),
    ("gemma3.attention.layer_norm_rms_epsilon", 0.0),
    ("gemma3.attn_logit_softcapping", 50.0),
    ("gemma3.final_logit_softcapping", 30.0),
    ("tokenizer.ggml.model", "gpt2"),
    ("tokenizer.ggml.add_space_prefix", True),
    ("tokenizer.ggml.add_bos_token", False),
    ("tokenizer.ggml.bos_token_id", 1024),
    ("tokenizer.ggml.eot_token_id", 4096),
    ("tokenizer.ggml.scores", FIELDS["tokenizer.ggml.scores"][:-1]),
    ("tokenizer.ggml.tokens", [*FIELDS["tokenizer.ggml.tokens"][:-1], "<bos>"]),
    ("tokenizer.ggml.token_type", [*FIELDS["tokenizer.ggml.token_type"][:-1], 9]),
    ("tokenizer.ggml.token_type", [1] * 1024),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), BROKEN, ids=[f"{key}={str(value)[:12]}" for key, value in BROKEN])
def test_every_field_that_matters_is_checked_and_named(make: Make, key: str, value: Any) -> None:
    with pytest.raises(SourceFieldError) as caught, GgufFile(make({key: value})) as file:
        open_gemma3(file, None, "")
    assert caught.value.details["field"] == key
    assert caught.value.details["file"].endswith("model.gguf")
    assert all(word in str(caught.value) for word in (key, "expected", "found"))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("blk.5.attn_q_norm.weight", None),
        ("blk.2.ffn_up.weight", np.zeros((64, 128), np.float32)),
        ("token_embd.weight", np.zeros((1023, 64), np.float32)),
        ("output_norm.weight", None),
        ("rope_freqs.weight", np.zeros(16, np.float32)),
        ("blk.6.attn_q.weight", np.zeros((64, 64), np.float32)),
    ],
)
def test_every_tensor_is_checked_and_named(make: Make, name: str, tensor: Any) -> None:
    with (
        pytest.raises(SourceFieldError, match=name.replace(".", r"\.")),
        GgufFile(make(tensors={name: tensor})) as file,
    ):
        open_gemma3(file, None, "")


def test_what_the_fields_mean(make: Make) -> None:
    changes = {
        "gemma3.attention.sliding_window_pattern": 3,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        "tokenizer.ggml.eot_token_id": None,
        "tokenizer.ggml.padding_token_id": None,
        "tokenizer.chat_template": "{{ messages }}",
    }
    with GgufFile(make(changes)) as file:
        source = open_gemma3(file, "mine", "")
    spec = source.spec
    assert spec.name == "mine" and source.turns is not None and spec.eos_token_ids == (1,)
    assert spec.layer_types == (SLIDING, SLIDING, FULL) * 2
    assert spec.rope_frequencies(FULL)[0] == 0.125 and spec.rope_frequencies(SLIDING)[0] == 1.0
    assert spec.rope_frequencies(SLIDING)[8] == pytest.approx(0.01, rel=1e-15)
    assert source.vocabulary.pad == source.vocabulary.eos


@pytest.mark.slow
def test_a_tied_model_has_its_embedding_as_head(make: Make, tmp_path: Path) -> None:
    tied = build_bundle(None, tmp_path / "tied", source=make(tensors={"output.weight": None}))
    spelled = build_bundle(
        None, tmp_path / "spelled", source=make(tensors={"output.weight": TENSORS["token_embd.weight"]})
    )
    assert (tied.weights, tied.heads) == (spelled.weights, spelled.heads)


@pytest.mark.parametrize(
    ("name", "value"), [("blk.1.ffn_gate.weight", 70_000.0), ("blk.0.attn_norm.weight", np.nan), ("token_embd.weight", np.inf), ("output.weight", np.nan)]
)  # fmt: skip
def test_weights_that_fp16_cannot_hold_are_refused(make: Make, tmp_path: Path, name: str, value: float) -> None:
    tensor = TENSORS[name].copy()
    tensor.reshape(-1)[5] = value
    with pytest.raises(SourceFieldError, match=name.replace(".", r"\.")):
        build_bundle(None, tmp_path / "out", source=make(tensors={name: tensor}))
    assert not (tmp_path / "out").exists()


def test_user_defined_pieces_are_spelled_with_the_space_mark(make: Make) -> None:
    tokens, types = list(FIELDS["tokenizer.ggml.tokens"]), list(FIELDS["tokenizer.ggml.token_type"])
    tokens[-1], types[-1] = "  ", 4
    with GgufFile(make({"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types})) as file:
        assert open_gemma3(file, None, "").vocabulary.pieces[-1] == "▁▁"


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return gguf_files.tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


def open_bytes(folder: Path, data: bytes) -> None:
    path = folder / "hostile.gguf"
    path.write_bytes(data)
    with GgufFile(path) as file:
        source = open_gemma3(file, None, "")
        source.weights.tensor("blk.5.ffn_up.weight")


def test_a_file_cut_short_anywhere_is_refused(content: bytes, tmp_path: Path) -> None:
    open_bytes(tmp_path, content)
    for length in [0, 3, 4, 8, 23, 24, 25, 100, 1000, 20_000, 40_000, len(content) // 2, len(content) - 1]:
        with pytest.raises(BuildError):
            open_bytes(tmp_path, content[:length])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_headers_are_refused_or_harmless(content: bytes, tmp_path_factory: Any, data: st.DataObject) -> None:
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 1200) | st.integers(0, 45_000))
        damaged[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
    try:
        open_bytes(tmp_path_factory.getbasetemp(), bytes(damaged))
    except BuildError as error:
        assert isinstance(error, SourceDamaged | SourceFieldError)


def header(tensors: int = 0, fields: bytes = b"", count: int = 0, version: int = 3) -> bytes:
    return (
        b"GGUF" + version.to_bytes(4, "little") + tensors.to_bytes(8, "little") + count.to_bytes(8, "little") + fields
    )


def text(value: str) -> bytes:
    return len(value).to_bytes(8, "little") + value.encode()


NOTHING = bytes(64)
HOSTILE = {
    "not gguf": b"GGML" + bytes(100),
    "big endian": b"GGUF" + (3).to_bytes(4, "big") + bytes(100),
    "version 1": header(version=1) + NOTHING,
    "2^63 tensors": header(tensors=1 << 63) + NOTHING,
    "2^63 fields": header(count=1 << 63) + NOTHING,
    "string of 2^62 bytes": header(count=1, fields=(1 << 62).to_bytes(8, "little")) + NOTHING,
    "array of 2^60": header(count=1, fields=text("a") + (9).to_bytes(4, "little") + (4).to_bytes(4, "little") + (1 << 60).to_bytes(8, "little")) + NOTHING,
    "array of arrays": header(count=1, fields=text("a") + (9).to_bytes(4, "little") + (9).to_bytes(4, "little") + NOTHING),
    "unknown value type": header(count=1, fields=text("a") + (99).to_bytes(4, "little")) + NOTHING,
    "a key twice": header(count=2, fields=(text("a") + (0).to_bytes(4, "little") + b"\1") * 2) + NOTHING,
    "alignment 0": header(count=1, fields=text("general.alignment") + (4).to_bytes(4, "little") + bytes(4)) + NOTHING,
    "9 dimensions": header(tensors=1, fields=text("t") + (9).to_bytes(4, "little")) + NOTHING,
    "tensor past the end": header(tensors=1, fields=text("t") + (1).to_bytes(4, "little") + (1 << 40).to_bytes(8, "little") + bytes(12)) + NOTHING,
    "tensor of size 0": header(tensors=1, fields=text("t") + (1).to_bytes(4, "little") + bytes(8) + bytes(12)) + NOTHING,
    "unknown tensor type": header(tensors=1, fields=text("t") + (1).to_bytes(4, "little") + (1).to_bytes(8, "little") + (200).to_bytes(4, "little") + bytes(8)) + NOTHING,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_before_anything_is_allocated(tmp_path: Path, name: str) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(HOSTILE[name])
    with pytest.raises((SourceDamaged, SourceFieldError)) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)
