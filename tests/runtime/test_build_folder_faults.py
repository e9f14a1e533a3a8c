"""What a Hugging Face folder may have wrong with it, refused by name before much is written; and what a failed build leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gemma4_e2b import E2B
from gemma4_folder import write_folder

from runtime.build import (
    BuildError,
    Packing,
    PackingUnsupported,
    SourceDamaged,
    SourceFieldError,
    SourceMissing,
    TargetExists,
    build_bundle,
    estimate_build,
)
from runtime.build.gemma4.config import read_config
from runtime.build.gemma4.tiny import tiny_config, tiny_gemma4

MODEL = tiny_gemma4(0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "folder", MODEL)


def refused(root: Path, kind: type[BuildError], match: str) -> BuildError:
    """The refusal of a build of ``root``, which has to come before anything is written beside it."""
    seen: list[str] = []
    with pytest.raises(kind, match=match) as caught:
        build_bundle(None, root.parent / "out", source=root, progress=lambda step, _: seen.append(step))
    assert set(seen) <= {"reading the weights"}, "refused before anything is made"
    assert [p.name for p in root.parent.iterdir() if "out" in p.name] == []
    return caught.value


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


# The tokenizer


def test_a_tokenizer_config_cut_short_is_refused(root: Path) -> None:
    path = root / "tokenizer_config.json"
    path.write_bytes(path.read_bytes()[:40])
    error = refused(root, SourceDamaged, r"tokenizer_config\.json: line \d+ column \d+: expected JSON")
    assert error.details["file"] == "tokenizer_config.json"


@pytest.mark.parametrize("content", ["{}", '{"model": {"type": "BPE"}}', '{"model": '])
def test_a_tokenizer_that_cannot_be_loaded_is_refused(root: Path, content: str) -> None:
    (root / "tokenizer.json").write_text(content)
    assert refused(root, SourceDamaged, r"tokenizer\.json: ").details["file"] == "tokenizer.json"


def test_more_ids_than_the_vocabulary_has_rows_are_refused(root: Path) -> None:
    rewrite(
        root / "tokenizer.json",
        lambda d: d["added_tokens"].append({**d["added_tokens"][0], "id": 1024, "content": "<new>"}),
    )
    error = refused(root, SourceFieldError, r"tokenizer\.json: .*vocab_size \(1024\)")
    assert "1024" in error.details["found"]


def test_an_id_beyond_the_vocabulary_is_refused_though_there_are_few(root: Path) -> None:
    def move(document: dict[str, Any]) -> None:
        vocabulary = document["model"]["vocab"]
        vocabulary[next(piece for piece, token in vocabulary.items() if token == 1023)] = 5000

    rewrite(root / "tokenizer.json", move)
    assert "5000" in refused(root, SourceFieldError, r"tokenizer\.json: .*vocab_size").details["found"]


# The beginning-of-sequence token


@pytest.mark.parametrize("folder", [False, True])
def test_a_missing_tokenizer_config_is_refused(root: Path, folder: bool) -> None:
    (root / "tokenizer_config.json").unlink()
    if folder:
        (root / "tokenizer_config.json").mkdir()
    error = refused(root, SourceMissing, r"tokenizer_config\.json")
    assert error.details["file"].endswith("tokenizer_config.json")


@pytest.mark.parametrize("value", [-1, 1.5, "x", {}, True, 1024, [2], None])
def test_bos_token_id_has_to_be_an_id(root: Path, value: object) -> None:
    rewrite(root / "config.json", lambda d: d.update(bos_token_id=value))
    error = refused(root, SourceFieldError, r"config\.json: bos_token_id: expected an integer from 0 to 1023")
    assert error.details["field"] == "bos_token_id"


def test_bos_token_id_has_to_be_there(root: Path) -> None:
    rewrite(root / "config.json", lambda d: d.pop("bos_token_id"))
    error = refused(root, SourceFieldError, r"bos_token_id: .*found no such field")
    assert error.details["field"] == "bos_token_id"


def test_bos_token_id_comes_from_either_place() -> None:
    assert read_config(E2B, "e2b").bos_token_id == 2
    with pytest.raises(SourceFieldError, match="bos_token_id"):
        read_config({**E2B, "bos_token_id": 262_144}, "e2b")


def test_bos_token_id_has_to_be_what_the_tokenizer_begins_with(root: Path) -> None:
    rewrite(root / "config.json", lambda d: d.update(bos_token_id=3))
    error = refused(
        root, SourceFieldError, r"bos_token: expected the token that config\.json's bos_token_id names \(3\), found .*2"
    )
    assert error.details["field"] == "bos_token"
    rewrite(root / "config.json", lambda d: d.update(bos_token_id=2))
    rewrite(root / "tokenizer_config.json", lambda d: d.pop("bos_token"))
    error = refused(root, SourceFieldError, r"tokenizer_config\.json: bos_token: .*found no such field")
    assert error.details["field"] == "bos_token"


# Files that aren't files


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "LICENSE"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
def test_a_source_file_has_to_be_a_regular_file(root: Path, name: str, kind: str) -> None:
    path = root / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    words = {"fifo": "a named pipe", "folder": "a folder", "device": "a device"}
    error = refused(root, SourceMissing, rf"{name}: expected a regular file, found {words[kind]}")
    assert error.details["file"] == str(path)


def test_a_shard_has_to_be_a_regular_file(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "folder", MODEL, files=2)
    shard = root / "model-00002-of-00002.safetensors"
    shard.unlink()
    os.mkfifo(shard)
    error = refused(root, SourceMissing, "model-00002-of-00002.safetensors: expected a regular file")
    assert error.details["file"] == str(shard)


def test_a_gguf_file_has_to_be_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    pipe = refused(tmp_path / "model.gguf", SourceMissing, r"model\.gguf: expected a regular file, found a named pipe")
    none = refused(tmp_path / "none.gguf", SourceMissing, r"none\.gguf: expected a GGUF file, found none")
    assert [error.details["file"] for error in (pipe, none)] == [str(tmp_path / n) for n in ("model.gguf", "none.gguf")]


def test_a_safetensors_file_is_not_the_source_but_its_folder_is(root: Path) -> None:
    with pytest.raises(BuildError, match=f"Give its folder, {root}"):
        estimate_build(None, source=root / "model.safetensors")


def test_a_file_too_short_for_a_header_is_refused_in_its_own_terms(root: Path) -> None:
    (root / "model.safetensors").write_bytes(b"1234567")
    error = refused(
        root, SourceDamaged, r"model\.safetensors: the file's length: expected at least 10 bytes, found 7 bytes"
    )
    assert error.details["file"].endswith("model.safetensors")


# What a failed build leaves


def test_a_refusal_leaves_nothing(tmp_path: Path) -> None:
    """The last layer has the NaN, so that tables and chunks are made before it is met."""
    name = "layers.6.mlp.up_proj.weight"

    def broken(given: str, tensor: Any) -> Any:
        return np.full_like(tensor, np.nan) if given == name else tensor

    root = write_folder(tmp_path / "folder", MODEL, change=broken)
    seen: list[str] = []
    with pytest.raises(SourceFieldError, match=r"layers\.6\.mlp"):
        build_bundle(None, tmp_path / "out", source=root, progress=lambda step, _: seen.append(step))
    assert "chunk_2.mlpackage" in seen
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_an_interrupt_keeps_what_is_whole_and_says_where(tmp_path: Path) -> None:
    out, stage = tmp_path / "out", tmp_path / ".out.building"

    def stop(step: str, _: float) -> None:
        if step == "per-layer embedding" and any((stage / ".part").glob("ple_*")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        build_bundle("tiny-gemma4", out, progress=stop)
    (note,) = caught.value.__notes__
    assert str(stage) in note and "again" in note and "delete" in note
    assert {p.name for p in stage.iterdir()} == {"embed_int8.bin", "embed_scale_f32.bin", ".state.json"}
    steps: list[str] = []
    inode = (stage / "embed_int8.bin").stat().st_ino
    assert build_bundle("tiny-gemma4", out, progress=lambda step, _: steps.append(step)).made
    assert (out / "embed_int8.bin").stat().st_ino == inode and not stage.exists()


def test_an_interrupt_before_any_part_leaves_nothing(tmp_path: Path) -> None:
    def stop(step: str, _: float) -> None:
        if step == "embedding":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        build_bundle("tiny-gemma4", tmp_path / "out", progress=stop)
    assert not hasattr(caught.value, "__notes__") and list(tmp_path.iterdir()) == []


def test_the_command_says_where_an_interrupted_build_stays(tmp_path: Path) -> None:
    """With the warning of an inexact verification head before it."""
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from kvstore.__main__ import main; main()"
    words = ["bundle", "build", "tiny-gemma4", str(tmp_path / "out"), "--verify-head", "pal6"]
    child = subprocess.Popen([sys.executable, "-c", code, *words], stderr=subprocess.PIPE, text=True)
    stage = tmp_path / ".out.building"
    while not (stage / "ple_int8.bin").exists():
        assert child.poll() is None, "built before it was interrupted"
        time.sleep(0.002)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate()
    assert child.returncode == 130
    assert "may say another token" in err and "kvferry bundle heads" in err and "speculation is refused" in err
    assert f"stays in {stage}: running the same command again goes on" in err
    assert err.splitlines()[-1].startswith("kvferry: Interrupted: ")
    assert (stage / "ple_int8.bin").exists() and not (stage / ".part").exists()


# Words


def test_a_packing_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(PackingUnsupported, match="found weights fp16, verify-head same, sidecars int8") as caught:
        build_bundle("tiny", tmp_path / "out", packing=Packing("fp16"))
    assert "Packing(" not in str(caught.value)


def test_another_packing_in_the_way_is_named(tiny_gemma4_bundle: Path) -> None:
    with pytest.raises(TargetExists, match=r"another bundle, with weights pal6, not fp16\. Give a DIR") as caught:
        build_bundle("tiny-gemma4", tiny_gemma4_bundle, packing=Packing("fp16"))
    assert "{" not in str(caught.value)


def test_the_tiny_models_configuration_is_buildable() -> None:
    assert read_config(tiny_config(), "tiny").bos_token_id == 2
