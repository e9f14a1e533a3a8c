"""For people who write a backend of their own: KV to try it with, ways to damage a store, and the tests that every backend passes.

The tests are `kvstore.testing.contract.BackendContract`, which alone needs pytest. `docs/library.md` shows how to plug a backend in.

Order: data · damage · contract
"""

from .damage import damage_object, lose_object
from .data import HEAD, IDENTITY, LAYOUT, PlainRows, lineage, other_identity, save, tokens

__all__ = [
    "HEAD",
    "IDENTITY",
    "LAYOUT",
    "PlainRows",
    "damage_object",
    "lineage",
    "lose_object",
    "other_identity",
    "save",
    "tokens",
]
