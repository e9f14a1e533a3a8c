"""Marks for tests that hold for every model family: the `bundle` fixture, and what is made from it, is then each family's in turn."""

from __future__ import annotations

import pytest

FAMILIES = ("tiny", "tiny-llama", "tiny-gemma4")
every_family = pytest.mark.parametrize("bundle", FAMILIES, indirect=True, scope="session")
"""With sliding layers and one KV head; with full attention in every layer and several KV heads; and with shared layers, per-layer embeddings, two head
dimensions and 6-bit weights, in the published shape."""

every_family_slow = pytest.mark.parametrize(
    "bundle",
    ["tiny", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[1:])],
    indirect=True,
    scope="session",
)
"""The same where a test takes long: all but `tiny` run in the second tier."""
