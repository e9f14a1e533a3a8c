"""The digests of a bundle: its weights whatever the packaging, its heads, and its files.

A weight digest is BLAKE3 (derive-key) over the tensors in name order; each contributes its name, dtype, shape and the BLAKE3 of its bytes
(little-endian, row-major), every variable part preceded by its length. Chunk bounds, file layout, folded gains and the order in which
tensors were made don't enter it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

WEIGHTS_CONTEXT = "kvferry 1 canonical weights"
HEADS_CONTEXT = "kvferry 1 canonical heads"


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """What one tensor contributes: dtype name, shape, BLAKE3 of its bytes (hex)."""

    dtype: str
    shape: tuple[int, ...]
    content: str


def tensor_digest(array: NDArray[np.generic]) -> TensorDigest:
    """The digest of an array. Reads it without a copy when it is contiguous and little-endian."""
    plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    content = blake3(plain.reshape(-1).view(np.uint8).data, max_threads=blake3.AUTO).hexdigest()
    return TensorDigest(array.dtype.name, array.shape, content)


def canonical_digest(tensors: Mapping[str, TensorDigest], context: str) -> str:
    """The digest of named tensors under ``context``, hex."""
    state = blake3(derive_key_context=context)
    for name in sorted(tensors):
        tensor = tensors[name]
        for text in (name, tensor.dtype):
            state.update(len(text.encode()).to_bytes(4, "big") + text.encode())
        state.update(len(tensor.shape).to_bytes(4, "big"))
        for size in tensor.shape:
            state.update(size.to_bytes(8, "big"))
        state.update(bytes.fromhex(tensor.content))
    return state.hexdigest()


def file_digest(path: Path) -> str:
    """BLAKE3 of a file's bytes, hex."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def folder_digests(root: Path, *, leave: Iterable[str] = ()) -> dict[str, str]:
    """BLAKE3 (hex) of every file under ``root`` by its relative POSIX path, sorted; but not of entries of ``root`` named in ``leave``."""
    left = set(leave)
    names = {path.relative_to(root): path for path in root.rglob("*") if path.is_file()}
    return {name.as_posix(): file_digest(names[name]) for name in sorted(names) if name.parts[0] not in left}
