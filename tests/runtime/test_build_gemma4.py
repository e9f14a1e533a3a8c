"""Gemma 4 bundles: E2B's geometry from its configuration, fields and tensors refused by name, the published shape, and what the builder does to numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from built_models import Changed, Runner, relative_error
from gemma4_e2b import E2B, KINDS
from gemma4_folder import tensors_of, write_folder
from text import KITCHEN

from runtime.build import (
    ArchitectureUnsupported,
    Packing,
    PackingUnsupported,
    SourceFieldError,
    SourceMissing,
    build_bundle,
    estimate_build,
)
from runtime.build.assembly import carry_out
from runtime.build.authoring import WEIGHT_FILE
from runtime.build.compress import dense
from runtime.build.emitter import Numerics
from runtime.build.gemma4 import drafts
from runtime.build.gemma4.config import read_config
from runtime.build.gemma4.folder import TURNS, folder_origin, open_folder
from runtime.build.gemma4.graph import ChunkWeights, fold
from runtime.build.gemma4.model import Gemma4Model
from runtime.build.gemma4.parts import read_chunk
from runtime.build.gemma4.tiny import tiny_config, tiny_gemma4
from runtime.bundle import Bundle
from runtime.engine import Fp16Overflow
from runtime.mlpackage import Package
from runtime.portable import PortableEngine

MODEL = tiny_gemma4(0)


def build(model: Gemma4Model, out: Path, packing: Packing | None = None, numerics: Numerics | None = None) -> Path:
    return carry_out(drafts.model_draft(model, packing or Packing(), numerics), out, progress=lambda *_: None).path


# E2B, from its configuration alone


def test_e2b_has_the_published_geometry() -> None:
    spec = read_config(E2B, "e2b")
    assert (spec.layers, spec.first_shared, spec.hidden, spec.heads, spec.vocabulary) == (35, 15, 1536, 8, 262_144)
    assert spec.kv_bytes_per_token == 18_432
    assert [spec.owns(i) for i in (0, 14, 15, 34)] == [True, True, False, False]
    assert (spec.store_layer("sliding_attention"), spec.store_layer("full_attention")) == (13, 14)
    assert spec.chunk_bounds == ((0, 15), (15, 25), (25, 35))
    assert [i for i in range(15) if spec.layer_types[i] == "full_attention"] == [4, 9, 14]
    assert [spec.ffn_of(i) for i in (14, 15)] == [6144, 12288]
    assert [spec.head_dim_of(i) for i in (13, 14)] == [256, 512]
    assert spec.eos_token_ids == (1, 106)
    inverse = spec.rope_frequencies("full_attention")
    assert len(inverse) == 256 and inverse[64:] == (0.0,) * 192
    assert inverse[:2] == (1.0, pytest.approx(1e6 ** (-2 / 512), rel=1e-15)) and inverse[63] > 0
    sliding = spec.rope_frequencies("sliding_attention")
    assert len(sliding) == 128 and sliding[-1] == pytest.approx(1e4 ** (-254 / 256), rel=1e-15)


def test_e2b_has_the_published_tensors_and_sizes() -> None:
    spec = read_config(E2B, "e2b")
    shapes = spec.tensors()
    assert shapes["embed_tokens_per_layer.weight"] == (262_144, 8960)
    assert shapes["per_layer_model_projection.weight"] == (8960, 1536)
    assert shapes["layers.14.self_attn.k_proj.weight"] == (512, 1536)
    assert shapes["layers.34.self_attn.q_proj.weight"] == (4096, 1536)
    assert shapes["layers.34.mlp.down_proj.weight"] == (1536, 12288)
    assert "layers.15.self_attn.k_proj.weight" not in shapes
    assert {"layers.15.self_attn.k_proj.weight", "layers.34.self_attn.v_proj.weight"} <= spec.dropped()
    each = drafts.chunk_elements
    weights = [each(spec, bounds) for bounds in spec.chunk_bounds]
    assert max(weights) < 1.25 * min(weights), "the chunks weigh about the same"


def test_the_needs_of_e2b_are_known_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(E2B))
    small, large = (estimate_build(None, source=tmp_path, packing=Packing(w)) for w in ("pal6", "fp16"))
    # PLE and embedding 2.75 GB, chunks 1.4 GB, head 0.4 GB
    assert 4.4e9 < small.bundle < 4.8e9 and 6.6e9 < large.bundle < 7.2e9
    assert 0.9e9 < small.memory < 2.5e9 < large.memory + 1e9 < 4.5e9
    half = estimate_build(None, source=tmp_path, packing=Packing(sidecars="fp16"))
    assert 2.7e9 < half.bundle - small.bundle < 2.8e9


def without(path: str) -> dict[str, Any]:
    """E2B's configuration without one field."""
    document: dict[str, Any] = json.loads(json.dumps(E2B))
    *parents, last = path.split(".")
    inner = document
    for name in parents:
        inner = inner[name]
    del inner[last]
    return document


