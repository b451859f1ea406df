"""Ranks whose keys are gone from etcd are asked themselves. Real servers; the mirror's views are made up."""

import asyncio
from dataclasses import replace
from pathlib import Path

from etcd.real_etcd import client, running, until
from index.cluster import registration
from net.certificates import make_certificates
from services.index.keys import ClusterKeys
from services.index.read.mirror import Mirror, RankState, RankView
from services.net import servers
from services.net.channels import TlsConfig
from services.router.connections.rank_health import SuspectChecks
from services.values.rank import RankAddress, RankId


def lapsed(worker: str, endpoint: str) -> RankView:
    its = registration(worker)
    its = replace(its, address=RankAddress(its.id, endpoint))
    return RankView(its, RankState.SUSPECT, since_s=0.0, registered=False)


async def test_who_answers_lives_and_who_does_not_has_failed() -> None:
    server = await servers.open_server("127.0.0.1:0", lambda opened: None, [])
    refused = await servers.open_server("127.0.0.1:0", lambda opened: None, [], serving=False)
    async with client("127.0.0.1:1") as nowhere:
        mirror = Mirror(nowhere, ClusterKeys("c"), "r0")
        views = [
            lapsed("alive", f"127.0.0.1:{server.port}"),
            lapsed("draining", f"127.0.0.1:{refused.port}"),
            lapsed("gone", "127.0.0.1:1"),
        ]
        mirror.ranks.update({view.registration.id.key: view for view in views})
        failed: list[RankId] = []
        checks = SuspectChecks(mirror, None, failed.append, interval_s=0.01, timeout_s=5.0)
        alive, draining, gone = (view.registration.id for view in views)
        async with running(checks.run()):
            await until(lambda: {draining, gone} <= set(failed))
            await until(lambda: mirror.ranks[alive.key].state is RankState.LIVE)
            assert alive not in failed
            # It is asked again and again, for nobody else would tell of its end.
            await server.stop(0)
            await until(lambda: alive in failed)
            # Back in etcd, none of our business any more.
            for view in views:
                mirror.ranks[view.registration.id.key] = replace(view, registered=True)
            await until(lambda: not checks._channels)
    await refused.stop(0)


async def test_a_rank_that_begins_a_new_life_meanwhile_is_not_marked() -> None:
    server = await servers.open_server("127.0.0.1:0", lambda opened: None, [])
    async with client("127.0.0.1:1") as nowhere:
        mirror = Mirror(nowhere, ClusterKeys("c"), "r0")
        old = lapsed("w", f"127.0.0.1:{server.port}")
        key = old.registration.id.key
        mirror.ranks[key] = old
        checks = SuspectChecks(mirror, None, lambda incarnation: None)
        asking = asyncio.create_task(checks._check(old))
        new = replace(lapsed("w", "127.0.0.1:1"), registration=registration("w", generation=2))
        mirror.ranks[key] = new
        await asking
        assert mirror.ranks[key] == new
        await checks._close_all_but(set())
    await server.stop(0)


async def test_a_certificate_that_cannot_be_read_ends_nobody(tmp_path: Path) -> None:
    async with client("127.0.0.1:1") as nowhere:
        mirror = Mirror(nowhere, ClusterKeys("c"), "r0")
        gone = lapsed("gone", "127.0.0.1:1")
        mirror.ranks[gone.registration.id.key] = gone
        failed: list[RankId] = []
        tls = TlsConfig(ca=tmp_path / "ca.pem")
        checks = SuspectChecks(mirror, tls, failed.append, interval_s=0.01, timeout_s=5.0)
        async with running(checks.run()):
            await until(lambda: gone.registration.id in failed)
            make_certificates(tmp_path, "DNS:localhost")
            await until(lambda: checks._channels)
