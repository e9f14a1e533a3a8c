"""Whether a snapshot may come: who signed it, and whether one of them is trusted. Also the signatures' way between stores."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from kvstore.digest import SnapshotDigest
from kvstore.errors import FormatTooNew, InputInvalid, SignaturesCorrupt, Unsigned
from kvstore.records import Records
from kvstore.signatures import MAX_SIGNATURES, Signature, true_ones

from .remote import Remote, Target

Producers = Mapping[bytes, str]
"""The names of trusted producers by their keys."""


def vouched(source: Remote, label: str, digest: SnapshotDigest, required: Producers | None) -> tuple[Signature, ...]:
    """The true signatures that a remote has of a snapshot. With ``required`` `Unsigned` unless one of them is by one of these."""
    try:
        found = true_ones(source.signatures(digest), digest)
    except (SignaturesCorrupt, FormatTooNew):
        if required is not None:
            raise
        return ()  # whoever requires none needn't go without the snapshot
    require(source.where, label, digest, found, required)
    return found


def require(
    where: str, label: str, digest: SnapshotDigest, signatures: Sequence[Signature], required: Producers | None
) -> None:
    """`Unsigned` unless one of ``signatures``, which are true, is by one of ``required``; None requires nothing."""
    if required is None or any(signature.key in required for signature in signatures):
        return
    keys = [signature.key.hex() for signature in signatures]
    raise Unsigned(
        f"{where}: {label!r}: expected a signature by one of {len(required)} trusted keys, found that it is signed by {', '.join(keys) or 'nobody'}. "
        f"If you trust one of them, `kvferry keys trust KEY`; else have its producer run `kvferry sign` and push again.",
        label=label,
        snapshot=digest.hex,
        signed_by=keys,
    )


def take_along(records: Records, digest: SnapshotDigest, signatures: Sequence[Signature]) -> None:
    """Keeps true signatures with the snapshot here, as many as there is room for; those that are here go first."""
    with contextlib.suppress(FormatTooNew, InputInvalid):  # others may have filled it meanwhile
        try:
            here = {signature.key for signature in records.signatures(digest)}
        except SignaturesCorrupt:
            here = set()
        new = [signature for signature in signatures if signature.key not in here][: MAX_SIGNATURES - len(here)]
        if new:
            records.add_signatures(digest, new)


def send_along(records: Records, target: Target, digest: SnapshotDigest) -> None:
    """Adds the signatures of a snapshot here to those that a remote has. `SignaturesCorrupt` of this store."""
    own = true_ones(records.signatures(digest), digest)
    if not own:
        return
    try:
        there = {signature.key for signature in target.signatures(digest)}
    except SignaturesCorrupt:
        there = set()
    new = [signature for signature in own if signature.key not in there]
    if new:
        target.add_signatures(digest, new)


def checked(signatures: Sequence[Signature], digest: SnapshotDigest) -> Sequence[Signature]:
    """Before they are kept for others: `InputInvalid` unless all are true of this snapshot, and at least one and at most `MAX_SIGNATURES`."""
    if not 1 <= len(signatures) <= MAX_SIGNATURES:
        raise InputInvalid(f"signatures: expected 1 to {MAX_SIGNATURES}, found {len(signatures)}")
    if len(true_ones(signatures, digest)) != len(signatures):
        raise InputInvalid(f"signatures: expected such that are true of snapshot {digest}, found one that is not")
    return signatures
