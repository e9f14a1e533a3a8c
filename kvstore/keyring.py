"""The keys that this machine signs with, and those that it trusts: one file of mode 0600 in the settings folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from .digest import SnapshotDigest
from .errors import InputInvalid, Refused
from .files import Pending, Root
from .signatures import KEY, Signature, sign

_FILE = "keys.json"
_LIMIT = 1 << 20


class Own(msgspec.Struct, forbid_unknown_fields=True):
    """A key of this machine's. ``key`` and ``secret`` in hex."""

    name: str
    key: str
    secret: str


class Trusted(msgspec.Struct, forbid_unknown_fields=True):
    """A producer that is believed. ``name``: for people."""

    name: str
    key: str


class _Keys(msgspec.Struct, forbid_unknown_fields=True):
    own: tuple[Own, ...] = ()
    trusted: tuple[Trusted, ...] = ()


_Change = Callable[[_Keys], _Keys]


class Keyring:
    """``keys.json`` below a folder. Any number of processes may use one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def own(self) -> tuple[Own, ...]:
        """The keys to sign with, by name. `InputInvalid` where the file is not ours."""
        return self._read().own

    def trusted(self) -> Mapping[bytes, str]:
        """The names of the trusted producers by key."""
        return {bytes.fromhex(one.key): one.name for one in self._read().trusted}

    def make(self, name: str) -> Own:
        """A new key to sign with, durably. `Refused` where there is one of that name."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        private = Ed25519PrivateKey.generate()
        made = Own(name, private.public_key().public_bytes_raw().hex(), private.private_bytes_raw().hex())

        def add(keys: _Keys) -> _Keys:
            if any(one.name == name for one in keys.own):
                raise Refused(f"key {name!r}: expected a new name, found a key of this name. Choose another --name.")
            return _Keys((*keys.own, made), keys.trusted)

        self._change(add)
        return made

    def trust(self, key: str, name: str) -> Trusted:
        """Believes a producer from now on, durably. `InputInvalid` for what is no key."""
        given = Trusted(name, parse_key(key).hex())
        self._change(lambda keys: _Keys(keys.own, (*(one for one in keys.trusted if one.key != given.key), given)))
        return given

    def untrust(self, key: str) -> Trusted:
        """Believes a producer no longer, durably; by key or name. `Refused` where nobody or more than one is meant."""
        gone: list[Trusted] = []

        def drop(keys: _Keys) -> _Keys:
            gone.extend(one for one in keys.trusted if key in (one.key, one.name))
            if len(gone) != 1:
                raise Refused(
                    f"key {key!r:.80}: expected one trusted key of this name, found {len(gone)}. `kvferry keys ls` lists them; give the key itself."
                )
            return _Keys(keys.own, tuple(one for one in keys.trusted if one not in gone))

        self._change(drop)
        return gone[0]

    def sign(self, digest: SnapshotDigest, name: str | None) -> Signature:
        """Signs with the key ``name``, by default the only one. `Refused` where there is none, or several and no name."""
        own = self.own()
        chosen = [one for one in own if name is None or one.name == name]
        if len(chosen) != 1:
            raise Refused(
                f"key: expected one{'' if name is None else f' named {name!r}'} to sign with, found {len(chosen)} of "
                f"{', '.join(one.name for one in own) or 'none at all'}. `kvferry keys new` makes one, --key names one."
            )
        return sign(bytes.fromhex(chosen[0].secret), digest)

    def _read(self) -> _Keys:
        path = self._folder / _FILE
        try:
            with path.open("rb") as file:
                keys = msgspec.convert(json.loads(file.read(_LIMIT)), _Keys)
            for text in (*(o.key for o in keys.own), *(o.secret for o in keys.own), *(t.key for t in keys.trusted)):
                parse_key(text)
        except FileNotFoundError:
            return _Keys()
        except (ValueError, RecursionError, msgspec.ValidationError) as error:
            raise InputInvalid(
                f"{path}: expected the keys that kvferry wrote, found something else. Move it away, and begin anew with `kvferry keys new`."
            ) from error
        by_name = sorted(keys.own, key=lambda one: one.name), sorted(keys.trusted, key=lambda one: (one.name, one.key))
        return _Keys(tuple(by_name[0]), tuple(by_name[1]))

    def _change(self, change: _Change) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        root = Root(self._folder)
        try:
            root.make_folder("tmp")
            with root.lock("tmp", exclusive=True):
                plain = msgspec.to_builtins(change(self._read()))
                root.publish([Pending(_FILE, [json.dumps(plain, indent=1, ensure_ascii=False).encode() + b"\n"])])
        finally:
            root.close()


def parse_key(text: str) -> bytes:
    """The bytes of a key from its 64 hex digits. `InputInvalid`."""
    if len(text) != 2 * KEY or set(text) - set("0123456789abcdef"):
        raise InputInvalid(
            f"key: expected {2 * KEY} lowercase hex digits as `kvferry keys ls` shows them, found something else"
        )
    return bytes.fromhex(text)
