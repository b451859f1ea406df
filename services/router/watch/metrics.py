"""What a router shows Prometheus of its watchers."""

from prometheus_client import CollectorRegistry, Counter, Gauge


class WatchMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.watchers = Gauge(
            "isthmus_watchers", "Streams of WatchCluster and /v1/cluster/watch.", registry=registry
        )
        self.refused = Counter(
            "isthmus_watchers_refused", "Those that were one too many (--max-watchers).", registry=registry
        )
        self.dropped = Counter(
            "isthmus_watch_dropped",
            "Finished requests that a watcher was not told of because it reads too slowly.",
            registry=registry,
        )
