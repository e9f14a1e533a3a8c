"""What is lost of a snapshot, told with the names that it has and with what brings it back."""

from __future__ import annotations

import shlex

from .errors import NotCovered, ObjectCorrupt, ObjectMissing
from .match import Match, usable_at
from .objects import mending
from .shelf import Shelf
from .snapshot import Coverage


def lost_object(error: ObjectMissing | ObjectCorrupt, match: Match, shelf: Shelf) -> ObjectMissing | ObjectCorrupt:
    """The error about an object that ``match`` reads (its ``details["name"]``), with the snapshot and the names it belongs to."""
    snapshot = match.snapshot
    name = error.details.get("name")
    block, group = next((b, g) for b, g in match.objects() if snapshot.blocks[b][g].hex == name)
    labels = sorted(ref.label for ref in shelf.records.readable_refs() if ref.snapshot == match.digest)
    named = ", ".join(map(repr, labels)) or "without a name"
    what = f"object {name} (block {block} of group {snapshot.layout.groups[group].name} of snapshot {match.digest}, {named})"
    label = labels[0] if labels else None
    details = {"name": name, "snapshot": match.digest.hex, "names": labels}
    if isinstance(error, ObjectCorrupt):
        return error.told(what=what, todo=mending(label), **details)
    found = f"expected its file in {shelf.path}, found none"
    return ObjectMissing(f"{what}: {found}. {mending(label, absent=True)}", **details)


def not_covered(name: str, match: Match, coverage: Coverage) -> NotCovered:
    """That ``name`` can't be continued where ``match`` was asked for, and from where it can."""
    tokens = match.snapshot.tokens
    found = match.reason
    todo = f"`kvferry pull REMOTE {shlex.quote(name)}` fetches what is missing from a remote that has it"
    if not any(coverage.runs):
        found = f"the store promises nothing of it (its file snapshots/{match.digest}.cov is absent or empty)"
        todo += f", `kvferry prefill --name {shlex.quote(name)}` with the same text makes it again"
    elif usable_at(match.snapshot, coverage, tokens)[0] == tokens:
        todo += ", or continue from its end"
    elif match.n:
        todo += f", or continue after {match.n + 1} tokens, of which {match.n} are here"
    return NotCovered(
        f"{name!r} can't be continued after {match.asked} tokens: expected the rows that this reads, found that {found}. {todo}.",
        name=name,
        asked=match.asked,
        usable=match.n,
    )