def having(path: str, value: object) -> dict[str, Any]:
    """E2B's configuration with one field changed."""
    document: dict[str, Any] = json.loads(json.dumps(E2B))
    *parents, last = path.split(".")
    inner = document
    for name in parents:
        inner = inner[name]
    inner[last] = value
    return document


NEEDED = [
    name for name in E2B["text_config"] if name not in (
        "bos_token_id", "eos_token_id", "num_global_key_value_heads", "use_bidirectional_attention", "rope_parameters",
    )
]  # fmt: skip
ROPE = ["full_attention.rope_theta", "full_attention.rope_type", "full_attention.partial_rotary_factor"]
ROPE += ["sliding_attention.rope_theta", "sliding_attention.rope_type", "full_attention", "sliding_attention"]


@pytest.mark.parametrize("field", [*NEEDED, "rope_parameters", *(f"rope_parameters.{name}" for name in ROPE)])
def test_no_field_is_made_up(field: str) -> None:
    with pytest.raises(SourceFieldError) as caught:
        read_config(without(f"text_config.{field}"), "e2b")
    assert caught.value.details["field"] == f"text_config.{field}"
    assert caught.value.details["found"] == "no such field"


def test_end_tokens_come_from_either_place_but_have_to_come() -> None:
    assert read_config(without("eos_token_id"), "e2b").eos_token_ids == (1,)
    document = without("eos_token_id")
    del document["text_config"]["eos_token_id"]
    with pytest.raises(SourceFieldError, match="eos_token_id"):
        read_config(document, "e2b")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_key_value_heads", 2),
        ("num_global_key_value_heads", 2),
        ("attention_k_eq_v", True),
        ("enable_moe_block", True),
        ("tie_word_embeddings", False),
        ("hidden_activation", "silu"),
        ("vocab_size_per_layer_input", 262_143),
        ("sliding_window", 500),
        ("num_kv_shared_layers", 0),
        ("num_kv_shared_layers", 34),
        ("layer_types", KINDS[:-1]),
        ("layer_types", [*KINDS[:-1], "sliding_attention"]),
        ("layer_types", [*KINDS[:-1], "linear_attention"]),
        ("global_head_dim", 511),
        ("hidden_size", "1536"),
        ("rms_norm_eps", 0),
        ("use_double_wide_mlp", 1),
        ("model_type", "gemma3_text"),
        ("rope_parameters.full_attention.rope_type", "yarn"),
        ("rope_parameters.full_attention.factor", 8.0),
        ("rope_parameters.sliding_attention.partial_rotary_factor", 0.5),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(SourceFieldError) as caught:
        read_config(having(f"text_config.{field}", value), "e2b")
    assert caught.value.details["field"] == f"text_config.{field}"


def test_another_model_is_refused() -> None:
    with pytest.raises(ArchitectureUnsupported, match="gemma3"):
        read_config(having("model_type", "gemma3"), "e2b")


# A folder


def digests_of(path: Path) -> tuple[str, str]:
    record = json.loads((path / "kvferry.json").read_bytes())
    return record["weights"], record["heads"]


def test_a_folder_gives_the_named_models_bundle(tmp_path: Path, tiny_gemma4_bundle: Path) -> None:
    root = write_folder(tmp_path / "Tiny Gemma", MODEL, files=3)
    built = build_bundle(None, tmp_path / "out", source=root)
    assert (built.weights, built.heads) == digests_of(tiny_gemma4_bundle)
    for name in ("convert_config.json", "tokenizer.json", "tokenizer_config.json", "ple_int8.bin"):
        assert (tmp_path / "out" / name).read_bytes() == (tiny_gemma4_bundle / name).read_bytes()
    assert Bundle.open(tmp_path / "out").config.name == "tiny-gemma"
    again = build_bundle(None, tmp_path / "out", source=root)
    assert not again.made


