"""What a built package is: several functions over shared weights, exactly the contract's inputs and outputs, valid to coremltools."""

from __future__ import annotations

import importlib
import shutil
import struct
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from runtime.build import Estimate, estimate_build
from runtime.build.authoring import WEIGHT_FILE, import_coremltools
from runtime.build.sidecar import quantise_head, quantise_sidecar
from runtime.mlpackage import Blob, Function, Package

WIDTHS = (512, 256, 32, 8, 4)
CHUNKS = {"chunk_0.mlpackage": (0, 3, "s"), "chunk_1.mlpackage": (3, 6, "sf")}


def blobs(function: Function) -> dict[int, tuple[int, ...]]:
    """Shape by offset of every weight that lies in the weight file."""
    values = [value for op in function.ops for value in (*op.attributes.values(), *chain(*op.inputs.values()))]
    return {value.offset: value.spec.shape for value in values if isinstance(value, Blob)}


@pytest.mark.parametrize("name", CHUNKS)
def test_a_chunk_has_every_function_with_the_contracts_names_and_shapes(tiny_bundle: Path, name: str) -> None:
    first, stop, kinds = CHUNKS[name]
    package = Package.open(tiny_bundle / name)
    assert package.functions == ("decode", *(f"prefill_{width}" for width in WIDTHS))
    assert package.default_function == "decode"
    for width in (None, *WIDTHS):
        function = package.function("decode" if width is None else f"prefill_{width}")
        rows = () if width is None else (width,)
        plain = width == 512
        slots = 512 if plain else 2048
        inputs: dict[str, tuple[int, ...]] = {"hidden_in": (*rows, 64)}
        for kind in kinds:
            inputs |= {f"cos_{kind}": (*rows, 32), f"sin_{kind}": (*rows, 32), f"mask_{kind}": (*rows, slots)}
        if not plain:
            inputs["onehot"] = (*rows, 2048)
            inputs |= {f"{which}_{i}_in": (1, 2048, 32) for i in range(first, stop) for which in "kv"}
        outputs: dict[str, tuple[int, ...]] = {"hidden": (*rows, 64)}
        kept = (1, 2048, 32) if width is None else (width, 32)
        outputs |= {f"{which}_{i}_out": kept for i in range(first, stop) for which in "kv"}
        assert {n: spec.shape for n, spec in function.inputs.items()} == inputs
        assert {n: spec.shape for n, spec in function.outputs.items()} == outputs
        assert {spec.dtype for spec in [*function.inputs.values(), *function.outputs.values()]} == {"fp16"}
        made = {output for op in function.ops for output, _ in op.outputs}
        assert {f"{which}_{i}_row" for i in range(first, stop) for which in "kv"} <= made


@pytest.mark.parametrize("name", CHUNKS)
def test_the_functions_of_a_chunk_share_one_copy_of_the_weights(tiny_bundle: Path, name: str) -> None:
    package = Package.open(tiny_bundle / name)
    decode = blobs(package.function("decode"))
    for width in WIDTHS:
        assert blobs(package.function(f"prefill_{width}")) == decode
    per_layer = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 128 * 3 + 4 * 64 + 2 * 32)
    size = (tiny_bundle / name / WEIGHT_FILE).stat().st_size
    assert 3 * per_layer < size < 3 * per_layer + 64 * 3 * len(decode) + 2000


def test_both_heads_are_one_weight_file(tiny_bundle: Path) -> None:
    heads = {n: tiny_bundle / n for n in ("lmhead.mlpackage", "lmhead_v4.mlpackage")}
    stats = [(path / WEIGHT_FILE).stat() for path in heads.values()]
    assert stats[0].st_ino == stats[1].st_ino
    for name, shape, tokens in (("lmhead.mlpackage", (64,), (1,)), ("lmhead_v4.mlpackage", (4, 64), (4,))):
        function = Package.open(heads[name]).function(None)
        assert {n: (s.shape, s.dtype) for n, s in function.inputs.items()} == {"hidden": (shape, "fp16")}
        assert {n: (s.shape, s.dtype) for n, s in function.outputs.items()} == {"token": (tokens, "int32")}
        other = Package.open(heads[name]).function("margin")
        assert {n: (s.shape, s.dtype) for n, s in other.outputs.items()} == {
            "token": (tokens, "int32"),
            "margin": (tokens, "fp16"),
        }
        assert "constexpr_blockwise_shift_scale" in {op.type for op in function.ops}


def test_coremltools_accepts_the_packages(tmp_path: Path, tiny_bundle: Path) -> None:
    """Its own loader builds every operation again and infers every type; opening a package leaves its bytes as they are."""
    ct = import_coremltools()
    milproto = importlib.import_module("coremltools.converters.mil.frontend.milproto.load")
    for name in ("chunk_1.mlpackage", "lmhead_v4.mlpackage"):
        copy = shutil.copytree(tiny_bundle / name, tmp_path / name)
        model = ct.models.MLModel(str(copy), skip_model_load=True)
        spec = model.get_spec()
        assert spec.specificationVersion == 9, "iOS 18"
        program = milproto.load(spec, spec.specificationVersion, model.weights_dir)
        assert len(program.functions) == (6 if name.startswith("chunk") else 2)
        for function in program.functions.values():
            function.validate(force_validate=True)
        for file in ("Manifest.json", "Data/com.apple.CoreML/model.mlmodel", WEIGHT_FILE):
            assert (copy / file).read_bytes() == (tiny_bundle / name / file).read_bytes()


def test_a_package_names_its_two_items_and_nothing_that_changes(tiny_bundle: Path) -> None:
    for name in (*CHUNKS, "lmhead.mlpackage"):
        files = sorted(
            p.relative_to(tiny_bundle / name).as_posix() for p in (tiny_bundle / name).rglob("*") if p.is_file()
        )
        assert files == ["Data/com.apple.CoreML/model.mlmodel", WEIGHT_FILE, "Manifest.json"]
        content = (tiny_bundle / name / files[0]).read_bytes()
        assert b"conversion_date" not in content and b"/tmp" not in content


def test_blobs_are_aligned_for_mapping(tiny_bundle: Path) -> None:
    weights = (tiny_bundle / "chunk_0.mlpackage" / WEIGHT_FILE).read_bytes()
    offsets = blobs(Package.open(tiny_bundle / "chunk_0.mlpackage").function("decode"))
    assert offsets
    for offset in offsets:
        sentinel, _, _, data, _ = struct.unpack_from("<IIQQQ", weights, offset)
        assert sentinel == 0xDEADBEEF and data % 64 == 0


def test_quantised_rows_are_within_half_a_step() -> None:
    rng = np.random.default_rng(3)
    block = (rng.standard_normal((200, 48)) * np.exp(rng.uniform(-9, 3, (200, 1)))).astype(np.float32)
    block[7] = 0.0
    rows, magnitude = quantise_sidecar(block)
    assert (np.abs(rows * (magnitude / 127)[:, None] - block) <= 0.51 * (magnitude / 127)[:, None]).all()
    rows, step = quantise_head(block)
    wide = step.astype(np.float32)
    assert (np.abs(rows * wide - block) <= 0.51 * wide).all(), "the step was rounded to fp16 before the rows were"
    assert not rows[7].any() and np.isfinite(wide).all()


def test_the_estimate_adds_up() -> None:
    assert Estimate(5, 7, 11).disk == 12
    assert estimate_build("tiny").disk < 5_000_000
