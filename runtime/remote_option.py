"""--remote of the verbs that look for a prompt's KV. How a remote is asked is sync's business: the command line puts it into the context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import click

from kvstore.cli import Text, note
from kvstore.identity import Identity
from kvstore.items import Item
from kvstore.layout import Layout
from kvstore.match import Match
from kvstore.plaintext import counted, size_text
from kvstore.store import Store

from .opening import Opened

LOOK, BRING = "runtime.look", "runtime.bring"
"""Keys of the context's ``meta``: a `Look`, a `Bring`."""


class Look(Protocol):
    """Says what the remote at ``address`` has of some tokens."""

    def __call__(
        self,
        address: str,
        layout: Layout,
        identity: Identity,
        items: Sequence[Item],
        *,
        namespace: str,
        head: str | None,
    ) -> Match | None: ...


class Brought(Protocol):
    """What was fetched into the store."""

    @property
    def match(self) -> Match: ...
    @property
    def objects(self) -> int: ...
    @property
    def payload_bytes(self) -> int: ...


class Bring(Protocol):
    """Fetches what some tokens can use of the remote at ``address`` into ``store``; None where it has no more than the store."""

    def __call__(
        self,
        store: Store,
        address: str,
        layout: Layout,
        identity: Identity,
        items: Sequence[Item],
        *,
        namespace: str,
        head: str | None,
    ) -> Brought | None: ...


def remote_option(help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds --remote; the command gets ``remote``, an address or None."""
    return click.option("--remote", metavar="REMOTE", type=Text(), help=help)


def look(address: str, opened: Opened, items: Sequence[Item]) -> Match | None:
    """What the remote has of ``items``. It is told the tokens."""
    ask: Look = click.get_current_context().meta[LOOK]
    bundle = opened.bundle
    return ask(
        address, bundle.layout(), bundle.identity(), items, namespace=opened.namespace, head=bundle.head_digest()
    )


def bring(store: Store, address: str, opened: Opened, items: Sequence[Item]) -> dict[str, Any]:
    """Fetches what ``items`` can use; what was fetched, for JSON, said on stderr. The remote is told the tokens."""
    fetch: Bring = click.get_current_context().meta[BRING]
    bundle = opened.bundle
    found = fetch(
        store, address, bundle.layout(), bundle.identity(), items, namespace=opened.namespace, head=bundle.head_digest()
    )
    if found is None:
        return {"remote": address, "tokens": 0, "objects": 0, "payload_bytes": 0}
    note(
        f"fetched {counted(found.objects, 'object')}, {size_text(found.payload_bytes)}, for {counted(found.match.n, 'token')} from {address}"
    )
    return {"remote": address, "tokens": found.match.n, "objects": found.objects, "payload_bytes": found.payload_bytes}
