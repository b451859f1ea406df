"""`isthmus up` runs a cluster on this machine until Ctrl-C.

Ctrl-C, SIGTERM      running requests may end within --grace-s; then everything is stopped, exit code 0
a process ends       it is started again, as a worker's supervisor does with ranks
memory is short      nothing is started, or all is stopped again: exit code 75; 78 if no retry can help
a second one         everything is killed at once, exit code 130
standard error gone  (`up 2>&1 | head`) as the first Ctrl-C

On a terminal it shows the steps until all is ready, then the services' log in short lines. Before that it
shows only warnings and errors of the log, and lines that are not in our format.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from services.cli import screen
from services.cli.local.local_cluster import LocalCluster, Shape
from services.cli.model.fetch_model import ensure_cached
from services.cli.router_client import ClientConfig
from services.cli.table import format_bytes
from services.host.ports import check_port, host_port, is_wildcard
from services.observe import json_lines
from services.observe.log_lines import LogLine, read_line
from services.settings.flags import load, refusing, setting
from services.settings.named_models import MODEL_HELP, resolved
from services.values.errors import Unavailable

_QUIET = ("DEBUG", "INFO")
_STEP = 10  # It is a number of columns.


@dataclass(slots=True)
class StartProgress:
    num_ranks: int
    color: bool
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    _ready: set[str] = field(default_factory=set)
    _is_over: bool = False

    def step(self, name: str, what: str) -> None:
        head = f"{name:<{_STEP}}"
        print(
            f"\x1b[1m{head}\x1b[0m {what}" if self.color else f"{head} {what}", file=self.stream, flush=True
        )

    def line(self, child: str, text: str) -> None:
        line = read_line(text)
        if line is None:
            print(f"{child:<9}| {text}", file=self.stream, flush=True)
        elif self._is_over or line.level not in _QUIET:
            print(line.short(self.color), file=self.stream, flush=True)
        else:
            self._report(line)

    def _report(self, line: LogLine) -> None:
        fields = line.fields
        if line.event == "weights_loading":
            self.step("loading", f"{line.service}: {fields['done']} of {fields['of']} weights")
        if line.event == "kv_pool":
            size = format_bytes(int(fields["bytes_of_each"]))
            self.step("pool", f"{line.service}: {fields['pages']} pages of KV a rank, up to {size}")
        if line.event == "rank_ready":
            self._ready.add(fields["rank"])
            self.step("ready", f"{fields['rank']} ({len(self._ready)} of {self.num_ranks} ranks)")
        if line.event == "router_ready":
            self.step("ready", line.service)

    def over(self, addresses: Mapping[str, str]) -> None:
        self._is_over = True
        for what, address in addresses.items():
            self.step("", f"{what:<11} {address}")


def planned(shape: Shape) -> str:
    counts = {"router": shape.routers, "prefill rank": shape.prefill_ranks, "decode rank": shape.decode_ranks}
    parts = [f"{count} {what}{'s' * (count > 1)}" for what, count in counts.items() if count]
    return ", ".join(parts if shape.etcd else ["etcd", *parts])


# These settings are the shape's, too.
_OF_SHAPE = (
    *("model", "data_dir", "etcd", "host", "port", "http_port", "routers"),
    *("prefill_workers", "prefill_dp_size", "decode_workers", "decode_dp_size"),
)
_KILLED = 130  # Any program that Ctrl-C ends has this code.


def _passed_on(to: str) -> Any:
    return setting((), f"a flag for every {to}, NAME=VALUE", split=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """Start etcd, a router, prefill and decode ranks on this machine; Ctrl-C stops everything."""

    model: Path = setting(help=MODEL_HELP, bare="MODEL")
    model_name: str = setting("", "name it is served under; default: its own, or its directory's")
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
    log_format: Literal["text", "json"] = setting(
        "text", "format of the services' logs; json: one object a line"
    )
    color: screen.Color = setting("auto", screen.COLOR_HELP)
    rank_flag: tuple[str, ...] = _passed_on("rank")
    router_flag: tuple[str, ...] = _passed_on("router")
    flag: tuple[str, ...] = _passed_on("service")

    def __post_init__(self) -> None:
        check_port("--port", self.port, self.routers)
        check_port("--http-port", self.http_port, self.routers)

    def shape(self) -> Shape:
        return Shape(
            **{name: getattr(self, name) for name in _OF_SHAPE},
            common_flags=(
                f"--log-format={self.log_format}",
                *([f"--model-name={self.model_name}"] if self.model_name else []),
                *self._tls_flags(),
                *(f"--{flag}" for flag in self.flag),
            ),
            rank_flags=tuple(f"--{flag}" for flag in self.rank_flag),
            router_flags=tuple(f"--{flag}" for flag in self.router_flag),
            ready_timeout_s=None,  # A large model may take long to load; Ctrl-C ends the wait.
        )

    def _tls_flags(self) -> tuple[str, ...]:
        given = {"--tls-ca": self.tls_ca, "--tls-cert": self.tls_cert, "--tls-key": self.tls_key}
        return tuple(f"{name}={path}" for name, path in given.items() if path is not None)


@dataclass(slots=True)
class _Signals:
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    killing: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._again)

    def _again(self) -> None:
        (self.killing if self.stopping.is_set() else self.stopping).set()


def run(argv: list[str]) -> int:
    config = load(UpConfig, argv, prog="isthmus up")
    try:
        return _run(config)
    except Unavailable as error:
        print(f"isthmus up: {error}", file=sys.stderr)
        return os.EX_TEMPFAIL


def _run(config: UpConfig) -> int:
    progress = _progress(config)
    if progress is not None:
        progress.step("checking", "the model, flags, ports, memory and etcd")
    with refusing("isthmus up"):
        ensure_cached(str(config.model), _report)
        config = resolved(config, weights="engine=fake" not in config.rank_flag, report=_report)
    LocalCluster(config.shape(), lambda name, line: None).check()
    return asyncio.run(_up(config, progress))


def _progress(config: UpConfig) -> StartProgress | None:
    if config.log_format == "json" or not sys.stderr.isatty():
        return None
    shape = config.shape()
    return StartProgress(
        shape.prefill_ranks + shape.decode_ranks, screen.is_colored(config.color, sys.stderr)
    )


def _report(what: str) -> None:
    print(f"isthmus up: {what}", file=sys.stderr, flush=True)


async def _up(config: UpConfig, progress: StartProgress | None) -> int:
    signals = _Signals()

    def show_line(name: str, line: str) -> None:
        try:
            if progress is not None:
                progress.line(name, line)
            else:
                print(_as_logged(config, name, line), file=sys.stderr, flush=True)
        except BrokenPipeError:
            signals.stopping.set()

    cluster = LocalCluster(config.shape(), show_line)
    if progress is not None:
        progress.step("starting", planned(cluster.shape))
    serve = asyncio.create_task(_serve(config, cluster, progress))
    stop = asyncio.create_task(signals.stopping.wait())
    await asyncio.wait({serve, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if serve.done():
        return serve.result()
    _say("stopping; Ctrl-C again kills everything at once")
    serve.cancel()  # Leaving its context stops every process, even those that are still starting.
    return await _until_stopped(serve, cluster, signals.killing)


def _as_logged(config: UpConfig, name: str, line: str) -> str:
    as_json = config.log_format == "json"
    return json_lines.json_line(line, name, time.time()) if as_json else f"{name:<9}| {line}"


async def _until_stopped(serve: "asyncio.Task[int]", cluster: LocalCluster, killing: asyncio.Event) -> int:
    killed = asyncio.create_task(killing.wait())
    await asyncio.wait({serve, killed}, return_when=asyncio.FIRST_COMPLETED)
    if killing.is_set() and not serve.done():
        cluster.kill()
    killed.cancel()
    with suppress(asyncio.CancelledError):
        await serve
    return _KILLED if killing.is_set() else 0


async def _serve(config: UpConfig, cluster: LocalCluster, progress: StartProgress | None) -> int:
    async with cluster:
        _report_ready(config, cluster, progress)
        await cluster.keep_running()
    return 0


def _report_ready(config: UpConfig, cluster: LocalCluster, progress: StartProgress | None) -> None:
    scheme = "http" if cluster.router_config.tls() is None else "https"
    http_port = cluster.http_ports[0]
    grpc, http = cluster.router_endpoint(), f"{scheme}://{host_port(config.host, http_port)}/v1"
    etcd, has_page = cluster.etcd_endpoints[0], cluster.router_config.page == "on"
    page = f"{scheme}://{_host_to_open(config.host, http_port)}/"
    if progress is not None:
        pages = {"page": f"{page} (talk to it, and watch it)"} if has_page else {}
        chat = "isthmus chat" + f" --router={grpc}" * (grpc != ClientConfig().router)
        progress.over(
            {"gRPC": grpc, "OpenAI API": http, **pages, "etcd": etcd, "chat": chat, "stop": "Ctrl-C"}
        )
    if progress is None or not sys.stdout.isatty():
        _say(f"ready: gRPC on {grpc}, OpenAI API on {http}, etcd on {etcd}")
        if has_page:
            _say(f"to talk to it and watch it, open {page}")


def _host_to_open(host: str, port: int) -> str:
    return host_port("localhost" if is_wildcard(host) else host, port)


def _say(line: str) -> None:
    with suppress(BrokenPipeError):
        print(line, flush=True)
