"""Servers on the local network, by multicast DNS. A hint for people: what counts is the fingerprint that a machine was paired with."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SERVICE = "_kvferry._tcp.local."
_LONGEST = 63
"""Bytes of a DNS label."""


@dataclass(frozen=True, slots=True)
class Found:
    """A server that announced itself: its addresses, and what it says its certificate's fingerprint is."""

    name: str
    addresses: tuple[str, ...]
    port: int
    fingerprint: str | None


@contextlib.contextmanager
def announced(name: str, addresses: Sequence[str], port: int, fingerprint: str | None) -> Iterator[None]:
    """Tells the network of a server until the block ends. `OSError` where there is no network to tell."""
    from zeroconf import ServiceInfo, Zeroconf

    label = name.encode()[: _LONGEST - 5].decode(errors="ignore").replace(".", "-") or "kvferry"
    info = ServiceInfo(
        SERVICE,
        f"{label}.{SERVICE}",
        addresses=[socket.inet_pton(socket.AF_INET6 if ":" in a else socket.AF_INET, a) for a in addresses],
        port=port,
        properties={"v": "1", **({} if fingerprint is None else {"f": fingerprint})},
    )
    zeroconf = Zeroconf(interfaces=list(addresses))
    try:
        zeroconf.register_service(info, allow_name_change=True)
        yield
    finally:
        zeroconf.close()


def peers(seconds: float, interfaces: Sequence[str] | None = None) -> list[Found]:
    """The servers that answer within ``seconds``, by name."""
    from zeroconf import InterfaceChoice, ServiceBrowser, ServiceListener, Zeroconf

    names: set[str] = set()

    class Listener(ServiceListener):
        def add_service(self, zc: Zeroconf, type_: str, name: str) -> None:
            names.add(name)

        def remove_service(self, zc: Zeroconf, type_: str, name: str) -> None:
            names.discard(name)

        def update_service(self, zc: Zeroconf, type_: str, name: str) -> None:
            names.add(name)

    zeroconf = Zeroconf(interfaces=InterfaceChoice.All if interfaces is None else list(interfaces))
    try:
        browser = ServiceBrowser(zeroconf, SERVICE, Listener())
        time.sleep(seconds)
        browser.cancel()
        found = [_found(zeroconf, name) for name in sorted(names)]
        return [one for one in found if one is not None]
    finally:
        zeroconf.close()


def _found(zeroconf: object, name: str) -> Found | None:
    from zeroconf import Zeroconf

    assert isinstance(zeroconf, Zeroconf)
    info = zeroconf.get_service_info(SERVICE, name, timeout=1000)
    if info is None or info.port is None:
        return None
    told = (info.properties or {}).get(b"f")
    text = None if told is None else told.decode("ascii", "replace")
    good = text is not None and len(text) == 64 and not set(text) - set("0123456789abcdef")
    shown = "".join(c for c in name.removesuffix(f".{SERVICE}") if c.isprintable())
    return Found(shown[:_LONGEST], tuple(sorted(info.parsed_addresses())), info.port, text if good else None)
