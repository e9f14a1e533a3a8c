"""Reading safetensors: what the safetensors package writes comes back, bfloat16 too, and damaged files are refused by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from runtime.build.errors import SourceDamaged, SourceFieldError, SourceMissing
from runtime.build.safetensors_file import SafetensorsFolder


def written(root: Path, header: dict[str, Any] | bytes, data: bytes, *, length: int | None = None) -> Path:
    """A file by hand."""
    root.mkdir(exist_ok=True)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (root / "model.safetensors").write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return root


def tensor(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_what_the_package_writes_comes_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    given = {
        "a": rng.standard_normal((5, 7)).astype(np.float32),
        "b.weight": rng.standard_normal((4, 3)).astype(np.float16),
        "c": rng.standard_normal(9).astype(np.float32),
        "ids": np.arange(4),
        "none": np.zeros((0, 3), np.float32),
    }
    save_file(given, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with SafetensorsFolder(tmp_path) as folder:
        assert folder.files == ("model.safetensors",)
        assert {name: entry.shape for name, entry in folder.entries.items()} == {n: t.shape for n, t in given.items()}
        for name in ("a", "b.weight", "c", "none"):
            found = folder.rows(name, 0, len(given[name]))
            assert found.dtype == np.float32 and np.array_equal(found, given[name].astype(np.float32))
        assert np.array_equal(folder.rows("a", 2, 4), given["a"][2:4])
        with pytest.raises(SourceFieldError, match="tensor ids"):
            folder.rows("ids", 0, 4)
        kept = folder.rows("a", 0, 5)
    assert np.array_equal(kept, given["a"]), "arrays outlive the folder"


def test_bfloat16_is_the_upper_half_of_float32(tmp_path: Path) -> None:
    bits = np.array([[0x3F80, 0xBF80, 0x4049], [0x0000, 0x8000, 0x7F7F], [0x0001, 0x3EAB, 0xC2F7]], "<u2")
    root = written(tmp_path, {"w": tensor("BF16", [3, 3], 0, 18)}, bits.tobytes())
    with SafetensorsFolder(root) as folder:
        found = folder.rows("w", 0, 3)
        assert found[0].tolist() == [1.0, -1.0, 3.140625]
        assert found[1, 2] == np.float32(3.3895314e38) and np.signbit(found[1, 1])
        assert np.array_equal(folder.rows("w", 1, 3), found[1:])


def test_an_index_names_several_files(tmp_path: Path) -> None:
    save_file({"a": np.ones((2, 2), np.float32)}, tmp_path / "one.safetensors")
    save_file({"b": np.zeros(3, np.float32)}, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with SafetensorsFolder(tmp_path) as folder:
        assert set(folder.entries) == {"a", "b"} and folder.files == ("one.safetensors", "two.safetensors")

    def refused(weight_map: Any, kind: type[Exception], match: str) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(kind, match=match):
            SafetensorsFolder(tmp_path)

    refused({"a": "two.safetensors", "b": "two.safetensors"}, SourceDamaged, r"weight_map\.a")
    refused({"c": "one.safetensors"}, SourceDamaged, r"weight_map\.c")
    refused({"a": "three.safetensors"}, SourceMissing, r"three\.safetensors")
    refused({"a": "../one.safetensors"}, SourceDamaged, "the same folder")
    refused({}, SourceDamaged, "weight_map")
    refused(None, SourceDamaged, "weight_map")
    save_file({"a": np.ones((2, 2), np.float32)}, tmp_path / "two.safetensors")
    refused({"a": "one.safetensors", "b": "two.safetensors"}, SourceDamaged, "each tensor in one file")


W = tensor("F32", [2], 0, 8)


@pytest.mark.parametrize(
    ("write", "match"),
    [
        (lambda root: written(root, {"w": W}, b"\0" * 7), "the file's length"),
        (lambda root: written(root, {"w": W}, b"\0" * 9), "the file's length"),
        (lambda root: written(root, {"w": tensor("F32", [3], 0, 8)}, b"\0" * 8), r"w\.data_offsets"),
        (lambda root: written(root, {"w": tensor("F32", [2], 4, 12)}, b"\0" * 12), r"w\.data_offsets"),
        (lambda root: written(root, {"w": W, "v": W}, b"\0" * 8), "data_offsets"),
        (lambda root: written(root, {"w": W, "v": tensor("F32", [1], 12, 16)}, b"\0" * 16), r"v\.data_offsets"),
        (lambda root: written(root, {"w": tensor("F99", [2], 0, 8)}, b"\0" * 8), r"w\.dtype"),
        (lambda root: written(root, {"w": {"dtype": "F32", "shape": [2]}}, b"\0" * 8), r"w\.data_offsets"),
        (lambda root: written(root, {"w": tensor("F32", [-2], 0, 8)}, b"\0" * 8), r"w\.shape"),
        (lambda root: written(root, {"w": tensor("F32", [2**50], 0, 2**52)}, b"\0" * 8), r"w\.shape"),
        (lambda root: written(root, {"w": tensor("F32", [True], 0, 4)}, b"\0" * 4), r"w\.shape"),
        (lambda root: written(root, {"w": tensor("F32", [2], 8, 0)}, b"\0" * 8), r"w\.data_offsets"),
        (lambda root: written(root, {"w": 7}, b"\0" * 8), r"w\.data_offsets"),
        (lambda root: written(root, b"[1, 2]", b""), "object"),
        (lambda root: written(root, b'{"w": 1, "w": 2}', b""), "twice"),
        (lambda root: written(root, {"w": W}, b"\0" * 8, length=2**62), "the header's length"),
        (lambda root: written(root, {"w": W}, b"\0" * 8, length=1), "the header's length"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path, write: Callable[[Path], Path], match: str) -> None:
    with pytest.raises(SourceDamaged, match=match):
        SafetensorsFolder(write(tmp_path / "folder"))


def test_empty_and_absent_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceMissing, match=r"model\.safetensors"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(SourceDamaged, match="empty"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0")
    with pytest.raises(SourceDamaged, match="length: expected at least 10 bytes, found 3"):
        SafetensorsFolder(tmp_path)
