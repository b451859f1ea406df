"""Two turns against a whole cluster, with and without a cache."""

import pytest

from cluster.harness import FakeCluster
from exactness.checkpoints import tiny_checkpoint
from services.cli.look import check
from services.cli.look.check import CheckConfig, verdict
from services.wire.isthmus.v1 import common_pb2, generation_pb2


@pytest.fixture
def model_dir():
    return tiny_checkpoint()


def finish(worker, decode_prefix_len):
    placement = generation_pb2.Placement(decode=common_pb2.RankId(worker=worker, rank=0))
    return generation_pb2.Finish(
        usage=generation_pb2.Usage(decode_prefix_len=decode_prefix_len), placement=placement
    )


def test_only_kv_that_was_found_again_passes():
    assert verdict(finish("a", 0), finish("a", 16)) == ""
    assert "lacks the first turn's KV" in verdict(finish("a", 0), finish("a", 0))
    assert "another decode rank" in verdict(finish("a", 0), finish("b", 0))


async def run_check(cluster, **settings):
    config = CheckConfig(router=f"127.0.0.1:{cluster.routers[0].server.port}", **settings)
    return await check.check(config, check.random.Random(1))


async def test_a_cluster_that_keeps_kv_passes(etcd_endpoint, model_dir, cluster_name, capsys):
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, kv_pages=2048) as cluster:
        assert await run_check(cluster) == 0
    assert "the second turn found the first one's KV" in capsys.readouterr().out


async def test_one_that_does_not_fails_with_a_sentence(etcd_endpoint, model_dir, cluster_name, capsys):
    async with FakeCluster(
        etcd_endpoint, model_dir, cluster_name, kv_pages=2048, decode_cache="off"
    ) as cluster:
        assert await run_check(cluster) == 1
    assert capsys.readouterr().err.strip()


async def test_it_waits_for_a_router_and_says_what_for(capsys):
    config = CheckConfig(router="127.0.0.1:1", timeout_s=0.5)
    with pytest.raises(check.DeadlineExceeded, match="no two answers within"):
        await check.check(config, check.random.Random(1))
    assert "not ready" in capsys.readouterr().err
