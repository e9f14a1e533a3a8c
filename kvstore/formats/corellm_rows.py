"""The rows of a checkpoint in memory, one K and one V run of bytes a layer, and what those bytes say that the manifest doesn't."""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from ..digest import ContentDigest, content_digest
from ..layout import BLOCK, ITEM_BYTES, Layout

_CONTEXT = "kvferry 2026-11-30 corellm checkpoint {} 1"
_ZEROS = b"\0" * (1 << 16)


class CheckpointRows:
    """Rows of ``tokens`` tokens, zero at first. Implements `kvstore.layout.Rows`.

    A layer's K (or V) is what its file holds: row-major ``[tokens, head_dim]``, little-endian fp16.
    """

    def __init__(self, layout: Layout, tokens: int) -> None:
        self.layout = layout
        self.tokens = tokens
        self._step = {layer: g.row_elements * ITEM_BYTES[layout.dtype] for g in layout.groups for layer in g.layers}
        self._arrays = {
            layer: (bytearray(tokens * step), bytearray(tokens * step)) for layer, step in self._step.items()
        }

    def files(self, layer: int) -> tuple[memoryview, memoryview]:
        """The live bytes of the layer's K and V."""
        k, v = self._arrays[layer]
        return memoryview(k), memoryview(v)

    def spans(self, group: int, start: int, stop: int) -> Sequence[memoryview]:
        """`kvstore.layout.Rows.spans`."""
        layers = self.layout.groups[group].layers
        return [memoryview(a)[start * self._step[i] : stop * self._step[i]] for i in layers for a in self._arrays[i]]

    def zero_rows(self, group: int) -> int:
        """How many leading tokens have rows of zero bytes in every layer of ``group``: rows that a trimmed snapshot left out."""
        layers = self.layout.groups[group].layers
        return min(_zero_bytes(a) // self._step[i] for i in layers for a in self._arrays[i])

    def not_finite(self, layer: int) -> tuple[str, int] | None:
        """The first row of the layer with a NaN or an infinity: ("k" or "v", token); None without one."""
        import numpy as np

        for which, array in zip("kv", self._arrays[layer], strict=True):
            # All exponent bits set. (`isfinite` on fp16 is several times slower.)
            bad = (np.frombuffer(array, "<u2") & 0x7C00) == 0x7C00
            if bad.any():
                return which, int(bad.argmax()) * 2 // self._step[layer]
        return None

    def unwritten(self, layer: int) -> tuple[str, int] | None:
        """Where a full layer's bytes are zero as a sparse or failed copy leaves them: ("k", the first token whose K row is), or ("v", 0)
        where all of V is; None where nothing is. K after norm and RoPE is never zero; a single V row might be."""
        import numpy as np

        k, v = self._arrays[layer]
        empty = ~np.frombuffer(k, "<u2").reshape(self.tokens, -1).any(axis=1)
        if empty.any():
            return "k", int(empty.argmax())
        return None if _zero_bytes(v) < len(v) else ("v", 0)

    def soft_key(self, token: int) -> bytes:
        """32 bytes that stand for the soft row at ``token``, which the checkpoint doesn't hold: a digest of its KV in the groups without a
        window, whose rows are always here. No soft row's own digest can equal it, because the context is another one."""
        hasher = blake3(derive_key_context=_CONTEXT.format("soft row"))
        for group, one in enumerate(self.layout.groups):
            if one.window is None:
                for part in self.spans(group, token, token + 1):
                    hasher.update(part)
        return hasher.digest()

    def contents(self, block: int, first: Sequence[int]) -> tuple[ContentDigest, ...]:
        """The content digests of a full block, as its snapshot names them. ``first``: per group the first token whose rows are here.

        Of an object that isn't here nobody knows the content. It gets a name that no content has, drawn from the block's KV that is
        here, so that no store can ever promise it.
        """
        start, stop = block * BLOCK, (block + 1) * BLOCK
        groups = range(len(self.layout.groups))
        known = {g: content_digest(self.spans(g, start, stop)) for g in groups if first[g] <= start}
        here = b"".join(known[g].raw for g in sorted(known))
        return tuple(known[g] if g in known else _absent(self.layout.groups[g].name, here) for g in groups)


def _absent(group: str, here: bytes) -> ContentDigest:
    return ContentDigest(blake3(here + group.encode(), derive_key_context=_CONTEXT.format("absent object")).digest())


def _zero_bytes(data: bytearray) -> int:
    """Length of the run of zero bytes at the start; copies a piece at a time."""
    at, size = 0, len(_ZEROS)
    while data[at : at + size] == _ZEROS:
        at += size
    piece = data[at : at + size]
    return at + len(piece) - len(piece.lstrip(b"\0"))
