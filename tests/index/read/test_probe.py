"""Which routers there are, by their probes."""

from dataclasses import dataclass

import pytest

from services.index.keys import ClusterKeys
from services.index.read.probe import Probe


@dataclass
class FakeEtcd:
    now: float = 100.0

    def clock(self) -> float:
        return self.now


@pytest.fixture
def etcd() -> FakeEtcd:
    return FakeEtcd()


@pytest.fixture
def probe(etcd: FakeEtcd) -> Probe:
    return Probe(etcd, ClusterKeys("prod"), "m")  # type: ignore[arg-type]


def test_a_router_that_knows_of_nobody_is_the_only_one(probe: Probe) -> None:
    assert probe.place_among_routers() == (0, 1)
    probe.seen("m", b"1")
    assert probe.place_among_routers() == (0, 1)


def test_routers_are_in_the_order_of_their_names(probe: Probe) -> None:
    for router in ("z", "b", "m", "a"):
        probe.seen(router, b"1")
    assert probe.place_among_routers() == (2, 4)


def test_routers_that_place_on_another_fleet_are_not_counted(etcd: FakeEtcd) -> None:
    probe = Probe(etcd, ClusterKeys("prod"), "m", fleet="llama 3")  # type: ignore[arg-type]
    for router, value in (("a", b"7 qwen"), ("b", b"1"), ("c", b"1 llama 3"), ("m", b"1 llama 3")):
        probe.seen(router, value)
    assert probe.place_among_routers() == (1, 2)
    probe.seen("c", b"2 qwen")
    assert probe.place_among_routers() == (0, 1)


def test_a_router_whose_probes_end_is_gone_though_its_key_is_there_yet(probe: Probe, etcd: FakeEtcd) -> None:
    probe.seen("a", b"1")
    for number in range(5):
        assert probe.place_among_routers() == (1, 2)
        etcd.now += 1
        probe.seen("m", str(number).encode())
    assert probe.place_among_routers() == (0, 1)


def test_a_key_that_is_deleted_is_no_router(probe: Probe) -> None:
    probe.seen("a", b"1")
    probe.seen("a", None)
    probe.seen("never", None)
    assert probe.place_among_routers() == (0, 1)


def test_while_etcd_is_away_the_routers_stay_as_they_were(probe: Probe, etcd: FakeEtcd) -> None:
    for router in ("a", "m"):
        probe.seen(router, b"1")
    etcd.now += 3_600
    assert probe.place_among_routers() == (1, 2)
