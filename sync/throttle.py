"""How often one address may fail before it has to wait. Bounded in memory; no I/O."""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable

ADDRESSES = 4096
"""Addresses that are remembered; of more, those that failed last."""


class Throttle:
    """``burst`` failures of an address count for nothing; of more it gets one back every ``seconds``. Belongs to one thread."""

    def __init__(self, burst: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst, self._seconds, self._clock = burst, seconds, clock
        self._free: OrderedDict[str, float] = OrderedDict()
        """When an address will have all of its burst again."""

    def wait(self, address: str | None) -> int:
        """Whole seconds until the address may fail again; 0 if it may now."""
        owed = self._free.get(_network(address), 0.0) - self._clock()
        return max(0, math.ceil(owed - (self._burst - 1) * self._seconds))

    def failed(self, address: str | None) -> None:
        """Counts a failure."""
        key, now = _network(address), self._clock()
        self._free[key] = max(now, self._free.get(key, now)) + self._seconds
        self._free.move_to_end(key)
        while len(self._free) > ADDRESSES:
            self._free.popitem(last=False)


def _network(address: str | None) -> str:
    """Of IPv6 the first 64 bits: the others are whatever a host likes."""
    try:
        found = ipaddress.ip_address(address or "")
    except ValueError:
        return address or ""
    if found.version == 4:
        return str(found)
    return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))
