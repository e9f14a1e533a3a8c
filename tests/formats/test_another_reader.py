"""kvferry and a reader and writer that was made from docs/checkpoint.md alone understand each other's folders."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import another_reader
import numpy as np
import pytest
from another_reader import Checkpoint, identity_of, read, write

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "data" / "corellm-1"
WHEN = "createdAtISO8601"
Run = Callable[..., Any]


@pytest.fixture
def run(tiny_gemma4_bundle: Path, kvferry: Run) -> Run:
    """A command with the bundle and a store of this test's; the JSON that it prints."""

    def command(*args: object, code: int = 0) -> Any:
        answer = kvferry(*map(str, args), "--bundle", str(tiny_gemma4_bundle), "--json")
        assert answer.code == code, answer.err
        return json.loads(answer.out) if code == 0 else answer.err

    return command


def manifest(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "manifest.json").read_text(encoding="utf-8")))


def edit(folder: Path, **changes: Any) -> None:
    (folder / "manifest.json").write_text(json.dumps({**manifest(folder), **changes}), encoding="utf-8")


def made_up(bundle: Path, tokens: int, pending: int | None) -> Checkpoint:
    """Rows that no model computed: the folder's format doesn't care."""
    identity, random = identity_of(bundle), np.random.default_rng(5)
    config = json.loads((bundle / "convert_config.json").read_bytes())
    kinds = config["hostio"]["layer_types"][: identity["firstShared"]]
    rows = {
        (i, kv): random.standard_normal((tokens, dim)).astype("<f2")
        for i, dim in enumerate(identity["ownLayerHeadDims"])
        for kv in "kv"
    }
    made = {"createdOnOS": "Überwachung \U0001f980", "createdWithComputeUnits": "all", WHEN: "2026-11-30T01:02:03Z"}
    ids = [2, *random.integers(3, 300, tokens - 1).tolist()]
    return Checkpoint(identity, ids, kinds, rows, pending, bundle.name, made)


def test_it_is_short_and_shares_no_code() -> None:
    text = Path(another_reader.__file__).read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    nodes = list(ast.walk(ast.parse(text)))
    imported = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module.split(".")[0] for n in nodes if isinstance(n, ast.ImportFrom) and n.module}
    assert imported - {"__future__", "dataclasses", "pathlib", "typing"} == {"json", "hashlib", "numpy", "struct"}


def test_it_reads_the_golden_folder() -> None:
    said = json.loads((GOLDEN / "expected.json").read_text(encoding="utf-8"))
    found = read(GOLDEN / "checkpoint")
    assert (found.tokens, found.pending) == (said["tokens"], said["pending"])
    assert found.identity == identity_of(GOLDEN / "bundle")
    assert found.kinds == ["sliding_attention", "full_attention"] * 2 and found.bundle == "golden-bundle"
    assert {key: rows.shape for key, rows in found.rows.items()} == {
        (i, kv): (6, (8, 16)[i % 2]) for i in range(4) for kv in "kv"
    }
    for (i, kv), rows in found.rows.items():
        assert rows.tobytes() == (GOLDEN / "checkpoint" / f"{kv}_{i}.bin").read_bytes()


def test_what_it_writes_of_the_golden_folder_is_the_golden_folder(tmp_path: Path) -> None:
    write(tmp_path / "again", read(GOLDEN / "checkpoint"))
    assert manifest(tmp_path / "again") == manifest(GOLDEN / "checkpoint")
    for path in (GOLDEN / "checkpoint").glob("*.bin"):
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_it_reads_what_kvferry_exports(tmp_path: Path, tiny_gemma4_bundle: Path, run: Run) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    told = run("prefill", tmp_path / "text.txt", "--tokens", 200, "--name", "x")
    run("export", "x", tmp_path / "out", "--as", "corellm")
    found = read(tmp_path / "out")
    assert found.identity == identity_of(tiny_gemma4_bundle) and found.bundle == tiny_gemma4_bundle.name
    assert len(found.tokens) == 200 and found.pending is not None and found.tokens[0] == 2
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import read_kvferry
    finally:
        sys.path.pop(0)
    stored = read_kvferry.snapshot(tmp_path / "store", told["snapshot"])
    assert [int.from_bytes(item) for block in stored.blocks for item in block] == found.tokens
    assert stored.manifest["pending"] == found.pending
    rows = stored.rows()
    assert rows.keys() == found.rows.keys()
    assert all(found.rows[key].tobytes() == rows[key].tobytes() for key in rows)


