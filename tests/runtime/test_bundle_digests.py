"""`kvferry.json` against the files, and the cache that remembers digests: when it is used, and when it must not be."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from bundle_folder import convert_config, manifest, write_bundle, write_package, write_record

from runtime.bundle import Bundle, BundleDamaged, BundleFieldError, BundleFileMissing
from runtime.bundle.digests import SETTLED_NS, DigestCache, file_key, hash_file

BLOB = "Data/com.apple.CoreML/weights/weight.bin"
EVERY_FILE = [
    "manifest.json",
    "convert_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "embed_int8.bin",
    "embed_scale_f32.bin",
    "ple_int8.bin",
    "ple_scale_f32.bin",
    "embed_fp16.bin",
    f"chunk_0.mlpackage/{BLOB}",
    f"chunk_2.mlpackage/{BLOB}",
    "chunk_1.mlpackage/Data/com.apple.CoreML/model.mlmodel",
    f"lmhead.mlpackage/{BLOB}",
    f"lmhead_v4.mlpackage/{BLOB}",
]


def flip(path: Path, keep_times: bool = False) -> None:
    stat = path.stat()
    data = bytearray(path.read_bytes())
    # In the JSON files a bit of a letter, so that they still parse.
    place = data.index(b"name") if b'"name"' in data else len(data) // 2
    data[place] ^= 1
    if path.suffix == ".json":
        data = bytearray(path.read_bytes().replace(b"\n", b" ", 1))
        data = data if data != path.read_bytes() else data[:-1] + b" }"
    path.write_bytes(data)
    if keep_times:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def settle() -> None:
    """Until files just written are old enough to be remembered."""
    time.sleep(SETTLED_NS / 1e9 + 0.05)


@pytest.mark.parametrize("file", EVERY_FILE)
@pytest.mark.parametrize("cached", [False, True])
def test_one_changed_bit_in_any_recorded_file_is_damage(tmp_path: Path, file: str, cached: bool) -> None:
    root = write_bundle(tmp_path / "bundle")
    record = write_record(root)
    cache = tmp_path / "cache.json" if cached else None
    settle()
    Bundle.open(root, digest_cache=cache)
    flip(root / file, keep_times=True)
    with pytest.raises(BundleDamaged) as caught:
        Bundle.open(root, digest_cache=cache)
    error = caught.value
    assert error.file == file
    assert record["files"][file] in error.expected
    assert error.found == blake3((root / file).read_bytes()).hexdigest()
    assert pickle.loads(pickle.dumps(error)).file == file


@pytest.mark.parametrize("file", ["ple_int8.bin", f"chunk_1.mlpackage/{BLOB}", "tokenizer.json"])
def test_a_recorded_file_that_is_needed_and_gone_is_missing(tmp_path: Path, file: str) -> None:
    root = write_bundle(tmp_path)
    write_record(root)
    (root / file).unlink()
    with pytest.raises(BundleFileMissing) as caught:
        Bundle.open(root)
    assert caught.value.file == file


@pytest.mark.parametrize("file", ["tokenizer_config.json", "NOTICE", "extra/notes.txt"])
def test_whatever_is_recorded_and_gone_is_noticed_before_anything_is_hashed(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its `tokenizer_config.json` a bundle would be another model, which nobody would notice before a restore."""
    root = write_bundle(tmp_path)
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).touch()
    write_record(root)
    assert Bundle.open(root).has_record
    (root / file).unlink()
    monkeypatch.setattr("runtime.bundle.digests.hash_file", lambda path: pytest.fail(f"hashed {path}"))
    with pytest.raises(BundleFileMissing, match="`kvferry bundle build`") as caught:
        Bundle.open(root)
    assert caught.value.file == file and "kvferry.json: files" in str(caught.value)


def test_a_folder_in_the_place_of_a_recorded_file_is_no_file(tmp_path: Path) -> None:
    root = write_bundle(tmp_path)
    write_record(root)
    (root / "tokenizer_config.json").unlink()
    (root / "tokenizer_config.json").mkdir()
    with pytest.raises(BundleFileMissing) as caught:
        Bundle.open(root)
    assert caught.value.file == "tokenizer_config.json"


