"""What a router shows Prometheus of its HTTP connections."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.router.openai.connection import ENDS


class HttpMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.connections = Gauge(
            "isthmus_http_connections", "HTTP connections, idle ones too.", registry=registry
        )
        self._ended_connections = Counter(
            "isthmus_http_connections_ended",
            "HTTP connections that the router ended: full, above their number; slow_head and slow_body, for "
            "a request that took too long to come; unread, for an answer that nobody read.",
            ["reason"],
            registry=registry,
        )
        for reason in ENDS:
            self._ended_connections.labels(reason)

    def ended(self, reason: str) -> None:
        """`reason`: one of ENDS."""
        self._ended_connections.labels(reason).inc()
