"""Two turns against a whole cluster, with and without a cache."""

import pytest

from cluster.harness import FakeCluster
from exactness.checkpoints import tiny_checkpoint
from services.cli.look import check
from services.cli.look.check import CheckConfig, verdict
from services.values.errors import NotFound
from services.wire.isthmus.v1 import common_pb2, generation_pb2


@pytest.fixture
def model_dir():
    return tiny_checkpoint()


def finish(worker, decode_prefix_len):
    placement = generation_pb2.Placement(decode=common_pb2.RankId(worker=worker, rank=0))
    return generation_pb2.Finish(
        usage=generation_pb2.Usage(decode_prefix_len=decode_prefix_len), placement=placement
    )


async def run_check(cluster, **settings):
    config = CheckConfig(router=f"127.0.0.1:{cluster.routers[0].server.port}", **settings)
    return await check.check(config, check.random.Random(1))


async def test_a_cluster_passes_if_it_keeps_kv(subtests, etcd_endpoint, model_dir, cluster_name, capsys):
    with subtests.test("a cluster that keeps kv passes"):
        async with FakeCluster(etcd_endpoint, model_dir, cluster_name, kv_pages=2048) as cluster:
            assert await run_check(cluster, model="fake") == 0
            with pytest.raises(NotFound, match="other"):
                await run_check(cluster, model="other")
        assert "the second turn found the first one's KV" in capsys.readouterr().out
    with subtests.test("one that does not fails with a sentence"):
        async with FakeCluster(
            etcd_endpoint, model_dir, cluster_name, kv_pages=2048, decode_cache="off"
        ) as cluster:
            assert await run_check(cluster) == 1
        assert capsys.readouterr().err.strip()


async def test_the_verdict_and_the_wait_for_a_router(subtests, capsys):
    with subtests.test("only kv that was found again passes"):
        assert verdict(finish("a", 0), finish("a", 16)) == ""
        assert "lacks the first turn's KV" in verdict(finish("a", 0), finish("a", 0))
        assert "another decode rank" in verdict(finish("a", 0), finish("b", 0))
    with subtests.test("it waits for a router and says what for"):
        config = CheckConfig(router="127.0.0.1:1", timeout_s=0.5)
        with pytest.raises(check.DeadlineExceeded, match="no two answers within"):
            await check.check(config, check.random.Random(1))
        assert "not ready" in capsys.readouterr().err
