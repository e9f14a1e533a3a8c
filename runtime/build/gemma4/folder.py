"""A Gemma 4 model from a Hugging Face folder: its configuration, its tensors by name and shape, its tokenizer as it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.jsonfile import JsonInvalid, read_object
from runtime.build.digests import file_digest
from runtime.build.errors import SourceDamaged, SourceMissing, field_error
from runtime.build.gemma4.config import CONFIG, read_config
from runtime.build.gemma4.model import Gemma4Model
from runtime.build.gemma4.spec import Gemma4Spec
from runtime.build.gemma4.tokens import check_tokenizer
from runtime.build.regular import regular_file
from runtime.build.safetensors_file import INDEX, SafetensorsFolder
from runtime.build.source import Origin, Turns

_CONFIG_LIMIT = 8 << 20
_TOKENIZER_LIMIT = 256 << 20
_NEEDED = ("tokenizer.json", "tokenizer_config.json")
_COPIED = (*_NEEDED, "special_tokens_map.json", "chat_template.jinja", "LICENSE")
#: What stands before the text decoder's tensors in a checkpoint: of the whole model, or of the decoder by itself.
_PREFIXES = ("model.language_model.", "model.")
#: Parts of the whole model that the text decoder doesn't need.
_OTHERS = (
    "model.vision_tower.",
    "model.audio_tower.",
    "model.embed_vision.",
    "model.embed_audio.",
    "model.multi_modal_projector.",
)
_FIX = "Give the folder of a Gemma 4 E2B-like text model as it was published"
#: The markers of Gemma 4's turns; a tokenizer that has them belongs to a model that was trained on turns.
TURNS = Turns("<|turn>user\n", "<turn|>\n<|turn>model\n", "<turn|>\n")


def read_folder_config(root: Path, name: str | None) -> Gemma4Spec:
    """The geometry that the folder's configuration gives, without looking at its weights. ``name`` None takes the folder's own."""
    if not regular_file(root / CONFIG):
        raise SourceMissing(
            f"{root}: expected {CONFIG} of a Hugging Face model, found none. {_FIX}.", file=str(root / CONFIG)
        )
    try:
        document, _ = read_object(root / CONFIG, limit=_CONFIG_LIMIT)
    except JsonInvalid as error:
        raise SourceDamaged(str(error), file=CONFIG, field=error.field) from error
    return read_config(document, name or _own_name(root))


def _own_name(root: Path) -> str:
    return "-".join(re.findall(r"[a-z0-9.]+", root.resolve().name.lower())) or "gemma4"


def check_files(root: Path, spec: Gemma4Spec) -> None:
    """Everything but the weights, which :func:`folder_origin` and :func:`open_folder` take minutes for.

    Raises SourceMissing, SourceDamaged or SourceFieldError.
    """
    present = {name for name in _COPIED if regular_file(root / name)}
    for needed in _NEEDED:
        if needed not in present:
            raise SourceMissing(f"{root}: expected {needed}, found none. {_FIX}.", file=str(root / needed))
    check_tokenizer(root, spec)


def folder_origin(root: Path) -> Origin:
    """What a bundle of this folder is made from: the digest of its configuration, weights and tokenizer, and their names."""
    with SafetensorsFolder(root) as weights:
        names = [CONFIG, *weights.files]
    names += [name for name in (INDEX, *_COPIED) if regular_file(root / name)]
    total = sha256()
    for name in sorted(names):
        total.update(f"{name}\0{file_digest(root / name)}\n".encode())
    return {"kind": "hugging-face", "sha256": total.hexdigest()}


@contextmanager
def open_folder(root: Path, name: str | None, origin: Origin) -> Iterator[Gemma4Model]:
    """The model in the folder ``root``, whose other files :func:`check_files` has seen, while open. Raises SourceMissing, SourceDamaged, SourceFieldError or ArchitectureUnsupported."""
    spec = read_folder_config(root, name)
    with SafetensorsFolder(root) as files:
        prefix = _checked(files, spec)
        yield Gemma4Model(
            spec=spec,
            weights=FolderWeights(files, prefix),
            tokenizer={name: root / name for name in _COPIED if regular_file(root / name)},
            turns=TURNS if _has_turns(root / "tokenizer.json") else None,
            origin=origin,
            license="that of the folder's model",
            terms=None,
        )


@dataclass(frozen=True, slots=True)
class FolderWeights:
    """The decoder's tensors by their names without ``prefix``."""

    files: SafetensorsFolder
    prefix: str

    def has(self, name: str) -> bool:
        return self.prefix + name in self.files.entries

    def tensor(self, name: str) -> NDArray[np.float32]:
        shape = self.files.entries[self.prefix + name].shape
        return self.files.rows(self.prefix + name, 0, shape[0])

    def row_blocks(self, name: str, rows: int) -> Iterator[NDArray[np.float32]]:
        count = self.files.entries[self.prefix + name].shape[0]
        for start in range(0, count, rows):
            yield self.files.rows(self.prefix + name, start, min(start + rows, count))


def _checked(files: SafetensorsFolder, spec: Gemma4Spec) -> str:
    """The prefix of the decoder's tensors, which are all there, in their shapes, with nothing else beside them."""
    prefix = next((p for p in _PREFIXES if any(name.startswith(p + "layers.") for name in files.entries)), _PREFIXES[0])
    for name, shape in spec.tensors().items():
        entry = files.entries.get(prefix + name)
        found = None if entry is None else list(entry.shape)
        if entry is None or entry.shape != shape:
            raise field_error("the weights", f"tensor {prefix}{name}", f"shape {list(shape)}", found, _FIX)
    known = {prefix + name for name in (*spec.tensors(), *spec.dropped())}
    others = () if prefix == _PREFIXES[1] else _OTHERS
    extra = sorted(name for name in files.entries if name not in known and not name.startswith(others))
    if extra:
        raise field_error("the weights", "tensors", "only those of a Gemma 4 text decoder", extra[:3], _FIX)
    return prefix


def _has_turns(tokenizer: Path) -> bool:
    try:
        document, _ = read_object(tokenizer, limit=_TOKENIZER_LIMIT)
    except JsonInvalid as error:
        raise SourceDamaged(str(error), file=tokenizer.name, field=error.field) from error
    added = document.get("added_tokens")
    pieces = {item.get("content") for item in added if isinstance(item, dict)} if isinstance(added, list) else set()
    return {"<|turn>", "<turn|>"} <= pieces
