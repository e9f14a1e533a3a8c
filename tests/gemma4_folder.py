"""Writes a Gemma 4 model as the folder it would be published in, with the safetensors package: none of our own code writes the files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from runtime.build.gemma4.model import Gemma4Model
from runtime.build.gemma4.tiny import tiny_config

F32 = np.float32


def tensors_of(model: Gemma4Model) -> dict[str, NDArray[F32]]:
    """Every tensor of the model by its name in the decoder."""
    return {name: model.weights.tensor(name) for name in model.spec.tensors()}


def write_folder(
    root: Path,
    model: Gemma4Model,
    *,
    config: Mapping[str, Any] | None = None,
    prefix: str = "model.",
    tensors: Mapping[str, NDArray[Any]] | None = None,
    extra: Mapping[str, NDArray[Any]] | None = None,
    files: int = 1,
    change: Callable[[str, NDArray[F32]], NDArray[Any]] | None = None,
) -> Path:
    """``tensors`` (by default the model's) under ``prefix``, and ``extra`` as they are called, in ``files`` files; ``change`` gives each its stored array."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "config.json").write_text(json.dumps(tiny_config() if config is None else config))
    for name, content in model.tokenizer.items():
        assert isinstance(content, str)
        (root / name).write_text(content, encoding="utf-8")
    given = tensors_of(model) if tensors is None else tensors
    stored = {prefix + name: np.ascontiguousarray(change(name, t) if change else t) for name, t in given.items()}
    stored |= extra or {}
    if files == 1:
        save_file(stored, root / "model.safetensors")
        return root
    where: dict[str, str] = {}
    for part in range(files):
        file = f"model-{part + 1:05d}-of-{files:05d}.safetensors"
        mine = {name: stored[name] for name in sorted(stored)[part::files]}
        save_file(mine, root / file)
        where |= dict.fromkeys(mine, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in stored.values())}, "weight_map": where}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return root
