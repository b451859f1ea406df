"""A router's cluster over a fake mirror; nobody listens at its ranks' ports."""

import pytest

from router.cluster.fake_mirror import D0, D1, P0, FakeMirror, cluster_of, connect, started
from services.router.ranks.balance import Balance
from services.values.rank import Role


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
    async with started(cluster_of(mirror, balance)) as cluster:
        yield cluster
    assert mirror.subscribers == []


@pytest.fixture
async def two_decodes(cluster, mirror):
    """Both are reached."""
    mirror.set(D0, D1, P0)
    cluster.ranks(Role.DECODE)
    connect(cluster)
    return cluster
