"""This module has what a process in the test's cluster shows Prometheus."""

import asyncio
import urllib.request

from prometheus_client.openmetrics.parser import text_string_to_metric_families


async def samples(part, cluster):
    """Values of a router's or a rank's page by (name, labels beside the process's own)."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{part.metrics_port}/metrics", headers={"Accept": "application/openmetrics-text"}
    )
    body = await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=10).read().decode())
    found = {}
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            assert sample.labels.pop("isthmus_cluster") == cluster.base.cluster
            found[(sample.name, *sorted(sample.labels.items()))] = sample
    return found


def value(found, name, **labels):
    matching = [
        sample.value
        for (sample_name, *pairs), sample in found.items()
        if sample_name == name and labels.items() <= dict(pairs).items()
    ]
    assert matching, (name, labels)
    return sum(matching)


async def moves(cluster, *kinds):
    """Return how often requests of any router left a rank."""
    pages = [await samples(router, cluster) for router in cluster.routers]
    moved = [
        sample for found in pages for sample in found.values() if sample.name == "isthmus_request_moves_total"
    ]
    return sum(sample.value for sample in moved if sample.labels["kind"] in kinds)
