"""How a rank's requests are counted."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from services.errors import NoCapacity, PeerFailed
from services.pool_metrics import RequestMetrics


@pytest.mark.parametrize(
    ("ends_with", "outcome"),
    [
        (None, "finished"),
        (asyncio.CancelledError(), "cancelled"),
        (TimeoutError(), "DeadlineExceeded"),
        (NoCapacity("full"), "NoCapacity"),
        (PeerFailed("gone"), "PeerFailed"),
    ],
)
def test_each_end_has_its_name(ends_with, outcome):
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    assert registry.get_sample_value("isthmus_rank_requests_total", {"outcome": "finished"}) == 0
    try:
        with metrics.counted():
            if ends_with is not None:
                raise ends_with
    except BaseException as error:
        assert error is ends_with
    assert registry.get_sample_value("isthmus_rank_requests_total", {"outcome": outcome}) == 1
    failed = registry.get_sample_value("isthmus_transfer_failures_total")
    assert failed == isinstance(ends_with, PeerFailed)
