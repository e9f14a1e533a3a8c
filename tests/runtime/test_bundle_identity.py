"""What changes a bundle's identity and layout, and what does not."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3
from bundle_folder import (
    Json,
    all_full,
    convert_config,
    manifest,
    write_bundle,
    write_json,
    write_package,
    write_record,
    write_tokenizer,
)

from kvstore.errors import SidecarMismatch, TokenizerMismatch, WeightsMismatch
from kvstore.identity import differences, require_same
from kvstore.layout import Group, Layout
from runtime.bundle import Bundle, BundleFileMissing

Change = Callable[[Json, Json], None]


def convert(*path: str, to: object) -> Change:
    def change(head: Json, config: Json) -> None:
        for name in path[:-1]:
            config = config[name]
        config[path[-1]] = to

    return change


def head(name: str, to: object) -> Change:
    return lambda manifest, config: manifest.__setitem__(name, to)


def opened(root: Path, change: Change | None = None, form: str = "ours") -> Bundle:
    config, top = convert_config(form), manifest(form)
    if change:
        change(top, config)
    write_json(root / "convert_config.json", config)
    write_json(root / "manifest.json", top)
    return Bundle.open(root)


def with_chunks(bounds: list[list[int]]) -> Change:
    def change(head: Json, config: Json) -> None:
        config["chunk_bounds"] = bounds

    return change


SAME: dict[str, Change] = {
    "CTX": convert("hostio", "CTX", to=512),
    "NEG": convert("hostio", "NEG", to=-30000.0),
    "embedding divisor": convert("hostio", "EMBED_DIVISOR", to=32),
    "chunk bounds": with_chunks([[0, 1], [1, 6]]),
    "decode function": convert("corellm", "decode_function", to="step"),
    "prefill functions": convert("corellm", "prefill", "functions", "32", to="other"),
    "widths": convert("corellm", "prefill", "N", to=[128, 32]),
    "no verification": convert("corellm", "verify", to=None),
    "another head": convert("corellm", "lmhead", to="lmhead_v4.mlpackage"),
    "end tokens": convert("eos_token_ids", to=[]),
    "a new key": convert("note", to="text"),
    "name": head("name", "other"),
    "prompts": head("promptPrefix", "other"),
    "compute units": head("computeUnits", "cpuOnly"),
    "context length": head("contextLength", 1),
}
OTHER: dict[str, tuple[Change, set[str]]] = {
    "architecture": (head("architecture", "other"), {"architecture"}),
    "window": (convert("hostio", "SLIDING", to=128), {"sliding_window"}),
    "a frequency": (convert("hostio", "inv_slide", to=[1.0, 0.1, 0.01, 0.0010000000000000002]), {"rope_sliding"}),
    "a full frequency": (convert("hostio", "inv_full", to=[1.0] + [0.0] * 7), {"rope_full"}),
    "KV heads": (convert("hostio", "KV_HEADS", to=4), {"kv_heads"}),
    "layer kinds": (
        convert("hostio", "layer_types", to=["full_attention"] * 5 + ["sliding_attention"]),
        {"layer_types"},
    ),
    "no sliding layers": (
        lambda _, config: all_full(config),
        {"layer_types", "sliding_window", "rope_sliding", "head_dim"},
    ),
    "the scale": (
        convert("corellm", "sidecars", "int8", "embed", "runtime_scale_sqrt", to=17),
        {"scale_embed"},
    ),
    "the stage": (head("sidecarStage", "fp16"), {"sidecar_stage", "sidecars", "scale_embed"}),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_what_changes_no_kv_byte_is_not_identity(tmp_path: Path, change: Change) -> None:
    write_bundle(tmp_path, "ours")
    whole = opened(tmp_path)
    other = opened(tmp_path, change)
    files = (tmp_path / "convert_config.json").read_text(), (tmp_path / "manifest.json").read_text()
    opened(tmp_path)
    assert files != ((tmp_path / "convert_config.json").read_text(), (tmp_path / "manifest.json").read_text())
    assert differences(whole.identity(), other.identity()) == []
    assert other.identity().digest == whole.identity().digest
    assert other.layout().digest == whole.layout().digest


@pytest.mark.parametrize(("change", "fields"), OTHER.values(), ids=OTHER)
def test_what_changes_a_kv_byte_is_identity(tmp_path: Path, change: Change, fields: set[str]) -> None:
    write_bundle(tmp_path, "ours")
    whole = opened(tmp_path)
    other = opened(tmp_path, change)
    assert {name for name, _, _ in differences(whole.identity(), other.identity())} == fields
    assert other.identity().digest != whole.identity().digest


def test_shared_layers_and_ple_are_identity(tmp_path: Path) -> None:
    write_bundle(tmp_path, "published")
    whole = opened(tmp_path, form="published").identity()
    other = opened(tmp_path, convert("store_layers", "sliding_attention", to=0), form="published").identity()
    assert {name for name, _, _ in differences(whole, other)} == {"store_layers"}
    other = opened(
        tmp_path, convert("corellm", "sidecars", "int8", "ple", "runtime_scale_sqrt", to=5), form="published"
    ).identity()
    assert {name for name, _, _ in differences(whole, other)} == {"scale_ple"}


def test_the_layout_is_of_the_layers_that_own_kv(tmp_path: Path) -> None:
    published = Bundle.open(write_bundle(tmp_path / "published")).layout()
    assert published == Layout((Group("full", None, (1, 3), 1, 16), Group("sliding", 64, (0, 2), 1, 8)), "float16")
    assert published.bytes_per_token == 2 * 2 * (2 * 8 + 2 * 16)
    ours = Bundle.open(write_bundle(tmp_path / "ours", "ours")).layout()
    assert ours == Layout((Group("full", None, (1, 3, 5), 2, 16), Group("sliding", 64, (0, 2, 4), 2, 8)), "float16")
    root = write_bundle(tmp_path / "full", "ours")
    full = opened(root, lambda _, config: all_full(config))
    assert (full.config.sliding_window, full.config.inv_slide) == (None, None)
    assert full.layout().groups == (Group("full", None, (0, 1, 2, 3, 4, 5), 2, 16),)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


BLOB = "Data/com.apple.CoreML/weights/weight.bin"


@pytest.mark.parametrize(
    ("file", "error"),
    [
        (f"chunk_1.mlpackage/{BLOB}", WeightsMismatch),
        ("embed_int8.bin", SidecarMismatch),
        ("embed_scale_f32.bin", SidecarMismatch),
        ("ple_int8.bin", SidecarMismatch),
    ],
)
def test_without_a_record_one_bit_is_another_identity(tmp_path: Path, file: str, error: type[Exception]) -> None:
    root = write_bundle(tmp_path)
    whole = Bundle.open(root)
    expected = (whole.identity(), whole.layout())
    flip(root / file)
    other = Bundle.open(root)
    with pytest.raises(error):
        require_same(expected, (other.identity(), other.layout()), "the snapshot")


def test_another_tokenizer_is_another_identity(tmp_path: Path) -> None:
    root = write_bundle(tmp_path)
    whole = Bundle.open(root)
    expected = (whole.identity(), whole.layout())
    write_tokenizer(root, extra="zebra")
    other = Bundle.open(root)
    with pytest.raises(TokenizerMismatch):
        require_same(expected, (other.identity(), other.layout()), "the snapshot")


def test_the_heads_are_apart_from_the_identity(tmp_path: Path) -> None:
    root = write_bundle(tmp_path)
    whole = Bundle.open(root)
    identity, heads = whole.identity(), whole.head_digest()
    flip(root / "lmhead_v4.mlpackage" / BLOB)
    other = Bundle.open(root)
    assert other.identity() == identity
    assert other.head_digest() != heads
    assert len(bytes.fromhex(heads)) == 32


def test_programs_and_metadata_are_not_hashed(tmp_path: Path) -> None:
    root = write_bundle(tmp_path)
    whole = Bundle.open(root).identity()
    (root / "chunk_0.mlpackage" / "Manifest.json").write_text('{"author": "another run"}')
    (root / "chunk_0.mlpackage" / "Data" / "com.apple.CoreML" / "model.mlmodel").write_bytes(b"another run")
    assert Bundle.open(root).identity() == whole


def test_a_record_gives_both_packagings_one_identity(tmp_path: Path) -> None:
    root = write_bundle(tmp_path / "package")
    write_record(root)
    packaged = Bundle.open(root)
    assert packaged.has_record and packaged.unverified == ()
    assert dict(packaged.identity().fields)["weights"] == "a" * 64
    assert packaged.head_digest() == "b" * 64

    compiled_root = tmp_path / "compiled"
    shutil.copytree(root, compiled_root)
    for package in compiled_root.glob("*.mlpackage"):
        shutil.rmtree(package)
        write_package(package.with_suffix(".mlmodelc"), f"1 {package.name}".encode(), compiled=True)
    compiled = Bundle.open(compiled_root)
    assert compiled.identity() == packaged.identity()
    assert compiled.head_digest() == packaged.head_digest()
    assert set(compiled.unverified) == {*compiled.config.chunks, *compiled.config.heads}


def test_the_weight_digest_is_the_documented_one(tmp_path: Path) -> None:
    """Computed here from `docs/bundle.md`, not with the code under test."""
    config = convert_config()
    config["corellm"]["chunks"][0] = "last.mlpackage"  # names in another order than the chunks
    root = write_bundle(tmp_path, convert=config)
    (root / "chunk_0.mlpackage").rename(root / "last.mlpackage")

    def documented(kind: str, packages: list[str]) -> str:
        hasher = blake3(derive_key_context=f"kvferry 2026-11-30 bundle {kind} 1")
        for package in sorted(packages):
            name = f"{package}/weight.bin".encode()
            hasher.update(len(name).to_bytes(4, "little") + name)
            hasher.update(blake3((root / f"{package}.mlpackage" / BLOB).read_bytes()).digest())
        return hasher.hexdigest()

    bundle = Bundle.open(root)
    weights = dict(bundle.identity().fields)["weights"]
    assert weights == documented("weights", ["last", "chunk_1", "chunk_2"])
    assert bundle.head_digest() == documented("heads", ["lmhead_v4", "lmhead"])


def test_without_a_record_packaging_matters(tmp_path: Path) -> None:
    root = write_bundle(tmp_path)
    whole = Bundle.open(root)
    assert not whole.has_record and set(whole.unverified) == {*whole.config.chunks, *whole.config.heads}
    identity = whole.identity()
    shutil.rmtree(root / "chunk_0.mlpackage")
    write_package(root / "chunk_0.mlmodelc", b"otherwise packed", compiled=True)
    assert {n for n, _, _ in differences(identity, Bundle.open(root).identity())} == {"weights"}


def test_a_chunk_without_weights_has_no_identity(tmp_path: Path) -> None:
    root = write_bundle(tmp_path)
    shutil.rmtree(root / "chunk_0.mlpackage" / "Data" / "com.apple.CoreML" / "weights")
    with pytest.raises(BundleFileMissing, match=r"chunk_0\.mlpackage/weights"):
        Bundle.open(root).identity()


def test_the_compiled_copy_is_used_where_both_exist(tmp_path: Path) -> None:
    root = write_bundle(tmp_path)
    write_package(root / "chunk_0.mlmodelc", b"compiled", compiled=True)
    bundle = Bundle.open(root)
    assert bundle.package_path("chunk_0.mlpackage") == root.resolve() / "chunk_0.mlmodelc"
    assert bundle.package_path("chunk_1.mlpackage") == root.resolve() / "chunk_1.mlpackage"
    assert bundle.package_path("lmhead_v4.mlpackage").is_dir()


def test_a_compiled_name_is_taken_as_it_is(tmp_path: Path) -> None:
    config = convert_config()
    config["corellm"]["lmhead"] = "head.mlmodelc"
    root = write_bundle(tmp_path, convert=config)
    write_package(root / "head.mlmodelc", b"head", compiled=True)
    assert Bundle.open(root).package_path("head.mlmodelc").name == "head.mlmodelc"


def test_the_config_digest_is_that_of_the_file(tmp_path: Path) -> None:
    root = write_bundle(tmp_path)
    expected = hashlib.sha256((root / "convert_config.json").read_bytes()).hexdigest()
    assert Bundle.open(root).config_sha256 == expected


def test_the_identity_is_the_same_in_another_folder(tmp_path: Path) -> None:
    one = Bundle.open(write_bundle(tmp_path / "one"))
    two = Bundle.open(write_bundle(tmp_path / "two"))
    assert one.identity().digest == two.identity().digest
    assert Bundle.open(write_bundle(tmp_path / "three", seed=2)).identity().digest != one.identity().digest


def test_opening_is_fast_and_imports_nothing_heavy(tmp_path: Path) -> None:
    root = write_bundle(tmp_path / "bundle")
    write_record(root)
    cache = tmp_path / "cache.json"
    code = (
        "import sys, pathlib; from runtime.bundle import Bundle\n"
        "b = Bundle.open(pathlib.Path(sys.argv[1]), digest_cache=pathlib.Path(sys.argv[2])); b.identity(); b.layout()\n"
        "print([m for m in ('numpy', 'tokenizers', 'coremltools', 'google.protobuf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, root, cache], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    times = []
    for _ in range(5):
        started = time.perf_counter()
        Bundle.open(root, digest_cache=cache)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.1
