"""What must hold after a server lied: an error of ours, nothing visible, nothing lost, and the next pull from a good one ends well."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from ferries import assert_restores, save, tree, verify
from liar import Answer, Liar, Lie

from kvstore import Store
from kvstore.codec import HEADER
from kvstore.digest import SnapshotDigest
from kvstore.errors import (
    KVError,
)
from sync import pull
from sync.client import Client
from sync.connection import Peer

TOKENS = 200
"""Four blocks of two groups."""


def refused(good: Peer, tmp_path: Path, lies: dict[str, Lie], *kinds: type[KVError], before: int = 200) -> KVError:
    """Pulls from a liar: an error of ours, and no trace of it that a reader could see. Then from the good server."""
    folder = tmp_path / "phone"
    with Store.open(folder) as phone:
        save(phone, "mine", 120, "mine")
        seen = visible(folder)
        with Liar(good, lies) as liar:
            with pytest.raises(kinds) as caught, Client.open(liar.peer) as remote:
                pull(phone, remote, ["book"])
            assert len(liar.asked) < before, "it asks for ever"
            assert visible(folder) == seen, "something became visible, or was disturbed"
        assert type(caught.value) in kinds, caught.value
        assert len(str(caught.value)) < 4000 and str(caught.value).isprintable()
        assert liar.peer.where in str(caught.value)
        with Client.open(good) as remote:
            moved = pull(phone, remote, ["book"])
        assert moved.objects + moved.resumed == 8
        assert_restores(phone, "book", TOKENS)
        assert_restores(phone, "mine", 120, "mine")
    verify(folder)
    return caught.value


def visible(folder: Path) -> dict[str, tuple[int, int, int, int]]:
    return {name: stat for name, stat in tree(folder).items() if name.split("/")[0] in ("objects", "refs", "snapshots")}


def error_of(status: int, value: object) -> Lie:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return lambda said: said.but(body=text, status=status, Content_Type="application/json")


INFO, REF, MANIFEST, COVERAGE, FETCH, OBJECT = (
    "/v1/info", "/v1/refs/book", r"/v1/snapshots/\w+$", "/coverage", "/v1/fetch", "/v1/objects/",
)  # fmt: skip


def of(good: Path, label: str) -> tuple[SnapshotDigest, bytes, bytes]:
    """Digest, manifest and coverage of a name, as the good server has them."""
    with Store.open(good) as store:
        digest = store.resolve(label)
        manifest = (good / "snapshots" / digest.hex).read_bytes()
        return digest, manifest, (good / "snapshots" / f"{digest}.cov").read_bytes()


def flipped(at: int) -> Lie:
    def lie(said: Answer) -> Answer:
        data = bytearray(said.body)
        data[at] ^= 0x10
        return said.but(body=bytes(data))

    return lie


def cut(said: Answer) -> bytes:
    """In the middle of the first object."""
    return said.head + said.body[: HEADER + 5000]


def rest(change: Callable[[Answer], Answer]) -> dict[str, Lie]:
    return {FETCH: cut, OBJECT: change}
