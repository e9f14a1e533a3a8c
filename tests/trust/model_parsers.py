"""Parsers of models and of what is given beside them: bundles, packages, weights, profiles, metrics, prompts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from mutations import Mutate, as_json, as_protobuf, as_text, some_bytes
from parsing import Case, Parser, files_in, in_folder

# bundles


def _bundle(folder: Path, form: str) -> Path:
    import bundle_folder

    path = bundle_folder.write_bundle(folder / form, form)
    bundle_folder.write_record(path)
    return path


def bundle(form: str) -> Callable[[Path], Case]:
    def prepare(folder: Path) -> Case:
        from runtime.bundle import Bundle

        good = _bundle(folder, form)
        loose = random.Random(3)

        def read(path: Path) -> None:
            # With its record every changed byte is noticed: half of the time it must not be what refuses.
            kept = (path / "kvferry.json").read_bytes()
            if kept == (good / "kvferry.json").read_bytes() and loose.random() < 0.8:
                (path / "kvferry.json").unlink()
            try:
                opened = Bundle.open(path)
                opened.identity(), opened.layout(), opened.head_digest()
                assert opened.config.sliding_window % 64 == 0
                opened.embed.take([0, opened.embed.rows - 1])
            finally:
                (path / "kvferry.json").write_bytes(kept)

        seeds = files_in(good, "manifest.json", "kvferry.json", "convert_config.json")
        seeds = [*seeds, *[seed for seed in seeds if seed[0] == "convert_config.json"] * 3, *files_in(good, "*.bin")]
        return Case(seeds, in_folder(folder, good, read), {"json": as_json})

    return prepare


def tokenizer(folder: Path) -> Case:
    import bundle_folder

    from runtime.tokenizer import Tokenizer

    good = folder / "good"
    good.mkdir()
    bundle_folder.write_tokenizer(good)

    def read(path: Path) -> None:
        opened = Tokenizer.open(path)
        assert len(opened.digest) == 32
        ids = opened.encode("hello w\u00f6rld")
        assert all(0 <= one < 2**32 for one in ids)
        opened.decode(ids)

    seeds = files_in(good, "*.json")
    return Case(seeds, in_folder(folder, good, read), {"json": as_json})


def digest_cache(folder: Path) -> Case:
    from runtime.bundle.digests import DigestCache, hash_file

    good = folder / "good"
    good.mkdir()
    (good / "file").write_bytes(b"x" * 100)
    cache = DigestCache.open(good / "cache.json")
    cache.derived("name", lambda: bytes(32))
    cache.digest(good / "file")
    cache.save()

    def read(path: Path) -> None:
        opened = DigestCache.open(path / "cache.json")
        assert opened.digest(good / "file") == hash_file(good / "file"), "a digest that somebody changed"
        assert len(opened.derived("name", lambda: bytes(32))) == 32

    return Case(files_in(good, "cache.json"), in_folder(folder, good, read), {"json": as_json})


# programs


def package(folder: Path) -> Case:
    import test_mlpackage_hostile as made

    from runtime.mlpackage.schema import parse_model

    good = made.write(folder / "good")
    ways: dict[str, Mutate] = {"json": as_json, "mlmodel": as_protobuf(parse_model)}
    model = files_in(good, "**/*.mlmodel")
    return Case([*model * 3, *files_in(good, "**/*.json", "**/*.bin")], in_folder(folder, good, made.read_all), ways)


def compiled(folder: Path) -> Case:
    import test_mil_reader as made

    good = made.write(folder / "good")
    text = files_in(good, "model.mil")
    return Case(
        [*text * 3, *files_in(good, "weights/*")], in_folder(folder, good, made.read_all), {"mil": as_text(MIL)}
    )


MIL = (
    b"tensor<", b"fp16(", b"BLOBFILE(", b"state<", b"const()", b"inf", b"x", b"99999999999", b"/*", b"*/", b"//", b"(" * 300, b"[" * 300,
    b"{{", b"}}", b'"', b"\\", b"0x1p+99999", b"tensor<fp16, [4294967296, 4294967296]>", b"-", b"func decode<ios18>() {} -> ();", b"\xff",
)  # fmt: skip


# weights and other files that are given


def safetensors(folder: Path) -> Case:
    import numpy as np
    from safetensors.numpy import save_file

    from runtime.build.safetensors_file import SafetensorsFolder

    one, two = folder / "one", folder / "two"
    one.mkdir(), two.mkdir()
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    save_file({"a": rows, "b": rows.astype(np.float16)}, one / "model.safetensors", metadata={"format": "pt"})
    save_file({"a": rows}, two / "model-1.safetensors")
    save_file({"b": rows}, two / "model-2.safetensors")
    where = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (two / "model.safetensors.index.json").write_text(json.dumps(where))

    def read(path: Path) -> None:
        with SafetensorsFolder(path) as opened:
            for name, entry in opened.entries.items():
                if entry.shape:
                    opened.rows(name, 0, entry.shape[0])

    readers = {place.name: in_folder(folder / f"{place.name}-copy", place, read) for place in (one, two)}
    seeds = [(f"{place.name}/{file}", data) for place in (one, two) for file, data in files_in(place, "*")]

    def either(file: str, data: bytes) -> None:
        place, _, name = file.partition("/")
        readers[place](name, data)

    def header(data: bytes, chance: random.Random) -> bytes:
        """Its JSON changed, its length right."""
        length = int.from_bytes(data[:8], "little")
        made = as_json(data[8 : 8 + length], chance)
        return len(made).to_bytes(8, "little") + made + data[8 + length :]

    def way(data: bytes, chance: random.Random) -> bytes:
        return header(data, chance) if chance.random() < 0.7 else some_bytes(data, chance)

    return Case(seeds, either, {"safetensors": way, "json": as_json})


def gguf(folder: Path) -> Case:
    import gguf_files

    from runtime.build.gguf_file import GgufFile
    from runtime.build.models import open_gguf
    from runtime.build.tiny import tiny_source

    source = tiny_source(0)
    tensors = gguf_files.tiny_tensors(source)
    path = gguf_files.write(folder / "whole.gguf", gguf_files.tiny_fields(source), tensors)
    data = path.read_bytes()
    place = folder / "changed.gguf"
    end = data.rindex(b"output_norm.weight") + 64
    chance = random.Random(4)

    def read(_: str, changed: bytes) -> None:
        place.write_bytes(changed)
        with GgufFile(place) as opened:
            for entry in list(opened.entries.values())[:3]:
                opened.rows(entry, 0, 1)
            if chance.random() < 0.5:
                open_gguf(opened, None, "0" * 64)

    def way(data: bytes, chance: random.Random) -> bytes:
        """Most changes in the header: the weights are most of the file."""
        if chance.random() < 0.1:
            return some_bytes(data, chance)
        at = chance.choice([0, chance.randrange(end), chance.randrange(min(end, 3000))])
        part = data[at : at + 64]
        return data[:at] + some_bytes(part, chance) + data[at + 64 :]

    return Case([("gguf", data)], read, {"": way})


def model_folder(folder: Path) -> Case:
    """A folder of Gemma 4's, as it is published: its configuration and its tokenizer; its weights are `safetensors`'."""
    from gemma4_folder import write_folder

    from runtime.build.gemma4.folder import open_folder
    from runtime.build.gemma4.tiny import tiny_gemma4

    good = write_folder(folder / "good", tiny_gemma4(0))

    def read(path: Path) -> None:
        with open_folder(path, "m", {"kind": "hugging-face", "sha256": "0" * 64}):
            pass

    seeds = files_in(good, "config.json") * 3 + files_in(good, "tokenizer*.json")
    return Case(seeds, in_folder(folder, good, read), {"json": as_json})


def profile(_: Path) -> Case:
    from kvstore.jsonfile import parse_object
    from runtime.profile import PROFILES, read_profile

    def read(_: str, data: bytes) -> None:
        made = read_profile(parse_object(data, "profile.json"), "profile.json")
        assert read_profile(made.document(), "profile.json") == made

    seeds = [("profile.json", json.dumps(one.document()).encode()) for one in PROFILES.values()]
    return Case(seeds, read, {"json": as_json})


def metrics(_: Path) -> Case:
    import metrics_lines

    from runtime.metrics.records import decode, encode

    def read(_: str, data: bytes) -> None:
        line = encode(decode(data))
        assert encode(decode(line)) == line

    return Case(
        [("line.json", metrics_lines.line(one)) for one in (*metrics_lines.APPS, metrics_lines.STEPPED)],
        read,
        {"json": as_json},
    )


def prompts(folder: Path) -> Case:
    from runtime.bundle import Bundle
    from runtime.gate.prompts import read_prompts

    opened = Bundle.open(_bundle(folder, "published"))

    def read(file: str, data: bytes) -> None:
        place = folder / file
        place.write_bytes(data)
        for prompt in read_prompts(opened, place, 4):
            assert prompt.tokens

    text = b"hello w\nhe\n\n"
    lines = b'{"text": "hello"}\n\n{"text": "w", "more": 1}\n'
    return Case(
        [("p.txt", text), ("p.jsonl", lines)], read, {"": as_text((b"\xff", b"\n", b"{", b'"text"', b"[" * 3000))}
    )


MODELS: tuple[Parser, ...] = (
    Parser(
        "published bundle", ("kvstore.jsonfile", "runtime.bundle.parse", "runtime.bundle.fields"), bundle("published")
    ),
    Parser("our bundle", ("runtime.bundle.parse", "runtime.bundle.record", "runtime.bundle.sidecar"), bundle("ours")),
    Parser("tokenizer", ("runtime.tokenizer", "runtime.tokenizer_digest"), tokenizer),
    Parser("digest cache", ("runtime.bundle.digests",), digest_cache),
    Parser(
        "mlpackage",
        (
            "runtime.mlpackage.package",
            "runtime.mlpackage.schema",
            "runtime.mlpackage.program",
            "runtime.mlpackage.blob",
        ),
        package,
    ),
    Parser(
        "mlmodelc", ("runtime.mil.compiled", "runtime.mil.reader", "runtime.mil.types", "runtime.mil.values"), compiled
    ),
    Parser("safetensors", ("runtime.build.safetensors_file",), safetensors),
    Parser("GGUF", ("runtime.build.gguf_file", "runtime.build.models"), gguf),
    Parser("model folder", ("runtime.build.gemma4.config", "runtime.build.gemma4.folder"), model_folder),
    Parser("device profile", ("runtime.profile",), profile),
    Parser("metrics", ("runtime.metrics.records",), metrics),
    Parser("prompts", ("runtime.gate.prompts",), prompts),
)