def test_the_whole_models_folder_gives_its_text_decoder(tmp_path: Path) -> None:
    config = {"model_type": "gemma4", "text_config": tiny_config(), "eos_token_id": [1, 5]}
    extra = {
        "model.vision_tower.patch.weight": np.zeros((2, 2), np.float32),
        "model.embed_audio.norm.weight": np.zeros(3, np.float32),
        # published for shared layers too, though nothing reads them
        "model.language_model.layers.6.self_attn.k_proj.weight": np.ones((64, 64), np.float32),
        "model.language_model.layers.4.self_attn.k_norm.weight": np.ones(32, np.float32),
    }
    root = write_folder(tmp_path, MODEL, config=config, prefix="model.language_model.", extra=extra)
    with open_folder(root, None, {}) as model:
        assert model.spec == replace(MODEL.spec, name=model.spec.name)
        for name, tensor in tensors_of(MODEL).items():
            assert np.array_equal(model.weights.tensor(name), tensor)
        assert model.turns is None


def test_a_tokenizer_with_gemma_4s_turns_gets_them(tmp_path: Path) -> None:
    root = write_folder(tmp_path, MODEL)
    document = json.loads((root / "tokenizer.json").read_text())
    document["added_tokens"] += [{"id": 1022, "content": "<|turn>"}, {"id": 1023, "content": "<turn|>"}]
    (root / "tokenizer.json").write_text(json.dumps(document))
    with open_folder(root, None, {}) as model:
        assert model.turns == TURNS


def test_missing_extra_and_misshapen_tensors_are_refused_by_name(tmp_path: Path) -> None:
    whole = tensors_of(MODEL)

    def refused(tensors: Mapping[str, Any], match: str) -> None:
        root = write_folder(tmp_path, MODEL, tensors=tensors)
        with pytest.raises(SourceFieldError, match=match), open_folder(root, None, {}):
            pass

    refused({n: t for n, t in whole.items() if n != "layers.5.layer_scalar"}, r"model\.layers\.5\.layer_scalar")
    refused(whole | {"lm_head.weight": np.zeros((2, 2), np.float32)}, r"model\.lm_head\.weight")
    wrong = whole | {"layers.2.self_attn.k_proj.weight": np.zeros((32, 64), np.float32)}
    refused(wrong, r"layers\.2\.self_attn\.k_proj\.weight: expected shape \[64, 64\], found '?\[32, 64\]")
    # a stray one of a layer that owns K and V isn't stray
    refused(whole | {"layers.1.self_attn.v_norm.weight": np.zeros(32, np.float32)}, r"v_norm")


def test_numbers_that_fp16_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    name = "layers.3.mlp.up_proj.weight"
    root = write_folder(tmp_path / "folder", MODEL, change=lambda n, t: t * 1e6 if n == name else t)
    with pytest.raises(SourceFieldError, match=r"layers\.3\.mlp\.up_proj\.weight"):
        build_bundle(None, tmp_path / "out", source=root)


def test_a_folder_without_its_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceMissing, match=r"config\.json"):
        build_bundle(None, tmp_path / "out", source=tmp_path)
    root = write_folder(tmp_path / "folder", MODEL)
    (root / "tokenizer.json").rename(tmp_path / "moved")
    with pytest.raises(SourceMissing, match=r"tokenizer\.json"):
        build_bundle(None, tmp_path / "out", source=root)
    (tmp_path / "moved").rename(root / "tokenizer.json")
    (root / "model.safetensors").unlink()
    with pytest.raises(SourceMissing, match=r"model\.safetensors"):
        build_bundle(None, tmp_path / "out", source=root)


def test_the_origin_is_of_every_file_that_matters(tmp_path: Path) -> None:
    root = write_folder(tmp_path, MODEL)
    before = folder_origin(root)
    (root / "README.md").write_text("not part of the model")
    assert folder_origin(root) == before
    (root / "tokenizer_config.json").write_text("{}")
    assert folder_origin(root) != before


# The bundle


