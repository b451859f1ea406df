"""This module serves the page of metrics that Prometheus reads: /metrics, on its own port or another
server's.

For values that are counted at every request or token, the children of a metric are cached by their labels,
and a histogram adds a repeated value at the cost of one.
"""

import asyncio
import contextlib
import socket
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from services.host.ports import bindable, host_port
from services.values.errors import ConfigError

_Metric = TypeVar("_Metric", bound=MetricWrapperBase)


class Children(dict[tuple[str, ...], _Metric]):
    """This caches `metric.labels`, which checks and locks each time: a child is found ten times faster."""

    def __init__(self, metric: _Metric) -> None:
        super().__init__()
        self._metric = metric

    def __missing__(self, labels: tuple[str, ...]) -> _Metric:
        child = self[labels] = self._metric.labels(*labels)
        return child


class RepeatedHistogram(Collector):
    """This histogram has neither labels nor exemplars. One thread writes it; a scrape reads it."""

    def __init__(self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        """`buckets` are inclusive upper bounds in rising order; one more holds the values above the last."""
        self._name, self._text = name, text
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, times: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[HistogramMetricFamily]:
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


# The label is not called `cluster`: many a Prometheus names Kubernetes clusters by that (external_labels,
# relabelings), and with honor_labels our label would replace it.
CLUSTER_LABEL = "isthmus_cluster"
_SCRAPE_TIMEOUT_S = 10.0  # This is Prometheus's default.


class OnLoop(Collector):
    """This collector runs another collector on the event loop on which OnLoop was made.

    A thread serves /metrics, and data that the loop owns must not change while it is read, nor by being read.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def collect(self) -> Iterable[Metric]:
        """Collect on the loop. Raises TimeoutError if the loop does not answer."""
        if threading.get_ident() == self._thread:
            return list(self._collector.collect())
        return asyncio.run_coroutine_threadsafe(self._collect(), self._loop).result(_SCRAPE_TIMEOUT_S)

    async def _collect(self) -> list[Metric]:
        return list(self._collector.collect())


Part = tuple[CollectorRegistry, Mapping[str, str]]  # These metrics are shown with these labels.


class _Labelled(Collector):
    def __init__(self, parts: Callable[[], Iterable[Part]]) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        """Yield each metric once, as the format requires, with the samples of all parts."""
        shown: dict[str, Metric] = {}
        for registry, labels in self._parts():
            for metric in registry.collect():
                # Creation times of counters are useless, and would be a third of all series.
                metric.samples = [
                    sample._replace(labels={**labels, **sample.labels})
                    for sample in metric.samples
                    if not sample.name.endswith("_created")
                ]
                if (known := shown.setdefault(metric.name, metric)) is not metric:
                    known.samples += metric.samples
        yield from shown.values()


class MetricsPage:
    """Every sample gets these `labels`, which name the process, unless it has a label of that name itself.
    `more` returns the parts that are shown besides."""

    def __init__(
        self,
        registry: CollectorRegistry,
        labels: Mapping[str, str],
        more: Callable[[], Iterable[Part]] = tuple,
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Labelled(lambda: [(registry, labels), *more()]))

    def rendered(self, accept: str) -> tuple[bytes, str]:
        """Return the page in the format that the HTTP header Accept requests, and the format's name.

        Do not call it on the event loop: it waits for that loop, at most as long as `OnLoop` does.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


def serve_metrics(
    host: str,
    port: int,
    registry: CollectorRegistry,
    labels: Mapping[str, str],
    more: Callable[[], Iterable[Part]] = tuple,
) -> tuple[int, Callable[[], None]]:
    """Serve a MetricsPage on http://host:port/metrics from a thread of its own; port 0 chooses a free port.

    Returns the port, and a function that stops the server and waits for its end. Raises ConfigError if the
    address cannot be bound.
    """
    page = MetricsPage(registry, labels, more)
    try:
        server, thread = prometheus_client.start_http_server(port, bindable(host), page.registry)
    except OSError as error:
        raise ConfigError(f"cannot serve metrics on {host_port(host, port)}: {error}") from error

    here = (bindable(host), server.server_port)

    def stop() -> None:
        stopping = threading.Thread(target=server.shutdown)
        stopping.start()
        # The server checks twice a second whether to stop, and at each connection.
        with contextlib.suppress(OSError), socket.create_connection(here, 1.0):
            stopping.join()
        stopping.join()
        server.server_close()
        thread.join()

    return server.server_port, stop
