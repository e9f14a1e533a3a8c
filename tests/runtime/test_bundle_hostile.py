"""Files that are damaged, hostile or not there: JSON with two readings, names that lead out of the bundle."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from bundle_folder import convert_config, holder, write_bundle

from runtime.bundle import Bundle, BundleFieldError, BundleFileMissing

BAD_JSON: list[tuple[str, bytes, str]] = [
    ("a key twice", b'{"num_layers": 6, "num_layers": 7}', "num_layers"),
    ("a nested key twice", b'{"hostio": {"CTX": 1, "CTX": 1}}', "CTX"),
    ("not a number", b'{"hostio": {"NEG": NaN}}', "NaN"),
    ("infinity", b'{"hostio": {"NEG": -Infinity}}', "-Infinity"),
    ("a number beyond doubles", b'{"x": 1e999}', "1e999"),
    ("a very long fraction", b'{"x": 0.' + b"1" * 5000 + b"}", "0.111"),
    ("an integer beyond 64 bits", b'{"x": 9223372036854775808}', "9223372036854775808"),
    ("an integer of 10,000 digits", b'{"x": ' + b"9" * 10000 + b"}", "10000 characters"),
    ("an array", b"[1, 2]", "an array"),
    ("a string", b'"text"', "a string"),
    ("null", b"null", "null"),
    ("nothing", b"", "expecting value"),
    ("half an object", b'{"num_layers": 6', "expecting"),
    ("two objects", b"{} {}", "extra data"),
    ("bytes that are not UTF-8", b'{"a": "\xff"}', "0xff"),
    ("a byte order mark", b"\xef\xbb\xbf{}", "BOM"),
    ("half a surrogate pair", b'{"name": "\\ud800"}', "half a surrogate pair"),
    ("nesting without end", b'{"a":' * 200_000, "nesting deeper"),
    ("arrays without end", b'{"a":' + b"[" * 500_000, "nesting deeper"),
    ("a file of 9 MiB", b'{"a": "' + b"x" * (9 << 20) + b'"}', "a larger file"),
]


@pytest.mark.parametrize("file", ["manifest.json", "convert_config.json", "kvferry.json"])
@pytest.mark.parametrize(("data", "found"), [b[1:] for b in BAD_JSON], ids=[b[0] for b in BAD_JSON])
def test_json_that_two_readers_could_read_differently_is_refused(
    tmp_path: Path, file: str, data: bytes, found: str
) -> None:
    write_bundle(tmp_path)
    (tmp_path / file).write_bytes(data)
    with pytest.raises(BundleFieldError) as caught:
        Bundle.open(tmp_path)
    assert caught.value.file == file
    assert found.lower() in str(caught.value).lower()
    assert len(str(caught.value)) < 1000


HOSTILE_NAMES = [
    "/etc/passwd",
    "a/../embed_int8.bin",
    "../x.bin",
    "a/../../x.bin",
    "a//b.bin",
    "./x.bin",
    "a\\b",
    "a\0b",
    "c:x",
    "a\n",
    "../..",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
@pytest.mark.parametrize(
    "dotted",
    ["corellm.sidecars.int8.embed.file", "corellm.sidecars.int8.ple.scale", "corellm.lmhead", "corellm.chunks"],
)
def test_a_name_that_leads_out_of_the_bundle_is_refused(tmp_path: Path, dotted: str, name: str) -> None:
    convert = convert_config()
    inner, last = holder(convert, dotted)
    package = name + ".mlpackage"
    inner[last] = [package, *inner[last][1:]] if last == "chunks" else package if last == "lmhead" else name
    write_bundle(tmp_path, convert=convert)
    with pytest.raises(BundleFieldError) as caught:
        Bundle.open(tmp_path)
    assert caught.value.field.startswith(dotted)


@pytest.mark.parametrize("what", ["embed_int8.bin", "chunk_0.mlpackage"])
def test_a_link_that_leads_out_of_the_bundle_is_refused(tmp_path: Path, what: str) -> None:
    root = write_bundle(tmp_path / "bundle")
    (root / what).rename(tmp_path / what)
    (root / what).symlink_to(tmp_path / what)
    with pytest.raises(BundleFieldError, match="inside the bundle"):
        Bundle.open(root)
    (root / what).unlink()
    (root / what).symlink_to(what)
    with pytest.raises(BundleFieldError, match="can be opened"):
        Bundle.open(root)


def test_a_link_within_the_bundle_is_followed(tmp_path: Path) -> None:
    root = write_bundle(tmp_path / "bundle")
    whole = Bundle.open(root).identity()
    (root / "embed_int8.bin").rename(root / "elsewhere.bin")
    (root / "embed_int8.bin").symlink_to("elsewhere.bin")
    assert Bundle.open(root).identity() == whole


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "convert_config.json",
        "embed_int8.bin",
        "embed_scale_f32.bin",
        "ple_int8.bin",
        "ple_scale_f32.bin",
        "tokenizer.json",
        "chunk_1.mlpackage",
        "lmhead.mlpackage",
        "lmhead_v4.mlpackage",
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write_bundle(tmp_path)
    (tmp_path / name).rename(tmp_path / "moved away")
    with pytest.raises(BundleFileMissing) as caught:
        Bundle.open(tmp_path)
    assert caught.value.file == name
    assert pickle.loads(pickle.dumps(caught.value)).file == name


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleFileMissing, match="nowhere"):
        Bundle.open(tmp_path / "nowhere")


def test_files_of_the_other_stage_need_not_be_there(tmp_path: Path) -> None:
    write_bundle(tmp_path)
    (tmp_path / "embed_fp16.bin").unlink()
    assert Bundle.open(tmp_path).config.sidecar_stage == "int8"


@pytest.mark.parametrize("name", ["chunk_0", "chunk_0.mlmodel", "chunk_0.mlpackage.zip"])
def test_a_package_name_of_another_kind_is_refused(tmp_path: Path, name: str) -> None:
    convert = convert_config()
    convert["corellm"]["chunks"][0] = name
    write_bundle(tmp_path, convert=convert)
    with pytest.raises(BundleFieldError, match=r"corellm\.chunks\[0\].*\.mlpackage or \.mlmodelc"):
        Bundle.open(tmp_path)
