"""Who vouches for a snapshot: Ed25519 signatures of its digest, beside the manifest and unknown to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .digest import SnapshotDigest
from .errors import InputInvalid

KEY, SIGNATURE = 32, 64
"""Bytes of a public key, and of a signature."""
MAX_SIGNATURES = 64
"""Of one snapshot."""
_DOMAIN = b"kvferry 2026-11-30 signed snapshot\0"


@dataclass(frozen=True, slots=True, order=True)
class Signature:
    """A public key, and what its owner made of a snapshot's digest. The form is checked; whether it is true says `is_true`."""

    key: bytes
    raw: bytes

    def __post_init__(self) -> None:
        if len(self.key) != KEY or len(self.raw) != SIGNATURE:
            raise InputInvalid(
                f"signature: expected a key of {KEY} bytes and a signature of {SIGNATURE}, found {len(self.key)} and {len(self.raw)}"
            )


def message(digest: SnapshotDigest) -> bytes:
    """What is signed."""
    return _DOMAIN + digest.raw


def sign(secret: bytes, digest: SnapshotDigest) -> Signature:
    """Signs with the 32 bytes of an Ed25519 secret key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.from_private_bytes(secret)
    return Signature(private.public_key().public_bytes_raw(), private.sign(message(digest)))


def is_true(signature: Signature, digest: SnapshotDigest) -> bool:
    """Whether the owner of the key signed this snapshot."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(signature.key).verify(signature.raw, message(digest))
    except (InvalidSignature, ValueError):
        return False
    return True


def true_ones(signatures: Iterable[Signature], digest: SnapshotDigest) -> tuple[Signature, ...]:
    """Those that are true of this snapshot."""
    return tuple(signature for signature in signatures if is_true(signature, digest))


def joined(there: Iterable[Signature], more: Iterable[Signature]) -> tuple[Signature, ...]:
    """Both, one a key, in order of keys; of two by one key the one that is there. `InputInvalid` beyond `MAX_SIGNATURES`."""
    by_key = {signature.key: signature for signature in more} | {signature.key: signature for signature in there}
    if len(by_key) > MAX_SIGNATURES:
        raise InputInvalid(f"signatures: expected at most {MAX_SIGNATURES} of one snapshot, found {len(by_key)}")
    return tuple(by_key[key] for key in sorted(by_key))
