"""SGLang as it is: one prefill server, decode servers, and SGLang's own router before them.

    start:  servers at once -> healthy      route:  flush -> router -> both roles registered -> requests
Everything runs in process groups of its own, which end with us.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from bench.sglang_load import TokenIds, Turn
from services.engine.sglang.service.sglang_process import SglangHttp
from services.engine.sglang.service.sglang_settings import SglangSettings
from services.host.child_processes import dying_with_us
from services.host.ports import free_ports
from services.values.errors import ConfigError, PeerFailed
from services.values.rank import Role

_REPOSITORY = Path(__file__).resolve().parent.parent
_PROBE, _WAITS = "bench.sglang_probe", "bench.sglang_waits"  # plugins
_PROBE_FILE = "ISTHMUS_BENCH_PROBE"  # as in sglang_probe
_START_S, _STOP_S, _POLL_S = 900.0, 5.0, 0.2
_OURS = "--kv-events-config"  # only our index needs it


@asynccontextmanager
async def process(
    command: Sequence[str], environment: dict[str, str], log_path: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A child in a process group of its own; at the end the whole group is ended."""
    with log_path.open("w") as log:
        child = await asyncio.create_subprocess_exec(
            *dying_with_us(command),
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield child
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await child.wait()


@dataclass(slots=True)
class Server:
    """One `sglang.launch_server` and what the probe in it says."""

    name: str
    port: int
    log_path: Path
    probe_path: Path
    read_bytes: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def events(self) -> list[dict[str, Any]]:
        if not self.probe_path.exists():
            return []
        with self.probe_path.open() as file:
            file.seek(self.read_bytes)
            lines = file.read()
        self.read_bytes += len(lines)
        return [json.loads(line) for line in lines.splitlines()]


class StockSglang:
    """`async with StockSglang(...)`: one prefill server, and decode servers of as many ranks as it says."""

    def __init__(
        self, settings: SglangSettings, decode_workers: int, folder: Path, waits: bool = False
    ) -> None:
        """`waits`: its processes wait where they spin, as our plugin has them do."""
        self._settings = settings  # of decode; prefill has one rank
        self._decode_workers = decode_workers
        self._folder = folder
        self._plugins = (_PROBE, _WAITS) if waits else (_PROBE,)
        self.prefill: Server
        self.decodes: list[Server] = []

    async def __aenter__(self) -> "StockSglang":
        self._stack = await AsyncExitStack().__aenter__()
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        self._folder.mkdir()
        # SGLang ends by killing itself, and leaves behind what it had there.
        temporary = tempfile.TemporaryDirectory(prefix="stock-sglang-", ignore_cleanup_errors=True)
        self._temporary = self._stack.enter_context(temporary)
        for module in self._plugins:
            _write_plugin(self._folder, module)
        self._session = await self._stack.enter_async_context(aiohttp.ClientSession())
        one_rank = replace(self._settings.engine, dp_size=1)
        prefill = replace(self._settings, engine=one_rank, role=Role.PREFILL, worker="prefill")
        self.bootstrap_port, *ports = free_ports("127.0.0.1", 2 + self._decode_workers)
        flag = f"--disaggregation-bootstrap-port={self.bootstrap_port}"
        self.prefill = await self._serve(prefill, ports.pop(), 0, (flag,))
        for number in range(self._decode_workers):
            decode = replace(self._settings, worker=f"decode-{number}")
            self.decodes.append(await self._serve(decode, ports.pop(), number, ()))
        await asyncio.gather(*map(self._until_healthy, (self.prefill, *self.decodes)))

    async def _serve(
        self, settings: SglangSettings, port: int, first_core: int, flags: tuple[str, ...]
    ) -> Server:
        name = settings.worker
        server = Server(name, port, self._folder / f"{name}.log", self._folder / f"{name}.jsonl")
        arguments = [text for text in settings.arguments(port) if not text.startswith(_OURS)]
        command = [sys.executable, "-m", "sglang.launch_server", *arguments, *flags]
        environment = settings.environment(os.environ)
        paths = (str(self._folder), str(_REPOSITORY), environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment |= {
            "SGLANG_PLUGINS": ",".join(map(_plugin_name, self._plugins)),
            _PROBE_FILE: str(server.probe_path),
            "TMPDIR": self._temporary,
        }
        if settings.engine.dp_size == 1:
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = str(first_core % (os.cpu_count() or 1))
        await self._stack.enter_async_context(process(command, environment, server.log_path))
        return server

    async def _until_healthy(self, server: Server) -> None:
        http = SglangHttp(server.port)
        try:
            async with asyncio.timeout(_START_S):
                while not await http.healthy():
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise ConfigError(f"{server.name} is not healthy: {_tail(server.log_path)}") from None
        finally:
            await http.close()

    async def flush(self) -> None:
        """Every radix tree is empty again."""
        for server in (self.prefill, *self.decodes):
            async with self._session.post(f"{server.url}/flush_cache?timeout=20") as response:
                if response.status != 200:
                    raise PeerFailed(f"{server.name} does not flush: {await response.text()}")

    @asynccontextmanager
    async def routed(self, flags: Sequence[str], router_path: str, name: str) -> AsyncIterator["Router"]:
        """SGLang's router with these flags; its workers' caches are empty."""
        await self.flush()
        port, metrics_port = free_ports("127.0.0.1", 2)
        command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
        command += ["--host=127.0.0.1", f"--port={port}", f"--prometheus-port={metrics_port}"]
        command += ["--worker-startup-check-interval=1", "--log-level=info"]
        command += ["--prefill", self.prefill.url, str(self.bootstrap_port)]
        for decode in self.decodes:
            command += ["--decode", decode.url]
        paths = (router_path, os.environ.get("PYTHONPATH", ""))
        # It would send a URL that it got wrong to a proxy, whose answer then hides why it failed.
        environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        log_path = self._folder / f"router-{name}.log"
        async with process([*command, *flags], environment, log_path) as child:
            router = Router(self, port, log_path, self._session, name)
            await router.until_ready(child)
            yield router


class Router:
    """SGLang's router, and the requests through it."""

    def __init__(
        self, system: StockSglang, port: int, log_path: Path, session: aiohttp.ClientSession, name: str
    ) -> None:
        self._system = system
        self._base = f"http://127.0.0.1:{port}"
        self._log_path = log_path
        self._session = session
        self._name = name

    async def until_ready(self, child: asyncio.subprocess.Process) -> None:
        try:
            async with asyncio.timeout(60):
                while not await self._ready():
                    if child.returncode is not None:
                        raise ConfigError(f"sglang-router ended: {_tail(self._log_path)}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise ConfigError(f"sglang-router is not ready: {_tail(self._log_path)}") from None

    async def _ready(self) -> bool:
        """All workers are registered: it answers before that, with what it has."""
        try:
            async with self._session.get(f"{self._base}/workers") as response:
                workers = (await response.json())["workers"] if response.status == 200 else []
        except aiohttp.ClientError:
            return False
        return len([w for w in workers if w["is_healthy"]]) >= 1 + len(self._system.decodes)

    def rid(self, turn: Turn) -> str:
        return f"{self._name}-{turn.name}-{turn.attempts}"

    async def stream(self, turn: Turn, max_tokens: int, text: str) -> AsyncIterator[TokenIds]:
        """`text` is for the router, which looks at nothing else; the engines take the ids."""
        body = {
            "rid": self.rid(turn),
            "text": text,
            "input_ids": turn.prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True},
            "stream": True,
        }
        timeout = aiohttp.ClientTimeout(total=120)
        try:
            async with self._session.post(f"{self._base}/generate", json=body, timeout=timeout) as response:
                if response.status != 200:
                    raise PeerFailed(f"sglang-router answers {response.status}: {await response.text()}")
                async for line in response.content:
                    if ids := _ids_of(line):
                        yield ids
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PeerFailed(f"sglang-router breaks off: {error!r}") from error

    def settle(self, turns: Sequence[Turn]) -> None:
        """Tell the turns where they ran and what was moved for them, as the probe saw it.

        Raises PeerFailed when what prefill wrote is not what decode asked for, and no turn was tried again.
        """
        written = [event for event in self._system.prefill.events() if event["kind"] == "written"]
        tickets = {
            event["rid"]: (f"{server.name}/{event['dp_rank']}", event)
            for server in self._system.decodes
            for event in server.events()
        }
        asked = sum(ticket["pages"] for _, ticket in tickets.values())
        pages, size_bytes = (sum(event[what] for event in written) for what in ("pages", "size_bytes"))
        if pages != asked and all(turn.attempts == 1 for turn in turns):
            raise PeerFailed(f"prefill wrote {pages} pages where decode asked for {asked}")
        page_bytes = size_bytes // pages if pages else 0
        for turn in turns:
            turn.rank, ticket = tickets[self.rid(turn)]
            turn.decode_prefix_len = ticket["decode_prefix_len"]
            turn.kv_bytes_moved = ticket["pages"] * page_bytes


def _plugin_name(module: str) -> str:
    return module.replace(".", "_")


def _write_plugin(folder: Path, module: str) -> None:
    """Write what makes a module an installed plugin for whoever has `folder` in its path."""
    name = _plugin_name(module)
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {module}:register\n")


def _ids_of(line: bytes) -> TokenIds:
    data = line.strip().removeprefix(b"data:").strip()
    if not data or data == b"[DONE]":
        return []
    try:
        return [int(token) for token in json.loads(data)["output_ids"]]
    except (ValueError, KeyError):  # the router writes its own errors with single quotes
        raise PeerFailed(f"sglang-router passes on: {data.decode(errors='replace')}") from None


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-3000:]