@pytest.mark.parametrize("file", ["embed_fp16.bin", "ple_fp16.bin"])
def test_the_sidecars_of_the_other_stage_may_be_gone(tmp_path: Path, file: str) -> None:
    root = write_bundle(tmp_path)
    write_record(root)
    (root / file).unlink()
    assert Bundle.open(root).has_record


def test_the_other_stage_s_scales_may_be_gone_too_by_their_default_names(tmp_path: Path) -> None:
    convert, head = convert_config(), manifest()
    del head["sidecarStage"], convert["corellm"]["sidecars"]["int8"]["ple"]["scale"]
    root = write_bundle(tmp_path, convert=convert, head=head)
    write_record(root)
    for name in ("embed_int8.bin", "embed_scale_f32.bin", "ple_int8.bin", "ple_scale_f32.bin"):
        (root / name).unlink()
    assert Bundle.open(root).config.sidecar_stage == "fp16"
    (root / "embed_fp16.bin").unlink()
    with pytest.raises(BundleFileMissing, match=r"embed_fp16\.bin"):
        Bundle.open(root)


def test_a_package_replaced_by_its_compiled_copy_may_be_gone(tmp_path: Path) -> None:
    root = write_bundle(tmp_path)
    write_record(root)
    shutil.rmtree(root / "chunk_0.mlpackage")
    with pytest.raises(BundleFileMissing) as caught:
        Bundle.open(root)
    assert caught.value.file == "chunk_0.mlpackage"
    write_package(root / "chunk_0.mlmodelc", b"1 chunk_0.mlpackage", compiled=True)
    assert Bundle.open(root).unverified == ("chunk_0.mlpackage",)


def test_what_is_left_of_a_replaced_package_is_still_verified(tmp_path: Path) -> None:
    root = write_bundle(tmp_path)
    write_record(root)
    write_package(root / "chunk_0.mlmodelc", b"1 chunk_0.mlpackage", compiled=True)
    (root / "chunk_0.mlpackage" / "Manifest.json").unlink()
    assert Bundle.open(root).has_record
    flip(root / "chunk_0.mlpackage" / BLOB)
    with pytest.raises(BundleDamaged, match=r"chunk_0\.mlpackage"):
        Bundle.open(root)


@pytest.mark.parametrize(
    "file",
    [
        "embed_int8.bin",
        "ple_scale_f32.bin",
        "tokenizer.json",
        f"chunk_0.mlpackage/{BLOB}",
        f"lmhead_v4.mlpackage/{BLOB}",
    ],
)
def test_a_record_that_leaves_out_a_needed_file_is_refused(tmp_path: Path, file: str) -> None:
    root = write_bundle(tmp_path)
    record = write_record(root)
    del record["files"][file]
    write_record(root, files=record["files"])
    with pytest.raises(BundleFieldError) as caught:
        Bundle.open(root)
    assert (caught.value.file, caught.value.field) == ("kvferry.json", f"files.{file}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "kvferry-bundle-2"),
        ("format", None),
        ("weights", None),
        ("weights", "A" * 64),
        ("weights", "a" * 63),
        ("heads", 5),
        ("heads", "g" * 64),
        ("files", None),
        ("files", []),
        ("files", {"../outside": "a" * 64}),
        ("files", {"/etc/passwd": "a" * 64}),
        ("files", {"manifest.json": "a" * 63}),
        ("files", {"manifest.json": None}),
    ],
)
def test_a_record_with_a_wrong_field_is_refused(tmp_path: Path, field: str, value: object) -> None:
    root = write_bundle(tmp_path)
    record = write_record(root)
    if isinstance(value, dict):
        value = {**record["files"], **value}
    write_record(root, **{field: value})
    with pytest.raises(BundleFieldError) as caught:
        Bundle.open(root)
    assert caught.value.file == "kvferry.json"
    assert caught.value.field.startswith(field)


def test_unknown_fields_of_a_record_are_ignored(tmp_path: Path) -> None:
    root = write_bundle(tmp_path)
    write_record(root, source={"any": ["thing"]}, license="Gemma", later=1)
    assert Bundle.open(root).head_digest() == "b" * 64


