"""Writes small bundle folders of the published shape and of ours, from scratch and independently of the builder.

The packages hold random weight bytes and no program: reading a bundle never opens one.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from random import Random
from typing import Any

import pytest
from blake3 import blake3
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from runtime.bundle import BundleConfig, BundleFieldError, parse_config

ROWS = 320
HIDDEN = 16
LAYERS = 6
PLE = 4

Json = dict[str, Any]


def convert_config(form: str = "published") -> Json:
    """A valid `convert_config.json` with every optional field written out. ``form``: published or ours."""
    kinds = ["sliding_attention", "full_attention"] * 3
    config: Json = {
        "num_layers": LAYERS,
        "hidden": HIDDEN,
        "ple_dim": PLE,
        "first_shared": 4,
        "store_layers": {"sliding_attention": 2, "full_attention": 3},
        "chunk_bounds": [[0, 2], [2, 4], [4, 6]],
        "eos_token_ids": [1],
        "hostio": {
            "CTX": 256,
            "HD": 8,
            "GHD": 16,
            "SLIDING": 64,
            "NEG": -40000.0,
            "layer_types": kinds,
            "inv_slide": [10000.0 ** (-2 * i / 8) for i in range(4)],
            "inv_full": [1e6 ** (-2 * i / 16) for i in range(2)] + [0, 0, 0, 0, 0, 0],
        },
        "corellm": {
            "chunks": ["chunk_0.mlpackage", "chunk_1.mlpackage", "chunk_2.mlpackage"],
            "lmhead": "lmhead.mlpackage",
            "decode_function": "decode",
            "margin_function": "margin",
            "prefill": {
                "N": [4, 32, 16, 128],
                "functions": {"128": "prefill_128", "32": "prefill_32", "16": "prefill_16", "4": "prefill_4"},
                "plain_N": 128,
            },
            "verify": {
                "widths": [4],
                "functions": {"4": "verify_4"},
                "lmhead_batched": {"4": "lmhead_v4.mlpackage"},
            },
            "sidecars": {
                "default_stage": "fp16",
                "int8": {
                    "embed": _int8("embed", HIDDEN, 16),
                    "ple": _int8("ple", LAYERS * PLE, 4.0),
                },
                "fp16": {
                    "embed": {"file": "embed_fp16.bin", "shape": [ROWS, HIDDEN]},
                    "ple": {"file": "ple_fp16.bin", "shape": [ROWS, LAYERS * PLE]},
                },
            },
        },
    }
    if form == "ours":
        config |= {"ple_dim": 0, "first_shared": LAYERS, "chunk_bounds": [[0, 3], [3, 6]]}
        del config["store_layers"]
        config["hostio"]["KV_HEADS"] = 2
        config["corellm"]["chunks"].pop()
        for stage in ("int8", "fp16"):
            del config["corellm"]["sidecars"][stage]["ple"]
    return config


def all_full(config: Json) -> Json:
    """The same model without sliding layers: then nothing is said about them."""
    host = config["hostio"]
    host["layer_types"] = ["full_attention"] * LAYERS
    del host["SLIDING"], host["inv_slide"]
    host["HD"] = host["GHD"]
    return config


def _int8(name: str, cols: int, square: float) -> Json:
    return {
        "file": f"{name}_int8.bin",
        "shape": [ROWS, cols],
        "scale": f"{name}_scale_f32.bin",
        "runtime_scale_sqrt": square,
    }


def manifest(form: str = "published") -> Json:
    """A valid `manifest.json` with every optional field written out."""
    return {
        "name": f"test {form}",
        "architecture": "test-gemma",
        "contextLength": 4096,
        "modelRelativePath": "anything.mlmodelc",
        "tokenizerRelativePath": "../ignored",
        "format": "coreml-corellm-r1" if form == "published" else "kvferry-bundle-1",
        "promptPrefix": "<user>",
        "promptSuffix": "",
        "assistantSuffix": "<end>",
        "promptSuffixThinking": "<think>",
        "eos": [3],
        "sidecarStage": "int8",
        "computeUnits": "all",
        "drafterRelativePath": "",
    }


def write_bundle(
    root: Path, form: str = "published", *, convert: Json | None = None, head: Json | None = None, seed: int = 1
) -> Path:
    """A whole folder below ``root``. The files follow the valid configuration, whatever the JSON given says."""
    root.mkdir(parents=True, exist_ok=True)
    write_json(root / "convert_config.json", convert_config(form) if convert is None else convert)
    write_json(root / "manifest.json", manifest(form) if head is None else head)
    valid = convert_config(form)
    for name in [*valid["corellm"]["chunks"], "lmhead.mlpackage", "lmhead_v4.mlpackage"]:
        write_package(root / name, f"{seed} {name}".encode())
    random = Random(seed)
    tables = {"embed": HIDDEN} if form == "ours" else {"embed": HIDDEN, "ple": LAYERS * PLE}
    for name, cols in tables.items():
        (root / f"{name}_int8.bin").write_bytes(random.randbytes(ROWS * cols))
        scales = struct.pack(f"<{ROWS}f", *(random.uniform(0.001, 4) for _ in range(ROWS)))
        (root / f"{name}_scale_f32.bin").write_bytes(scales)
        halves = struct.pack(f"<{ROWS * cols}e", *(random.gauss(0, 1) for _ in range(ROWS * cols)))
        (root / f"{name}_fp16.bin").write_bytes(halves)
    write_tokenizer(root)
    return root


def write_json(path: Path, value: Json) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def write_package(path: Path, weights: bytes, *, compiled: bool = False) -> None:
    """A package (or compiled model) folder with these weight bytes."""
    inner = path if compiled else path / "Data" / "com.apple.CoreML"
    (inner / "weights").mkdir(parents=True)
    (inner / "weights" / "weight.bin").write_bytes(weights * 100)
    (inner / ("model.mil" if compiled else "model.mlmodel")).write_bytes(b"program")
    if not compiled:
        (path / "Manifest.json").write_text("{}")


def write_tokenizer(root: Path, *, extra: str | None = None, bos: str | None = "<bos>") -> None:
    """A byte-fallback BPE like Gemma's: specials, 256 bytes, letters, a few merges. ``extra``: one more piece."""
    pieces = ["<pad>", "<eos>", "<bos>", "<end>", "<unk>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += [*"▁abcdehlorwtã日"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "w"), ("o", "r")]
    pieces += [a + b for a, b in merges]
    if extra:
        pieces.append(extra)
    model = models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    made = Tokenizer(model)
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in pieces[:5]])
    made.save(str(root / "tokenizer.json"))
    write_json(root / "tokenizer_config.json", {"bos_token": bos, "add_bos_token": True})


def write_record(root: Path, **changes: Any) -> Json:
    """`kvferry.json` over every file that is in the folder now; ``changes`` replace its fields."""
    files = {
        path.relative_to(root).as_posix(): blake3(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "kvferry.json"
    }
    record: Json = {"format": "kvferry-bundle-1", "weights": "a" * 64, "heads": "b" * 64, "files": files, **changes}
    write_json(root / "kvferry.json", record)
    return record


def documents(form: str = "published") -> dict[str, Json]:
    """Both valid files by name."""
    return {"manifest.json": manifest(form), "convert_config.json": convert_config(form)}


def holder(document: Json, dotted: str) -> tuple[Json, str]:
    """The object that holds a dotted field, and the field's own name."""
    *parents, last = dotted.split(".")
    for name in parents:
        document = document[name]
    return document, last


def parse(files: dict[str, Json]) -> BundleConfig:
    return parse_config(files["manifest.json"], files["convert_config.json"])


def refusal(files: dict[str, Json]) -> BundleFieldError:
    """The error that parsing ``files`` ends with."""
    with pytest.raises(BundleFieldError) as caught:
        parse(files)
    return caught.value
