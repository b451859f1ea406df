"""One cluster of real processes under load, watched by a real Prometheus, for all tests of a run."""

import asyncio
import os
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass

import pytest

from exactness.checkpoints import tiny_checkpoint
from observe import alert_rules
from observe.load import kill, run_load
from observe.otlp_collector import running_collector
from observe.prometheus import SCRAPE_S, Prometheus
from processes.harness import parse_line
from services.cli.local.local_cluster import LocalCluster, Shape
from services.net import channels
from services.wire.isthmus.v1 import generation_pb2_grpc

LOAD_S = float(os.environ.get("OBSERVE_LOAD_S", "120"))


@dataclass(frozen=True)
class Watched:
    """What Prometheus saw from `start_s` to `end_s`."""

    prometheus: Prometheus
    start_s: float
    end_s: float
    trace_ids: frozenset
    turns: int


@pytest.fixture(scope="session")
def watched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("observe")
    with ExitStack() as stack, asyncio.Runner() as runner:
        collector = stack.enter_context(running_collector())
        yield runner.run(_watch(folder, stack, collector))


async def _watch(folder, stack, collector):
    lines, tenants = [], folder / "tenants.json"
    tenants.write_text('{"acme": {"weight": 4}, "labs": {"requests_per_minute": 60}}')
    models = folder / "models.json"
    models.write_text('{"models": {}, "aliases": {"assistant": {"served": 1}}}')
    shape = Shape(
        model=tiny_checkpoint("gemma3"),  # its windows' tails are carried, and it tells where it can go on
        data_dir=folder / "etcd",
        routers=2,
        prefill_workers=2,
        decode_dp_size=2,
        common_flags=(
            "--index-block=16",
            "--model-name=served",
            f"--otlp-endpoint={collector.endpoint}",
            "--trace-sample-ratio=0.2",
        ),
        # Small pools, so that some must wait and be evicted; a slow writer keeps quarantine short.
        rank_flags=(
            "--page-size=16",
            "--kv-pages=160",
            "--max-running-requests=4",
            "--speculation=lookup",
        ),
        router_flags=(
            "--plans=remote",
            f"--tenants={tenants}",
            f"--models={models}",
            "--plan-ttft-s=2",
            "--plan-every-s=20",
        ),
        ready_timeout_s=300.0,
    )

    def note(name, line):
        print(f"{name}| {line}")  # shown by pytest with a test that fails
        lines.append(parse_line(name, line))

    async with LocalCluster(shape, note) as cluster, AsyncExitStack() as calls:
        found = [line for line in lines if line is not None]
        prometheus = Prometheus(folder, _targets(found), alert_rules.write(_made(folder / "rules")))
        stack.enter_context(prometheus)
        stubs = []
        for index in range(shape.routers):
            channel = await calls.enter_async_context(channels.open_channel(cluster.router_endpoint(index)))
            stubs.append(generation_pb2_grpc.GenerationStub(channel))
        start_s = time.time()
        victim = next(line for line in found if line.event == "rank_started" and line.service == "prefill-1")
        turns = await run_load(stubs, LOAD_S, lambda: kill(int(victim.fields["pid"])))
        await asyncio.sleep(2 * SCRAPE_S)
        end_s = time.time() - SCRAPE_S
    traces = frozenset(span.trace_id.hex() for _, span, _ in collector.spans())
    return Watched(prometheus, start_s, end_s, traces, turns)


def _made(folder):
    folder.mkdir()
    return folder


def _targets(lines):
    """Where each service serves its metrics, by job."""
    targets = {}
    for line in lines:
        if line.event in ("router_ready", "rank_ready"):
            role = line.fields.get("role", "router")
            address = f"127.0.0.1:{line.fields['metrics_port']}"
            targets.setdefault(f"isthmus-{role}", []).append(address)
    return targets
