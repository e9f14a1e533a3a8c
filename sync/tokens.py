"""Who may ask a server for what: tokens with scopes and namespaces, kept as digests in one file."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvstore.digest import check_namespace
from kvstore.errors import InputInvalid, Refused, SnapshotMissing
from kvstore.files import Pending, Root

SCOPES = ("read", "push", "admin")
_TOKEN = re.compile(r"kvf1\.([0-9a-f]{16})\.([A-Za-z0-9_-]{43})", re.ASCII)
_NOBODY = b"\0" * 32
_FILE = "tokens.json"
_LIMIT = 1 << 22
UNSURE = 1_000_000_000
"""Nanoseconds after a change in which another one may leave a folder's time as it is."""


class TokenRefused(Refused):
    """No token, or one that the server does not know (any more)."""


class NotAllowed(Refused):
    """The token, or the server, does not allow this."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What somebody may do. ``id``: of the token, or of whoever asks without one; ``namespaces``: None is all."""

    id: str
    scopes: frozenset[str]
    namespaces: frozenset[str] | None

    def sees(self, namespace: str) -> bool:
        """Whether what lies in ``namespace`` exists for it."""
        return self.namespaces is None or namespace in self.namespaces

    def require(self, scope: str) -> None:
        """`NotAllowed` without ``scope``."""
        if scope not in self.scopes:
            has = ", ".join(sorted(self.scopes)) or "nothing"
            raise NotAllowed(
                f"expected leave to {scope}, found leave for {has}. Whoever runs the server gives it with a new "
                f"`kvferry pair --scope read --scope {scope}`; pushing needs `kvferry serve --allow push` too.",
                scope=scope,
            )


class Token(msgspec.Struct, forbid_unknown_fields=True):
    """A token as the server keeps it: ``digest`` is SHA-256 of its secret in hex; ``created`` in Unix seconds."""

    id: str
    digest: str
    device: str
    scopes: tuple[str, ...]
    namespaces: tuple[str, ...] | None
    created: int

    def grant(self) -> Grant:
        """What it allows."""
        return Grant(self.id, frozenset(self.scopes), None if self.namespaces is None else frozenset(self.namespaces))


class TokenBook:
    """The tokens of a server, in ``tokens.json`` below a folder of its own. Any number of processes may use one folder.

    What another process adds or revokes counts with the next request.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root = Root(folder)
        self._root.make_folder("tmp")
        self._root.make_folder("book")  # only locked
        self._seen: tuple[int, int] | None = None
        self._tokens: dict[str, Token] = {}

    def close(self) -> None:
        self._root.close()

    def issue(self, device: str, scopes: Iterable[str], namespaces: Iterable[str] | None) -> tuple[str, Token]:
        """Makes a token, durably: its text, which is nowhere kept, and what is kept of it. `InputInvalid`."""
        given = tuple(scope for scope in SCOPES if scope in set(scopes := tuple(scopes)))
        if not given or set(scopes) - set(SCOPES):
            raise InputInvalid(f"scopes: expected some of {', '.join(SCOPES)}, found {', '.join(scopes) or 'none'}")
        spaces = None if namespaces is None else tuple(sorted(set(namespaces)))
        for namespace in spaces or ():
            check_namespace(namespace)
        if spaces == ():
            raise InputInvalid("namespaces: expected at least one, or all, found none")
        check_device(device)
        raw = secrets.token_bytes(32)
        secret = base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
        token = Token(secrets.token_hex(8), _digest(secret).hex(), device, given, spaces, int(time.time()))
        with self._root.lock("book", exclusive=True):
            self._write([*self._read().values(), token])
        return f"kvf1.{token.id}.{secret}", token

    def revoke(self, id_: str) -> Token:
        """Takes a token away, durably. `SnapshotMissing` where there is none of that id."""
        with self._root.lock("book", exclusive=True):
            tokens = self._read()
            gone = tokens.pop(id_, None)
            if gone is None:
                raise SnapshotMissing(f"no token {id_!r}. `kvferry tokens ls` lists them.", id=id_)
            self._write(list(tokens.values()))
        return gone

    def tokens(self) -> list[Token]:
        """All, oldest first."""
        return sorted(self._fresh().values(), key=lambda token: (token.created, token.id))

    def check(self, text: str | None) -> Grant:
        """What the bearer of a token may do. `TokenRefused`. Takes as long for a wrong secret as for an unknown id."""
        match = _TOKEN.fullmatch(text or "")
        token = self._fresh().get(match[1]) if match else None
        kept = bytes.fromhex(token.digest) if token is not None else _NOBODY
        right = hmac.compare_digest(_digest(match[2] if match else ""), kept)
        if token is None or not right:
            found = "none" if text is None else "one that this server does not know"
            raise TokenRefused(
                f"expected a token of this server, found {found}. Pair this machine with `kvferry pair` there, and `kvferry pair URL` here."
            )
        return token.grant()

    def _fresh(self) -> dict[str, Token]:
        size = self._root.size(_FILE)
        seen = None if size is None else (size, self._root.mtime_ns(""))
        if seen is None or seen != self._seen:
            self._tokens = self._read()
            # Right after a change another one may leave the folder's time as it is.
            self._seen = seen if seen is not None and time.time_ns() - seen[1] > UNSURE else None
        return self._tokens

    def _read(self) -> dict[str, Token]:
        try:
            data = self._root.read(_FILE, _LIMIT)
            tokens = msgspec.convert(json.loads(data), tuple[Token, ...])
            for token in tokens:
                bytes.fromhex(token.digest)
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError, msgspec.ValidationError) as error:
            where = self._root.path / _FILE
            raise InputInvalid(
                f"{where}: expected the tokens that kvferry wrote, found something else ({error!s:.200}). Move it away, and pair the devices again."
            ) from error
        return {token.id: token for token in tokens}

    def _write(self, tokens: Iterable[Token]) -> None:
        plain: Any = [msgspec.to_builtins(token) for token in tokens]
        self._root.publish([Pending(_FILE, [json.dumps(plain, indent=1).encode() + b"\n"])])


def check_device(device: str) -> None:
    """`InputInvalid` unless it can stand in a list for people."""
    if not 0 < len(device) <= 200 or not device.isprintable():
        raise InputInvalid(f"device: expected a name of 1 to 200 printable characters, found {device!r:.60}")


def check_token(text: str) -> None:
    """`TokenRefused` unless it looks like a token: anything else must not get into a header."""
    if not _TOKEN.fullmatch(text):
        raise TokenRefused(
            f"expected a token, kvf1.<id>.<secret>, found {len(text)} characters of something else. `kvferry pair` gives one."
        )


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