def test_compiled_files_that_are_recorded_are_verified(tmp_path: Path) -> None:
    root = write_bundle(tmp_path)
    shutil.rmtree(root / "chunk_0.mlpackage")
    write_package(root / "chunk_0.mlmodelc", b"compiled", compiled=True)
    write_record(root)
    assert Bundle.open(root).unverified == ()
    flip(root / "chunk_0.mlmodelc" / "weights" / "weight.bin")
    with pytest.raises(BundleDamaged, match=r"chunk_0\.mlmodelc/weights/weight\.bin"):
        Bundle.open(root)


@pytest.mark.parametrize("package", ["chunk_0.mlpackage", "lmhead.mlpackage", "lmhead_v4.mlpackage"])
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("change", ["other", "absent", "renamed", "elsewhere", "one more"])
def test_a_compiled_copy_with_other_weights_has_not_the_record_s_identity(
    tmp_path: Path, package: str, beside: bool, change: str
) -> None:
    root = write_bundle(tmp_path / "bundle")
    record = write_record(root)
    copy = package.replace(".mlpackage", ".mlmodelc")
    write_package(root / copy, f"1 {package}".encode(), compiled=True)
    if not beside:
        shutil.rmtree(root / package)
    cache = tmp_path / "cache.json"
    settle()
    opened = Bundle.open(root, digest_cache=cache)
    assert dict(opened.identity().fields)["weights"] == "a" * 64 and opened.unverified == (package,)
    weights = root / copy / "weights" / "weight.bin"
    bad, found = weights, "no such file"
    match change:
        case "other":
            flip(weights, keep_times=True)
            found = blake3(weights.read_bytes()).hexdigest()
        case "absent":
            weights.unlink()
        case "renamed":
            weights.rename(weights.with_name("weights.bin"))
        case "elsewhere":
            shutil.copytree(weights.parent, root / copy / "z" / "weights")
            weights.write_bytes(b"other")
            found = blake3(b"other").hexdigest()
        case _:
            bad, found = weights.with_name("more.bin"), "such a file"
            bad.write_bytes(b"more")
    with pytest.raises(BundleDamaged) as caught:
        Bundle.open(root, digest_cache=cache)
    error = caught.value
    assert (error.details["package"], error.file, error.found) == (package, bad.relative_to(root).as_posix(), found)
    assert (record["files"][f"{package}/{BLOB}"] in error.expected) == (change != "one more")
    assert f"Remove {copy}" in str(error) and error.exit_code == 4
    (root / "kvferry.json").unlink()
    if change == "other":
        assert dict(Bundle.open(root).identity().fields)["weights"] != "a" * 64


def test_a_compiled_copy_of_what_the_record_does_not_know_has_no_identity(tmp_path: Path) -> None:
    root = write_bundle(tmp_path)
    record = write_record(root)
    shutil.rmtree(root / "chunk_0.mlpackage")
    write_package(root / "chunk_0.mlmodelc", b"1 chunk_0.mlpackage", compiled=True)
    write_record(root, files={n: d for n, d in record["files"].items() if not n.startswith("chunk_0.")})
    with pytest.raises(
        BundleDamaged, match=r"chunk_0\.mlmodelc is not chunk_0\.mlpackage, compiled: expected kvferry\.json"
    ) as caught:
        Bundle.open(root)
    assert caught.value.file == "kvferry.json"


def test_a_compiled_copy_whose_program_is_not_recorded_is_unverified(tmp_path: Path) -> None:
    root = write_bundle(tmp_path)
    write_package(root / "chunk_0.mlmodelc", b"1 chunk_0.mlpackage", compiled=True)
    record = write_record(root)
    assert Bundle.open(root).unverified == ()
    del record["files"]["chunk_0.mlmodelc/model.mil"]
    write_record(root, files=record["files"])
    assert Bundle.open(root).unverified == ("chunk_0.mlpackage",)


def test_a_file_with_two_names_takes_its_place_once(tmp_path: Path) -> None:
    root = write_bundle(tmp_path / "bundle")
    before = Bundle.open(root).disk_bytes()
    assert before == sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    one, other = root / "lmhead.mlpackage" / BLOB, root / "lmhead_v4.mlpackage" / BLOB
    size = other.stat().st_size
    other.unlink()
    other.hardlink_to(one)
    (root / "gone").symlink_to("nowhere")
    assert Bundle.open(root).disk_bytes() == before - size


