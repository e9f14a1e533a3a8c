"""What a remote can do, as two narrow Protocols: a `Source` is pulled from, a `Target` is pushed to.

A folder is both. So can an HTTP server or a bucket be: nothing here knows paths, locks or sockets. The values that come
back (refs, snapshots, coverage) are verified by the implementation, with kvstore's codecs; frames are not: the receiver
verifies those while they arrive. A remote belongs to one thread, except `Source.fetch` and `Target.put`, which are called
from up to `WORKERS` threads at once, each call for objects of its own.

Errors, everywhere: `Unreachable` (nothing is known about what is there), `Corrupt` by kind, `FormatTooNew`, and `Missing`
only where the remote did answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from kvstore.digest import ContentDigest, SnapshotDigest
from kvstore.signatures import Signature
from kvstore.snapshot import Coverage, Ref, Snapshot

from .frames import Buffer
from .plan import Lengths

WORKERS = 4
"""Objects under way at once."""

MAX_ASKED = 1024
"""Objects that one `have`, `sound` or `resume` asks about at most."""

Frame = tuple[ContentDigest, Iterable[Buffer]]
"""An object's name and its frame (header and payload) in pieces; each piece is valid until the next is asked for."""


class Remote(Protocol):
    """What pulling and pushing both ask."""

    @property
    def where(self) -> str:
        """The remote for people, in errors."""
        ...

    def refs(self) -> Iterator[Ref]:
        """Every ref, by label."""
        ...

    def ref(self, label: str) -> Ref | None:
        """What a name stands for; None where there is none. `RefCorrupt`: then `Target.publish` takes it for absent."""
        ...

    def snapshot(self, digest: SnapshotDigest) -> Snapshot:
        """The manifest, verified against its digest. `SnapshotMissing`, `SnapshotCorrupt`."""
        ...

    def signatures(self, digest: SnapshotDigest) -> Sequence[Signature]:
        """The signatures of a snapshot by form, whether they are true or not; none where there are none. `SignaturesCorrupt`."""
        ...

    def have(self, objects: Lengths) -> set[ContentDigest]:
        """Those of at most `MAX_ASKED` objects that are there, by name and length; what was put just now counts.

        Not a promise that they stay, nor that their bytes are sound.
        """
        ...

    def sound(self, objects: Lengths) -> set[ContentDigest]:
        """As `have`, but only those of which every byte was read just now, and is what it should be."""
        ...


class Source(Remote, Protocol):
    """A remote that is pulled from. Nothing in it writes."""

    def coverage(self, digest: SnapshotDigest, snapshot: Snapshot) -> Coverage:
        """What the remote promises of a snapshot; nothing where it has no coverage. `CoverageCorrupt`."""
        ...

    def fetch(self, names: Sequence[ContentDigest]) -> Iterator[Frame]:
        """The objects' frames in this order, unverified; each is read, or given up, before the next is asked for.

        `ObjectMissing` for one that is not there, at the latest when its frame is read.
        """
        ...


class Target(Remote, Protocol):
    """A remote that is pushed to."""

    def resume(self, objects: Lengths) -> set[ContentDigest]:
        """Takes over those of at most `MAX_ASKED` objects that an interrupted push left there, complete; none will do."""
        ...

    def put(self, frames: Iterator[Frame], lengths: Lengths) -> None:
        """Takes objects in, each verified while it passes. Until `publish` they may be out of sight.

        `ObjectCorrupt` when a frame is not what its name and its entry in ``lengths`` say; that one leaves no trace.
        """
        ...

    def publish(self, snapshot: Snapshot, coverage: Coverage, label: str, expect: SnapshotDigest | None) -> Coverage:
        """Makes a snapshot visible, in this order: its covered objects, manifest and coverage, then the ref.

        One call, so that a remote with a lock can hold it from the check of the objects to the ref. ``coverage`` joins the one
        that is there; returns what then holds. The ref moves by compare-and-swap from ``expect`` (None: absent); nothing
        is moved if it is to stay where it was. `ObjectMissing` when a covered object is not there (any more): plan again.
        `RefConflict`.
        """
        ...

    def add_signatures(self, digest: SnapshotDigest, signatures: Sequence[Signature]) -> None:
        """Adds true signatures to those of a published snapshot. `SnapshotMissing`; `InputInvalid` where they are not true, or too many."""
        ...
