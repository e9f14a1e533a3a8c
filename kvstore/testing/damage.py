"""What disks and people do to the files of a store in a folder."""

from __future__ import annotations

from pathlib import Path

from ..digest import ContentDigest
from ..objects import Objects


def damage_object(store: Path, name: ContentDigest, at: int = -1) -> None:
    """Flips one bit of byte ``at`` of an object's file (by default of its content's last one), in place."""
    path = store / Objects.path(name)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def lose_object(store: Path, name: ContentDigest) -> None:
    """Deletes an object's file."""
    (store / Objects.path(name)).unlink()
