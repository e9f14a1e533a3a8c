"""GGUF files for tests, written by the gguf package: the tiny model as a Gemma 3 GGUF, with any field changed or left out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import quants

from runtime.build.source import Source
from runtime.build.spec import EMBEDDING, LAYER_TENSORS, OUTPUT, OUTPUT_NORM
from runtime.build.tiny import tiny_source

Fields = dict[str, Any]
_KINDS = {
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
    list: gguf.GGUFValueType.ARRAY,
}


def tiny_fields(source: Source) -> Fields:
    spec, vocabulary = source.spec, source.vocabulary
    return {
        "general.architecture": "gemma3",
        "general.name": "Tiny Gemma",
        "general.license": "apache-2.0",
        "gemma3.context_length": 32768,
        "gemma3.embedding_length": spec.hidden,
        "gemma3.block_count": spec.layers,
        "gemma3.feed_forward_length": spec.ffn,
        "gemma3.attention.head_count": spec.heads,
        "gemma3.attention.head_count_kv": spec.kv_heads,
        "gemma3.attention.key_length": spec.head_dim,
        "gemma3.attention.value_length": spec.head_dim,
        "gemma3.attention.layer_norm_rms_epsilon": spec.norm_epsilon,
        "gemma3.attention.sliding_window": spec.window,
        "gemma3.rope.freq_base": spec.rope_base_full,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.replace("▁", " ") if kind == 4 else piece for piece, kind in zip(vocabulary.pieces, vocabulary.types, strict=True)],
        "tokenizer.ggml.scores": list(vocabulary.scores),
        "tokenizer.ggml.token_type": [int(kind) for kind in vocabulary.types],
        "tokenizer.ggml.bos_token_id": vocabulary.bos,
        "tokenizer.ggml.eos_token_id": vocabulary.eos,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.unknown_token_id": vocabulary.unknown,
        "tokenizer.ggml.padding_token_id": vocabulary.pad,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }  # fmt: skip


def tiny_tensors(source: Source) -> dict[str, np.ndarray]:
    names = [EMBEDDING, OUTPUT, OUTPUT_NORM]
    names += [f"blk.{i}.{tensor}" for i in range(source.spec.layers) for tensor in LAYER_TENSORS]
    return {name: source.weights.tensor(name) for name in names}


def write(path: Path, fields: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, matrices: str = "F32") -> Path:
    """``matrices``: the ggml type of every matrix; vectors are F32. A field whose value is None is left out."""
    kind = gguf.GGMLQuantizationType[matrices]
    writer = gguf.GGUFWriter(path, arch="unused")
    writer.kv_data[0].clear()
    for key, value in fields.items():
        if value is not None:
            inner = _KINDS[type(value[0])] if isinstance(value, list) else None
            inner = gguf.GGUFValueType.INT32 if inner is gguf.GGUFValueType.UINT32 else inner
            writer.add_key_value(key, value, _KINDS[type(value)], inner)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and matrices != "F32":
            writer.add_tensor(name, quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_gguf(path: Path, changes: Mapping[str, Any] | None = None, *, matrices: str = "F32") -> Path:
    """The tiny model for seed 0 with ``changes`` to its fields."""
    source = tiny_source(0)
    return write(path, tiny_fields(source) | dict(changes or {}), tiny_tensors(source), matrices=matrices)
