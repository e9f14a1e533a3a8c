"""What a check found, as values and as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .digest import SnapshotDigest
from .inventory import Level
from .plaintext import counted, size_text

Kind = Literal["object", "manifest", "coverage", "ref", "signatures", "folder", "index", "newer"]
"""What is damaged. ``newer``: a file that a newer version wrote, which is no damage and which nobody here can judge."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One damaged or absent file: its path in the store, what is wrong, the names it hurts, and what to do."""

    kind: Kind
    path: str
    found: str
    names: tuple[str, ...]
    todo: str


@dataclass(frozen=True, slots=True)
class Named:
    """One ref. ``lost``: promised (block, group) objects that are absent or damaged; ``usable``: how many leading tokens can still be
    continued from here, None where the manifest can't be read.

    A trimmed snapshot loses nothing by being trimmed: ``usable`` is all of its tokens. ``pull``: the command that gets the rest from a
    remote, None where nothing is missing.
    """

    label: str
    snapshot: SnapshotDigest
    tokens: int | None
    lost: tuple[tuple[int, int], ...]
    usable: int | None
    pull: str | None = None

    @property
    def whole(self) -> bool:
        """All of its tokens can be continued, and all that is promised of it is here."""
        return self.usable == self.tokens is not None and not self.lost

    def __str__(self) -> str:
        told = f"name {self.label!r}: {self.usable or 0} of {self.tokens or 'unknown'} tokens can be continued"
        return told if self.pull is None else f"{told}; `{self.pull}` gets the rest from a remote that has it"


@dataclass(frozen=True, slots=True)
class Report:
    """``problems`` are damage; ``notes`` are harmless: leftovers, files that are not ours, a remade index.

    ``bytes`` of all ``objects`` as files; of these ``read_objects`` and ``read_bytes`` were read and compared with their digests. ``complete``: as
    many as the level asked for; else its time was over first.
    """

    level: Level
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    names: tuple[Named, ...]
    snapshots: int
    objects: int
    bytes: int
    read_objects: int
    read_bytes: int
    complete: bool

    @property
    def ok(self) -> bool:
        """Nothing is damaged or absent."""
        return not self.problems

    def value(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "ok": self.ok,
            "quick": self.level.name == "quick",
            "level": self.level.name,
            "snapshots": self.snapshots,
            "objects": self.objects,
            "bytes": self.bytes,
            "read_objects": self.read_objects,
            "read_bytes": self.read_bytes,
            "complete": self.complete,
            "problems": [
                {"kind": p.kind, "path": p.path, "found": p.found, "names": list(p.names), "todo": p.todo}
                for p in self.problems
            ],
            "names": [
                {
                    "name": n.label,
                    "snapshot": n.snapshot.hex,
                    "tokens": n.tokens,
                    "usable": n.usable,
                    "lost": len(n.lost),
                    "pull": n.pull,
                }
                for n in self.names
            ],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [f"{p.path}: {p.found} {p.todo}".rstrip() for p in self.problems]
        lines += [str(n) for n in self.names if n.usable != n.tokens or n.tokens is None]
        lines += [*self.notes, self._verdict()]
        return "\n".join(lines)

    def _verdict(self) -> str:
        verdict = "ok" if self.ok else counted(len(self.problems), "problem")
        objects = counted(self.objects, "object")
        here = f"{verdict}: {counted(self.snapshots, 'snapshot')}, {objects}"
        if self.read_objects == self.objects and self.level.name != "quick":
            return f"{here} verified, {size_text(self.bytes)}"
        here = f"{here} present with the right size, {size_text(self.bytes)}"
        if self.level.name == "quick":
            return here
        short = "" if self.complete else "; its time was over: the next check goes on there"
        return f"{here}; {self.read_objects:,} of them verified, {size_text(self.read_bytes)}{short}"
