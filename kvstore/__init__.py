"""kvstore: a content-addressed store of LLM KV cache, keyed by token-prefix hashes.

    with Store.open(Path("~/kv").expanduser()) as store:
        saved = store.save(layout, identity, tokens, rows, namespace="default", name="book", lineage=[me] * blocks)
        match = store.find(layout, identity, prompt, namespace="default")
        store.load(match, into=rows)

`Store.save` and `Store.load` take and return host memory (`Rows`, or `ArrayRows` over any arrays); no model and no array library is needed.
The public names are imported when they are first used, so that a short command loads what it needs and nothing else.

Order: errors · jsonfile · plaintext · mounts · holders · disk · waiting · digest · layout · identity · items · snapshot · signatures · planes · codec · match · files · objects · records · shelf · gauge · loss · saving ·
backend · memory · staging · counts · index · usage · prune · quota · search · store · formats · recode · pins · keyring · trash · inventory · check_report · check · salvage · repair · report · explain · stats · doctor · cli · recode_command · stats_commands · upkeep · space · keeping · key_commands · joined · demo · testing
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import KVError
    from .identity import Identity
    from .items import SoftToken
    from .layout import ArrayRows, Group, Layout, Rows
    from .match import Match
    from .saving import Saved
    from .snapshot import Lineage, Snapshot
    from .store import Store

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

_HOMES = {
    "ArrayRows": "layout",
    "Group": "layout",
    "Identity": "identity",
    "KVError": "errors",
    "Layout": "layout",
    "Lineage": "snapshot",
    "Match": "match",
    "Rows": "layout",
    "Saved": "saving",
    "Snapshot": "snapshot",
    "SoftToken": "items",
    "Store": "store",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