def test_the_configuration_has_the_published_keys_and_no_others(tiny_gemma4_bundle: Path) -> None:
    config = json.loads((tiny_gemma4_bundle / "convert_config.json").read_bytes())
    assert set(config) == {
        "num_layers", "hidden", "ple_dim", "first_shared", "store_layers", "chunk_bounds", "eos_token_ids", "hostio", "corellm",
    }  # fmt: skip
    assert set(config["hostio"]) == {"CTX", "HD", "GHD", "SLIDING", "NEG", "layer_types", "inv_slide", "inv_full"}
    core = config["corellm"]
    assert set(core) == {"chunks", "lmhead", "decode_function", "prefill", "verify", "sidecars"}
    assert (config["first_shared"], config["store_layers"]) == (4, {"sliding_attention": 3, "full_attention": 2})
    assert config["chunk_bounds"] == [[0, 4], [4, 6], [6, 7]]
    assert core["prefill"]["N"] == [512, 256, 32, 8, 4] and core["prefill"]["plain_N"] == 512
    assert core["verify"]["lmhead_batched"] == {"4": "lmhead_v4.mlpackage"}
    assert core["sidecars"] == {
        "default_stage": "int8",
        "int8": {
            "embed": {"file": "embed_int8.bin", "shape": [1024, 64], "scale": "embed_scale_f32.bin", "runtime_scale_sqrt": 64},
            "ple": {"file": "ple_int8.bin", "shape": [1024, 112], "scale": "ple_scale_f32.bin", "runtime_scale_sqrt": 16},
        },
    }  # fmt: skip
    manifest = json.loads((tiny_gemma4_bundle / "manifest.json").read_bytes())
    assert (manifest["format"], manifest["sidecarStage"]) == ("coreml-corellm-r1", "int8")
    assert Bundle.open(tiny_gemma4_bundle).layout().bytes_per_token == 2 * 2 * (3 * 32 + 64)


@pytest.mark.parametrize(("chunk", "own"), [(0, (0, 1, 2, 3)), (1, ()), (2, ())])
def test_functions_have_the_published_inputs_and_outputs(
    tiny_gemma4_bundle: Path, chunk: int, own: tuple[int, ...]
) -> None:
    kinds = {0: "sf", 1: "s", 2: "f"}[chunk]
    width_of = {"s": 32, "f": 64}
    package = Package.open(tiny_gemma4_bundle / f"chunk_{chunk}.mlpackage")
    assert package.functions == ("decode", *(f"prefill_{n}" for n in (512, 256, 32, 8, 4)))
    for name in package.functions:
        n = None if name == "decode" else int(name.removeprefix("prefill_"))
        rows, slots = (() if n is None else (n,)), 512 if n == 512 else 2048
        inputs: dict[str, tuple[int, ...]] = {
            "hidden_in": (*rows, 64), "inputs_embeds": (*rows, 64), "tokid": (*rows, 7, 16),
        }  # fmt: skip
        for kind in kinds:
            inputs |= {f"{w}_{kind}": (*rows, width_of[kind]) for w in ("cos", "sin")}
            inputs[f"mask_{kind}"] = (*rows, slots)
            if not own:
                inputs |= {f"{w}{kind}": (1, slots, width_of[kind]) for w in ("sk", "sv")}
        widths = {i: 64 if i == 2 else 32 for i in own}
        outputs: dict[str, tuple[int, ...]] = {"hidden": (*rows, 64)}
        for i, width in widths.items():
            outputs |= {f"{w}_{i}_out": (1, 2048, width) if n is None else (n, width) for w in "kv"}
            if n != 512:
                inputs |= {f"{w}_{i}_in": (1, 2048, width) for w in "kv"}
        if own and n != 512:
            inputs["onehot"] = (*rows, 2048)
        function = package.function(name)
        assert {i: spec.shape for i, spec in function.inputs.items()} == inputs
        assert {o: spec.shape for o, spec in function.outputs.items()} == outputs
        assert {spec.dtype for spec in [*function.inputs.values(), *function.outputs.values()]} == {"fp16"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "used", "unused"),
    [
        ("pal6", "constexpr_lut_to_dense", "constexpr_blockwise_shift_scale"),
        ("int8", "constexpr_blockwise_shift_scale", "constexpr_lut_to_dense"),
        ("fp16", "const", "constexpr_lut_to_dense"),
    ],
)
def test_each_form_is_what_it_says_and_no_larger_than_estimated(
    tmp_path: Path, weights: Any, used: str, unused: str
) -> None:
    root = build(MODEL, tmp_path / "bundle", Packing(weights))
    for index, bounds in enumerate(MODEL.spec.chunk_bounds):
        function = Package.open(root / f"chunk_{index}.mlpackage").function("decode")
        types = [op.type for op in function.ops]
        matrices = sum(len(MODEL.spec.matrices(i)) for i in range(*bounds)) + 1
        assert used == "const" or types.count(used) == matrices
        assert unused not in types
        expected = drafts.chunk_bytes(MODEL.spec, Packing(weights), bounds)
        size = (root / f"chunk_{index}.mlpackage" / WEIGHT_FILE).stat().st_size
        blobs = 3 * (matrices + 8 * (bounds[1] - bounds[0]) + 20)
        assert expected < size < expected + 128 * blobs
    total = sum(p.stat().st_size for p in root.rglob("*") if p.is_file())
    estimate = drafts.bundle_bytes(MODEL.spec, Packing(weights)) + drafts.extra_bytes(MODEL.spec, Packing(weights))
    assert total <= estimate <= 3 * total


