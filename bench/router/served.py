"""This part measures what a request costs the router's process: real services, one machine, an open loop at a
modest rate.

etcd, one prefill rank, two decode ranks and the router are processes of their own; the ranks' engine is the
fake one, with a step of 10 ms. Nine tenths of a prompt are a conversation's, which the ranks hold, and the
rest is new. CPU is the router process's user and system time, less what it takes when nobody asks.
"""

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.report import Row, verdict
from bench.router.clients import Answered, Front, GrpcFront, HttpFront
from bench.router.process import cpu_s
from bench.router.text import Corpus, make_checkpoint
from bench.soak.ranks import resident_bytes
from services.cli.local.local_cluster import LocalCluster, Shape
from services.net import channels

PROMPT_TOKENS = (1_000, 100_000)
MAX_TOKENS = (16, 128)
_RATES_PER_S = {1_000: 10.0, 100_000: 1.5}
_IDLE_S = 5.0
_WARM_UP = 8
_RANK_FLAGS = (
    "--engine=fake",
    "--fake-step-s=0.01",
    "--transport=local",
    "--page-size=64",
    "--kv-pages=24000",
    "--chunk-size=8192",
    "--max-running-requests=64",
)
_COMMON_FLAGS = ("--model-name=bench", "--log-level=info")
_MIB = 1 << 20
_RANK = "bench.router.rank"
_WANTED_CORES = 0.05  # per request a second


@dataclass(slots=True)
class _Cluster(LocalCluster):
    """Its ranks are bench.router's."""

    decode_module: str = _RANK

    def _plan(self) -> list[tuple[str, str, list[str]]]:
        modules = {"services.prefill": _RANK, "services.decode": self.decode_module}
        return [
            (name, modules.get(module, module), flags) for name, module, flags in LocalCluster._plan(self)
        ]


@dataclass(frozen=True, slots=True)
class Served:
    """Rows of requests, and of the router's process at rest."""

    requests: list[Row]
    process: Row


@dataclass(frozen=True, slots=True)
class _Load:
    front_name: str
    prompt_tokens: int
    max_tokens: int
    seconds: float

    @property
    def rate_per_s(self) -> float:
        return _RATES_PER_S[self.prompt_tokens]


async def served(seconds: float) -> Served:
    """`seconds` of load for each kind of request."""
    with tempfile.TemporaryDirectory(prefix="isthmus-router-") as folder:
        corpus = make_checkpoint(Path(folder) / "model")
        shape = Shape(
            model=Path(folder) / "model",
            data_dir=Path(folder) / "data",
            common_flags=_COMMON_FLAGS,
            rank_flags=_RANK_FLAGS,
            router_flags=("--chunk-size=8192",),
        )
        async with _Cluster(shape, lambda name, line: None) as cluster:
            return await _measure(cluster, corpus, seconds)


async def _measure(cluster: _Cluster, corpus: Corpus, seconds: float) -> Served:
    pid = cluster.children["router"].process.pid
    process: Row = {"start_cpu_s": cpu_s(pid), "start_rss_mib": resident_bytes(pid) / _MIB}
    began = cpu_s(pid)
    await asyncio.sleep(_IDLE_S)
    idle = (cpu_s(pid) - began) / _IDLE_S
    rows = []
    for prompt_tokens in PROMPT_TOKENS:
        async with _fronts(cluster, prompt_tokens, corpus) as fronts:
            for name, front in fronts.items():
                await _warm_up(front)
                for max_tokens in MAX_TOKENS:
                    load = _Load(name, prompt_tokens, max_tokens, seconds)
                    rows.append(await _row(front, load, pid, idle))
                    print(rows[-1], flush=True)
    process |= {"idle_cores": idle, "end_rss_mib": resident_bytes(pid) / _MIB}
    return Served(rows, process)


@contextlib.asynccontextmanager
async def _fronts(
    cluster: LocalCluster, prompt_tokens: int, corpus: Corpus
) -> AsyncIterator[dict[str, Front]]:
    rng = random.Random(prompt_tokens)
    url = f"http://127.0.0.1:{cluster.http_ports[0]}"
    async with (
        channels.open_channel(cluster.router_endpoint()) as channel,
        httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as client,
    ):
        yield {
            "gRPC, ids": GrpcFront(channel, prompt_tokens, rng),
            "HTTP, text": HttpFront(client, prompt_tokens, rng, corpus),
        }


async def _warm_up(front: Front) -> None:
    """The ranks then hold every conversation."""
    for request in front.prepare(_WARM_UP, 4):
        await front.ask(request)


async def _row(front: Front, load: _Load, pid: int, idle: float) -> Row:
    requests = front.prepare(max(1, round(load.rate_per_s * load.seconds)), load.max_tokens)
    began_s, began = time.monotonic(), cpu_s(pid)
    answers = await _open_loop(front, requests, load.rate_per_s)
    took_s, spent_s = time.monotonic() - began_s, cpu_s(pid) - began
    tokens = sum(answer.tokens for answer in answers)
    assert tokens == len(requests) * load.max_tokens, f"{tokens} tokens of {len(requests)} requests"
    return {
        "front": load.front_name,
        "prompt tokens": load.prompt_tokens,
        "output tokens": load.max_tokens,
        "requests": len(requests),
        "req/s": len(requests) / took_s,
        "ms CPU / request": 1e3 * max(0.0, spent_s - idle * took_s) / len(requests),
        "tokens / response": tokens / sum(answer.responses for answer in answers),
    }


async def _open_loop(front: Front, requests: Sequence[object], rate_per_s: float) -> list[Answered]:
    """One after the other at a fixed rate, whether or not those before have been answered."""
    due, asked = time.monotonic(), []
    async with asyncio.TaskGroup() as group:
        for request in requests:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            asked.append(group.create_task(front.ask(request)))
            due += 1 / rate_per_s
    return [task.result() for task in asked]


def parts(rows: Sequence[Row]) -> list[Row]:
    """Each kind of request as so much by itself and so much for each streamed token."""
    kinds = dict.fromkeys((row["front"], row["prompt tokens"]) for row in rows)
    return [
        _parts(kind, [row for row in rows if (row["front"], row["prompt tokens"]) == kind]) for kind in kinds
    ]


def _parts(kind: tuple[object, object], rows: Sequence[Row]) -> Row:
    tokens, spent_ms = (
        [float(str(row[name])) for row in rows] for name in ("output tokens", "ms CPU / request")
    )
    line = statistics.linear_regression(tokens, spent_ms)
    return {
        "front": kind[0],
        "prompt tokens": kind[1],
        "ms / request": line.intercept,
        "us / token": 1e3 * line.slope,
        "cores per req/s, 16 tokens": spent_ms[0] / 1e3,
        "128 tokens": spent_ms[-1] / 1e3,
        "1,000 tokens (reckoned)": (line.intercept + 1_000 * line.slope) / 1e3,
    }


def goals(parts: Sequence[Row]) -> list[Row]:
    [long] = [row for row in parts if row["front"] == "gRPC, ids" and row["prompt tokens"] == 100_000]
    names = [name for name in long if "tokens" in name and name != "prompt tokens"]
    return [
        verdict(f"cores per req/s, 100,000 ids, {name.rpartition(', ')[2]}", "<=", _WANTED_CORES, long[name])
        for name in names
    ]
