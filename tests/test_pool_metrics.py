"""How a rank's requests are counted."""

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from services.decode.metrics import DecodeMetrics
from services.errors import KvCorrupt, NoCapacity, PeerFailed
from services.kv.types import RankLoad
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


@pytest.mark.parametrize("error", [KvCorrupt("changed"), PeerFailed("gone")])
def test_pages_that_came_changed_are_a_failed_transfer_that_is_counted_by_itself(error):
    registry = CollectorRegistry()
    metrics = DecodeMetrics(registry, SimpleNamespace(load=RankLoad))
    with pytest.raises(PeerFailed), metrics.counted():
        raise error
    assert registry.get_sample_value("isthmus_transfer_failures_total") == 1
    mismatches = registry.get_sample_value("isthmus_kv_digest_mismatches_total")
    assert mismatches == isinstance(error, KvCorrupt)
