"""Whole folders of the published shape, compiled as the app ships them: what may be left out, what it is then, what is missed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bundle_folder import (
    HIDDEN,
    PLE,
    ROWS,
    Json,
    convert_config,
    documents,
    holder,
    manifest,
    parse,
    refusal,
    write_bundle,
    write_package,
)

from runtime.bundle import Bundle, BundleFieldError, BundleFileMissing

Change = Callable[[Json, Json], None]
CHUNKS = ["chunk_0", "chunk_1", "chunk_2"]
HEADS = ["lmhead", "lmhead_v4"]


def minimal() -> tuple[Json, Json]:
    """`manifest.json` and `convert_config.json` with required fields only: no prefill widths, no verification, fp16."""
    head = {
        name: manifest()[name]
        for name in ("name", "architecture", "contextLength", "modelRelativePath", "tokenizerRelativePath")
    }
    convert = convert_config()
    del convert["eos_token_ids"]
    corellm = convert["corellm"]
    for name in ("decode_function", "verify"):
        del corellm[name]
    corellm["prefill"] = {"N": []}
    del corellm["sidecars"]["default_stage"], corellm["sidecars"]["int8"]
    return head, convert


def compiled(root: Path, **documents_: Any) -> Path:
    """A bundle whose JSON names packages and whose folders are compiled."""
    write_bundle(root, **documents_)
    for name in [*CHUNKS, *HEADS]:
        shutil.rmtree(root / f"{name}.mlpackage")
        write_package(root / f"{name}.mlmodelc", name.encode(), compiled=True)
    return root


def without(document: Json, dotted: str) -> None:
    inner, last = holder(document, dotted)
    del inner[last]


def put(document: Json, dotted: str, value: Any) -> None:
    inner, last = holder(document, dotted)
    inner[last] = value


def test_the_published_folder_opens_compiled(tmp_path: Path) -> None:
    head = manifest()
    bundle = Bundle.open(compiled(tmp_path, head=head))
    assert {bundle.package_path(f"{name}.mlpackage").name for name in CHUNKS + HEADS} == {
        f"{name}.mlmodelc" for name in CHUNKS + HEADS
    }
    assert bundle.config.format == "coreml-corellm-r1" and bundle.embed.rows == ROWS and bundle.ple is not None
    assert bundle.config.ctx == 256 != head["contextLength"], "CTX rules, the manifest's contextLength is not used"


def test_required_fields_are_enough(tmp_path: Path) -> None:
    head, convert = minimal()
    config = Bundle.open(compiled(tmp_path, head=head, convert=convert)).config
    assert (config.format, config.sidecar_stage, config.compute_units) == ("coreml-corellm-r1", "fp16", None)
    assert (config.eos_token_ids, config.decode_function, config.plain_width) == (frozenset(), "decode", None)
    assert (config.prefill_widths, config.prefill_functions) == ((), {})
    assert (config.verify_functions, config.lmhead_batched, config.heads) == ({}, {}, ("lmhead.mlpackage",))
    assert (config.embed.scale_file, config.embed.scale_square) == (None, None)
    assert (config.prompt_prefix, config.prompt_suffix, config.assistant_suffix) == (None, None, None)


@pytest.mark.parametrize(
    "name", ["name", "architecture", "contextLength", "modelRelativePath", "tokenizerRelativePath"]
)
def test_what_the_minimal_manifest_lacks_is_named(tmp_path: Path, name: str) -> None:
    head, convert = minimal()
    del head[name]
    with pytest.raises(BundleFieldError, match=rf"manifest\.json: {name}: expected .*, found no such field"):
        Bundle.open(compiled(tmp_path, head=head, convert=convert))


@pytest.mark.parametrize(
    ("head", "missed"), [("lmhead", "corellm.lmhead"), ("lmhead_v4", r"corellm\.verify\.lmhead_batched\.4")]
)
@pytest.mark.parametrize("packaging", ["packages", "compiled"])
def test_an_absent_head_is_named_with_the_field_that_names_it(
    tmp_path: Path, head: str, missed: str, packaging: str
) -> None:
    root = write_bundle(tmp_path) if packaging == "packages" else compiled(tmp_path)
    shutil.rmtree(root / f"{head}{'.mlpackage' if packaging == 'packages' else '.mlmodelc'}")
    with pytest.raises(BundleFileMissing, match=missed) as caught:
        Bundle.open(root)
    assert caught.value.file == f"{head}.mlpackage" and "`kvferry bundle build`" in str(caught.value)


STAGES = [("int8", None, "int8"), ("fp16", None, "fp16"), (None, None, "fp16"), (None, "int8", "int8"), ("fp16", "int8", "int8"), ("int8", "fp16", "fp16")]  # fmt: skip
FILES = {
    "int8": ["embed_int8.bin", "embed_scale_f32.bin", "ple_int8.bin", "ple_scale_f32.bin"],
    "fp16": ["embed_fp16.bin", "ple_fp16.bin"],
}


@pytest.mark.parametrize(("default", "asked", "stage"), STAGES)
def test_the_manifest_s_stage_comes_before_the_default_which_is_fp16(
    tmp_path: Path, default: str | None, asked: str | None, stage: str
) -> None:
    head, convert = manifest(), convert_config()
    head["sidecarStage"], convert["corellm"]["sidecars"]["default_stage"] = asked, default
    root = compiled(tmp_path, head=head, convert=convert)
    for other in FILES.keys() - {stage}:
        for file in FILES[other]:
            (root / file).unlink()
    assert Bundle.open(root).config.sidecar_stage == stage
    for file in FILES[stage]:
        (root / file).rename(root / "away")
        with pytest.raises(BundleFileMissing) as caught:
            Bundle.open(root)
        assert caught.value.file == file
        (root / "away").rename(root / file)
    del convert["corellm"]["sidecars"][stage]
    assert refusal({"manifest.json": head, "convert_config.json": convert}).field == f"corellm.sidecars.{stage}"


@pytest.mark.parametrize(("table", "default"), [("embed", HIDDEN), ("ple", PLE)])
def test_a_scale_that_is_not_given_is_the_width_of_a_row(table: str, default: int) -> None:
    files = documents()
    dotted = f"corellm.sidecars.int8.{table}"
    put(files["convert_config.json"], f"{dotted}.runtime_scale_sqrt", 9)
    put(files["convert_config.json"], f"{dotted}.scale", "other.bin")
    spec = getattr(parse(files), table)
    assert (spec.scale_square, spec.scale_file) == (9.0, "other.bin")
    without(files["convert_config.json"], f"{dotted}.runtime_scale_sqrt")
    without(files["convert_config.json"], f"{dotted}.scale")
    spec = getattr(parse(files), table)
    assert (spec.scale_square, spec.scale_file) == (float(default), f"{table}_scale_f32.bin")


def test_the_decode_function_s_name() -> None:
    files = documents()
    put(files["convert_config.json"], "corellm.decode_function", "step")
    assert parse(files).decode_function == "step"
    without(files["convert_config.json"], "corellm.decode_function")
    assert parse(files).decode_function == "decode"


@pytest.mark.parametrize(
    ("listed", "of_manifest", "union"),
    [
        ([1], [3], {1, 3}),
        ([1, 2], [2], {1, 2}),
        (None, [3], {3}),
        ([1], None, {1}),
        (None, None, set()),
        ([], [], set()),
    ],
)
def test_end_tokens_are_those_of_both_files(listed: Any, of_manifest: Any, union: set[int]) -> None:
    files = documents()
    files["convert_config.json"]["eos_token_ids"], files["manifest.json"]["eos"] = listed, of_manifest
    assert parse(files).eos_token_ids == union


@pytest.mark.parametrize(
    ("widths", "prefill", "verify", "narrow", "verifies"),
    [
        ([128, 4], {"4": "p"}, {"4": "v"}, "p", "p"),
        ([128, 4], {}, {"4": "v"}, "v", "v"),
        ([128], {"4": "p"}, {"4": "v"}, None, "p"),
        ([128], {}, {"4": "v"}, None, "v"),
        ([128, 4], {"4": "p"}, None, "p", None),
    ],
)
def test_the_function_of_width_4(
    widths: Any, prefill: Any, verify: Any, narrow: str | None, verifies: str | None
) -> None:
    """For prefilling and for verifying it is the prefill function, else the verify function."""
    files = documents()
    corellm = files["convert_config.json"]["corellm"]
    corellm["prefill"] = {"N": widths, "functions": {"128": "wide", **prefill}}
    if verify is None:
        del corellm["verify"]
    else:
        corellm["verify"]["functions"] = verify
    config = parse(files)
    assert config.prefill_functions.get(4) == narrow and config.verify_functions.get(4) == verifies
    assert config.lmhead_batched == ({} if verify is None else {4: "lmhead_v4.mlpackage"})


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        (lambda v: v.pop("functions"), "corellm.verify.functions.4"),
        (lambda v: v.pop("lmhead_batched"), "corellm.verify.lmhead_batched.4"),
        (lambda v: v["functions"].update({"8": "v8"}), "corellm.verify.lmhead_batched.8"),
        (lambda v: v["lmhead_batched"].update({"8": "h8.mlpackage"}), "corellm.verify.functions.8"),
        (lambda v: v.update(widths=[4, 8]), "corellm.verify.functions.8"),
        (lambda v: v["lmhead_batched"].update({"4": ""}), "corellm.verify.lmhead_batched.4"),
    ],
)
def test_verification_needs_a_function_and_a_head_for_each_width(change: Callable[[Json], object], missed: str) -> None:
    files = documents()
    change(files["convert_config.json"]["corellm"]["verify"])
    assert refusal(files).field == missed


def test_optional_assets_of_the_app_don_t_matter(tmp_path: Path) -> None:
    root = compiled(tmp_path)
    before = Bundle.open(root).identity()
    for name in ("vision_fp16.mlmodelc", "audio_fp16.mlmodelc", "drafter.mlpackage"):
        write_package(root / name, b"other", compiled=name.endswith("c"))
    assert Bundle.open(root).identity() == before
