"""A router's cluster over a fake mirror; nobody listens at its ranks' ports."""

import pytest

from router.cluster.fake_mirror import D0, D1, P0, FakeMirror, NoPins
from services.router.cluster import Cluster, ClusterSettings
from services.router.placement.placer import PlacerSettings
from services.router.placement.price import PriceWeights
from services.router.ranks.balance import Balance
from services.values.rank import Plan, Role


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def mirror():
    return FakeMirror()


@pytest.fixture
def balance(clock):
    return Balance(lambda: clock[0])


@pytest.fixture
async def cluster(mirror, balance):
    settings = ClusterSettings("m", frozenset(Plan), PlacerSettings(16, 512, PriceWeights()))
    opened = Cluster(settings, mirror, NoPins(), balance, None)
    await opened.start()
    yield opened
    await opened.close()
    assert mirror.subscribers == []


@pytest.fixture
async def two_decodes(cluster, mirror):
    """Both are reached."""
    mirror.set(D0, D1, P0)
    cluster.ranks(Role.DECODE)
    for client in cluster._connections.clients.values():
        client.connected.set()
    return cluster
