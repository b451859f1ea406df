"""This measures what one client may do to a router and to another client: its memory, and a request's time.

    python -m bench.router --only beside [--beside bodies messages crowd] [--engine fake|torch]

messages    200 of 60 MB over gRPC, 20 connections at a time, with a wrong key and with a good one: all are
            refused. What the router's process holds before and after.
bodies      HTTP bodies that are refused, 30 at a time, from one key; another key asks for two tokens all the
            while. Its slowest answer.
crowd       400 streams of one key, 3,000 tokens each; another key asks for two tokens. Its slowest answer.

The load comes from a process of its own. etcd, a prefill rank, two decode ranks and the router are processes,
too.
"""

import asyncio
import contextlib
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path

import grpc
import httpx

from bench.checkpoint import Size, write
from bench.report import Row
from bench.router.process import cpu_s
from bench.soak.ranks import resident_bytes
from services.cli.local.local_cluster import LocalCluster, Shape
from services.net import channels
from services.wire.isthmus.v1 import common_pb2, generation_pb2, generation_pb2_grpc

PARTS = ("messages", "bodies", "crowd")
_CROWD, _QUIET = "crowds-key", "quiet-key"
_MIB = 1 << 20
_MESSAGES, _MESSAGE_BYTES, _CONNECTIONS = 200, 60_000_000, 20
_BODIES = 30
_STREAMS, _STREAM_TOKENS = 400, 3000
_PATIENCE_S = 60.0
_LOAD_OPTIONS = (("grpc.max_send_message_length", 2 * _MESSAGE_BYTES), ("grpc.use_local_subchannel_pool", 1))
_GENERATE = "/isthmus.v1.Generation/Generate"
_SIZE = Size(layers=2, hidden=64, max_context_tokens=4096, heads=2, kv_heads=1)


async def beside(parts: Sequence[str], engine: str, seconds: float) -> list[Row]:
    """`seconds`: how long a crowd stays."""
    rows: list[Row] = []
    for part in parts:  # each by a cluster of its own, which nothing has used
        measure = {"messages": messages, "bodies": _bodies, "crowd": _crowd}[part]
        async with keyed_cluster(engine) as cluster:
            async for row in measure(cluster, seconds):
                print(row, flush=True)
                rows.append(row)
    return rows


@contextlib.asynccontextmanager
async def keyed_cluster(engine: str) -> AsyncIterator[LocalCluster]:
    """One of processes, which asks for keys."""
    with tempfile.TemporaryDirectory(prefix="isthmus-beside-") as folder:
        write(Path(folder) / "model", _SIZE)
        keys = Path(folder) / "keys"
        keys.write_text(f"{_CROWD} tenant=crowd\n{_QUIET} tenant=quiet\n")
        shape = Shape(
            model=Path(folder) / "model",
            data_dir=Path(folder) / "data",
            common_flags=("--model-name=bench",),
            rank_flags=_rank_flags(engine),
            router_flags=(f"--api-key-file={keys}",),
        )
        async with LocalCluster(shape, lambda name, line: None) as cluster:
            yield cluster


def _rank_flags(engine: str) -> tuple[str, ...]:
    flags = ("--transport=local", f"--engine={engine}", "--page-size=16", "--kv-pages=16384")
    return (*flags, "--fake-step-s=0.01") if engine == "fake" else (*flags, "--device=cpu")


async def messages(
    cluster: LocalCluster, seconds: float, num_messages: int = _MESSAGES
) -> AsyncIterator[Row]:
    pid = cluster.children["router"].process.pid
    await _Quiet(cluster).ask()
    for key, kind in (("wrong", "a wrong key"), (_CROWD, "a good key")):
        before = resident_bytes(pid)
        async with _load("messages", cluster, key, str(num_messages)) as load:
            told, _ = await load.communicate()
        yield {
            "load": f"{num_messages} messages of {_MESSAGE_BYTES // 10**6} MB, {kind}",
            "answers": " ".join(json.loads(told)),
            "before MiB": before / _MIB,
            "after MiB": resident_bytes(pid) / _MIB,
        }


async def _bodies(cluster: LocalCluster, seconds: float) -> AsyncIterator[Row]:
    for kind in _BODY_KINDS:
        quiet = _Quiet(cluster)
        async with _load("bodies", cluster, kind) as load:
            row = await quiet.beside(load, f"{_BODIES} bodies: {kind}")
        yield row


async def _crowd(cluster: LocalCluster, seconds: float) -> AsyncIterator[Row]:
    quiet = _Quiet(cluster)
    async with _load("crowd", cluster, str(seconds)) as load:
        row = await quiet.beside(load, f"{_STREAMS} streams", settle_s=3.0)
    yield row