def test_files_that_finder_leaves_in_a_package_do_not_matter(tmp_path: Path) -> None:
    root = write_bundle(tmp_path)
    write_record(root)
    (root / "chunk_0.mlpackage" / ".DS_Store").write_bytes(b"finder")
    assert Bundle.open(root).has_record


# The cache


def checked(value: dict[str, Any]) -> str:
    """A cache that holds ``value``, whole."""
    rest = {key: inner for key, inner in value.items() if key != "check"}
    return json.dumps({**rest, "check": blake3(json.dumps(rest, sort_keys=True).encode()).hexdigest()})


def test_a_remembered_digest_is_used_for_an_untouched_file_only(tmp_path: Path) -> None:
    file, cache_file = tmp_path / "data", tmp_path / "cache.json"
    file.write_bytes(b"one")
    settle()
    cache = DigestCache.open(cache_file)
    assert cache.digest(file) == blake3(b"one").digest()
    cache.save()
    # A planted digest shows whether the cache was asked.
    planted = json.loads(cache_file.read_text())
    planted["files"][str(file)][-1] = "c" * 64
    cache_file.write_text(checked(planted))
    assert DigestCache.open(cache_file).digest(file) == bytes.fromhex("c" * 64)
    for i in range(4):
        changed = json.loads(cache_file.read_text())
        changed["files"][str(file)][i] += 1
        (tmp_path / "changed.json").write_text(checked(changed))
        assert DigestCache.open(tmp_path / "changed.json").digest(file) == blake3(b"one").digest(), (
            f"part {i} of the key"
        )
    flip_times = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(flip_times.st_atime_ns, flip_times.st_mtime_ns))
    assert DigestCache.open(cache_file).digest(file) == blake3(b"two").digest()


def test_a_file_replaced_by_one_with_the_same_times_is_hashed_again(tmp_path: Path) -> None:
    file, other, cache_file = tmp_path / "data", tmp_path / "other", tmp_path / "cache.json"
    file.write_bytes(b"one")
    other.write_bytes(b"two")
    os.utime(other, ns=(0, file.stat().st_mtime_ns))
    settle()
    cache = DigestCache.open(cache_file)
    cache.digest(file)
    cache.save()
    other.replace(file)
    assert DigestCache.open(cache_file).digest(file) == blake3(b"two").digest()


def test_a_file_written_just_now_is_hashed_but_not_remembered(tmp_path: Path) -> None:
    file, cache_file = tmp_path / "data", tmp_path / "cache.json"
    file.write_bytes(b"one")
    cache = DigestCache.open(cache_file)
    assert cache.digest(file) == blake3(b"one").digest()
    cache.save()
    assert not cache_file.exists()


CORRUPT = [
    b"",
    b"{",
    b"\xff\xff",
    b"[]",
    b'{"version": 2}',
    b'{"version": 3, "files": {}, "derived": {}}',
    b'{"version": 2, "files": [], "derived": {}}',
    b'{"version": 2, "files": {"%s": [1, 2, 3, "cc"]}, "derived": {}}',
    b'{"version": 2, "files": {"%s": [3, 1.5, 3, 4, "cc"]}, "derived": {}}',
    b'{"version": 2, "files": {"%s": null}, "derived": {}}',
    b'{"version": 2, "files": {}, "derived": {"tokenizer": "zz"}}',
    b'{"version": 2, "files": {}, "derived": {"tokenizer": "ab"}}',
    b'{"version": 2, "files": {}, "derived": null}',
]


@pytest.mark.parametrize("data", CORRUPT)
def test_a_corrupt_cache_is_ignored_and_written_anew(tmp_path: Path, data: bytes) -> None:
    file, cache_file = tmp_path / "data", tmp_path / "cache.json"
    file.write_bytes(b"one")
    settle()
    data = data.replace(b"%s", str(file).encode())
    with suppress(ValueError, TypeError):  # as it would be if it were whole
        data = checked(dict(json.loads(data))).encode()
    cache_file.write_bytes(data)
    cache = DigestCache.open(cache_file)
    assert cache.digest(file) == blake3(b"one").digest()
    cache.save()
    assert json.loads(cache_file.read_text())["files"][str(file)][-1] == blake3(b"one").hexdigest()


