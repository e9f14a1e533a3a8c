"""A remote by its address: a folder, a bucket, or a kvferry server."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from kvstore.errors import InputInvalid, Refused

from .folder import Folder, folder_path
from .remote import Target
from .reuse import Finder

if TYPE_CHECKING:
    from .connection import Peer

DEFAULT_PORT = 8765
BUCKETS = ("s3", "gs", "az")
"""Schemes of addresses that name a bucket."""


class Both(Finder, Target, AbstractContextManager["Both"], Protocol):
    """A remote that is read, asked by tokens, written, and closed."""


def is_folder(address: str) -> bool:
    """Whether an address names a folder: a path or a ``file://`` URL."""
    return "://" not in address or address.startswith("file://")


def open_remote(address: str, *, config: Path, token: str | None = None, create: bool = False) -> Both:
    """Opens what an address names; ``create`` makes a folder that isn't there.

    ``config``: the folder that knows the servers this machine was paired with; ``token``: for a server by plain HTTP. `InputInvalid`, `Unreachable`, and what the
    remote raises.
    """
    if is_folder(address):
        return Folder.open(folder_path(address), create=create)
    if address.partition("://")[0] in BUCKETS:
        from .blobs import Blobs
        from .bucket import Bucket

        return Bucket.open(Blobs.open(address), create=create)
    from .client import Client

    return Client.open(peer_of(address, config, token))


def peer_of(address: str, config: Path, token: str | None = None) -> Peer:
    """The server at an address, ``http://HOST:PORT``, ``https://HOST:PORT`` or ``kvferry://HOST:PORT``, of which the last two are the same."""
    from .connection import Peer
    from .known import Known

    try:
        url = urlsplit(address)
        host, port = url.hostname, url.port
    except ValueError as error:
        raise _unknown(address) from error
    if (
        url.scheme not in ("http", "https", "kvferry")
        or not host
        or url.path not in ("", "/")
        or url.query
        or url.fragment
        or url.username
    ):
        raise _unknown(address)
    if url.scheme == "http":
        return Peer(host, port or 80, None, token)
    server = Known(config).find(host, port or DEFAULT_PORT)
    if server is None:
        raise Refused(
            f"{address}: expected a server that this machine was paired with, found that it wasn't. Run `kvferry pair` there, and here `kvferry pair` with "
            f"what it shows.",
            address=address,
        )
    return server.peer()


def _unknown(address: str) -> InputInvalid:
    return InputInvalid(
        f"remote {address!r}: expected a folder (a path or file:///path), a bucket (s3://BUCKET/PREFIX, gs://…, az://…), or the address of a kvferry server "
        f"such as https://192.168.1.5:{DEFAULT_PORT}."
    )
