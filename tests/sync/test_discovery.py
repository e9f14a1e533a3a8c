"""Servers tell the network of themselves, here loopback's own."""

from __future__ import annotations

import pytest

from sync.discovery import Found, announced, peers

LOOPBACK = ["127.0.0.1"]


def listened() -> list[Found]:
    try:
        return peers(2.5, LOOPBACK)
    except OSError as error:
        pytest.skip(f"no multicast on loopback here: {error}")


@pytest.mark.slow
def test_announced_and_found() -> None:
    name = "büro.kvferry test " + "x" * 60
    with announced(name, LOOPBACK, 8765, "ab" * 32), announced("plain", LOOPBACK, 8766, None):
        found = listened()
    mine = [one for one in found if one.name.startswith(("büro-kvferry", "plain"))]
    assert [(one.addresses, one.port, one.fingerprint) for one in mine] == [
        (("127.0.0.1",), 8765, "ab" * 32),
        (("127.0.0.1",), 8766, None),
    ]
    assert not [one for one in listened() if one.name.startswith(("büro-kvferry", "plain"))]
