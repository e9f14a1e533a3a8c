"""Giving a device a token: an offer with a one-time secret, shown as a URL and as a code that can be typed."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec

from kvstore.errors import InputInvalid
from kvstore.files import Pending, Root

from .bodies import Paired
from .tokens import SCOPES, TokenRefused, check_token

MINUTES = 10
ATTEMPTS = 5
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Crockford's base32."""
_SECRET = 8
_CODE = 24
_FILE = "offer.json"


@dataclass(frozen=True, slots=True)
class Invitation:
    """What the other device needs. ``fingerprint``: whole (64 hex digits), or from a code its first 20."""

    host: str
    port: int
    fingerprint: str
    secret: str

    @property
    def url(self) -> str:
        """As in a QR code."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"kvferry://{host}:{self.port}/?f={self.fingerprint}&s={self.secret}"

    @property
    def code(self) -> str:
        """As typed, in groups of four."""
        text = self.secret + _base32(bytes.fromhex(self.fingerprint[:20]))
        return "-".join(text[at : at + 4] for at in range(0, _CODE, 4))

    @classmethod
    def from_url(cls, url: str) -> Invitation:
        """`InputInvalid` on anything else."""
        try:
            parts = urlsplit(url)
            query = parse_qs(parts.query, strict_parsing=True, max_num_fields=2)
            host, port, (found,), (secret,) = parts.hostname, parts.port, query["f"], query["s"]
        except (ValueError, KeyError) as error:
            raise _no_invitation(url) from error
        if parts.scheme != "kvferry" or not host or not port or not re.fullmatch("[0-9a-f]{64}", found):
            raise _no_invitation(url)
        return cls(host, port, found, _typed(secret, _SECRET))

    @classmethod
    def from_code(cls, code: str, host: str, port: int) -> Invitation:
        """`InputInvalid` on anything else."""
        text = _typed(code, _CODE)
        return cls(host, port, _bytes(text[_SECRET:]).hex(), text[:_SECRET])


def _no_invitation(url: str) -> InputInvalid:
    return InputInvalid(
        f"expected what `kvferry pair` shows on the other machine, kvferry://HOST:PORT/?f=…&s=…, found {url!r:.80}"
    )


def _typed(text: str, length: int) -> str:
    """As typed by people: any case, any grouping, O for 0, I and L for 1."""
    plain = re.sub(r"[\s-]", "", text).upper().translate(str.maketrans("OIL", "011"))
    if len(plain) != length or set(plain) - set(_ALPHABET):
        raise InputInvalid(f"code: expected {length} letters and digits in groups of four, found {text!r:.60}")
    return plain


def _base32(raw: bytes) -> str:
    number, digits = int.from_bytes(raw, "big"), len(raw) * 8 // 5
    return "".join(_ALPHABET[number >> 5 * (digits - 1 - i) & 31] for i in range(digits))


def _bytes(text: str) -> bytes:
    number = 0
    for digit in text:
        number = number << 5 | _ALPHABET.index(digit)
    return number.to_bytes(len(text) * 5 // 8, "big")


class _Offer(msgspec.Struct, forbid_unknown_fields=True):
    digest: str
    expires: float
    attempts: int
    scopes: tuple[str, ...]
    namespaces: tuple[str, ...] | None


class Offers:
    """The one open offer of a server, in ``offer.json`` below its folder: `kvferry pair` makes it, `kvferry serve` answers it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root = Root(folder)
        self._root.make_folder("tmp")
        self._root.make_folder("book")

    def close(self) -> None:
        self._root.close()

    def open(self, scopes: Sequence[str], namespaces: Sequence[str] | None) -> str:
        """Makes an offer in the place of an earlier one; returns its secret, which is nowhere kept."""
        if not scopes or set(scopes) - set(SCOPES):
            raise InputInvalid(f"scopes: expected some of {', '.join(SCOPES)}, found {', '.join(scopes) or 'none'}")
        secret = _base32(secrets.token_bytes(5))
        offer = _Offer(
            _digest(secret),
            time.time() + 60 * MINUTES,
            ATTEMPTS,
            tuple(scopes),
            None if namespaces is None else tuple(namespaces),
        )
        with self._root.lock("book", exclusive=True):
            self._write(offer)
        return secret

    def take(self, secret: str) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
        """Scopes and namespaces of the offer with this secret, which is closed with it. `TokenRefused`: a wrong one costs an attempt."""
        try:
            plain = _typed(secret, _SECRET)
        except InputInvalid:
            plain = ""
        with self._root.lock("book", exclusive=True):
            offer = self._read()
            if offer is not None and hmac.compare_digest(_digest(plain).encode(), offer.digest.encode()):
                self._root.remove(_FILE)
                return offer.scopes, offer.namespaces
            if offer is not None:
                offer.attempts -= 1
                if offer.attempts > 0:
                    self._write(offer)
                else:
                    self._root.remove(_FILE)
        raise TokenRefused(
            f"expected the secret of an open offer, found another, or one that is used up or older than {MINUTES} minutes. Run `kvferry pair` on the "
            f"server again."
        )

    def waiting(self) -> bool:
        """Whether an offer is open."""
        with self._root.lock("book", exclusive=True):
            return self._read() is not None

    def _read(self) -> _Offer | None:
        try:
            offer = msgspec.convert(json.loads(self._root.read(_FILE, 1 << 16)), _Offer)
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError, msgspec.ValidationError):
            self._root.remove(_FILE)  # it holds nothing that a new offer would not
            return None
        # A clock that was set back must not keep an offer open for long.
        if not 0 < offer.expires - time.time() <= 60 * MINUTES:
            self._root.remove(_FILE)
            return None
        return offer

    def _write(self, offer: _Offer) -> None:
        self._root.publish([Pending(_FILE, [json.dumps(msgspec.to_builtins(offer)).encode()])])


def check_paired(paired: Paired) -> Paired:
    """What a server gave; `InputInvalid` unless it can be kept and shown to people, `TokenRefused` unless it is a token."""
    check_token(paired.token)
    shown = (paired.name, *paired.scopes, *(paired.namespaces or ()))
    if not all(0 < len(text) <= 255 and text.isprintable() for text in shown):
        raise InputInvalid(f"the answer: expected names of 1 to 255 printable characters, found {shown!r:.100}")
    return paired


def _digest(secret: str) -> str:
    return hashlib.sha256(f"kvferry offer {secret}".encode()).hexdigest()
