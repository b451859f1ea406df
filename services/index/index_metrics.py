"""These are the metrics of following and publishing the index; all but the histograms are read by the
scrape.
"""

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.index.degraded import Degraded
from services.index.pins import PinWriter
from services.index.read.mirror import Mirror
from services.index.write.membership import Membership

_ROUND_TRIP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_STALENESS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class EtcdMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._round_trips = Histogram(
            "isthmus_etcd_round_trip_seconds",
            "One attempt at one call to etcd.",
            ["method"],
            buckets=_ROUND_TRIP_S,
            registry=registry,
        )
        self._failures = Counter(
            "isthmus_etcd_failures",
            "Attempts that etcd refused or did not answer.",
            ["method"],
            registry=registry,
        )

    def observe(self, method: str, took_s: float, failed: bool) -> None:
        self._round_trips.labels(method).observe(took_s)
        if failed:
            self._failures.labels(method).inc()


def staleness_histogram(registry: CollectorRegistry) -> Histogram:
    return Histogram(
        "isthmus_index_update_staleness_seconds",
        "Age of each delta or snapshot when the router took it in.",
        buckets=_STALENESS_S,
        registry=registry,
    )


class MirrorCollector(Collector):
    def __init__(self, mirror: Mirror, pins: PinWriter) -> None:
        self._mirror = mirror
        self._pins = pins

    def collect(self) -> Iterator[Metric]:
        mirror, blocks = self._mirror, self._mirror.blocks
        yield _degraded(
            "isthmus_router_degraded", "1 while the router cannot follow etcd.", mirror.degraded_reason
        )
        yield _gauge(
            "isthmus_index_staleness_seconds", "How far the index is behind the ranks.", mirror.staleness_s
        )
        yield _gauge("isthmus_index_ready", "1 once the whole index was read.", mirror.ready.is_set())
        yield _gauge("isthmus_index_revision", "Revision of etcd that was read.", mirror.revision)
        yield _gauge("isthmus_index_blocks", "Index blocks over all ranks.", mirror.index.total_blocks)
        yield _gauge(
            "isthmus_index_resumable_blocks",
            "Index blocks at whose end ranks can continue computing, over all ranks that report them.",
            len(mirror.index.checkpoints),
        )
        yield _gauge(
            "isthmus_index_below_blocks",
            "Index blocks that the tiers of all ranks hold.",
            mirror.below.index.total_blocks,
        )
        yield _gauge("isthmus_index_pins", "Conversations with a pin.", len(mirror.pins))
        yield self._ranks()
        yield _counter("isthmus_index_listings", "Times the index was listed anew.", mirror.listings)
        yield _counter("isthmus_index_gaps", "Times a rank's record was missing.", blocks.gaps)
        yield _counter("isthmus_index_resyncs", "Times a rank was read again for that.", blocks.resyncs)
        yield _counter("isthmus_index_torn_values", "Values in etcd skipped as torn.", mirror.torn_values)
        yield _counter(
            "isthmus_index_added_blocks", "Index blocks that ranks reported as held.", blocks.added_blocks
        )
        yield _counter(
            "isthmus_index_removed_blocks",
            "Index blocks that ranks reported as evicted.",
            blocks.removed_blocks,
        )
        yield self._pins_written()

    def _ranks(self) -> Metric:
        ranks = GaugeMetricFamily("isthmus_index_ranks", "Ranks known, by state.", labels=["state"])
        views = self._mirror.ranks.values()
        tally = Tally(view.condition for view in views)
        for state in ("live", "suspect", "draining"):
            ranks.add_metric([state], tally[state])
        return ranks

    def _pins_written(self) -> Metric:
        pins = CounterMetricFamily("isthmus_pins", "Pins by what became of them.", labels=["outcome"])
        pins.add_metric(["written"], self._pins.written)
        pins.add_metric(["dropped"], self._pins.dropped)
        return pins


class MembershipCollector(Collector):
    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def collect(self) -> Iterator[Metric]:
        membership, publisher = self._membership, self._membership.publisher
        yield _degraded(
            "isthmus_publisher_degraded", "1 while the rank cannot publish its index.", publisher.degraded
        )
        yield _gauge(
            "isthmus_rank_registered",
            "1 while the rank's key is in etcd under a good lease.",
            membership.registered.is_set(),
        )
        yield _counter("isthmus_lease_losses", "Leases that lapsed or were revoked.", membership.lease_losses)
        yield _gauge(
            "isthmus_publisher_lag_seconds", "How long the oldest cache event has waited.", publisher.lag_s
        )
        yield _gauge(
            "isthmus_publisher_flush_interval_seconds", "Between two writes.", publisher.pace.interval_s
        )
        yield _gauge("isthmus_publisher_blocks", "Index blocks that the rank holds.", publisher.num_blocks)
        yield _gauge(
            "isthmus_publisher_resumable_blocks",
            "Index blocks at whose end the rank can continue computing; 0 if it can anywhere.",
            publisher.num_resumable,
        )
        below = membership.below
        yield _gauge(
            "isthmus_publisher_below_blocks",
            "Index blocks that the rank's tiers hold.",
            0 if below is None else below.num_blocks,
        )
        yield self._writes()
        failures = sum(each.failures for each in membership.publishers)
        yield _counter("isthmus_publisher_failures", "Writes that etcd did not accept.", failures)

    def _writes(self) -> Metric:
        publishers = self._membership.publishers
        writes = CounterMetricFamily("isthmus_publisher_writes", "Writes to etcd by kind.", labels=["kind"])
        writes.add_metric(["delta"], sum(each.deltas_written for each in publishers))
        writes.add_metric(["snapshot"], sum(each.snapshots_written for each in publishers))
        return writes


def _degraded(name: str, documentation: str, present: Degraded | None) -> Metric:
    gauge = GaugeMetricFamily(name, documentation, labels=["reason"])
    for reason in Degraded:
        gauge.add_metric([reason.value], reason is present)
    return gauge


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(name, documentation, value)


def _counter(name: str, documentation: str, value: float) -> Metric:
    return CounterMetricFamily(name, documentation, value)
