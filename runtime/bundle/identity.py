"""Which model a bundle is, for the KV store: the layout of its KV, and everything that changes a KV byte."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from blake3 import blake3

from kvstore.identity import Identity
from kvstore.layout import Group, Layout

from .config import FULL, SLIDING, BundleConfig

DTYPE = "float16"
_CONTEXT = "kvferry 2026-11-30 bundle {} 1"


def kv_layout(config: BundleConfig) -> Layout:
    """The groups ``full`` and ``sliding``, in this order, of the layers that own KV; a kind without any is left out."""
    full = Group("full", None, config.own_layers(FULL), config.kv_heads, config.global_head_dim)
    window = config.sliding_window
    sliding = Group("sliding", window, config.own_layers(SLIDING), config.kv_heads, config.head_dim)
    return Layout(tuple(group for group in (full, sliding) if group.layers), DTYPE)


def kv_identity(config: BundleConfig, *, weights: str, sidecars: list[tuple[str, ...]], tokenizer: str) -> Identity:
    """``weights`` and ``tokenizer`` as hex; ``sidecars``: per table its name and the hex digests of its files.

    Left out, because no KV byte depends on them: ``CTX``, chunk bounds, function and file names, packaging, the heads,
    the bundle's own name, prompts, end tokens, and the mask value (masked slots get a weight of exactly 0).
    `docs/bundle.md` lists every field.
    """
    store = config.store_layers
    fields: dict[str, Any] = {
        "adapter": None,
        "architecture": config.architecture,
        "dtype": DTYPE,
        "first_shared": config.first_shared,
        "global_head_dim": config.global_head_dim,
        "head_dim": config.head_dim,
        "hidden": config.hidden,
        "kv_heads": config.kv_heads,
        "layer_types": list(config.layer_types),
        "num_layers": config.num_layers,
        "ple_dim": config.ple_dim,
        "rope_full": list(config.inv_full),
        "rope_sliding": None if config.inv_slide is None else list(config.inv_slide),
        "scale_embed": config.embed.scale_square,
        "scale_ple": config.ple.scale_square if config.ple else None,
        "sidecar_stage": config.sidecar_stage,
        "sidecars": [list(table) for table in sidecars],
        "sliding_window": config.sliding_window,
        "store_layers": [store.sliding, store.full] if store else None,
        "tokenizer": tokenizer,
        "vocab_size": config.vocab_size,
        "weights": weights,
    }
    return Identity.of(fields)


def blobs_digest(meaning: str, blobs: Iterable[tuple[str, bytes]]) -> str:
    """Hex digest over (name, BLAKE3 of the bytes) pairs, in name order; ``meaning`` keeps kinds of digest apart."""
    hasher = blake3(derive_key_context=_CONTEXT.format(meaning))
    for name, digest in sorted(blobs):
        raw = name.encode()
        hasher.update(struct.pack("<I", len(raw)) + raw + digest)
    return hasher.hexdigest()
