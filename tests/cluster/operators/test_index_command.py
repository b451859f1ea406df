"""`isthmus index --etcd` reads the index itself: it is what is left where no router answers."""

import asyncio

import pytest

from cluster.harness import FakeCluster
from services.cli.look import index
from services.index.read.mirror import Mirror
from services.values.errors import ConfigError, Unavailable


async def test_the_ranks_by_etcd_alone_and_by_a_router(
    etcd_endpoint, model_dir, cluster_name, capsys, monkeypatch, subtests
):
    with subtests.test("the ranks are read from etcd alone"):
        flags = [f"--etcd={etcd_endpoint}", f"--cluster={cluster_name}"]
        assert await asyncio.to_thread(index.run, flags) == 0
        assert capsys.readouterr().out == "no rank is registered\n"
        async with FakeCluster(etcd_endpoint, model_dir, cluster_name) as cluster:
            _, finish = await cluster.generate(list(range(40)))
            home = f"{finish.placement.decode.worker}/{finish.placement.decode.rank}"
            async with asyncio.timeout(20):
                blocks = {}
                while blocks.get(home, 0) < 10:  # of four tokens; they are told a moment later
                    assert await asyncio.to_thread(index.run, flags) == 0
                    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
                    blocks = {cells[0]: int(cells[4]) for cells in rows}
            assert blocks.keys() == {"decode-0/0", "decode-0/1", "prefill-0/0"}
            await cluster.assert_nothing_held()
    with subtests.test("a router says how far each rank is behind"):
        monkeypatch.setattr(Mirror, "rank_staleness_s", lambda mirror, rank: 7.5 + rank.rank)
        async with FakeCluster(etcd_endpoint, model_dir, f"{cluster_name}-1") as cluster:
            flags = [f"--router=127.0.0.1:{cluster.routers[0].server.port}"]
            assert await asyncio.to_thread(index.run, flags) == 0
        rows = capsys.readouterr().out.splitlines()[-3:]  # above them a line too where the router is degraded
        assert [f"{7.5 + number:.3f} s" in row for row, number in zip(rows, (0, 1, 0), strict=True)] == [
            True
        ] * 3


async def test_an_etcd_that_is_away_is_given_some_time_and_one_that_refuses_none(
    monkeypatch, etcd_endpoint, cluster_name, subtests
):
    with subtests.test("an etcd that is away is given some time"):
        monkeypatch.setattr(index, "_LISTING_TIMEOUT_S", 0.3)
        config = index.IndexConfig(etcd=("127.0.0.1:1",))
        with pytest.raises(Unavailable, match="the index could not be read: "):
            await index._read_etcd(config)
    with subtests.test("what etcd refuses is said at once"):

        async def refused(mirror):
            raise ExceptionGroup("of a TaskGroup", [ConfigError("etcd refuses the user")])

        monkeypatch.setattr(Mirror, "run", refused)
        config = index.IndexConfig(etcd=(etcd_endpoint,), cluster=f"{cluster_name}-1")
        with pytest.raises(ConfigError, match="refuses the user"):
            await index._read_etcd(config)
