"""The servers that this machine was paired with: address, fingerprint and token, in one file of mode 0600."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from kvstore.errors import InputInvalid
from kvstore.files import Pending, Root

from .connection import Peer

_FILE = "servers.json"
_LIMIT = 1 << 22


class Server(msgspec.Struct, forbid_unknown_fields=True):
    """One server. ``name``: its own, for people."""

    host: str
    port: int
    fingerprint: str
    token: str
    name: str
    scopes: tuple[str, ...]
    namespaces: tuple[str, ...] | None

    def peer(self) -> Peer:
        """How to reach it."""
        return Peer(self.host, self.port, self.fingerprint, self.token)


class Known:
    """``servers.json`` below a folder. Any number of processes may use one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def servers(self) -> list[Server]:
        """All, in order of address. `InputInvalid` where the file is not ours."""
        path = self._folder / _FILE
        try:
            data = path.read_bytes()[:_LIMIT]
            servers = msgspec.convert(json.loads(data), tuple[Server, ...])
        except FileNotFoundError:
            return []
        except (ValueError, RecursionError, msgspec.ValidationError) as error:
            raise InputInvalid(
                f"{path}: expected the servers that kvferry wrote, found something else ({error!s:.200}). Move it away, and pair again."
            ) from error
        return sorted(servers, key=lambda server: (server.host, server.port))

    def find(self, host: str, port: int) -> Server | None:
        """The server at an address; None where this machine was not paired with it."""
        return next((server for server in self.servers() if (server.host, server.port) == (host, port)), None)

    def remember(self, server: Server) -> None:
        """Adds it, in the place of an earlier one of that address, durably."""
        self._change(server.host, server.port, [server])

    def forget(self, host: str, port: int) -> bool:
        """Takes it away, durably; False where it wasn't known."""
        there = self.find(host, port) is not None
        self._change(host, port, [])
        return there

    def _change(self, host: str, port: int, new: list[Server]) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        root = Root(self._folder)
        try:
            root.make_folder("tmp")
            with root.lock("tmp", exclusive=True):
                rest = [server for server in self.servers() if (server.host, server.port) != (host, port)]
                plain = [msgspec.to_builtins(server) for server in (*rest, *new)]
                root.publish([Pending(_FILE, [json.dumps(plain, indent=1).encode() + b"\n"])])
        finally:
            root.close()