class _Quiet:
    """Another tenant, with a short request now and then."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._stub = generation_pb2_grpc.GenerationStub(cluster.open_channel())

    async def ask(self) -> float:
        """Return how long it took, or the time that it waited in vain where it was given up."""
        ids = [secrets.randbelow(200) + 3 for _ in range(12)]
        sampling = common_pb2.SamplingParams(max_tokens=2, ignore_eos=True)
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=ids), sampling=sampling
        )
        began = time.monotonic()
        call = self._stub.Generate(
            request, metadata=(("authorization", f"Bearer {_QUIET}"),), timeout=_PATIENCE_S
        )
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        return time.monotonic() - began

    async def beside(self, load: asyncio.subprocess.Process, name: str, settle_s: float = 0.0) -> Row:
        pid = self._cluster.children["router"].process.pid
        alone = statistics.median([await self.ask() for _ in range(10)])
        assert load.stdin is not None, "it is a pipe"
        load.stdin.write(b"go\n")
        telling = asyncio.create_task(load.communicate())
        await asyncio.sleep(settle_s)
        began, spent = time.monotonic(), cpu_s(pid)
        took = []
        while not telling.done():
            took.append(await self.ask())
            await asyncio.sleep(0.05)
        row: Row = {
            "load": name,
            "answers": " ".join(json.loads((await telling)[0])),
            "short requests": len(took),
            "alone s": alone,
            "median s": statistics.median(took),
            "p99 s": sorted(took)[99 * len(took) // 100],
            "slowest s": max(took),
            "router cores": (cpu_s(pid) - spent) / (time.monotonic() - began),
            "after MiB": resident_bytes(pid) / _MIB,
        }
        return row


@contextlib.asynccontextmanager
async def _load(
    kind: str, cluster: LocalCluster, *arguments: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that begins when it reads a line, and writes what it was answered."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.router.beside", kind, cluster.router_endpoint()),
        *(str(cluster.http_ports[0]), *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


# -- the process that is the load -----------------------------------------------------------------


async def _send_messages(endpoint: str, http_port: str, key: str, num_messages: str) -> set[str]:
    message = generation_pb2.GenerateRequest(text="a" * _MESSAGE_BYTES).SerializeToString()

    async def one() -> str:
        async with grpc.aio.insecure_channel(endpoint, options=_LOAD_OPTIONS) as channel:
            call = channel.unary_stream(_GENERATE)(message, metadata=(("authorization", f"Bearer {key}"),))
            return str((await call.code()).name)

    answers: set[str] = set()
    for _ in range(int(num_messages) // _CONNECTIONS):
        answers |= set(await asyncio.gather(*(one() for _ in range(_CONNECTIONS))))
    return answers


_BODY_KINDS = {
    "2.7 million ids, 8.1 MB": lambda: json.dumps({"prompt": [7] * 2_700_000}),
    "0.95 million ids, 2.9 MB": lambda: json.dumps({"prompt": [7] * 950_000}),
    "150,000 messages, 5.1 MB": lambda: json.dumps(
        {"messages": [{"role": "user", "content": "a"}] * 150_000}
    ),
    "80,000 messages, 2.7 MB": lambda: json.dumps({"messages": [{"role": "user", "content": "a"}] * 80_000}),
    "4,000 messages of 700 bytes": lambda: json.dumps(
        {"messages": [{"role": "user", "content": "a" * 700}] * 4000}
    ),
}


async def _send_bodies(endpoint: str, http_port: str, kind: str) -> set[str]:
    body = _BODY_KINDS[kind]().replace(", ", ",").encode()
    path = "/v1/chat/completions" if b"messages" in body[:20] else "/v1/completions"
    limits = httpx.Limits(max_connections=None)
    await asyncio.to_thread(sys.stdin.readline)
    url = f"http://127.0.0.1:{http_port}"
    headers = {"authorization": f"Bearer {_CROWD}"}
    async with httpx.AsyncClient(
        base_url=url, timeout=120.0, trust_env=False, limits=limits, headers=headers
    ) as client:

        async def one() -> str:
            try:
                return str((await client.post(path, content=body)).status_code)
            except httpx.TransportError as error:  # closed while it was sent: a body that is not read
                return type(error).__name__

        return set(await asyncio.gather(*(one() for _ in range(_BODIES))))


async def _stream(endpoint: str, http_port: str, seconds: str) -> set[str]:
    await asyncio.to_thread(sys.stdin.readline)
    counted: set[str] = set()

    async def one(stub: generation_pb2_grpc.GenerationStub, number: int) -> None:
        sampling = common_pb2.SamplingParams(max_tokens=_STREAM_TOKENS, ignore_eos=True)
        ids = generation_pb2.TokenIds(ids=[(number * 37 + i * 5) % 200 + 3 for i in range(64)])
        request = generation_pb2.GenerateRequest(token_ids=ids, sampling=sampling)
        call = stub.Generate(request, metadata=(("authorization", f"Bearer {_CROWD}"),))
        try:
            async for _ in call:
                pass
            counted.add("OK")
        except grpc.aio.AioRpcError as error:
            counted.add(error.code().name)

    async with channels.open_channel(endpoint) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        streams = [asyncio.create_task(one(stub, number)) for number in range(_STREAMS)]
        await asyncio.wait(streams, timeout=float(seconds))
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return counted or {"left"}


if __name__ == "__main__":
    works: dict[str, Callable[..., Coroutine[None, None, set[str]]]] = {
        "messages": _send_messages,
        "bodies": _send_bodies,
        "crowd": _stream,
    }
    work = works[sys.argv[1]]
    print(json.dumps(sorted(asyncio.run(work(*sys.argv[2:])))))
