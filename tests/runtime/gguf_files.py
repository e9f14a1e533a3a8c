"""GGUF files for tests, written by the gguf package: the tiny models as Gemma 3 and Llama GGUFs, with any field changed or left out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import quants

from runtime.build.source import Source
from runtime.build.spec import EMBEDDING, OUTPUT, OUTPUT_NORM
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
    names += [f"blk.{i}.{tensor}" for i in range(source.spec.layers) for tensor in source.spec.layer_tensors]
    return {name: source.weights.tensor(name) for name in names}


def llama_fields(source: Source) -> Fields:
    spec, vocabulary = source.spec, source.vocabulary
    return {
        "general.architecture": "llama",
        "general.name": "Tiny Llama",
        "general.license": "apache-2.0",
        "llama.context_length": 8192,
        "llama.embedding_length": spec.hidden,
        "llama.block_count": spec.layers,
        "llama.feed_forward_length": spec.ffn,
        "llama.attention.head_count": spec.heads,
        "llama.attention.head_count_kv": spec.kv_heads,
        "llama.attention.key_length": spec.head_dim,
        "llama.attention.value_length": spec.head_dim,
        "llama.attention.layer_norm_rms_epsilon": spec.norm_epsilon,
        "llama.rope.freq_base": spec.rope_base_full,
        "llama.rope.dimension_count": spec.head_dim,
        "llama.vocab_size": spec.vocabulary,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": list(vocabulary.pieces),
        "tokenizer.ggml.token_type": [int(kind) for kind in vocabulary.types],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in vocabulary.merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": vocabulary.eos,
        "tokenizer.ggml.unknown_token_id": vocabulary.unknown,
        "tokenizer.ggml.padding_token_id": vocabulary.pad,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": "{{ '<|im_start|>' + role + content + '<|im_end|>' }}",
    }


def llama_tensors(source: Source) -> dict[str, np.ndarray]:
    """As converted files have them: in a query or key head of width w, row i of the first half becomes row 2i, of the second half row 2i + 1."""
    tensors = tiny_tensors(source)
    width = source.spec.head_dim
    order = [
        head + i // 2 + width // 2 * (i % 2)
        for head in range(0, source.spec.heads * width, width)
        for i in range(width)
    ]
    for name, tensor in tensors.items():
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            tensors[name] = np.ascontiguousarray(tensor[order[: len(tensor)]])
    return tensors


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
