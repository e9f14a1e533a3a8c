"""Pins: refs that keep one snapshot, whatever becomes of its name. A pin is a ref whose label begins with ``pin/``, and never moves."""

from __future__ import annotations

from collections.abc import Iterable

from .digest import SnapshotDigest
from .errors import SnapshotMissing
from .records import PIN, Records, check_label
from .snapshot import Ref

SHORT = 8
"""Digits of a digest that at least must be given."""


def find_snapshot(records: Records, text: str) -> SnapshotDigest:
    """The snapshot of a name, or of the first 8 to 64 digits of a digest. `SnapshotMissing`, also where two begin so; `RefCorrupt`."""
    ref = records.ref(text)
    return ref.snapshot if ref is not None else by_digits(records.snapshots(), text)


def by_digits(digests: Iterable[SnapshotDigest], text: str) -> SnapshotDigest:
    """The one that begins with these digits. `SnapshotMissing`."""
    found = []
    if SHORT <= len(text) <= 64 and not set(text) - set("0123456789abcdef"):
        found = [digest for digest in digests if digest.hex.startswith(text)]
    if len(found) != 1:
        told = f"{len(found)} that begin so" if found else "none"
        raise SnapshotMissing(
            f"{text!r}: expected a name, or the first {SHORT} digits or more of one snapshot's digest, found {told}. `kvferry ls` and "
            f"`kvferry du` list what is here, `kvferry trash ls` what was collected.",
            label=text,
        )
    return found[0]


def pin(records: Records, name: str, label: str | None = None) -> Ref:
    """Keeps the snapshot that ``name`` (a name or a digest) stands for now. Durable when it returns.

    The pin's label is ``pin/`` and ``label``; by default ``name``, where that is a name, and the digest's first digits, so that the states
    of a name can be pinned one after the other. Pinning the same again changes nothing. `SnapshotMissing`, `LabelInvalid`; `RefConflict`
    where a pin of that label keeps another snapshot.
    """
    digest = find_snapshot(records, name)
    if label is None:
        short = digest.hex[:12]
        label = short if records.ref(name) is None else f"{name.removeprefix(PIN)}@{short}"
    full = check_label(PIN + label.removeprefix(PIN))
    records.move_ref(full, records.standing(full), digest)
    made = records.ref(full)
    if made is None:
        raise SnapshotMissing(f"{full!r}: it was removed by somebody else in the meantime.", label=full)
    return made


def unpin(records: Records, labels: Iterable[str]) -> list[tuple[str, SnapshotDigest | None]]:
    """Removes pins, given with or without ``pin/``: all, or none where one is not there (`SnapshotMissing`)."""
    return records.remove(PIN + label.removeprefix(PIN) for label in labels)
