"""Packages written by coremltools, read without it: structure, constants, packed and compressed weights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from authored import Geometry, chunk_function, head_function, program, save, weights
from numpy.typing import NDArray

from runtime.mlpackage import Blob, Const, Name, Package, PackageError, TensorSpec
from runtime.ops import CONSTANTS, Call, Source, Stored, WeightCache
from runtime.ops.widen import fastest

pytest.importorskip("coremltools")
GEOMETRY = Geometry(ctx=64, window=16, layers=1, full=(), vocab=96)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("authored")
    w = weights(GEOMETRY)
    functions = {
        "decode": chunk_function(GEOMETRY, w, None, False),
        "prefill_16": chunk_function(GEOMETRY, w, 16, True),
        "prefill_4": chunk_function(GEOMETRY, w, 4, False),
    }
    save(functions, folder / "chunk.mlpackage")
    save({"main": head_function(GEOMETRY, w, None)}, folder / "head.mlpackage")
    return folder


def test_functions_come_in_description_order(root: Path) -> None:
    package = Package.open(root / "chunk.mlpackage")
    assert package.functions == ("decode", "prefill_16", "prefill_4")
    assert package.default_function == "decode"
    assert [f.name for f in package.program().functions] == list(package.functions)
    head = Package.open(root / "head.mlpackage")
    assert head.functions == ("main",) and head.function(None) is head.function("main")


def test_a_function_that_is_not_there_is_refused_by_name(root: Path) -> None:
    with pytest.raises(PackageError, match=r"function: expected one of decode, .*, found verify"):
        Package.open(root / "chunk.mlpackage").function("verify")


def test_inputs_outputs_and_operations_are_those_that_coremltools_reads(root: Path) -> None:
    import coremltools as ct

    package = Package.open(root / "chunk.mlpackage")
    spec = ct.utils.load_spec(str(root / "chunk.mlpackage"))
    for name in package.functions:
        ours, theirs = package.function(name), spec.mlProgram.functions[name]
        block = theirs.block_specializations[theirs.opset]
        assert list(ours.inputs) == [i.name for i in theirs.inputs]
        assert list(ours.outputs) == list(block.outputs)
        assert [op.type for op in ours.ops] == [op.type for op in block.operations]
        for op, other in zip(ours.ops, block.operations, strict=True):
            assert [n for n, _ in op.outputs] == [o.name for o in other.outputs]
            for _, found in op.outputs:
                dims = [d.constant.size for d in other.outputs[0].type.tensorType.dimensions]
                assert list(found.shape) == dims
            given = {k: [b.name for b in a.arguments] for k, a in other.inputs.items()}
            assert {k: [getattr(a, "name", "") for a in v] for k, v in op.inputs.items()} == given
    assert package.function("decode").inputs["k_0_in"] == TensorSpec((1, 64, 32), "fp16")
    assert package.function("prefill_4").outputs["k_0_out"] == TensorSpec((4, 32), "fp16")


def test_weights_are_views_of_the_mapped_file_and_equal_what_was_written(root: Path) -> None:
    package = Package.open(root / "chunk.mlpackage")
    w = weights(GEOMETRY)
    found: dict[bytes, int] = {}
    for name in package.functions:
        for op in package.function(name).ops:
            value = op.attributes.get("val") if op.type == "const" else None
            if isinstance(value, Blob):
                array = package.blob(value)
                assert not array.flags.owndata and not array.flags.writeable
                found.setdefault(array.tobytes(), value.offset)
                assert found[array.tobytes()] == value.offset, "functions share their blobs"
    assert {array.tobytes() for key, array in w.items() if key != "head"} <= found.keys()


def test_small_constants_keep_value_and_type(root: Path) -> None:
    function = Package.open(root / "chunk.mlpackage").function("decode")
    constants = {op.name: op.attributes["val"] for op in function.ops if op.type == "const"}
    used: dict[str, Const] = {}
    for op in function.ops:
        for key, args in op.inputs.items():
            if isinstance(args[0], Name) and isinstance(value := constants.get(args[0].name), Const):
                used.setdefault(f"{op.type}.{key}", value)
    assert used["reduce_mean.axes"].array.tolist() == [-1] and used["reduce_mean.axes"].spec.dtype == "int32"
    assert used["reduce_mean.keep_dims"].array.tolist() is True
    assert used["gelu.mode"].array.tolist() == "TANH_APPROXIMATION"
    assert used["maximum.y"].array == np.float16(1e-3) and used["maximum.y"].array.dtype == np.float16


def test_the_model_file_is_parsed_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import runtime.mlpackage.package as module

    calls: list[int] = []
    parse = module.parse_model
    monkeypatch.setattr(module, "parse_model", lambda data: calls.append(len(data)) or parse(data))
    package = Package.open(root / "chunk.mlpackage")
    for name in (*package.functions, *package.functions):
        package.function(name)
    assert len(calls) == 1


def test_reading_needs_no_coremltools(root: Path) -> None:
    code = (
        "import sys; sys.modules['coremltools'] = None\n"
        "from pathlib import Path\nfrom runtime.mlpackage import Package\n"
        f"p = Package.open(Path({str(root / 'chunk.mlpackage')!r})); print(len(p.function('decode').ops))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 100


def _compressed() -> dict[str, tuple[str, dict[str, Any]]]:
    """Every stored form: bit width, blocks, offsets, vectors, a palette of quantised numbers."""
    from coremltools.converters.mil.mil import types

    rng = np.random.default_rng(5)
    cases: dict[str, tuple[str, dict[str, Any]]] = {}
    for bits, dtype in ((1, "uint1"), (2, "uint2"), (3, "uint3"), (4, "uint4"), (6, "uint6"), (8, "uint8")):
        held = np.uint8 if bits == 8 else getattr(types, f"np_{dtype}_dtype")
        indices = rng.integers(0, 1 << bits, (6, 21)).astype(held)
        for blocks in ((1, 1), (3, 1), (6, 7)):
            lut = rng.standard_normal((*blocks, 1 << bits, 1)).astype(np.float16)
            cases[f"palette {bits} bits {blocks}"] = ("constexpr_lut_to_dense", {"indices": indices, "lut": lut})
    indices = rng.integers(0, 4, (4, 3, 2)).astype(types.np_uint2_dtype)
    for axis in (0, 1, 2):
        lut = rng.standard_normal((2, 1, 1, 4, 5)).astype(np.float16)
        given = {"indices": indices, "lut": lut, "vector_axis": np.int32(axis)}
        cases[f"palette of vectors along {axis}"] = ("constexpr_lut_to_dense", given)
    for dtype, low, high in (("int8", -128, 128), ("uint8", 0, 256), ("int4", -8, 8), ("uint4", 0, 16)):
        held = getattr(np, dtype) if "8" in dtype else getattr(types, f"np_{dtype}_dtype")
        data = rng.integers(low, high, (6, 32)).astype(held)
        for blocks in ((1, 1), (6, 1), (1, 4), (3, 8)):
            scale = rng.random(blocks).astype(np.float16)
            cases[f"{dtype} scaled {blocks}"] = ("constexpr_blockwise_shift_scale", {"data": data, "scale": scale})
            offset = rng.integers(max(low, 0), high // 2, blocks).astype(held)
            given = {"data": data, "scale": scale, "offset": offset}
            cases[f"{dtype} shifted {blocks}"] = ("constexpr_blockwise_shift_scale", given)
    return cases


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Package, Mapping[str, NDArray[Any]]]:
    """A package whose one function adds up every compressed weight, and what coremltools says they hold."""
    from coremltools.converters.mil import Builder as mb

    want: dict[str, NDArray[Any]] = {}

    def body(x: Any) -> Any:
        total = x
        for number, (kind, given) in enumerate(_compressed().values()):
            weight = getattr(mb, kind)(**given, name=f"weight_{number}")
            want[f"weight_{number}"] = weight.op.materialized_val_inference()
            total = mb.add(x=total, y=mb.reduce_sum(x=weight, keep_dims=False))
        return total

    path = tmp_path_factory.mktemp("compressed") / "weights.mlpackage"
    return Package.open(save({"main": program({"x": [1]}, body)}, path)), want


@pytest.mark.parametrize("name", list(_compressed()))
def test_compressed_weights_expand_to_what_coremltools_says(
    name: str, compressed: tuple[Package, Mapping[str, NDArray[Any]]]
) -> None:
    package, want = compressed
    function = package.function()
    cache = WeightCache(package, fastest())
    sources: dict[str, Source] = {}
    for op in function.ops:
        if op.type == "const":
            sources[op.name] = Stored(op.attributes["val"], cache)
        elif op.type in CONSTANTS:
            sources[op.name] = CONSTANTS[op.type](Call(op, "main", True, False, cache, {}, sources))
    weight = f"weight_{list(_compressed()).index(name)}"
    found = sources[weight].plain()
    assert found.dtype == np.float32 and found.shape == want[weight].shape
    # coremltools multiplies in fp16, we in float32
    assert np.allclose(found, want[weight].astype(np.float32), rtol=2e-3, atol=1e-4)
