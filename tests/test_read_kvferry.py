"""`examples/read_kvferry.py` reads the golden store without kvferry, gets the document's test vectors, and refuses damage."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import msgpack
import numpy as np
import pytest
import zstandard
from blake3 import blake3

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "read_kvferry.py"
GOLDEN = ROOT / "tests" / "kvstore" / "golden" / "format-2"
SAID = json.loads(GOLDEN.with_suffix(".json").read_text(encoding="utf-8"))
PLANES = GOLDEN.with_name("format-2-planes")


@pytest.fixture(scope="module")
def reader() -> ModuleType:
    spec = importlib.util.spec_from_file_location("read_kvferry", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "store"))


def run(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)


def ref_file(label: str) -> str:
    return str(blake3(label.encode()).hexdigest())


def framed(kind: int, what: str, payload: bytes, version: int = 1) -> bytes:
    name = blake3(payload, derive_key_context=f"kvferry 2026-11-30 format 1 {what}").digest()
    head = b"KVFERRY\0" + version.to_bytes(2, "little") + bytes([kind]) + bytes(5)
    head += len(payload).to_bytes(8, "little") * 2 + name * 2
    return head + blake3(head).digest() + payload


def read(reader: ModuleType, store: Path, label: str = "trimmed") -> None:
    """All that the script verifies, and nothing printed."""
    for _ in reader.snapshot(store, reader.ref(store, ref_file(label))[1]).objects():
        pass


def test_it_is_short_and_knows_nothing_of_kvferrys_packages() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    imported = {line.split()[1].split(".")[0] for line in text.splitlines() if re.match(r"\s*(import|from) ", line)}
    assert imported - sys.stdlib_module_names == {"blake3", "msgpack", "numpy", "zstandard"}
    assert "__import__" not in text and "importlib" not in text


@pytest.mark.parametrize("label", SAID)
def test_it_reads_what_the_golden_stores_maker_says(reader: ModuleType, label: str) -> None:
    said = SAID[label]
    assert reader.ref(GOLDEN, ref_file(label)) == (label, said["snapshot"])
    snapshot = reader.snapshot(GOLDEN, said["snapshot"])
    assert snapshot.runs == said["runs"]
    assert snapshot.manifest["lineages"][snapshot.manifest["lineage"][0]]["engine"] == said["engine"]
    rows, n = snapshot.rows(), sum(map(len, snapshot.blocks))
    assert sorted(rows) == [(layer, kind) for layer in range(5) for kind in "kv"]
    nothing = np.float16(np.nan).tobytes()
    for g, (group, runs) in enumerate(zip(snapshot.groups, said["runs"], strict=True)):
        width, covered = group.kv_heads * group.head_dim, {b for run in runs for b in range(*run)}
        for b in range(len(snapshot.blocks)):
            part, name = slice(64 * b, min(64 * b + 64, n)), snapshot.contents[b][g].hex()
            size = (part.stop - part.start) * width * 2
            found = [rows[layer, kind][part].tobytes() for layer in group.layers for kind in "kv"]
            if b in covered:
                assert b"".join(found) == (GOLDEN / "objects" / name[0] / name[1:]).read_bytes()[128:]
            else:
                assert found == [nothing * (size // 2)] * 2 * len(group.layers)
        assert all(rows[layer, kind].shape == (n, width) for layer in group.layers for kind in "kv")


def test_the_script_says_so() -> None:
    listed = run(GOLDEN)
    assert listed.returncode == 0, listed.stderr
    lines = {line.split()[0]: line.split("tokens")[1].strip() for line in listed.stdout.splitlines()}
    assert {label: digest for digest, label in lines.items() if label} == {
        repr(label): said["snapshot"] for label, said in SAID.items()
    }
    assert len(lines) == 4  # and one without a name
    told = run(GOLDEN, "trimmed")
    assert told.returncode == 0, told.stderr
    assert SAID["trimmed"]["snapshot"] in told.stdout and "330 tokens: 0 5 10 15 " in told.stdout
    assert "330 rows of each, 10560 bytes" in told.stdout and "138 rows of each, 6624 bytes" in told.stdout
    absent = run(GOLDEN, "Trimmed")
    assert absent.returncode == 1 and re.fullmatch(r"read_kvferry: refs/\w{64}: no ref there.*\n", absent.stderr)


def test_the_documents_vectors(reader: ModuleType, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    vectors = dict(re.findall(r"^\| ([^|]+?)(?:: [^|]*)? \| `([0-9a-f]+)` \|$", text, re.MULTILINE))
    names = [bytes.fromhex(vectors[f"content digest of block {b}, group {g}"]) for b in (0, 1) for g in (0, 1)]
    manifest = {
        "identity": msgpack.unpackb(bytes.fromhex(vectors["identity bytes"])),
        "layout": msgpack.unpackb(bytes.fromhex(vectors["layout bytes"])),
        "namespace": "default",
        "items": b"".join(i.to_bytes(4) for i in range(64)) + bytes.fromhex(vectors["items of block 1"]),
        "blocks": b"".join(names),
        "lineages": [{"engine": "cpu"}],
        "lineage": [0, 0],
        "pending": 5,
        "head": "h",
        "receipt": [[5, 6], 2, "cap"],
        "model": "tiny",
    }
    for folder in ("refs", "snapshots", *(f"objects/{digit}" for digit in "0123456789abcdef")):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "format.json").write_text('{"format": 2, "features": [], "another": 1}')
    place = tmp_path / "snapshots" / vectors["snapshot digest"]
    place.write_bytes(framed(2, "snapshot", msgpack.packb(manifest)))
    assert place.read_bytes()[:128].hex() == vectors["header of the manifest"]
    place.with_suffix(".cov").write_bytes(bytes.fromhex(vectors["coverage file"]))
    (tmp_path / "refs" / vectors["file name of the ref"]).write_bytes(bytes.fromhex(vectors["ref file"]))
    for b, g in ((0, 0), (0, 1), (1, 0), (1, 1)):
        n = (64, 2)[b] * (2 * 2 * 4, 3 * 2 * 4)[g] * 2
        data = framed(1, "object", bytes((7 * i + 3 * b + g) % 251 for i in range(n)))
        (tmp_path / "objects" / data[32:64].hex()[0] / data[32:64].hex()[1:]).write_bytes(data)
    snapshot = reader.snapshot(tmp_path, reader.ref(tmp_path, vectors["file name of the ref"])[1])
    assert [x.hex() for x in snapshot.chain()[0]] == [vectors[f"prefix key of block {b}"] for b in (0, 1)]
    assert [x.hex() for x in snapshot.chain()[1]] == [vectors[f"BlockId of block {b}"] for b in (0, 1)]
    assert [(g, b) for g, b, _ in snapshot.objects()] == [(0, 0), (0, 1), (1, 1)]
    told = run(tmp_path, "Café")
    assert vectors["BlockId of block 1"] in told.stdout, told.stderr
    assert run(tmp_path, "Cafe\u0301").stdout.startswith("'Cafe\u0301': snapshot ")  # the same name, decomposed
    again = snapshot._replace(blocks=[snapshot.blocks[0], [b"\0\0\0\x40", b"\x80\0\0\x07" + bytes(32)]])
    assert again.chain()[0][0] == snapshot.chain()[0][0] and again.chain()[0][1] != snapshot.chain()[0][1]


def places(label: str = "trimmed") -> dict[str, str]:
    """A file of each kind that reading this name needs."""
    name = SAID[label]["snapshot"]
    manifest = msgpack.unpackb((GOLDEN / "snapshots" / name).read_bytes()[128:])
    last = manifest["blocks"][-32:].hex()
    return {
        "ref": f"refs/{ref_file(label)}",
        "manifest": f"snapshots/{name}",
        "coverage": f"snapshots/{name}.cov",
        "object": f"objects/{last[0]}/{last[1:]}",
    }


@pytest.mark.parametrize("kind", places())
def test_every_damaged_byte_and_every_cut_is_refused(reader: ModuleType, store: Path, kind: str) -> None:
    place = places()[kind]
    good = (store / place).read_bytes()
    read(reader, store)
    step = max(1, (len(good) - 128) // 50)
    for at in (*range(128), *range(128, len(good), step), len(good) - 1):
        (store / place).write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        with pytest.raises(ValueError, match=re.escape(place)):
            read(reader, store)
    for bad in (b"", good[:7], good[:100], good[:128], good[:-1], good + b"\0", b"GGUF" + good[4:], b"hello\n"):
        (store / place).write_bytes(bad)
        with pytest.raises(ValueError, match=re.escape(place)):
            read(reader, store)
    (store / place).write_bytes(b"GGUF" + good[4:])
    with pytest.raises(ValueError, match="not one of kvferry's files"):
        read(reader, store)
    (store / place).unlink()
    if kind == "coverage":  # which then promises nothing
        assert reader.snapshot(store, SAID["trimmed"]["snapshot"]).runs == [[], []]
    else:
        with pytest.raises(ValueError, match="there"):
            read(reader, store)
    (store / "elsewhere").write_bytes(good)
    (store / place).symlink_to(store / "elsewhere")
    with pytest.raises(ValueError, match="links"):
        read(reader, store)
    said = run(store, "trimmed")
    assert said.returncode == 1 and said.stderr.count("\n") == 1 and said.stderr.startswith(f"read_kvferry: {place}: ")


@pytest.mark.parametrize("kind", ["manifest", "object"])
def test_a_good_file_in_the_wrong_place_is_refused(reader: ModuleType, store: Path, kind: str) -> None:
    (store / places()[kind]).write_bytes((store / places("whole")[kind]).read_bytes())
    with pytest.raises(ValueError, match="names other content"):
        read(reader, store)


def test_a_ref_or_coverage_of_another_and_a_newer_frame_are_refused(reader: ModuleType, store: Path) -> None:
    for kind, words in (("ref", "another label"), ("coverage", "another snapshot")):
        good = (store / places()[kind]).read_bytes()
        (store / places()[kind]).write_bytes((store / places("whole")[kind]).read_bytes())
        with pytest.raises(ValueError, match=words):
            read(reader, store)
        (store / places()[kind]).write_bytes(good)
    payload = (store / places()["ref"]).read_bytes()[128:]
    (store / places()["ref"]).write_bytes(framed(4, "ref", payload, version=2))
    with pytest.raises(ValueError, match="version 2 of the frame"):
        read(reader, store)
    (store / places()["ref"]).write_bytes(framed(3, "ref", payload))
    with pytest.raises(ValueError, match="header is not that of a plain ref"):
        read(reader, store)
    for lengths in (bytes(16), (len(payload) + 1).to_bytes(8, "little") + len(payload).to_bytes(8, "little")):
        head = framed(4, "ref", payload)[:16] + lengths + framed(4, "ref", payload)[32:96]
        (store / places()["ref"]).write_bytes(head + blake3(head).digest() + payload)
        with pytest.raises(ValueError, match="impossible lengths"):
            read(reader, store)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"items": bytes(4 * 329)}, "expected 288 bytes, found 320"),
        ({"items": bytes(4 * 330 - 1)}, "misfit"),
        ({"items": b""}, "misfit"),
        ({"items": bytes(4 * 300)}, "misfit"),
        ({"items": bytes(4 * 329) + b"\x80" + bytes(34)}, "misfit"),
        ({"blocks": bytes(32 * 11)}, "snapshots/"),
        ({"blocks": bytes(32 * 10)}, "misfit"),
        ({"blocks": bytes(32 * 12 + 1)}, "snapshots/"),
        ({"blocks": bytes(32 * 12)}, "no object there"),
        ({"layout": ["float32", [["full", None, [1, 4], 1, 4], ["sliding", 128, [0, 2, 3], 2, 2]]]}, "misfit"),
        ({"layout": ["float16", [["full", None, [1, 4], 1, 8], ["sliding", 128, [0, 2, 3], 2, 2]]]}, "expected"),
        ({"layout": ["float16", [["full", None, [1, 4], 1, -4], ["sliding", 128, [0, 2, 3], 2, 2]]]}, "misfit"),
        ({"layout": ["float16", [["full", None, [1, 4], 1]]]}, "snapshots/"),
        ({"layout": 7}, "snapshots/"),
    ],
)
def test_a_manifest_whose_parts_do_not_fit_is_refused(
    reader: ModuleType, store: Path, change: dict[str, object], words: str | None
) -> None:
    name = SAID["trimmed"]["snapshot"]
    manifest = {**msgpack.unpackb((store / "snapshots" / name).read_bytes()[128:]), **change}
    manifest["model"] = "changed"
    data = framed(2, "snapshot", msgpack.packb(manifest))
    name = data[32:64].hex()
    coverage = {"snapshot": data[32:64], "runs": SAID["trimmed"]["runs"]}
    ref = {"label": "trimmed", "snapshot": data[32:64], "updated": 1}
    (store / "snapshots" / name).write_bytes(data)
    (store / "snapshots" / f"{name}.cov").write_bytes(framed(3, "coverage", msgpack.packb(coverage)))
    (store / places()["ref"]).write_bytes(framed(4, "ref", msgpack.packb(ref)))
    if words is None:
        read(reader, store)
        return
    with pytest.raises(ValueError, match=words):
        read(reader, store)


@pytest.mark.parametrize(
    "change",
    [
        {"runs": [[[0, 6]], [[3, 7]]]},
        {"runs": [[[0, 6]], [[3, 3]]]},
        {"runs": [[[0, 3], [3, 6]], [[3, 6]]]},
        {"runs": [[[0, 6]]]},
        {"runs": [[[0.0, 6.0]], [[3, 6]]]},
        {"runs": 7},
        {"more": 1},
    ],
)
def test_a_coverage_that_cannot_be_is_refused(reader: ModuleType, store: Path, change: dict[str, object]) -> None:
    place = store / places()["coverage"]
    payload = {**msgpack.unpackb(place.read_bytes()[128:]), **change}
    place.write_bytes(framed(3, "coverage", msgpack.packb(payload)))
    with pytest.raises((ValueError, TypeError)):
        read(reader, store)


def test_another_encoding_of_the_same_ref_is_refused(reader: ModuleType, store: Path) -> None:
    place = store / places()["ref"]
    payload = place.read_bytes()[128:]
    assert payload[:7] == b"\x83\xa5label" and payload[7] == 0xA7
    place.write_bytes(framed(4, "ref", payload[:7] + b"\xd9\x07" + payload[8:]))
    with pytest.raises(ValueError, match="canonical"):
        read(reader, store)


@pytest.mark.parametrize(
    "about", ['{"format": 3, "features": []}', '{"format": 2, "features": ["x"]}', "[]", "{", "{}"]
)
def test_another_format_or_feature_is_refused(store: Path, about: str) -> None:
    (store / "format.json").write_text(about)
    said = run(store)
    assert said.returncode == 1 and said.stderr.startswith("read_kvferry: ") and said.stderr.count("\n") == 1


def test_what_a_collector_has_just_taken_is_found_in_the_trash(reader: ModuleType, store: Path) -> None:
    (store / "trash").mkdir()
    name = SAID["trimmed"]["snapshot"]
    place = places()["object"]
    (store / place).rename(store / "trash" / place.removeprefix("objects/").replace("/", ""))
    (store / "snapshots" / name).rename(store / "trash" / f"{name}.snapshot")
    (store / "snapshots" / f"{name}.cov").rename(store / "trash" / f"{name}.cov")
    read(reader, store)
    shutil.rmtree(store / "trash")
    with pytest.raises(ValueError, match="no snapshot there"):
        read(reader, store)


# objects as planes


def planes(data: bytes, payload: bytes) -> bytes:
    """An object's file with another payload, and a header that is right for it."""
    head = data[:24] + len(payload).to_bytes(8, "little") + data[32:64] + blake3(payload).digest()
    return head + blake3(head).digest() + payload


