"""Metrics as Prometheus reads them."""

import asyncio
import threading
import urllib.request

import prometheus_client
import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from net.ipv6 import LOOPBACKS, needs_ipv6
from services.observe import prometheus
from services.values.errors import ConfigError

pytestmark = pytest.mark.long


def page_at(url, accept):
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.read().decode()


def test_metrics_are_served_until_stopped():
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Counter("moved_bytes", "Bytes.", registry=registry).inc(7)
    by_tenth = prometheus_client.Histogram("took", "Seconds.", ["role"], registry=registry)
    by_tenth.labels("theirs").observe(0.1, {"trace_id": "ab"})
    labels = {"role": "decode", "rank": "1"}
    port, stop = prometheus.serve_metrics("127.0.0.1", 0, registry, labels)
    url = f"http://127.0.0.1:{port}/metrics"
    plain = page_at(url, "text/plain")
    assert 'moved_bytes_total{rank="1",role="decode"} 7.0' in plain
    # What a sample says itself holds: a router speaks of other ranks.
    assert 'took_count{rank="1",role="theirs"} 1.0' in plain
    assert "_created" not in plain and "trace_id" not in plain
    assert '# {trace_id="ab"} 0.1' in page_at(url, "application/openmetrics-text")
    with pytest.raises(ConfigError, match=str(port)):
        prometheus.serve_metrics("127.0.0.1", port, registry, labels)
    stop()
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=10)


@needs_ipv6
def test_metrics_are_served_over_ipv6_too(subtests):
    for host, heard in [("::", LOOPBACKS), ("::1", LOOPBACKS[1:])]:
        with subtests.test(host=host, heard=heard):
            port, stop = prometheus.serve_metrics(host, 0, prometheus_client.CollectorRegistry(), {})
            for address in heard:
                assert page_at(f"http://{address}:{port}/metrics", "text/plain") == ""
            stop()
            with pytest.raises(OSError):
                urllib.request.urlopen(f"http://[::1]:{port}/metrics", timeout=10)


async def test_what_a_loop_owns_is_collected_on_that_loop():
    class Owned(Collector):
        def collect(self):
            threads.append(threading.get_ident())
            yield GaugeMetricFamily("owned", "Of the loop.", asyncio.get_running_loop() is loop)

    loop, threads, registry = asyncio.get_running_loop(), [], prometheus_client.CollectorRegistry()
    registry.register(prometheus.OnLoop(Owned()))
    port, stop = prometheus.serve_metrics("127.0.0.1", 0, registry, {})
    plain = await asyncio.to_thread(page_at, f"http://127.0.0.1:{port}/metrics", "text/plain")
    assert "owned 1.0" in plain
    assert [metric.name for metric in registry.collect()] == ["owned"]
    assert threads == [threading.get_ident()] * 2
    await asyncio.to_thread(stop)
