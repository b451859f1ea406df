"""These tests show which routers there are, by their probes."""

from dataclasses import dataclass

import pytest

from services.index.keys import ClusterKeys
from services.index.read.mirror import Probe


@dataclass
class FakeEtcd:
    now: float = 100.0

    def clock(self) -> float:
        return self.now


def probed(**options: str) -> tuple[Probe, FakeEtcd]:
    etcd = FakeEtcd()
    return Probe(etcd, ClusterKeys("prod"), "m", **options), etcd  # type: ignore[arg-type]


def test_which_routers_there_are(subtests: pytest.Subtests) -> None:
    with subtests.test("a router that knows of nobody is the only one"):
        probe, _ = probed()
        assert probe.place_among_routers() == (0, 1)
        probe.seen("m", b"1")
        assert probe.place_among_routers() == (0, 1)
    with subtests.test("routers are in the order of their names"):
        probe, _ = probed()
        for router in ("z", "b", "m", "a"):
            probe.seen(router, b"1")
        assert probe.place_among_routers() == (2, 4)
    with subtests.test("routers that place on another fleet are not counted"):
        probe, _ = probed(fleet="llama 3")
        for router, value in (("a", b"7 qwen"), ("b", b"1"), ("c", b"1 llama 3"), ("m", b"1 llama 3")):
            probe.seen(router, value)
        assert probe.place_among_routers() == (1, 2)
        probe.seen("c", b"2 qwen")
        assert probe.place_among_routers() == (0, 1)
    with subtests.test("a router of several fleets counts in each"):
        probe, _ = probed(fleet="llama 3")
        for _ in range(2):
            probe.join("qwen/3")
        own = probe._names["qwen/3"]
        for router, value in (
            ("a", b"7 qwen/3"),
            (own, b"1 qwen/3"),
            ("z", b"1 llama 3"),
            ("m", b"1 llama 3"),
        ):
            probe.seen(router, value)
        assert probe.place_among_routers("qwen/3") == (1, 2)
        assert probe.place_among_routers("llama 3") == probe.place_among_routers() == (0, 2)
        probe.leave("qwen/3")
        assert probe.place_among_routers("qwen/3") == (1, 2), "it has joined twice"
        probe.leave("qwen/3")
        assert probe.place_among_routers("qwen/3") == (0, 1), "calls may not be over"


def test_routers_that_have_gone(subtests: pytest.Subtests) -> None:
    with subtests.test("a router whose probes end is gone though its key is there yet"):
        probe, etcd = probed()
        probe.seen("a", b"1")
        for number in range(5):
            assert probe.place_among_routers() == (1, 2)
            etcd.now += 1
            probe.seen("m", str(number).encode())
        assert probe.place_among_routers() == (0, 1)
    with subtests.test("a key that is deleted is no router"):
        probe, _ = probed()
        probe.seen("a", b"1")
        probe.seen("a", None)
        probe.seen("never", None)
        assert probe.place_among_routers() == (0, 1)
    with subtests.test("while etcd is away the routers stay as they were"):
        probe, etcd = probed()
        for router in ("a", "m"):
            probe.seen(router, b"1")
        etcd.now += 3_600
        assert probe.place_among_routers() == (1, 2)
