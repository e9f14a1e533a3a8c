"""The errors of kvferry: one root, and a class only where a caller would act differently.

Missing, corrupt and unreachable are three families; only *missing* is a cache miss. Each message says what was
expected, what was found and what to do next; ``details`` carries the same as values. All are picklable.

Exit codes of the command line (``exit_code``): 1 other · 2 usage · 3 missing · 4 corrupt · 5 another model ·
6 another format · 7 refused · 8 unreachable · 9 a continuation that differs · 10 the store is full ·
11 repaired, with losses · 130 interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self


class KVError(Exception):
    """Root of every error kvferry raises on purpose."""

    exit_code = 1

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: Mapping[str, Any] = details

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, dict(self.details))

    def __str__(self) -> str:
        return self.message


def _rebuild(kind: type[KVError], message: str, details: dict[str, Any]) -> KVError:
    return kind(message, **details)


class Missing(KVError, KeyError):
    """What was asked for is not here. A cache miss, nothing is damaged."""

    exit_code = 3


class SnapshotMissing(Missing):
    """No snapshot of this name or digest."""


class ObjectMissing(Missing):
    """A KV object that a snapshot names is not in this store."""


class StoreMissing(Missing):
    """The folder holds no store."""


class Corrupt(KVError):
    """Bytes that are not what their name says. Never a cache miss. Made by `at`.

    The message is what it is about, what was expected and found, and what to do; the first and the last stand in ``details`` as
    ``what`` and ``todo``, so that whoever knows more than the reader of the bytes can say better (`told`).
    """

    exit_code = 4
    advice: ClassVar[str] = "`kvferry check` says what is affected."
    """What to do in the store where it was found, as far as the reader of the bytes can know."""

    @classmethod
    def at(cls, what: str, found: str, *, todo: str | None = None, **details: Any) -> Self:
        """``what``: the file, for people. ``found``: which field, what was expected there and what was found."""
        todo = cls.advice if todo is None else todo
        return cls(f"{what}: {found}. {todo}", what=what, todo=todo, **details)

    @property
    def found(self) -> str:
        """The message without what it is about and what to do: a sentence."""
        what, todo = self._parts
        return self.message.removeprefix(f"{what}: ").removesuffix(f" {todo}")

    @property
    def _parts(self) -> tuple[str, str]:
        return str(self.details.get("what", self.details.get("path", "store"))), str(
            self.details.get("todo", self.advice)
        )

    def told(self, *, what: str | None = None, todo: str | None = None, **details: Any) -> Self:
        """The same, about ``what`` and with the advice ``todo`` (as they were by default)."""
        old_what, old_todo = self._parts
        what, todo = what or old_what, old_todo if todo is None else todo
        return type(self)(f"{what}: {self.found} {todo}", **{**self.details, **details, "what": what, "todo": todo})


class ObjectCorrupt(Corrupt):
    """A KV object (one block of one group) fails its digest, header or length."""

    advice = (
        "`kvferry pull --verify REMOTE NAME` fetches it again, `kvferry prefill --no-reuse` with the same text computes it again; "
        "`kvferry check` says whom it hurts."
    )


class SnapshotCorrupt(Corrupt):
    """A snapshot manifest fails its digest, header, limits or canonical form."""

    advice = (
        "`kvferry pull REMOTE NAME` fetches it again, `kvferry prefill --no-reuse` with the same text makes it again; "
        "`kvferry check` says whom it hurts."
    )


class CoverageCorrupt(Corrupt):
    """A coverage file (``<digest>.cov``) fails its digest, header, limits or canonical form."""

    advice = SnapshotCorrupt.advice


class SignaturesCorrupt(Corrupt):
    """A file of signatures (``<digest>.sig``) fails its digest, header, limits or canonical form."""

    advice = "`kvferry check --repair` sets it aside; then `kvferry pull REMOTE NAME` fetches them again, and `kvferry sign NAME` signs anew."


class RefCorrupt(Corrupt):
    """A ref file fails its digest, header, limits or canonical form."""

    advice = "`kvferry rm NAME` removes the name, and `kvferry prefill --name NAME` or `kvferry pull REMOTE NAME` gives it anew."


class StoreCorrupt(Corrupt):
    """A store's own folder: ``format.json`` is not ours, it holds something else, or a link or folder stands in a file's place."""

    advice = "Look at it with `ls -l`, then move it away."


class FormatTooNew(KVError):
    """Written by a newer kvferry: a format version or a required feature that this one does not know."""

    exit_code = 6


class FormatTooOld(KVError):
    """Written before the first release, in a format that is not read any more."""

    exit_code = 6


class IdentityMismatch(KVError):
    """The KV belongs to another model. ``fields`` lists (field, expected, found) of every difference."""

    exit_code = 5

    @property
    def fields(self) -> Sequence[tuple[str, Any, Any]]:
        return tuple(tuple(f) for f in self.details.get("fields", ()))


class WeightsMismatch(IdentityMismatch):
    """Same model shape, other weights."""


class SidecarMismatch(IdentityMismatch):
    """Same model and weights, other embedding or per-layer-embedding sidecars."""


class TokenizerMismatch(IdentityMismatch):
    """Same model and weights, another tokenizer."""


class LayoutMismatch(IdentityMismatch):
    """Another KV layout: layers, head sizes, window or dtype."""


class Refused(KVError):
    """A well-formed request that the rules do not allow."""

    exit_code = 7


class NotCovered(Refused):
    """The rows that this continuation would read are not all here."""


class RefConflict(Refused):
    """The ref moved since it was read, or the label clashes with another one."""


class LabelInvalid(Refused, ValueError):
    """A snapshot name that cannot be a label."""


class InputInvalid(Refused, ValueError):
    """An argument out of its documented range."""


class Unsigned(Refused):
    """A snapshot that no trusted key signed, where that is required. ``signed_by``: the keys that did."""


class WouldDeleteMost(Refused):
    """A collection that nobody confirmed would delete more than a stated share of the store. ``bytes`` of ``total``."""


class StoreFull(KVError):
    """What was to be written doesn't fit below the store's quota, whatever is evicted. ``quota``, ``used``, ``needed``: bytes."""

    exit_code = 10


class StoreBusy(KVError):
    """Another process held the store's lock for too long."""


class Unreachable(KVError):
    """A remote or a disk did not answer; nothing is known about what it holds."""

    exit_code = 8
