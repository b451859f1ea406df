"""In a tool loop the decode rank holds the whole turn before, whatever the client sends back of it."""

import pytest

from cluster.harness import BLOCK, FakeCluster
from cluster.tool_loops import Script, play
from router.templates.agents import CLIENTS
from router.templates.formats import FORMATS

QUICK = ("qwen3", "glm")


async def loops_keep_their_prefix(name, etcd, directory, cluster_name, script, num_calls):
    FORMATS[name].save(directory)
    async with FakeCluster(etcd, directory, cluster_name, decode=(1,), kv_pages=8192) as cluster:
        for number, client in enumerate(CLIENTS.values()):
            steps = await play(cluster, script, FORMATS[name], client, num_calls, f"tenant-{number}")
            assert len(steps) == num_calls
            for step in steps:
                assert step.held - BLOCK < step.decode_prefix_len <= step.held, step
        await cluster.assert_nothing_held()


@pytest.fixture
def script(monkeypatch):
    script = Script()
    script.install(monkeypatch.setattr)
    return script


@pytest.mark.parametrize("name", QUICK)
async def test_a_loop_of_three_calls(name, etcd_endpoint, tmp_path, cluster_name, script):
    await loops_keep_their_prefix(name, etcd_endpoint, tmp_path, cluster_name, script, 3)


@pytest.mark.long
@pytest.mark.parametrize("num_calls", [2, 8])
@pytest.mark.parametrize("name", FORMATS)
async def test_loops_over_every_format(name, num_calls, etcd_endpoint, tmp_path, cluster_name, script):
    await loops_keep_their_prefix(name, etcd_endpoint, tmp_path, cluster_name, script, num_calls)