def test_the_verification_head_shares_the_sequential_ones_weights_or_is_the_published_pairing(
    tmp_path: Path, tiny_gemma4_bundle: Path
) -> None:
    heads = [tiny_gemma4_bundle / name / WEIGHT_FILE for name in ("lmhead.mlpackage", "lmhead_v4.mlpackage")]
    assert heads[0].stat().st_ino == heads[1].stat().st_ino
    root = build(MODEL, tmp_path / "bundle", Packing(verify_head="pal6"))
    types = [{op.type for op in Package.open(root / f"lmhead{v}.mlpackage").function(None).ops} for v in ("", "_v4")]
    assert "constexpr_blockwise_shift_scale" in types[0] and "constexpr_lut_to_dense" in types[1]
    ours, theirs = digests_of(tiny_gemma4_bundle), digests_of(root)
    assert ours[0] == theirs[0], "the same KV"
    assert ours[1] != theirs[1], "another head: receipts and pending tokens are not the other's"


@pytest.mark.slow
def test_fp16_tables_are_the_embedding_as_it_is_used(tmp_path: Path) -> None:
    bundle = Bundle.open(build(MODEL, tmp_path / "bundle", Packing(sidecars="fp16")))
    assert bundle.config.sidecar_stage == "fp16" and bundle.ple is not None
    for table, name, square in ((bundle.embed, "embed_tokens", 64), (bundle.ple, "embed_tokens_per_layer", 16)):
        expected = MODEL.weights.tensor(f"{name}.weight") * np.float32(square**0.5)
        assert np.array_equal(table.take(range(1024)), expected.astype(np.float16))
    assert not (bundle.root / "embed_int8.bin").exists()


def test_other_families_have_one_packing(tmp_path: Path) -> None:
    with pytest.raises(PackingUnsupported, match="tiny"):
        build_bundle("tiny", tmp_path / "out", packing=Packing())


# Numbers


def hot(**more: float) -> Gemma4Model:
    """With a residual stream above fp16's 65,504, which the gate of the per-layer embedding reads as it is."""
    factors = {
        "post_feedforward_layernorm.weight": 60_000.0,
        "per_layer_input_gate.weight": 1e-5,
        "q_proj.weight": 300.0,
        "v_proj.weight": 100.0,
        **more,
    }
    return replace(MODEL, weights=Changed(MODEL.weights, factors))


def test_a_residual_stream_above_fp16_is_carried(tmp_path: Path) -> None:
    root = build(hot(), tmp_path / "bundle", Packing("fp16"))
    tokens = Bundle.open(root).tokenizer.encode(KITCHEN)[:40]
    found = [
        Runner(root, PortableEngine(root, compute=compute)).feed(tokens).astype(np.float32)  # type: ignore[arg-type]
        for compute in ("fp32", "fp16-rounding")
    ]
    assert np.abs(found[0]).max() * 32 > 65_504, "the model must be one that needs it"
    assert relative_error(found[1], found[0]) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    "undone", [Numerics(residual_scale=1.0), Numerics(norm_by_maximum=False)], ids=["whole residual", "plain norm"]
)
def test_each_precaution_undone_overflows(tmp_path: Path, undone: Numerics) -> None:
    root = build(hot(), tmp_path / "bundle", Packing("fp16"), undone)
    runner = Runner(root, PortableEngine(root, compute="fp16-rounding"))
    with pytest.raises(Fp16Overflow):
        runner.feed(runner.bundle.tokenizer.encode(KITCHEN)[:40])


