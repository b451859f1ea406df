"""Clients of a test process's etcd, and an etcd that a test may kill, for the folders that need them."""

import itertools
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from etcd.real_etcd import FAST, client
from services.etcd.embedded import EmbeddedEtcd
from services.etcd.etcd_client import Etcd
from services.index.keys import ClusterKeys

_numbers = itertools.count()


@pytest_asyncio.fixture
async def etcd(etcd_endpoint: str) -> AsyncIterator[Etcd]:
    async with client(etcd_endpoint) as opened:
        yield opened


@pytest_asyncio.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[EmbeddedEtcd]:
    """An etcd that the test may kill."""
    async with EmbeddedEtcd(tmp_path / "own", extra_arguments=FAST) as server:
        yield server


@pytest.fixture
def keys() -> ClusterKeys:
    """Of a cluster that no other test uses."""
    return ClusterKeys(f"test{next(_numbers)}-{os.getpid()}")
