"""This part measures what a request and a token cost in a closed loop, in which as much is asked as can be
answered.

    clients (a process) -> router -> decode ranks, engine fake      the CPU of each process, apart
    client -> decode rank, without a router                         what a router adds, one request at a time
    clients -> sglang-router -> workers that only answer            the peer, in the same run (peers/)
    clients -> a router that does nothing -> a decode rank          what grpc.aio takes (peers/bare.py)

Nine tenths of a prompt are a conversation's, which the ranks hold. A token's cost is the slope over answers
of different lengths, a request's what is left. ITL counts each token after the first, and 0 for one that came
with another; a gap is between two messages, as a reader sees them come. On few cores the ranks are at their
limit before the router is: stand-ins (stand_in.py) are not.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import linear_regression

import numpy as np

from bench.report import Row
from bench.router.asked import Asked, Told
from bench.router.peers.bare import bare_router
from bench.router.process import tree_cpu_s
from bench.router.served import _Cluster
from bench.router.text import make_checkpoint
from services.cli.local.local_cluster import LocalCluster, Shape
from services.wire.isthmus.v1 import common_pb2, generation_pb2, generation_pb2_grpc

STREAMS = (1, 32, 256, 1_000)
PROMPTS = (100, 1_000, 32_000)
ANSWERS = (1, 64, 256)
_COMMON_FLAGS = ("--model-name=bench", "--log-level=warning")
_RANK_FLAGS = (
    "--engine=fake",
    "--transport=local",
    "--page-size=64",
    "--kv-pages=24000",
    "--chunk-size=8192",
    "--max-running-requests=512",
)
_MOST_TOKENS = 1_000_000  # of prompts that are asked at once: more would measure memory


@dataclass(frozen=True, slots=True)
class Grid:
    fronts: Sequence[str] = ("grpc", "http")
    streams: Sequence[int] = STREAMS
    prompts: Sequence[int] = PROMPTS
    answers: Sequence[int] = ANSWERS
    seconds: float = 6.0
    step_s: float = 0.01
    decode_ranks: int = 8
    routers: int = 1
    router_flags: Sequence[str] = ()
    ranks: str = "rank"  # the module that decode ranks run; or stand_in
    bare: bool = False  # ask the router that does nothing, too

    def asked(self, address: Mapping[str, str]) -> list[Asked]:
        """`address` is by front."""
        return [
            Asked(front, address[front], streams, prompt, answer, self.seconds, seed=index)
            for front in self.fronts
            for streams in self.streams
            for index, prompt in enumerate(self.prompts)
            if streams * prompt <= _MOST_TOKENS
            for answer in self.answers
        ]


Spent = Callable[[], dict[str, float]]  # CPU seconds so far, by process


async def saturated(grid: Grid) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="isthmus-limit-") as folder:
        make_checkpoint(Path(folder) / "model")
        shape = Shape(
            model=Path(folder) / "model",
            data_dir=Path(folder) / "data",
            routers=grid.routers,
            decode_dp_size=grid.decode_ranks,
            common_flags=_COMMON_FLAGS,
            rank_flags=(*_RANK_FLAGS, f"--fake-step-s={grid.step_s}"),
            router_flags=("--chunk-size=8192", *grid.router_flags),
        )
        show = partial(print, file=sys.stderr)
        async with _Cluster(shape, show, decode_module=f"bench.router.{grid.ranks}") as cluster:
            http = ",".join(f"127.0.0.1:{port}" for port in cluster.http_ports)
            grpc = ",".join(map(cluster.router_endpoint, range(grid.routers)))
            address = {"grpc": grpc, "http": http, "text": http}
            direct = await _direct(grid, cluster)
            every = [*grid.asked(address), *direct]
            spent = dict.fromkeys((*grid.fronts, "decode"), _spent(cluster))
            async with AsyncExitStack() as stack:
                if grid.bare:
                    bare = bare_router(direct[0], Path(folder) / "bare.log")
                    endpoint, process = await stack.enter_async_context(bare)
                    every += replace(grid, fronts=("bare",)).asked({"bare": endpoint})
                    spent["bare"] = _with_router(spent["decode"], process.pid)
                # What is compared comes side by side: what runs beside changes from minute to minute.
                every.sort(key=lambda asked: (asked.streams, asked.prompt_tokens, asked.max_tokens))
                return [await row(asked, spent[asked.front]) for asked in every]


async def _direct(grid: Grid, cluster: LocalCluster) -> list[Asked]:
    """One decode rank, asked as a router asks it."""
    async with cluster.open_channel() as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        ranks = (await stub.ListRanks(generation_pb2.ListRanksRequest(), timeout=10)).ranks
    rank = next(rank for rank in ranks if rank.role == common_pb2.ROLE_DECODE)
    return [
        replace(asked, generation=rank.rank.generation)
        for asked in replace(grid, fronts=("decode",), streams=(1,)).asked({"decode": rank.endpoint})
    ]


def _spent(cluster: LocalCluster) -> Spent:
    """Return the sums over several routers."""

    def spent() -> dict[str, float]:
        took_s: dict[str, float] = {}
        for name, child in cluster.children.items():
            kind = "router" if name.startswith("router-") else name
            took_s[kind] = took_s.get(kind, 0.0) + tree_cpu_s(child.process.pid)
        return took_s

    return spent


def _with_router(spent: Spent, pid: int) -> Spent:
    return lambda: {**spent(), "router": tree_cpu_s(pid)}


async def row(asked: Asked, spent: Spent) -> Row:
    await ask(replace(asked, warms=True, max_tokens=4, streams=min(asked.streams, 16)))
    before = spent()
    told = await ask(asked)
    took = {name: after - before[name] for name, after in spent().items()}
    told_row = row_of(asked, told, took)
    print(told_row, file=sys.stderr, flush=True)
    for text, count in Counter(told.errors).most_common(5):
        print(f"{count} errors: {text}", file=sys.stderr, flush=True)
    return told_row


async def ask(asked: Asked) -> Told:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "bench.router.asked",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    out, _ = await process.communicate(json.dumps(asdict(asked)).encode())
    if process.returncode:
        raise RuntimeError(f"the clients ended with {process.returncode}")
    return Told(**json.loads(out))


def row_of(asked: Asked, told: Told, took: Mapping[str, float]) -> Row:
    if not told.requests:
        raise RuntimeError(f"nothing was answered: {told.errors[:3]}")
    ttft_ms, e2e_ms = 1e3 * np.asarray(told.ttft_s), 1e3 * np.asarray(told.e2e_s)
    gaps_ms = 1e3 * np.asarray(told.gaps_s or [0.0])
    came_along = np.zeros(max(0, told.tokens - told.requests - len(told.gaps_s)))
    itl_ms = np.concatenate((gaps_ms, came_along))
    return {
        "front": asked.front,
        "streams": asked.streams,
        "prompt": asked.prompt_tokens,
        "answer": asked.max_tokens,
        "requests": told.requests,
        "errors": len(told.errors),
        "req/s": told.requests / told.took_s,
        "tokens/s": told.tokens / told.took_s,
        "found": told.found / (told.requests * asked.prompt_tokens) if asked.front == "grpc" else "-",
        "tokens/message": told.tokens / max(1, told.messages),
        "TTFT p50": float(np.percentile(ttft_ms, 50)),
        "TTFT p99": float(np.percentile(ttft_ms, 99)),
        "ITL p50": float(np.percentile(itl_ms, 50)),
        "ITL p99": float(np.percentile(itl_ms, 99)),
        "gap p99": float(np.percentile(gaps_ms, 99)),
        "E2E p50": float(np.percentile(e2e_ms, 50)),
        "E2E p99": float(np.percentile(e2e_ms, 99)),
        **{f"{name} ms": 1e3 * seconds / told.requests for name, seconds in took.items()},
        "client ms": 1e3 * told.cpu_s / told.requests,
    }


def parts(rows: Sequence[Row], processes: Sequence[str] = ("router",)) -> list[Row]:
    kinds: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row["front"], row["streams"], row["prompt"]), []).append(row)
    return [_part(kind, of_kind, processes) for kind, of_kind in kinds.items() if len(of_kind) > 1]


def _part(kind: tuple[object, ...], rows: Sequence[Row], processes: Sequence[str]) -> Row:
    part: Row = dict(zip(("front", "streams", "prompt"), kind, strict=True))
    for name in processes:
        answers, spent = ([float(str(row[key])) for row in rows] for key in ("answer", f"{name} ms"))
        line = linear_regression(answers, spent)
        part |= {f"{name} ms/request": line.intercept, f"{name} us/token": 1e3 * line.slope}
    return part | {
        f"most {name}": max(float(str(row[name])) for row in rows) for name in ("req/s", "tokens/s")
    }


def added(rows: Sequence[Row]) -> list[Row]:
    alone = [row for row in rows if row["streams"] == 1]
    direct = {(row["prompt"], row["answer"]): row for row in alone if row["front"] == "decode"}
    return [
        {
            **{name: row[name] for name in ("front", "prompt", "answer")},
            **{f"added {name}": _less(row, asked, name) for name in ("TTFT p50", "TTFT p99", "E2E p50")},
        }
        for row in alone
        if (asked := direct.get((row["prompt"], row["answer"]))) is not None and row["front"] != "decode"
    ]


def _less(row: Row, direct: Row, name: str) -> float:
    return float(str(row[name])) - float(str(direct[name]))
