"""Checkpoint folders that nobody should take: each refused by name, and nothing of it in the store."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corellm_independent as independent
import numpy as np
import pytest
from corellm_models import some_rows, some_tokens, take, write_bundle
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import Store
from kvstore.errors import FormatTooNew, IdentityMismatch, KVError, Refused
from kvstore.formats.corellm import decode_manifest, encode_manifest
from kvstore.formats.corellm_geometry import Geometry
from kvstore.formats.errors import CheckpointCorrupt, CheckpointMissing

COUNT = 70
Json = dict[str, Any]


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("published") / "gemma-small", ctx=128, sliding=64)


@pytest.fixture(scope="session")
def good(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a checkpoint that is as it should be."""
    folder = tmp_path_factory.mktemp("good") / "kv"
    independent.write(folder, root, some_tokens(COUNT), some_rows(root, COUNT), pending=3)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(good: dict[str, bytes], tmp_path: Path) -> Path:
    made = tmp_path / "kv"
    made.mkdir()
    for name, data in good.items():
        (made / name).write_bytes(data)
    return made


def refused(folder: Path, root: Path, tmp_path: Path, kind: type[KVError], words: str) -> KVError:
    with Store.open(tmp_path / "store") as store:
        with pytest.raises(kind, match=words) as caught:
            take(store, folder, root)
        assert list(store.shelf.records.ref_files()) == []
        assert list(store.shelf.records.snapshots()) == []
    return caught.value