@pytest.mark.parametrize("weights", ["pal6", "int8", "fp16"])
def test_a_gate_that_does_not_fit_times_32_is_refused_by_name(weights: Any) -> None:
    # up to 2,047 fits; the largest element is nearly √3 / √64
    bounds = MODEL.spec.chunk_bounds[0]

    def folded(by: float) -> ChunkWeights:
        model = replace(MODEL, weights=Changed(MODEL.weights, {"layers.2.per_layer_input_gate.weight": by}))
        read, _ = read_chunk(model, Packing(weights), bounds, lambda _: None)
        return fold(MODEL.spec, Numerics(), bounds, read)

    gate = dense(folded(9_000.0).matrices["layers.2.per_layer_input_gate.weight"])
    expected = 32 * 9_000 * MODEL.weights.tensor("layers.2.per_layer_input_gate.weight")
    assert relative_error(gate, expected) < 0.03 and np.isfinite(gate.astype(np.float16)).all()
    with pytest.raises(SourceFieldError, match=r"layers\.2\.per_layer_input_gate\.weight.*2047"):
        folded(10_000.0)


@pytest.mark.parametrize("length", [510, 1000, 1900])
def test_greedy_text_never_settles(tiny_gemma4_bundle: Path, ids: list[int], length: int) -> None:
    engine = PortableEngine(tiny_gemma4_bundle)
    for start in (0, 100):
        said = Runner(tiny_gemma4_bundle, engine).greedy([2, *ids[start + 1 : start + length]], 32)
        assert len(set(said)) >= 8 and min(said) >= 6 + 256


def test_short_prompts_do_not_settle_either(tiny_gemma4_bundle: Path, ids: list[int]) -> None:
    engine = PortableEngine(tiny_gemma4_bundle)
    for start, length in ((0, 1), (0, 2), (20, 5), (7, 9), (50, 20), (31, 40), (62, 63), (93, 64), (124, 127)):
        said = Runner(tiny_gemma4_bundle, engine).greedy([2, *ids[start + 1 : start + length]], 32)
        assert len(set(said)) >= 8, (start, length, said)


def test_one_other_token_far_back_changes_what_is_said(tiny_gemma4_bundle: Path, ids: list[int]) -> None:
    engine = PortableEngine(tiny_gemma4_bundle)
    for length in (20, 60, 150, 300):
        other = list(ids[:length])
        other[length // 2] = 300 + (other[length // 2] + 77) % 700
        said = [Runner(tiny_gemma4_bundle, engine).greedy(tokens, 32) for tokens in (ids[:length], other)]
        assert said[0] != said[1]


def test_margins_add_a_function_to_both_heads_and_a_key_and_change_nothing_else(
    tiny_gemma4_bundle: Path, tiny_gemma4_margins_bundle: Path
) -> None:
    plain, more = tiny_gemma4_bundle, tiny_gemma4_margins_bundle
    assert digests_of(plain) == digests_of(more), "the same KV, and the same tokens after it"
    configs = [json.loads((root / "convert_config.json").read_bytes()) for root in (plain, more)]
    assert configs[1]["corellm"].pop("margin_function") == "margin"
    assert configs[0] == configs[1]
    for name in ("lmhead.mlpackage", "lmhead_v4.mlpackage"):
        assert (plain / name / WEIGHT_FILE).read_bytes() == (more / name / WEIGHT_FILE).read_bytes()
        assert set(Package.open(more / name).function(None).outputs) == {"token"}, (
            "the default function is the published one"
        )
        assert set(Package.open(more / name).function("margin").outputs) == {"token", "margin"}
    others = [p.relative_to(plain) for p in plain.rglob("*") if p.is_file() and "lmhead" not in str(p)]
    changed = {str(name) for name in others if (plain / name).read_bytes() != (more / name).read_bytes()}
    assert changed == {"convert_config.json", "kvferry.json"}
