"""Sizes that plans are made of: read from a bundle's programs, and foretold from a configuration, against the files and each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gemma4_e2b import E2B

from runtime.build import Packing
from runtime.build.gemma4.config import read_config
from runtime.build.gemma4.sizes import config_sizes, gemma4_sizes
from runtime.build.gemma4.tiny import tiny_gemma4
from runtime.bundle import Bundle
from runtime.engine import is_host_cache
from runtime.hostkv import HostKV
from runtime.mil import open_model
from runtime.mlpackage import Blob, Function, Name, Op, TensorSpec
from runtime.plan_sizes import FunctionSize, ModelSizes, TableSize, bundle_sizes, function_size, spec_bytes
from runtime.portable import PortableEngine
from runtime.profile import IPHONE15, MIB

FAMILIES = ["tiny", "tiny-gemma4", "tiny-llama"]


@pytest.fixture(scope="session")
def sizes(bundle: Bundle) -> ModelSizes:
    return bundle_sizes(bundle)


@pytest.mark.parametrize("bundle", FAMILIES, indirect=True)
def test_weights_are_those_of_the_files(bundle: Bundle, sizes: ModelSizes) -> None:
    config = bundle.config
    for package in (*config.chunks, *config.heads):
        file = sum(path.stat().st_size for path in bundle.package_path(package).rglob("weight.bin"))
        named = {name for folder, name in sizes.functions if folder == package}
        largest = max(sizes.functions[package, name].weights for name in named)
        # A blob has a header of 64 bytes and begins at a multiple of 64.
        assert 0.8 * file < largest <= file
    engine = PortableEngine(bundle.root)
    for package in config.chunks:
        engine.function(package, config.decode_function)
    engine.function(config.lmhead, None)
    decode = [(package, config.decode_function) for package in config.chunks] + [(config.lmhead, None)]
    foretold = sum(sizes.functions[key].weights for key in decode)
    assert 0.95 * foretold <= engine.weight_bytes().stored <= foretold


def test_buffers_are_what_a_call_takes_and_gives_beside_the_cache(bundle: Bundle, sizes: ModelSizes) -> None:
    engine, config = PortableEngine(bundle.root), bundle.config
    kv = HostKV(bundle.layout(), config.ctx)
    for name in (config.decode_function, *config.prefill_functions.values()):
        function = engine.function(config.chunks[0], name)
        given = {n: np.zeros(spec.shape, spec.numpy) for n, spec in function.inputs.items()}
        arrays = [array for n, array in given.items() if not is_host_cache(n)]
        arrays += function(given).values()
        assert sum(array.nbytes for array in arrays) == sizes.functions[config.chunks[0], name].buffers
    assert kv.layout.bytes_per_token * config.ctx == sum(2 * k.nbytes for k, _ in map(kv.inputs, kv.layers))


@pytest.mark.parametrize("bundle", ["tiny-gemma4"], indirect=True)
def test_a_configuration_foretells_what_the_builder_makes(bundle: Bundle, sizes: ModelSizes) -> None:
    foretold = gemma4_sizes(tiny_gemma4(0).spec, Packing())
    assert replace(bundle.config, prompt_prefix=None, prompt_suffix=None, assistant_suffix=None) == foretold.config
    assert foretold.functions.keys() == sizes.functions.keys()
    for key, found in sizes.functions.items():
        assert foretold.functions[key].buffers == found.buffers, key
        # What the program adds: zero biases, zero points, constants of the graph.
        assert 0.9 * found.weights <= foretold.functions[key].weights <= 1.02 * found.weights, key
    assert foretold.tables() == sizes.tables()
    for table in sizes.tables():
        assert table.bytes == (bundle.root / table.name).stat().st_size


def test_the_heads_of_e2b_take_what_was_published(tmp_path: Path) -> None:
    spec = read_config(E2B, "e2b")
    same, small = (gemma4_sizes(spec, Packing(verify_head=head)) for head in ("same", "pal6"))
    int8, pal6 = (sizes.functions["lmhead_v4.mlpackage", None].weights / MIB for sizes in (same, small))
    assert round(int8) == 385 and pal6 == pytest.approx(291, abs=1.5)
    assert pal6 / int8 == pytest.approx(0.756, abs=0.003)
    assert sum(table.bytes for table in same.tables()) / (1 << 30) == pytest.approx(2.6, abs=0.05)
    assert same.layout.bytes_per_token == 18_432


def test_a_blob_that_two_operations_read_counts_once() -> None:
    blob = Blob(TensorSpec((3, 5), "uint6"), "weight.bin", 64)
    other = Blob(TensorSpec((4,), "fp16"), "weight.bin", 128)
    out = TensorSpec((3,), "fp16")
    ops = tuple(Op("linear", {"weight": (blob,)}, ((name, out),), {"bias": other}) for name in ("a", "b"))
    given = {"hidden_in": out, "k_0_in": TensorSpec((1, 100, 4), "fp16"), "sks": TensorSpec((1, 100, 4), "fp16")}
    size = function_size(Function("decode", given, {"b": out}, ops))
    assert size == FunctionSize(weights=12 + 8, buffers=6 + 6), (
        "15 elements of 6 bits are 12 bytes; the cache is the host's"
    )


def test_a_table_is_touched_by_pages() -> None:
    table = TableSize("t", rows=1000, row_bytes=100)
    assert table.touched(0, 4096) == 0
    assert table.touched(3, 4096) == 3 * (4096 + 99), (
        "on average, a row that begins anywhere lies in (4096 + 99) / 4096 pages"
    )
    assert table.touched(1000, 4096) == 25 * 4096, "never more than the file, in whole pages"


def live_bytes(function: Function) -> int:
    """The most that values of the program take together while it runs in its order, without inputs, outputs and constants."""
    last = {
        a.name: i
        for i, op in enumerate(function.ops)
        for args in op.inputs.values()
        for a in args
        if isinstance(a, Name)
    }
    live: dict[str, int] = {}
    most = 0
    for i, op in enumerate(function.ops):
        if op.type == "const" or op.type.startswith("constexpr"):
            continue
        live |= {name: spec_bytes(spec) for name, spec in op.outputs if name not in function.outputs}
        most = max(most, sum(live.values()))
        live = {name: size for name, size in live.items() if last.get(name, -1) > i}
    return most


@pytest.mark.parametrize("bundle", ["tiny", "tiny-gemma4"], indirect=True)
def test_the_working_share_covers_the_largest_wide_function(bundle: Bundle, sizes: ModelSizes) -> None:
    shares = []
    for width, name in bundle.config.prefill_functions.items():
        if width >= IPHONE15.wide_from_tokens.value:
            for package in bundle.config.chunks:
                live = live_bytes(open_model(bundle.root, package).function(name))
                shares.append(live / sizes.functions[package, name].buffers)
    assert 2.0 < max(shares) <= IPHONE15.working_share.value


def test_a_configuration_is_read_from_its_file_or_folder(tmp_path: Path) -> None:
    folder = tmp_path / "e2b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(E2B))
    whole = config_sizes(folder, Packing())
    assert whole == config_sizes(folder / "config.json", Packing()) and whole.config.name == "e2b"
    assert whole.functions["lmhead.mlpackage", None] == FunctionSize(262_144 * (1536 + 2) + 2 * 1536, 2 * 1536 + 4)
