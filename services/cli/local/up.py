"""`isthmus up`: a cluster on this machine until Ctrl-C.

Ctrl-C, SIGTERM      what runs may end within --grace-s; then everything is stopped, exit code 0
a second one         everything is killed at once, exit code 130
standard error gone  (`up 2>&1 | head`) as the first Ctrl-C
"""

import asyncio
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from services.cli.local.cluster import LocalCluster, Shape
from services.host.ports import check_port, host_port, is_wildcard
from services.observe import json_lines
from services.settings.flags import load, setting

_KILLED = 130  # as of any program that Ctrl-C ends


def _passed_on(to: str) -> Any:
    return setting((), f"a flag for every {to}, NAME=VALUE; may be repeated", split=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """Start etcd, a router, prefill and decode ranks on this machine; Ctrl-C stops everything."""

    model: Path = setting(help="directory of the checkpoint", bare="MODEL")
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
    tls_ca: Path | None = setting(None, "PEM of the authority of the services' certificates")
    tls_cert: Path | None = setting(None, "PEM of the certificate of all services; turns TLS on")
    tls_key: Path | None = setting(None, "PEM of its key")
    log_format: Literal["text", "json"] = setting("text", "of what the services log; json: an object a line")
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
            common_flags=(
                f"--log-format={self.log_format}",
                *self._tls_flags(),
                *(f"--{flag}" for flag in self.flag),
            ),
            rank_flags=tuple(f"--{flag}" for flag in self.rank_flag),
            router_flags=tuple(f"--{flag}" for flag in self.router_flag),
            ready_timeout_s=None,  # a large model loads for as long as it does; Ctrl-C is at hand
        )

    def _tls_flags(self) -> tuple[str, ...]:
        given = {"--tls-ca": self.tls_ca, "--tls-cert": self.tls_cert, "--tls-key": self.tls_key}
        return tuple(f"{name}={path}" for name, path in given.items() if path is not None)


@dataclass(slots=True)
class _Signals:
    """What was asked of us so far; made on the running loop."""

    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    killing: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._again)

    def _again(self) -> None:
        (self.killing if self.stopping.is_set() else self.stopping).set()


def run(argv: list[str]) -> int:
    config = load(UpConfig, argv, prog="isthmus up")
    LocalCluster(config.shape(), _show_nothing).check()
    return asyncio.run(_up(config))


def _show_nothing(name: str, line: str) -> None:
    """Nothing was started that could say anything."""


async def _up(config: UpConfig) -> int:
    signals = _Signals()

    def show_line(name: str, line: str) -> None:
        as_json = config.log_format == "json"
        text = json_lines.json_line(line, name, time.time()) if as_json else f"{name:<9}| {line}"
        try:
            print(text, file=sys.stderr, flush=True)
        except BrokenPipeError:
            signals.stopping.set()

    cluster = LocalCluster(config.shape(), show_line)
    serve = asyncio.create_task(_serve(config, cluster))
    stop = asyncio.create_task(signals.stopping.wait())
    await asyncio.wait({serve, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if serve.done():
        return serve.result()
    _say("stopping; Ctrl-C again kills everything at once")
    serve.cancel()  # leaving its context stops every process, also those that are starting
    return await _until_stopped(serve, cluster, signals.killing)


async def _until_stopped(serve: "asyncio.Task[int]", cluster: LocalCluster, killing: asyncio.Event) -> int:
    """The exit code."""
    killed = asyncio.create_task(killing.wait())
    await asyncio.wait({serve, killed}, return_when=asyncio.FIRST_COMPLETED)
    if killing.is_set() and not serve.done():
        cluster.kill()
    killed.cancel()
    with suppress(asyncio.CancelledError):
        await serve
    return _KILLED if killing.is_set() else 0


async def _serve(config: UpConfig, cluster: LocalCluster) -> int:
    """Until a process ends unasked."""
    async with cluster:
        scheme = "http" if cluster.router_config.tls() is None else "https"
        http_port = cluster.http_ports[0]
        http = f"{scheme}://{host_port(config.host, http_port)}/v1"
        _say(
            f"ready: gRPC on {cluster.router_endpoint()}, OpenAI API on {http}, "
            f"etcd on {cluster.etcd_endpoints[0]}"
        )
        if cluster.router_config.page == "on":
            _say(f"to talk to it and watch it, open {scheme}://{_host_to_open(config.host, http_port)}/")
        child = await cluster.wait_for_exit()
        print(f"{child.name} ended with exit code {child.process.returncode}; stopping", file=sys.stderr)
        return 1


def _host_to_open(host: str, port: int) -> str:
    """As a browser on this machine takes it."""
    return host_port("localhost" if is_wildcard(host) else host, port)


def _say(line: str) -> None:
    """On standard output, if anybody still reads it."""
    with suppress(BrokenPipeError):
        print(line, flush=True)
