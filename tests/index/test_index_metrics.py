import pytest
from prometheus_client import CollectorRegistry

from etcd.real_etcd import client, running, until
from index.cluster import FakeRank, mirroring, registration
from services.etcd.embedded import EmbeddedEtcd
from services.index.degraded import Degraded
from services.index.index_metrics import (
    EtcdMetrics,
    MembershipCollector,
    MirrorCollector,
    staleness_histogram,
)
from services.index.keys import ClusterKeys
from services.index.pins import PinWriter
from services.values.errors import NotFound


async def test_a_rank_and_a_router_tell_how_the_index_goes(
    own_server: EmbeddedEtcd, keys: ClusterKeys
) -> None:
    registry = CollectorRegistry()
    async with client(own_server.endpoint, timeout_s=0.5, observe=EtcdMetrics(registry).observe) as etcd:
        rank = FakeRank(etcd, keys, registration())
        registry.register(MembershipCollector(rank.membership))
        staleness = staleness_histogram(registry)
        async with running(rank.run()), mirroring(etcd, keys, observe=staleness.observe) as mirror:
            registry.register(MirrorCollector(mirror, PinWriter(etcd, keys, mirror.known_pin)))
            rank.store(1, 2, 3)
            rank.resume(2)
            await until(lambda: rank.is_mirrored_by(mirror) and mirror.degraded is None)

            def value(name: str, **labels: str) -> float:
                found = registry.get_sample_value(name, labels)
                assert found is not None, name
                return found

            assert value("isthmus_index_blocks") == value("isthmus_publisher_blocks") == 3
            assert value("isthmus_index_resumable_blocks") == value("isthmus_publisher_resumable_blocks") == 1
            assert value("isthmus_index_ranks", state="live") == value("isthmus_rank_registered") == 1
            assert value("isthmus_index_ready") == 1
            assert value("isthmus_router_degraded", reason="etcd_away") == 0
            assert value("isthmus_etcd_round_trip_seconds_count", method="Txn") > 0
            assert value("isthmus_index_update_staleness_seconds_count") > 0
            assert value("isthmus_index_added_blocks_total") == 3
            await until(lambda: value("isthmus_publisher_writes_total", kind="snapshot") >= 1)
            await own_server.kill()
            rank.store(4)
            await until(lambda: value("isthmus_publisher_degraded", reason="etcd_away") == 1)
            await until(lambda: value("isthmus_router_degraded", reason="etcd_away") == 1)
            assert (
                value("isthmus_publisher_lag_seconds") > 0 and value("isthmus_publisher_failures_total") > 0
            )


def test_the_names_of_the_reasons_are_fixed() -> None:
    """Dashboards and alerts know them."""
    assert {reason.value for reason in Degraded} == {
        "index_loading",
        "etcd_away",
        "etcd_full",
        "etcd_refuses",
        "index_behind",
        "lease_lost",
    }


async def test_attempts_that_fail_are_counted(etcd_endpoint: str) -> None:
    registry = CollectorRegistry()
    async with client(etcd_endpoint, observe=EtcdMetrics(registry).observe) as etcd:
        with pytest.raises(NotFound):
            await etcd.revoke_lease(12345)
    assert registry.get_sample_value("isthmus_etcd_failures_total", {"method": "LeaseRevoke"}) == 1