@pytest.mark.parametrize("pending", [7, None])
def test_kvferry_takes_what_it_writes_and_gives_the_same_back(
    tmp_path: Path, tiny_gemma4_bundle: Path, run: Run, pending: int | None
) -> None:
    mine = made_up(tiny_gemma4_bundle, 130, pending)
    write(tmp_path / "mine", mine)
    run("import", tmp_path / "mine", "--name", "back")
    run("export", "back", tmp_path / "back", "--as", "corellm")
    assert manifest(tmp_path / "back") | {WHEN: ""} == manifest(tmp_path / "mine") | {WHEN: ""}
    names = sorted(path.name for path in (tmp_path / "mine").glob("*"))
    assert sorted(path.name for path in (tmp_path / "back").glob("*")) == names and len(names) == 9
    for name in names:
        if name != "manifest.json":
            assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "mine" / name).read_bytes()
    back = read(tmp_path / "back")
    assert (back.tokens, back.pending, back.kinds) == (mine.tokens, pending, mine.kinds)


def test_the_page_says_what_may_differ(tmp_path: Path, tiny_gemma4_bundle: Path, run: Run) -> None:
    """Layers in any order, keys of later versions, null for absent: kvferry and this reader take all of it."""
    write(tmp_path / "a", made_up(tiny_gemma4_bundle, 70, None))
    value = manifest(tmp_path / "a")
    edit(tmp_path / "a", layers=value["layers"][::-1], pendingNextToken=None, bundleName=None, later=[1])
    edit(tmp_path / "a", identity={**value["identity"], "later": 1})
    run("import", tmp_path / "a", "--name", "a")
    assert read(tmp_path / "a").pending is None
    for key in ("createdOnOS", "createdWithComputeUnits", WHEN, "tokenCount"):
        shutil.copytree(tmp_path / "a", tmp_path / key)
        value = manifest(tmp_path / key)
        del value[key]
        (tmp_path / key / "manifest.json").write_text(json.dumps(value), encoding="utf-8")
        assert key in run("import", tmp_path / key, "--name", "b", code=4)
        with pytest.raises(KeyError, match=key):
            read(tmp_path / key)


@pytest.mark.parametrize(
    "change",
    [
        {"schemaVersion": 2},
        {"position": 5},
        {"position": 6.0},
        {"tokenCount": 7},
        {"processedTokens": [2, 258880, 258881, 300, 7, 8]},
        {"tokenSeqSHA256": "0" * 64},
        {"layers": []},
        {"identity": {}},
    ],
)
def test_it_refuses_a_manifest_that_contradicts_itself(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = Path(shutil.copytree(GOLDEN / "checkpoint", tmp_path / "c"))
    edit(folder)
    read(folder)
    edit(folder, **change)
    with pytest.raises(ValueError, match=r"\w"):
        read(folder)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("layer", 4),
        ("layer", 0),
        ("type", "sliding_attention"),
        ("headDim", 8),
        ("rows", 5),
        ("kFile", "k_2.bin"),
        ("vFile", "../v_3.bin"),
        ("kBytes", 96),
    ],
)
def test_it_refuses_a_layer_that_the_identity_does_not_have(tmp_path: Path, where: str, value: object) -> None:
    folder = Path(shutil.copytree(GOLDEN / "checkpoint", tmp_path / "c"))
    layers = manifest(folder)["layers"]
    edit(folder, layers=[*layers[:3], {**layers[3], where: value}])
    with pytest.raises(ValueError, match=r"layer|k_3"):
        read(folder)


def test_it_refuses_what_is_no_token_and_other_kinds_of_layers(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "checkpoint", tmp_path / "c"))
    tokens, identity = [2, 7, 7, 7, 7, -1], manifest(folder)["identity"]
    edit(folder, processedTokens=tokens, tokenSeqSHA256=another_reader.sha256_of(tokens))
    with pytest.raises(ValueError, match="no id"):
        read(folder)
    edit(folder, identity={**identity, "storeLayers": {"full_attention": 3}})
    with pytest.raises(ValueError, match="storeLayers"):
        read(folder)
    with pytest.raises(ValueError, match="32 MiB"):
        another_reader.parse(b" " * (1 + (32 << 20)))


def test_it_refuses_damaged_files(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "checkpoint", tmp_path / "c"))
    good = (folder / "v_3.bin").read_bytes()
    for bad, words in ((good[:-2], "190 bytes"), (good + b"\0", "193 bytes"), (good[:-2] + b"\x00\x7c", "infinity")):
        (folder / "v_3.bin").write_bytes(bad)
        with pytest.raises(ValueError, match=words):
            read(folder)
    (folder / "v_3.bin").write_bytes(good)
    text = (folder / "manifest.json").read_text(encoding="utf-8")
    for bad_text in (text.replace('"position"', '"position": 6, "position"'), text.replace(": 9,", ": NaN,"), "[]"):
        assert bad_text != text
        (folder / "manifest.json").write_text(bad_text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"twice|NaN|object"):
            read(folder)
