"""A rank whose engine has died takes nothing more from that moment on."""

import asyncio

from cluster.harness import FakeCluster
from services.rank import intake


async def test_only_a_rank_that_still_can_serves_until_routers_know(
    etcd_endpoint, model_dir, cluster_name, monkeypatch, subtests
):
    for number, failed in enumerate([False, True]):
        with subtests.test(failed=failed):
            noticing, noticed = asyncio.Event(), asyncio.Event()

            async def be_noticed(noticing=noticing, noticed=noticed):
                noticing.set()
                await noticed.wait()

            monkeypatch.setattr(intake, "_be_noticed", be_noticed)
            async with FakeCluster(
                etcd_endpoint, model_dir, f"{cluster_name}-{number}", decode=(1,)
            ) as cluster:
                decode = cluster.ranks["decode-0/0"]
                if failed:
                    decode.failed.set()
                draining = asyncio.create_task(decode.drain())
                async with asyncio.timeout(30):
                    if not failed:
                        await noticing.wait()
                        assert not draining.done()
                        noticed.set()
                    await draining
