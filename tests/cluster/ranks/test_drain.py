"""`isthmus drain`: ranks out of service and back, while requests run."""

import asyncio
import threading

import grpc
import pytest

from cluster.harness import FakeCluster, prompt_of
from cluster.metrics_page import moves
from services.cli import drain
from services.cli.look import index
from services.engine.fake import FakeRunner, continuation
from services.values.rank import RankAddress, Role
from services.wire.isthmus.v1 import generation_pb2

LONG = [(7 * i) % 500 for i in range(200)]


class Hold:
    """Stops an engine where a sequence gets as long as `end`, until it is released."""

    def __init__(self):
        self.end = 10**9
        self._reached, self._released = threading.Event(), threading.Event()

    def at(self, chunks):
        if any(chunk.end >= self.end for chunk in chunks):
            self._reached.set()
            self._released.wait(60)

    async def reached(self):
        assert await asyncio.to_thread(self._reached.wait, 60)

    def release(self):
        self._released.set()


@pytest.fixture
def hold(monkeypatch):
    held, compute = Hold(), FakeRunner.run

    def run(runner, chunks):
        held.at(chunks)
        return compute(runner, chunks)

    monkeypatch.setattr(FakeRunner, "run", run)
    yield held
    held.release()


def through_router(cluster):
    return [f"--router=127.0.0.1:{cluster.routers[0].server.port}"]


def through_etcd(cluster):
    return [f"--etcd={','.join(cluster.base.etcd)}", f"--cluster={cluster.base.cluster}"]


async def command(cluster, *arguments, through=through_router):
    """Its exit code."""
    return await asyncio.to_thread(drain.run, [*arguments, *through(cluster)])


async def until_excluded(cluster, rank, reason):
    """Every router knows why the rank is not chosen; empty: that it may be."""
    async with asyncio.timeout(20):
        for stub in cluster.stubs:
            while True:
                ranks = (await stub.ListRanks(generation_pb2.ListRanksRequest())).ranks
                if {f"{r.rank.worker}/{r.rank.rank}": r.excluded for r in ranks}.get(rank) == reason:
                    break
                await asyncio.sleep(0.01)


def placed_on(finish, role):
    rank = getattr(finish.placement, role)
    return f"{rank.worker}/{rank.rank}"


@pytest.mark.parametrize("role", ["decode", pytest.param("prefill", marks=pytest.mark.long)])
async def test_a_rank_is_drained_while_it_serves_and_put_back(
    etcd_endpoint, model_dir, cluster_name, hold, capsys, role
):
    shape = dict(routers=2, decode=(2,), prefill=(2,))
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **shape) as cluster:
        hold.end = len(LONG) + (5 if role == "decode" else 0)  # in the middle of its part
        stream = asyncio.create_task(cluster.generate(LONG, 20, conversation_id="c", timeout=100))
        await hold.reached()
        ranks = {f"{role}-0/{number}" for number in range(2)}
        (victim,) = (name for name in ranks if cluster.ranks[name].intake.num_running)
        (other,) = ranks - {victim}

        assert await command(cluster, victim, "--timeout-s=0") == 1
        assert f"{victim}: 1 still running after 0 s, and nothing new" in capsys.readouterr().out
        draining = asyncio.create_task(command(cluster, victim, through=through_etcd))
        await until_excluded(cluster, victim, "draining")
        for router in range(2):
            _, finish = await cluster.generate(prompt_of(router), router=router, conversation_id="c")
            assert placed_on(finish, role) == other
        for through in (through_router, through_etcd):
            assert await asyncio.to_thread(index.run, through(cluster)) == 0
            rows = [line.split() for line in capsys.readouterr().out.splitlines()]
            shown = {cells[0]: cells[2] for cells in rows if len(cells) > 2}
            assert (shown[victim], shown[other]) == ("draining", "live")
        assert not draining.done() and not stream.done()
        hold.release()
        tokens, finish = await stream
        assert tokens == continuation(LONG, 20)
        assert placed_on(finish, role) == victim
        assert await draining == 0
        assert f"{victim}: drained" in capsys.readouterr().out

        assert await command(cluster, "--undo", victim) == 0
        assert f"{victim}: in service" in capsys.readouterr().out
        await until_excluded(cluster, victim, "")
        assert await command(cluster, other) == 0
        await until_excluded(cluster, other, "draining")
        _, finish = await cluster.generate(prompt_of(3), conversation_id="c")
        assert placed_on(finish, role) == victim
        assert await moves(cluster, "retry", "migration") == 0
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("role", ["decode", pytest.param("prefill", marks=pytest.mark.long)])
async def test_who_waits_does_not_undo_an_undo(
    etcd_endpoint, model_dir, cluster_name, hold, capsys, monkeypatch, role
):
    monkeypatch.setattr(drain, "_POLL_S", 0.05)
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, decode=(1,), prefill=(1,)) as cluster:
        hold.end = len(LONG) + (5 if role == "decode" else 0)
        stream = asyncio.create_task(cluster.generate(LONG, 20, timeout=100))
        await hold.reached()
        victim = f"{role}-0/0"
        waiting = asyncio.create_task(command(cluster, victim))
        await until_excluded(cluster, victim, "draining")
        assert await command(cluster, "--undo", victim) == 0
        assert await waiting == 1
        said = capsys.readouterr()
        assert "was put back into service" in said.err
        assert "drained" not in said.out
        await until_excluded(cluster, victim, "")
        hold.release()
        await stream
        tokens, _ = await cluster.generate(prompt_of(1))
        assert tokens == continuation(prompt_of(1), 8)


@pytest.mark.long
async def test_a_whole_worker_and_one_that_restarts(etcd_endpoint, model_dir, cluster_name, capsys, subtests):
    with subtests.test("a whole worker and nobody left"):
        async with FakeCluster(etcd_endpoint, model_dir, cluster_name) as cluster:
            assert await command(cluster, "decode-0") == 0
            said = capsys.readouterr()
            assert "no other decode rank of model fake takes requests" in said.err
            assert "decode-0/0: drained" in said.out and "decode-0/1: drained" in said.out
            for number in range(2):
                await until_excluded(cluster, f"decode-0/{number}", "draining")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await cluster.generate(prompt_of(1))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "2 draining" in refused.value.details()
            assert await command(cluster, "--undo", "decode-0", through=through_etcd) == 0
            await cluster.until_placeable()
            tokens, _ = await cluster.generate(prompt_of(1))
            assert tokens == continuation(prompt_of(1), 8)
    with subtests.test("a restart ends it and is not drained by who meant the life before"):
        async with FakeCluster(etcd_endpoint, model_dir, f"{cluster_name}-1", decode=(1,)) as cluster:
            assert await command(cluster, "decode-0/0") == 0
            await until_excluded(cluster, "decode-0/0", "draining")
            before = (await cluster.stop_rank("decode-0/0")).address.id
            await cluster.start_rank("decode", "decode-0", 0)
            await cluster.until_placeable()
            now = cluster.ranks["decode-0/0"].address
            listed = drain.ListedRank(Role.DECODE, "fake", RankAddress(before, now.endpoint), draining=False)
            config = drain.DrainConfig(targets=("decode-0/0",))
            assert not await drain.answered(drain._drain, config, listed, "isthmus drain")
            assert "restarted" in capsys.readouterr().err
            tokens, _ = await cluster.generate(prompt_of(1))
            assert tokens == continuation(prompt_of(1), 8)
