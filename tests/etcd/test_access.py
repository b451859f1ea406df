"""Ranks and routers at an etcd that knows users."""

import asyncio
from pathlib import Path

import pytest

from etcd.etcd_users import CHEAP, add_user, require_users
from etcd.real_etcd import FAST, client, running, until
from index.cluster import FakeRank, mirroring, registration
from services.etcd.embedded import EmbeddedEtcd
from services.index.keys import ClusterKeys
from services.index.pins import PinSettings, PinWriter
from services.index.read.mirror import Mirror
from services.values.errors import ConfigError
from services.values.rank import Generation, RankId

KEYS = ClusterKeys("c")


async def test_a_role_for_the_clusters_prefix_is_enough(tmp_path: Path) -> None:
    """Also after a break, when a router asks etcd whether its past is still the one it was told."""
    home = RankId("d0", 0, Generation(1))
    async with EmbeddedEtcd(tmp_path / "etcd", extra_arguments=(*FAST, CHEAP)) as server:
        add_user(server, "isthmus", "pw", KEYS.prefix.decode())
        require_users(server)
        async with (
            client(server.endpoint, user="isthmus", password="pw") as etcd,
            client(server.endpoint, user="isthmus", password="pw") as reader,
            mirroring(reader, KEYS) as mirror,
        ):
            rank = FakeRank(etcd, KEYS, registration(), ttl_s=60)
            pins = PinWriter(reader, KEYS, mirror.known_pin, PinSettings(gather_s=0.001))
            async with running(rank.run(), pins.run()):
                rank.store(1, 2)
                pins.pin("before", home)
                await until(lambda: rank.is_mirrored_by(mirror) and mirror.pin("before") is not None, 30.0)
                await server.kill()
                await until(lambda: mirror.degraded is not None)
                await server.start()
                rank.store(3)
                pins.pin("after", home)
                await until(lambda: rank.is_mirrored_by(mirror) and mirror.pin("after") is not None, 30.0)
                await until(lambda: mirror.degraded is None, 30.0)
                assert mirror.listings == 1


async def test_who_has_forgotten_the_user_ends(tmp_path: Path) -> None:
    """It can never work: nobody is served by trying for ever."""
    async with EmbeddedEtcd(tmp_path / "etcd", extra_arguments=(*FAST, CHEAP)) as server:
        require_users(server)
        async with client(server.endpoint) as etcd:
            for run in (FakeRank(etcd, KEYS, registration()).run(), Mirror(etcd, KEYS, "r0").run()):
                with pytest.raises(ExceptionGroup) as raised:
                    await asyncio.wait_for(run, 30.0)
                assert raised.group_contains(ConfigError, match="user name is empty")
