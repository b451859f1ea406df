"""`isthmus bench` against a cluster, over gRPC and over HTTP."""

import asyncio
import io
import json
import os
import signal

import pytest
from rich.console import Console

from cluster.harness import FakeCluster
from services.cli.bench import bench
from services.cli.bench.bench import BenchConfig
from services.cli.model.make_model import make_model
from services.values.errors import NotFound


async def measured(config, capsys, code=0):
    """What it prints, and writes."""
    assert await bench._bench(config) == code
    return capsys.readouterr().out, json.loads(config.json.read_text())


async def test_both_apis(etcd_endpoint, cluster_name, tmp_path, capsys):
    make_model(tmp_path / "model")
    async with FakeCluster(etcd_endpoint, tmp_path / "model", cluster_name) as cluster:
        router = cluster.routers[0]
        settings = {
            "router": f"127.0.0.1:{router.server.port}",
            "model": "fake",
            "json": tmp_path / "figures.json",
            "workload": "multi-turn",
            "num_prompts": 3,
            "num_turns": 2,
            "input_len": 24,
            "output_len": 5,
        }
        url = f"http://127.0.0.1:{router.http_port}"
        told = [await measured(BenchConfig(**settings, http=http), capsys) for http in ("", url)]
        for (text, figures), api in zip(told, ("gRPC", "HTTP"), strict=True):
            assert figures["settings"]["api"] == api and figures["completed"] == 6 and not figures["errors"]
            assert figures["total_input_tokens"] == 3 * (24 + 24 + 5 + 24)
            assert figures["total_output_tokens"] == 30
            assert figures["decode_hit_rate"] > 0.2 and figures["kv_bytes_moved"] > 0
            assert 0 < figures["mean_ttft_ms"] < figures["mean_e2e_latency_ms"]
            assert "6 requests in " in text and "TTFT" in text
        same = ("total_input_tokens", "decode_prefix_len", "cached_tokens", "delta_tokens", "kv_bytes_moved")
        assert [told[0][1][name] for name in same] == [told[1][1][name] for name in same]

        for http in ("", url):
            with pytest.raises(NotFound, match="'other' is not served"):
                await bench._bench(BenchConfig(**settings | {"model": "other"}, http=http))
        await measured(BenchConfig(**settings | {"input_len": 17_000}, warm_up=0), capsys, code=1)
        await stopped(router, BenchConfig(**settings | {"output_len": 16_000}, warm_up=0), capsys)
        await cluster.assert_nothing_held()


async def stopped(router, config, capsys):
    """By Ctrl-C, while all three run: what was measured is told."""

    async def press():
        while router.generator.num_running < 3:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = asyncio.create_task(press())
    text, figures = await measured(config, capsys, code=130)
    await pressing
    assert figures["cut"] == 3 and "stopped, with 3 still running" in text


@pytest.mark.long
async def test_a_bar_at_a_terminal():
    seen = io.StringIO()
    console = Console(file=seen, force_terminal=True, width=80)
    meter = bench.Meter(lambda: 0.0)
    meter.begin()
    async with bench._bar(meter, 40, console):
        await asyncio.sleep(0)
    assert "0/40" in seen.getvalue() and "1 running" in seen.getvalue()
    silent = io.StringIO()
    async with bench._bar(meter, 40, Console(file=silent)):
        pass
    assert not silent.getvalue()
