"""`isthmus up`: a cluster on this machine until Ctrl-C."""

import asyncio
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services import rpc
from services.cli.local_cluster import LocalCluster, Shape
from services.config import load, setting
from services.ports import check_port, host_port


def _passed_on(to: str) -> Any:
    return setting((), f"a flag for every {to}, NAME=VALUE; may be repeated", split=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """Start etcd, a router, prefill and decode ranks on this machine; Ctrl-C stops everything."""

    model: Path = setting(help="directory of the checkpoint")
    data_dir: Path = setting(Path("run"), "where the embedded etcd keeps its data")
    etcd: tuple[str, ...] = setting((), "endpoints of an etcd that runs; default: an embedded one")
    host: str = setting("127.0.0.1", "address to listen on; :: is every one, IPv4's too")
    port: int = setting(7777, "gRPC port of the first router")
    http_port: int = setting(8000, "port of its OpenAI-compatible API")
    routers: int = setting(1, "routers")
    prefill_workers: int = setting(1, "prefill workers")
    prefill_dp_size: int = setting(1, "DP ranks of each")
    decode_workers: int = setting(1, "decode workers")
    decode_dp_size: int = setting(2, "DP ranks of each")
    rank_flag: tuple[str, ...] = _passed_on("rank")
    router_flag: tuple[str, ...] = _passed_on("router")
    flag: tuple[str, ...] = _passed_on("service")

    def __post_init__(self) -> None:
        check_port("--port", self.port, self.routers)
        check_port("--http-port", self.http_port, self.routers)

    def shape(self) -> Shape:
        return Shape(
            model=self.model,
            data_dir=self.data_dir,
            routers=self.routers,
            prefill_workers=self.prefill_workers,
            prefill_dp_size=self.prefill_dp_size,
            decode_workers=self.decode_workers,
            decode_dp_size=self.decode_dp_size,
            etcd=self.etcd,
            host=self.host,
            port=self.port,
            http_port=self.http_port,
            common_flags=tuple(f"--{flag}" for flag in self.flag),
            rank_flags=tuple(f"--{flag}" for flag in self.rank_flag),
            router_flags=tuple(f"--{flag}" for flag in self.router_flag),
            ready_timeout_s=None,  # a large model loads for as long as it does; Ctrl-C is at hand
        )


def run(argv: list[str]) -> int:
    config = load(UpConfig, argv, prog="isthmus up")
    return asyncio.run(_up(config))


async def _up(config: UpConfig) -> int:
    stopping = rpc.stop_on_signals()
    serve = asyncio.create_task(_serve(config))
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({serve, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if serve.done():
        return serve.result()
    print("stopping", flush=True)
    serve.cancel()  # leaving its context stops every process, also those that are starting
    with suppress(asyncio.CancelledError):
        await serve
    return 0


async def _serve(config: UpConfig) -> int:
    """Until a process ends unasked."""
    async with LocalCluster(config.shape(), show_line) as cluster:
        print(f"ready: gRPC on {cluster.router_endpoint()}, OpenAI API on ", end="")
        print(
            f"http://{host_port(config.host, cluster.http_ports[0])}/v1, etcd on {cluster.etcd_endpoints[0]}",
            flush=True,
        )
        child = await cluster.wait_for_exit()
        print(f"{child.name} ended with exit code {child.process.returncode}; stopping", file=sys.stderr)
        return 1


def show_line(name: str, line: str) -> None:
    print(f"{name:<9}| {line}", file=sys.stderr, flush=True)