def test_a_changed_digest_is_not_believed(tmp_path: Path) -> None:
    file, cache_file = tmp_path / "data", tmp_path / "cache.json"
    file.write_bytes(b"one")
    settle()
    cache = DigestCache.open(cache_file)
    cache.digest(file)
    cache.save()
    text, right = cache_file.read_text(), blake3(b"one").hexdigest()
    assert text.count(right) == 1
    cache_file.write_text(text.replace(right, blake3(b"two").hexdigest()))
    assert DigestCache.open(cache_file).digest(file).hex() == right


def test_a_cache_in_a_folder_that_cannot_be_made_is_let_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"not a folder")
    root = write_bundle(tmp_path / "bundle")
    write_record(root)
    settle()
    assert Bundle.open(root, digest_cache=tmp_path / "file" / "cache.json").has_record


def test_two_writers_keep_each_others_digests(tmp_path: Path) -> None:
    files = [tmp_path / f"data{i}" for i in range(16)]
    for file in files:
        file.write_bytes(file.name.encode())
    settle()
    code = (
        "import sys, pathlib; from runtime.bundle.digests import DigestCache\n"
        "for name in sys.argv[2:]:\n"
        "    cache = DigestCache.open(pathlib.Path(sys.argv[1])); cache.digest(pathlib.Path(name)); cache.save()\n"
    )
    cache_file = tmp_path / "cache.json"
    halves = [files[:8], files[8:]]
    running = [subprocess.Popen([sys.executable, "-c", code, cache_file, *half]) for half in halves]
    assert [p.wait(60) for p in running] == [0, 0]
    found = json.loads(cache_file.read_text())["files"]
    assert set(found) == {str(f) for f in files}
    assert not list(tmp_path.glob("cache.json.*[!k]"))


def test_a_writer_waits_for_the_one_before_it(tmp_path: Path) -> None:
    mine, theirs, cache_file = tmp_path / "mine", tmp_path / "theirs", tmp_path / "cache.json"
    mine.write_bytes(b"one")
    theirs.write_bytes(b"two")
    settle()
    other = DigestCache.open(tmp_path / "other.json")
    other.digest(theirs)
    other.save()
    code = (
        "import sys, pathlib; from runtime.bundle.digests import DigestCache\n"
        "cache = DigestCache.open(pathlib.Path(sys.argv[1])); cache.digest(pathlib.Path(sys.argv[2]))\n"
        "print('ready', flush=True); cache.save()"
    )
    with (tmp_path / "cache.json.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        writer = subprocess.Popen([sys.executable, "-c", code, cache_file, mine], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(0.5)
        (tmp_path / "other.json").replace(cache_file)
    writer.communicate(timeout=60)
    assert set(json.loads(cache_file.read_text())["files"]) == {str(mine), str(theirs)}


def test_the_cache_is_private_and_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(b"one")
    settle()
    cache = DigestCache.open(tmp_path / "deep" / "cache.json")
    cache.digest(file)
    cache.save()
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["cache.json", "cache.json.lock"]
    assert (tmp_path / "deep" / "cache.json").stat().st_mode & 0o777 == 0o600


def test_a_bundle_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_bundle(tmp_path / "bundle")
    record = write_record(root)
    settle()
    hashed: list[Path] = []

    def counting(path: Path) -> bytes:
        hashed.append(path)
        return hash_file(path)

    monkeypatch.setattr("runtime.bundle.digests.hash_file", counting)
    first = Bundle.open(root, digest_cache=tmp_path / "cache.json").identity()
    assert len(hashed) == len(record["files"])
    hashed.clear()
    monkeypatch.setattr(
        "runtime.bundle.folder.tokenizer_digest", lambda root: pytest.fail("parsed the tokenizer again")
    )
    assert Bundle.open(root, digest_cache=tmp_path / "cache.json").identity() == first
    assert hashed == []


def test_a_large_file_has_the_digest_of_its_bytes(tmp_path: Path) -> None:
    data = os.urandom((9 << 20) + 7)
    (tmp_path / "large").write_bytes(data)
    assert hash_file(tmp_path / "large") == blake3(data).digest()


def test_the_key_is_what_the_file_system_says(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"one")
    stat = (tmp_path / "data").stat()
    assert file_key(tmp_path / "data") == (3, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
