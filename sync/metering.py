"""What a server counts, for Prometheus. Nothing of what is asked for: no names, no tokens, no digests."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)


class Metering:
    """Counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "kvferry_requests", "Requests by route and status.", ("method", "route", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "kvferry_request_seconds", "Seconds of a request.", ("route",), buckets=_SECONDS, registry=self._registry
        )
        self._bytes = Counter("kvferry_bytes", "Bytes of object frames.", ("direction",), registry=self._registry)
        self._lookups = Counter("kvferry_lookups", "Objects asked about.", ("result",), registry=self._registry)

    def request(self, method: str, route: str, status: int, seconds: float, sent: int) -> None:
        """A request that ended."""
        known = method if method in ("GET", "HEAD", "POST", "PUT", "DELETE") else "other"
        self._requests.labels(known, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def sent(self, count: int) -> None:
        """Bytes of object frames that went out."""
        self._bytes.labels("out").inc(count)

    def received(self, count: int) -> None:
        """Bytes of object frames that came in."""
        self._bytes.labels("in").inc(count)

    def lookup(self, hits: int, misses: int) -> None:
        """Objects that were asked about."""
        self._lookups.labels("hit").inc(hits)
        self._lookups.labels("miss").inc(misses)

    def text(self) -> tuple[bytes, str]:
        """All of it in Prometheus' text form, and its media type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