def test_the_good_one_is_taken(folder: Path, root: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        assert take(store, folder, root).saved.digest is not None


def layer(manifest: Json, index: int) -> Json:
    entry: Json = manifest["layers"][index]
    return entry


def put(key: str, value: Any) -> Callable[[Json], None]:
    return lambda manifest: manifest.update({key: value})


def drop(key: str) -> Callable[[Json], None]:
    return lambda manifest: manifest.pop(key)


def fewer_rows(manifest: Json) -> None:
    """Rows, sizes and tokens agree with each other, and not with the files."""
    tokens = manifest["processedTokens"][:-1]
    manifest |= {"position": COUNT - 1, "tokenCount": COUNT - 1, "processedTokens": tokens}
    manifest["tokenSeqSHA256"] = independent.tokens_digest(tokens)
    for entry in manifest["layers"]:
        size = (COUNT - 1) * entry["headDim"] * 2
        entry |= {"rows": COUNT - 1, "kBytes": size, "vBytes": size}


def token(value: int) -> Callable[[Json], None]:
    def change(manifest: Json) -> None:
        manifest["processedTokens"][5] = value
        if abs(value) < 2**63:
            manifest["tokenSeqSHA256"] = independent.tokens_digest(manifest["processedTokens"])

    return change


MANIFESTS: dict[str, tuple[Callable[[Json], Any], type[KVError], str]] = {
    "a newer schema": (put("schemaVersion", 2), FormatTooNew, "schemaVersion: this kvferry reads 1, found 2"),
    "an older schema": (put("schemaVersion", 0), FormatTooNew, "found 0"),
    "a schema in words": (put("schemaVersion", "1"), CheckpointCorrupt, "schemaVersion: expected 1, found 1"),
    "schema true": (put("schemaVersion", True), CheckpointCorrupt, "found True"),
    "no schema": (drop("schemaVersion"), CheckpointCorrupt, "schemaVersion"),
    "no identity": (drop("identity"), CheckpointCorrupt, "identity: expected an object"),
    "no rows": (put("position", 0), Refused, "expected 1 row or more, found 0"),
    "more than the context": (put("position", 129), Refused, r"at most 128 .*found 129"),
    "fewer than none": (put("position", -1), CheckpointCorrupt, "position: expected 0 or more, found -1"),
    "position true": (put("position", True), CheckpointCorrupt, "its fields.*position"),
    "position 70.5": (put("position", 70.5), CheckpointCorrupt, "its fields.*position"),
    "no layers": (put("layers", []), CheckpointCorrupt, "expected 4 entries .*found 0"),
    "a layer too many": (lambda m: m["layers"].append(layer(m, 0)), CheckpointCorrupt, "expected 4 entries .*found 5"),
    "a layer twice": (lambda m: layer(m, 3).update(layer=2), CheckpointCorrupt, "an entry for layer 3"),
    "a layer that owns none": (lambda m: layer(m, 3).update(layer=4), CheckpointCorrupt, "an entry for layer 3"),
    "another kind": (lambda m: layer(m, 1).update(type="sliding_attention"), CheckpointCorrupt, "layer 1: type"),
    "another head dim": (lambda m: layer(m, 1).update(headDim=8), CheckpointCorrupt, "layer 1: headDim: expected 16"),
    "other rows": (lambda m: layer(m, 2).update(rows=COUNT + 1), CheckpointCorrupt, "layer 2: rows: expected 70"),
    "other bytes": (lambda m: layer(m, 2).update(vBytes=1), CheckpointCorrupt, "layer 2: vBytes"),
    "a path": (lambda m: layer(m, 0).update(kFile="../k_0.bin"), CheckpointCorrupt, "layer 0: kFile"),
    "another layer's file": (lambda m: layer(m, 0).update(kFile="k_2.bin"), CheckpointCorrupt, "layer 0: kFile"),
    "files of other lengths": (fewer_rows, CheckpointCorrupt, r"k_0.bin: length: expected 1104 bytes.*found 1120"),
    "another count": (put("tokenCount", 71), CheckpointCorrupt, "tokenCount: expected 70"),
    "fewer tokens": (lambda m: m["processedTokens"].pop(), CheckpointCorrupt, "processedTokens: expected 70"),
    "another token": (lambda m: m["processedTokens"].reverse(), CheckpointCorrupt, "tokenSeqSHA256"),
    "a token that the model has not": (token(320), CheckpointCorrupt, r"processedTokens\[5\]: .*0 to 319, found 320"),
    "a token below none": (token(-1), CheckpointCorrupt, r"processedTokens\[5\]"),
    "a token beyond 64 bits": (token(2**64), CheckpointCorrupt, r"processedTokens"),
    "a pending token that the model has not": (put("pendingNextToken", 320), CheckpointCorrupt, "pendingNextToken"),
    "a pending token in words": (put("pendingNextToken", "3"), CheckpointCorrupt, "pendingNextToken"),
    "no compute units": (drop("createdWithComputeUnits"), CheckpointCorrupt, "createdWithComputeUnits"),
    "a long name": (put("bundleName", "x" * 5000), CheckpointCorrupt, "bundleName"),
}  # fmt: skip


@pytest.mark.parametrize("case", MANIFESTS)
def test_manifests(folder: Path, root: Path, tmp_path: Path, case: str) -> None:
    change, kind, words = MANIFESTS[case]
    value = json.loads((folder / "manifest.json").read_text())
    change(value)
    independent.put(folder, value)
    error = refused(folder, root, tmp_path, kind, words)
    assert error.exit_code == {FormatTooNew: 6, CheckpointCorrupt: 4, Refused: 7}[kind]


def test_every_difference_of_identity_is_listed(folder: Path, root: Path, tmp_path: Path) -> None:
    value = json.loads((folder / "manifest.json").read_text())
    right = copy.deepcopy(value["identity"])
    for key in right:
        independent.put(folder, value | {"identity": right | {key: [] if key != "ownLayerHeadDims" else [8, 16, 8]}})
        error = refused(folder, root, tmp_path, IdentityMismatch, key)
        assert isinstance(error, IdentityMismatch)
        assert [(name, want) for name, want, _ in error.fields] == [(key, right[key])]
    wrong = dict.fromkeys(right) | {"ctx": 128.0, "hd": "8"}
    del wrong["hidden"]
    independent.put(folder, value | {"identity": wrong})
    error = refused(folder, root, tmp_path, IdentityMismatch, "ctx: expected 128, found 128.0")
    assert isinstance(error, IdentityMismatch)
    assert {name for name, _, _ in error.fields} == right.keys()
    assert ("hidden", 16, "(absent)") in error.fields
    assert error.exit_code == 5


TEXTS = {
    "not JSON": (b"kv", "JSON"),
    "cut": (b'{"schemaVersion" : 1', "JSON"),
    "empty": (b"", "JSON"),
    "a list": (b"[1]", "a JSON object"),
    "a key twice": (b'{"schemaVersion":1,"schemaVersion":2}', "schemaVersion: expected each key at most once"),
    "NaN": (b'{"schemaVersion":NaN}', "a finite number, found NaN"),
    "half a surrogate pair": (b'{"schemaVersion":1,"bundleName":"\\ud800"}', "half a surrogate pair"),
    "Latin-1": (b'{"\xe9":1}', "expected UTF-8, found byte 0xe9"),
    "deep": (b"[" * 100_000, "JSON"),
    "ten thousand digits": (b'{"schemaVersion":' + b"1" * 10_000 + b"}", "10000 characters"),
    "too large": (b" " * ((32 << 20) + 1), "at most 33554432 bytes"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_texts(folder: Path, root: Path, tmp_path: Path, case: str) -> None:
    text, words = TEXTS[case]
    (folder / "manifest.json").write_bytes(text)
    refused(folder, root, tmp_path, CheckpointCorrupt, words)


def cut(folder: Path) -> None:
    (folder / "v_3.bin").write_bytes((folder / "v_3.bin").read_bytes()[:-1])


def longer(folder: Path) -> None:
    with (folder / "k_1.bin").open("ab") as file:
        file.write(b"\0\0")


def link(folder: Path) -> None:
    (folder / "k_0.bin").rename(folder.parent / "k_0.bin")
    (folder / "k_0.bin").symlink_to(folder.parent / "k_0.bin")


def linked_manifest(folder: Path) -> None:
    (folder / "manifest.json").rename(folder.parent / "manifest.json")
    (folder / "manifest.json").symlink_to(folder.parent / "manifest.json")


def pipe(folder: Path) -> None:
    (folder / "k_0.bin").unlink()
    os.mkfifo(folder / "k_0.bin")


def inner_folder(folder: Path) -> None:
    (folder / "k_0.bin").unlink()
    (folder / "k_0.bin").mkdir()


def number(value: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        rows = np.frombuffer((folder / "v_1.bin").read_bytes(), "<f2").reshape(COUNT, 16).copy()
        rows[11, 15] = value
        (folder / "v_1.bin").write_bytes(rows.tobytes())

    return change


FILES: dict[str, tuple[Callable[[Path], object], type[KVError], str]] = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), CheckpointMissing, "expected manifest.json, found none"),
    "a file missing": (lambda f: (f / "v_2.bin").unlink(), CheckpointMissing, "v_2.bin"),
    "a file cut": (cut, CheckpointCorrupt, "v_3.bin: length: expected 2240 bytes.*found 2239"),
    "a file too long": (longer, CheckpointCorrupt, "k_1.bin: length: expected 2240 bytes.*found 2242"),
    "a link": (link, CheckpointCorrupt, "k_0.bin: expected a plain file"),
    "the manifest a link": (linked_manifest, CheckpointCorrupt, "manifest.json: expected a plain file"),
    "a pipe": (pipe, CheckpointCorrupt, "k_0.bin: expected a plain file"),
    "a folder": (inner_folder, CheckpointCorrupt, "k_0.bin: expected a plain file"),
    "a file of a layer without KV": (lambda f: (f / "k_4.bin").write_bytes(b""), CheckpointCorrupt, "found k_4.bin"),
    "another file": (lambda f: (f / "notes.txt").write_bytes(b""), CheckpointCorrupt, "found notes.txt"),
    "a NaN": (number(np.nan), CheckpointCorrupt, "v_1.bin: row 11: expected finite values"),
    "an infinity": (number(-np.inf), CheckpointCorrupt, "v_1.bin: row 11"),
}


@pytest.mark.parametrize("case", FILES)
def test_files(folder: Path, root: Path, tmp_path: Path, case: str) -> None:
    change, kind, words = FILES[case]
    change(folder)
    refused(folder, root, tmp_path, kind, words)


def test_no_folder(root: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", root, tmp_path, CheckpointMissing, "nowhere: expected a checkpoint folder")
    (tmp_path / "file").write_bytes(b"")
    refused(tmp_path / "file", root, tmp_path, CheckpointMissing, "file: expected a checkpoint folder")


GEOMETRY = Geometry("a" * 64, 6, 16, 4, 4, 128, 8, 16, 64, "int8", (2, 3), ("sliding_attention", "full_attention") * 2, 320)  # fmt: skip


@settings(max_examples=300)
@given(st.data())
def test_any_bytes_are_a_checkpoint_or_an_error_of_ours(good: dict[str, bytes], data: st.DataObject) -> None:
    """Values of the manifest replaced by others, and its bytes changed. What is taken encodes to the same values again."""
    value = json.loads(good["manifest.json"]) | {"identity": GEOMETRY.value()}
    odd = st.sampled_from([None, True, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, "", "x", [], {}, [[]]])
    for _ in range(data.draw(st.integers(0, 2))):
        place = (
            data.draw(st.sampled_from([value, value["identity"], *value["layers"]])) if value.get("layers") else value
        )
        if isinstance(place, dict) and place:
            place[data.draw(st.sampled_from(sorted(place)))] = data.draw(odd)
        if not isinstance(value["layers"], list) or not isinstance(value["identity"], dict):
            break
    text = bytearray(json.dumps(value).encode())
    for _ in range(data.draw(st.integers(0, 2))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        taken = decode_manifest(bytes(text), GEOMETRY)
    except KVError:
        return
    again = json.loads(encode_manifest(GEOMETRY, taken))
    known = {key: value for key, value in json.loads(text.decode()).items() if key in again}
    assert known == again


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ({"k_1.bin": (0, None)}, r"k_1\.bin: row 0: expected what a model computed, .* found zeros alone"),
        ({"v_3.bin": (0, None)}, r"v_3\.bin: rows: expected what a model computed, .* found zeros alone"),
        ({"k_3.bin": (64, None)}, r"k_3\.bin: row 64: "),  # the end of a sparse copy
        ({"k_1.bin": (69, 70), "k_3.bin": (69, 70), "v_1.bin": (69, 70), "v_3.bin": (69, 70)}, r"k_1\.bin: row 69: "),
    ],
)
def test_zeros_in_a_full_layer_are_what_a_failed_copy_leaves(
    folder: Path, root: Path, tmp_path: Path, harm: dict[str, tuple[int, int | None]], words: str
) -> None:
    for name, (start, stop) in harm.items():
        rows = np.fromfile(folder / name, "<u2").reshape(COUNT, -1)
        rows[start:stop] = 0
        rows.tofile(folder / name)
    refused(folder, root, tmp_path, CheckpointCorrupt, words)


def test_a_zero_v_row_alone_may_be_computed(folder: Path, root: Path, tmp_path: Path) -> None:
    rows = np.fromfile(folder / "v_1.bin", "<u2").reshape(COUNT, -1)
    rows[3] = 0
    rows.tofile(folder / "v_1.bin")
    with Store.open(tmp_path / "store") as store:
        assert take(store, folder, root).saved.digest is not None
