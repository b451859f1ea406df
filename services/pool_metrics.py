"""A rank's load as Prometheus gauges, read when scraped."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.kv.types import RankLoad


class PoolCollector(Collector):
    def __init__(self, load: Callable[[], RankLoad]) -> None:
        self._load = load

    def collect(self) -> Iterator[Metric]:
        load = self._load()
        pages = GaugeMetricFamily("isthmus_kv_pages", "Pages of the KV pool by state.", labels=["state"])
        for state in ("free", "cached", "locked", "private", "quarantined"):
            pages.add_metric([state], getattr(load.books, state))
        yield pages
        yield GaugeMetricFamily("isthmus_running_requests", "Sequences that hold pages.", load.running)
        yield GaugeMetricFamily("isthmus_waiting_requests", "Sequences that wait for pages.", load.waiting)
        yield GaugeMetricFamily(
            "isthmus_pending_tokens", "Prompt tokens still to compute.", load.pending_tokens
        )
        yield GaugeMetricFamily(
            "isthmus_reserved_pages", "Kept back for the growth of what runs.", load.reserved_pages
        )
        yield CounterMetricFamily(
            "isthmus_retractions", "Sequences that gave their pages to others for a while.", load.retractions
        )
        yield CounterMetricFamily(
            "isthmus_overtakes", "Times that one waiting was passed by another.", load.overtakes
        )
        yield GaugeMetricFamily("isthmus_step_seconds", "Moving average of an engine step.", load.step_s)
