"""kvstore: a content-addressed store of LLM KV cache, keyed by token-prefix hashes.

    with Store.open(Path("~/kv").expanduser()) as store:
        saved = store.save(layout, identity, tokens, rows, namespace="default", name="book", lineage=[me] * blocks)
        match = store.find(layout, identity, prompt, namespace="default")
        store.load(match, into=rows)

`Store.save` and `Store.load` take and return host memory (`Rows`, or `ArrayRows` over any arrays); no model and no array library is needed.

Order: errors · plaintext · disk · digest · layout · identity · items · snapshot · codec · match · files · objects · records · shelf · loss ·
staging · index · search · store · formats · usage · prune · check · report · doctor · cli · upkeep · demo
"""

from .errors import KVError
from .identity import Identity
from .items import SoftToken
from .layout import ArrayRows, Group, Layout, Rows
from .match import Match
from .snapshot import Lineage, Snapshot
from .store import Saved, Store

__all__ = [
    "ArrayRows",
    "Group",
    "Identity",
    "KVError",
    "Layout",
    "Lineage",
    "Match",
    "Rows",
    "Saved",
    "Snapshot",
    "SoftToken",
    "Store",
]
