"""kvstore: a content-addressed store of LLM KV cache, keyed by token-prefix hashes.

    with Store.open(Path("~/kv").expanduser()) as store:
        saved = store.save(layout, identity, tokens, rows, namespace="default", name="book", lineage=[me] * blocks)
        match = store.find(layout, identity, prompt, namespace="default")
        store.load(match, into=rows)

`Store.save` and `Store.load` take and return host memory (`Rows`); no model and no array library is needed.

Order: errors · digest · layout · identity · items · snapshot · codec · match · files · objects · records · shelf · staging · index ·
search · store · usage · prune · check · report · doctor · cli · upkeep · demo
"""

from .errors import KVError
from .identity import Identity
from .items import SoftToken
from .layout import Group, Layout, Rows
from .match import Match
from .snapshot import Lineage, Snapshot
from .store import Saved, Store

__all__ = [
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
