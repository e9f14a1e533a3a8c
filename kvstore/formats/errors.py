"""What can be wrong with a checkpoint that another program wrote. Another model's is `kvstore.errors.IdentityMismatch`."""

from __future__ import annotations

from ..errors import Corrupt, Missing


class CheckpointMissing(Missing):
    """The folder is not there, holds no checkpoint, or lacks a file of it."""


class CheckpointCorrupt(Corrupt):
    """A checkpoint that contradicts itself, or holds what its format doesn't allow. ``details``: file, field, expected."""

    advice = "Nothing was imported; copy the folder again, or save the checkpoint again where it was made."


def corrupt(file: str, field: str, expected: str, found: object) -> CheckpointCorrupt:
    """``expected`` is a phrase; ``found``, a text as it stands or another value, is cut short."""
    text = found if isinstance(found, str) else repr(found)
    text = text if len(text) <= 100 else text[:97] + "..."
    return CheckpointCorrupt.at(
        file, f"{field}: expected {expected}, found {text}", file=file, field=field, expected=expected
    )
