"""What the command says of a bundle that can't run as it is written: a named error, and the exit code of the table in `docs/cli.md`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command import Kvferry

INNER = Path("chunk_0.mlpackage") / "Data" / "com.apple.CoreML"


@pytest.fixture
def broken(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of tiny without its record, to be broken."""
    return shutil.copytree(tiny_bundle, tmp_path / "broken", ignore=shutil.ignore_patterns("kvferry.json"))


def configure(root: Path, section: str, field: str, value: object) -> None:
    file = root / "convert_config.json"
    config = json.loads(file.read_text())
    config[section][field] = value
    file.write_text(json.dumps(config))


def refused(kvferry: Kvferry, root: Path, code: int) -> dict[str, Any]:
    answer = kvferry("generate", "--bundle", str(root), "--prompt", "The ferry", "--json")
    assert (answer.code, answer.out) == (code, ""), answer.err
    error: dict[str, Any] = json.loads(answer.err.splitlines()[-1])
    return error


@pytest.mark.parametrize("file", ["model.mlmodel", "weights/weight.bin", "Manifest.json"])
@pytest.mark.parametrize("kept", [0, 100])
def test_a_damaged_package_is_corrupt(kvferry: Kvferry, broken: Path, file: str, kept: int) -> None:
    path = broken / INNER / file if file != "Manifest.json" else broken / "chunk_0.mlpackage" / file
    path.write_bytes(path.read_bytes()[:kept])
    error = refused(kvferry, broken, 4)
    assert error["error"] == "PackageError" and file in error["message"]


@pytest.mark.parametrize("text", ["", "program(1.3)\n{\n    func decode<ios18>("])
def test_a_damaged_compiled_program_is_corrupt(kvferry: Kvferry, broken: Path, text: str) -> None:
    copy = broken / "chunk_0.mlmodelc"
    (copy / "weights").mkdir(parents=True)
    shutil.copyfile(broken / INNER / "weights" / "weight.bin", copy / "weights" / "weight.bin")
    (copy / "model.mil").write_text(text)
    error = refused(kvferry, broken, 4)
    assert error["error"] == "PackageError" and "model.mil" in error["message"]


def test_a_package_without_its_manifest_is_missing(kvferry: Kvferry, broken: Path) -> None:
    (broken / "chunk_0.mlpackage" / "Manifest.json").unlink()
    assert refused(kvferry, broken, 3)["error"] == "PackageMissing"


def test_a_function_that_no_package_has_is_named(kvferry: Kvferry, broken: Path) -> None:
    configure(broken, "corellm", "decode_function", "step")
    error = refused(kvferry, broken, 4)
    assert error["error"] == "PackageError" and error["details"]["found"] == "step"
    assert "function" in error["message"] and "convert_config.json" in error["message"]


@pytest.mark.parametrize("context", [2047, 2049, 4096])
def test_a_context_that_the_functions_are_not_built_for_is_named(kvferry: Kvferry, broken: Path, context: int) -> None:
    configure(broken, "hostio", "CTX", context)
    error = refused(kvferry, broken, 4)
    assert error["error"] == "BundleFieldError"
    assert error["details"]["field"] == "hostio.CTX"
    assert error["details"]["expected"].startswith("2048 (chunk_0.mlpackage:") and error["details"]["found"] == str(
        context
    )


def test_another_size_of_an_input_is_named(kvferry: Kvferry, broken: Path) -> None:
    config = json.loads((broken / "convert_config.json").read_text())
    head = config["hostio"]["HD"]
    configure(broken, "hostio", "HD", 2 * head)
    configure(broken, "hostio", "inv_slide", [1.0] * head)
    error = refused(kvferry, broken, 4)
    assert error["error"] == "BundleFieldError" and error["details"]["function"].startswith("chunk_0.mlpackage:")
    assert error["details"]["field"] in ("cos_s", "sin_s", "k_0_in") and str(head) in error["details"]["expected"]