def test_it_reads_planes(reader: ModuleType) -> None:
    found = json.loads(PLANES.with_suffix(".json").read_text(encoding="utf-8"))
    codecs = set()
    for label, said in found.items():
        snapshot = reader.snapshot(PLANES, reader.ref(PLANES, ref_file(label))[1])
        assert (snapshot.name, sum(map(len, snapshot.blocks))) == (said["snapshot"], said["tokens"])
        for g, b, rows in snapshot.objects():
            name = snapshot.contents[b][g].hex()
            data = (PLANES / "objects" / name[0] / name[1:]).read_bytes()
            codecs.add(data[11])
            if data[11]:
                size = rows.nbytes // 2
                high = zstandard.ZstdDecompressor().decompress(data[128 + size :])
                assert rows.tobytes() == bytes(
                    x for pair in zip(data[128 : 128 + size], high, strict=True) for x in pair
                )
    assert codecs == {0, 1}
    told = run(PLANES, "planes")
    assert told.returncode == 0 and "330 tokens" in told.stdout and "330 rows of each, 10560 bytes" in told.stdout


def hostile(payload: bytes, half: int) -> dict[str, tuple[bytes, str]]:
    """Payloads that the document refuses, and what is said of them."""
    low, frame = payload[:half], payload[half:]
    high = zstandard.ZstdDecompressor().decompress(frame)
    squeeze = zstandard.ZstdCompressor(level=3, write_checksum=False).compress
    summed = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(high)
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"abcd"
    return {
        "a trailing byte": (low + frame + b"\0", "unused"),
        "two frames": (low + frame + squeeze(b""), "unused"),
        "skippable": (low + skippable + frame, "not one plain"),
        "a checksum": (low + summed, "not one plain"),
        "another size": (low + squeeze(high[:-1]), "not one plain"),
        "a bomb": (low + squeeze(bytes(10**8))[:200], "not one plain"),
        "other bytes": (low + squeeze(high[::-1]), "its digest is not its name"),
        "longer than raw": (payload + bytes(2 * half), "impossible lengths"),
        "too short": (low, "impossible lengths"),
    }


def test_damaged_and_hostile_planes_are_refused(reader: ModuleType, tmp_path: Path) -> None:
    store = Path(shutil.copytree(PLANES, tmp_path / "store"))
    snapshot = reader.snapshot(store, reader.ref(store, ref_file("planes"))[1])
    name = snapshot.contents[0][1].hex()
    place = store / "objects" / name[0] / name[1:]
    good = place.read_bytes()
    for at in (*range(128), *range(128, len(good), 41), len(good) - 1):
        place.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        with pytest.raises(ValueError, match=name[1:]):
            read(reader, store, "planes")
    for bad in (b"", good[:100], good[:128], good[:-1], good + b"\0"):
        place.write_bytes(bad)
        with pytest.raises(ValueError, match=name[1:]):
            read(reader, store, "planes")
    for payload, words in hostile(good[128:], int.from_bytes(good[16:24], "little") // 2).values():
        place.write_bytes(planes(good, payload))
        with pytest.raises((ValueError, zstandard.ZstdError), match=words):
            read(reader, store, "planes")
        said = run(store, "planes")
        assert said.returncode == 1 and said.stderr.count("\n") == 1 and said.stderr.startswith("read_kvferry: ")
