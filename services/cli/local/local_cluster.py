"""This module runs a whole cluster on this machine: etcd, routers, prefill and decode workers as processes.

    start: preflight -> etcd -> workers and routers at once -> our own routers listen -> every rank is
           connected -> READY
    run:   a process that ends by itself is started again after a delay, as supervisors do with ranks
    stop:  routers -> workers -> etcd, each with SIGTERM first; no process is left behind
    kill:  SIGKILL to all of them at once, then as stop

If this process is killed, the kernel kills its children (PR_SET_PDEATHSIG).
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from services.cli.local import preflight
from services.cli.router_client import key_metadata
from services.etcd.embedded import EmbeddedEtcd
from services.host import memory
from services.host.child_processes import child_lines, dying_with_us
from services.host.ports import host_port, is_wildcard
from services.net import channels, grpc_errors
from services.observe import log_lines
from services.process import supervisor
from services.process.health import Lifecycle, ProcessPhase
from services.process.notify import listening
from services.rank.rank_config import DEFAULT_HAND_OVER_S
from services.router.router_config import RouterConfig
from services.settings.cluster_config import ClusterConfig
from services.values.errors import ConfigError, OverLimit, Unavailable
from services.wire.isthmus.v1 import generation_pb2, generation_pb2_grpc

log = logging.getLogger(__name__)

_LAST_LINES_S = 5.0  # We wait this long for the last lines of a process that has ended.

# A supervisor gives its ranks 15 s more to stop their engines (rank/main.py), and needs some time itself.
_AFTER_GRACE_S = 20.0


@dataclass(frozen=True, slots=True)
class Shape:
    model: Path
    data_dir: Path
    routers: int = 1
    prefill_workers: int = 1
    prefill_dp_size: int = 1
    decode_workers: int = 1
    decode_dp_size: int = 2
    etcd: tuple[str, ...] = ()  # Without endpoints an embedded etcd is started.
    host: str = "127.0.0.1"
    port: int = 0  # The first router has this port, the others the following ones; 0 chooses them.
    http_port: int = 0
    common_flags: tuple[str, ...] = ()
    rank_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    ready_timeout_s: float | None = 120.0  # None waits until a process ends.

    @property
    def decode_ranks(self) -> int:
        return self.decode_workers * self.decode_dp_size

    @property
    def threads_per_rank(self) -> int:
        """Divide the machine's cores among all ranks: torch is very slow with more threads than cores."""
        return max(1, (os.cpu_count() or 1) // (self.decode_ranks + self.prefill_ranks))

    @property
    def prefill_ranks(self) -> int:
        return self.prefill_workers * self.prefill_dp_size


@dataclass(slots=True)
class Child:
    name: str
    command: list[str]
    process: asyncio.subprocess.Process
    log_task: "asyncio.Task[None]"
    life: Lifecycle  # The child reports it; supervisors report nothing.

    @property
    def stop_timeout_s(self) -> float:
        """Return how long a service may take to stop: its own --grace-s, and a worker's --hand-over-s."""
        is_worker = any(text.startswith("--worker=") for text in self.command)
        hand_over_s = self._seconds("--hand-over-s=", DEFAULT_HAND_OVER_S) if is_worker else 0.0
        return self._seconds("--grace-s=", ClusterConfig().grace_s) + hand_over_s + _AFTER_GRACE_S

    def _seconds(self, flag: str, default: float) -> float:
        """Return the flag's last value. One that is no number is skipped: the service refuses it."""
        found = default
        for text in self.command:
            with suppress(ValueError):
                found = float(text.removeprefix(flag)) if text.startswith(flag) else found
        return found

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)
        try:
            async with asyncio.timeout(self.stop_timeout_s):
                code = await self.process.wait()
        except TimeoutError:
            log.warning("child_killed name=%s", self.name)
            self.process.kill()
            code = await self.process.wait()
        await self.log_task
        return code


@dataclass(slots=True)
class LocalCluster:
    """Use it as `async with LocalCluster(shape, show_line)`. `show_line(name, line)` gets every log line."""

    shape: Shape
    show_line: Callable[[str, str], None]
    children: dict[str, Child] = field(default_factory=dict)
    router_ports: tuple[int, ...] = ()
    http_ports: tuple[int, ...] = ()
    etcd_endpoints: tuple[str, ...] = ()
    etcd: EmbeddedEtcd | None = None
    kv_pages: int | None = None  # This is --kv-pages of each rank, if we chose it.
    chunk_tokens: int | None = None  # A prefill rank computes this many in a step; routers get it as a flag.
    # This is the first router's config.
    router_config: RouterConfig = field(default_factory=lambda: RouterConfig(model=""))
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    # Each child reports its lifecycle through one of these.
    _lives: dict[str, ExitStack] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def router_endpoint(self, index: int = 0) -> str:
        return host_port(self.shape.host, self.router_ports[index])

    def open_channel(self, index: int = 0) -> grpc.aio.Channel:
        return channels.open_channel(self.router_endpoint(index), self.router_config.tls())

    async def is_whole(self, index: int = 0) -> bool:
        async with self.open_channel(index) as channel:
            return await self._serves(generation_pb2_grpc.GenerationStub(channel))

    async def wait_for_exit(self) -> Child:
        waits = {asyncio.create_task(c.process.wait()): c for c in self.children.values()}
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return waits[done.pop()]

    async def keep_running(self) -> None:
        async with asyncio.TaskGroup() as group:
            for name in self.children:
                group.create_task(self._keep_running(name))

    async def _keep_running(self, name: str) -> None:
        loop, failures = asyncio.get_running_loop(), 0
        while True:
            child, began_s = self.children[name], loop.time()
            code = await child.process.wait()
            # A process that the child started may hold the pipe open.
            await asyncio.wait([child.log_task], timeout=_LAST_LINES_S)
            failures = await self._start_again(child, code, loop.time() - began_s, failures)

    async def _start_again(self, child: Child, code: int, lived_s: float, failures: int) -> int:
        how = _ended(child)
        while True:
            decision = supervisor.on_exit(code, lived_s, failures, has_served=True)
            assert isinstance(decision, supervisor.Restart)  # With has_served it always is.
            failures, delay_s = decision.failures, decision.delay_s
            log_lines.event(log, "process_ended", logging.WARNING, how=how, starts_again_in_s=delay_s)
            await asyncio.sleep(delay_s)
            try:
                await self.start_child(child.name, child.command[2], child.command[3:])
                return failures
            except OSError as error:
                code, lived_s, how = os.EX_OSERR, 0.0, f"{child.name} cannot be started: {error}"

    async def start_child(self, name: str, module: str, flags: list[str]) -> Child:
        command = [sys.executable, "-m", module, *flags]
        life, stack = Lifecycle(name), ExitStack()
        notified = stack.enter_context(listening(life))
        if (earlier := self._lives.get(name)) is not None:
            earlier.close()
        self._lives[name] = stack
        process = await asyncio.create_subprocess_exec(
            *dying_with_us(command),
            env={**os.environ, **notified},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # Ctrl-C must reach only us, since we stop the children in order.
            start_new_session=True,
        )
        child = Child(name, command, process, asyncio.create_task(self._pass_lines(name, process)), life)
        self.children[name] = child
        return child

    async def _start(self) -> None:
        shape = self.shape
        self.check()
        enter = self._stack.enter_context
        self.router_ports = enter(supervisor.chosen_ports(shape.host, shape.port, shape.routers))
        self.http_ports = enter(supervisor.chosen_ports(shape.host, shape.http_port, shape.routers))
        self._stack.enter_context(preflight.sole_user(shape.data_dir))
        if shape.etcd:
            self.etcd_endpoints = shape.etcd
        else:
            self.etcd = await self._stack.enter_async_context(EmbeddedEtcd(shape.data_dir))
            self.etcd_endpoints = (self.etcd.endpoint,)
        self._stack.callback(self._forget_lives)
        self._stack.push_async_callback(self._stop_children)
        for name, module, flags in self._plan():
            await self.start_child(name, module, flags)
        await self._until_ready()

    def check(self) -> None:
        """Find what would fail, before anything is started.

        Raises:
            ConfigError: The checkpoint or a port cannot be used, or memory or an etcd is missing.
            Unavailable: There is not enough memory now.
            SystemExit: A service would refuse its flags; standard error names the flag and the reason.
        """
        shape = self.shape
        ranks = []
        for name, module, flags in reversed(self._plan()):
            if module == "services.router":
                self.router_config = preflight.router_config(name, flags)
            else:
                ranks.append(preflight.rank_config(name, flags))
        # The plan is read backwards, so this is the first prefill worker.
        self.chunk_tokens = ranks[-1].chunk_tokens
        for engine in {rank.engine for rank in ranks}:
            preflight.check_checkpoint(shape.model, engine)
        free_bytes, total_bytes = memory.available_bytes(), memory.total_bytes()
        self.kv_pages = preflight.check_memory(shape.model, ranks, free_bytes, total_bytes)
        preflight.check_etcd(shape.etcd)
        self.router_config.tls()
        keys = self.router_config.api_key_file
        if self.router_config.jwks_file is not None and keys is None:
            raise ConfigError("--jwks-file needs --api-key-file here, with a key by which routers are asked")
        key_metadata(keys)
        wanted = {"--port": shape.port, "--http-port": shape.http_port}
        named = {flag: port for flag, port in wanted.items() if port}
        preflight.check_ports(shape.host, named, shape.routers)

    def _plan(self) -> list[tuple[str, str, list[str]]]:
        shape = self.shape
        common = [f"--model={shape.model}", f"--host={shape.host}", *shape.common_flags]
        advertised = ["--advertise-host=127.0.0.1"] if is_wildcard(shape.host) else []
        common.append(f"--etcd={','.join(self.etcd_endpoints or shape.etcd)}")
        plan = []
        for role, workers, dp_size in (
            ("prefill", shape.prefill_workers, shape.prefill_dp_size),
            ("decode", shape.decode_workers, shape.decode_dp_size),
        ):
            for number in range(workers):
                name = role if workers == 1 else f"{role}-{number}"
                flags = [*advertised, *common, f"--worker={name}", f"--dp-size={dp_size}"]
                flags += [f"--num-threads={shape.threads_per_rank}"]
                flags += [f"--kv-pages={self.kv_pages}"] if self.kv_pages else []
                flags += ["--share-weights=on"] if shape.decode_ranks + shape.prefill_ranks > 1 else []
                flags += shape.rank_flags
                plan.append((name, f"services.{role}", flags))
        not_yet = (0,) * shape.routers
        ports = zip(self.router_ports or not_yet, self.http_ports or not_yet, strict=True)
        for number, (port, http_port) in enumerate(ports):
            name = _router_name(number, shape.routers)
            flags = [*common, f"--name={name}", f"--port={port}", f"--http-port={http_port}"]
            flags += [f"--chunk-size={self.chunk_tokens}"] if self.chunk_tokens else []
            plan.append((name, "services.router", [*flags, *shape.router_flags]))
        return plan

    async def _pass_lines(self, name: str, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in child_lines(process.stdout):
            self.show_line(name, line)

    async def _until_ready(self) -> None:
        """Return when every router sees every rank and can place a request.

        Raises ConfigError if a process refused its settings, or the shape's ready_timeout_s is over, and
        Unavailable if one ended for another reason: another start may succeed."""
        died = asyncio.create_task(self.wait_for_exit())
        ready = asyncio.create_task(self._routers_ready())
        try:
            async with asyncio.timeout(self.shape.ready_timeout_s):
                await asyncio.wait({died, ready}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise ConfigError(f"the cluster was not ready within {self.shape.ready_timeout_s} s") from None
        finally:
            died.cancel()
            ready.cancel()
            with suppress(asyncio.CancelledError):
                await ready
        if died.done() and not died.cancelled():
            child = died.result()
            refused = child.process.returncode in supervisor.REFUSALS
            raise (ConfigError if refused else Unavailable)(_ended(child))

    async def _routers_ready(self) -> None:
        for index in range(self.shape.routers):
            await self._router_ready(index)

    async def _router_ready(self, index: int) -> None:
        own = self.children[_router_name(index, self.shape.routers)]
        while not (own.life.phase is ProcessPhase.SERVING and await self.is_whole(index)):
            await asyncio.sleep(0.1)

    async def _serves(self, stub: generation_pb2_grpc.GenerationStub) -> bool:
        prompt = generation_pb2.TokenIds(ids=[0])
        probe = generation_pb2.ExplainRequest(request=generation_pb2.GenerateRequest(token_ids=prompt))
        shape, metadata = self.shape, key_metadata(self.router_config.api_key_file)
        try:
            models = generation_pb2.ListModelsRequest()
            model = (await stub.ListModels(models, timeout=2, metadata=metadata)).models[0]
            if (model.prefill_ranks, model.decode_ranks) != (shape.prefill_ranks, shape.decode_ranks):
                return False
            explanation = await stub.Explain(probe, timeout=2, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            refused = grpc_errors.error_from(error)
            if isinstance(refused, OverLimit):  # By --tenants nobody may ask so often, and all ranks are up.
                return True
            if isinstance(refused, Unavailable) or error.code() in _NOT_YET:
                return False
            raise
        return not any(c.excluded for c in explanation.candidates)

    def _forget_lives(self) -> None:
        for stack in self._lives.values():
            stack.close()

    def kill(self) -> None:
        for child in self.children.values():
            with suppress(ProcessLookupError):
                child.process.kill()

    async def _stop_children(self) -> None:
        # Routers go first, so that they send no more requests to the ranks.
        for role in ("router", "decode", "prefill"):
            children = [c for name, c in self.children.items() if name.startswith(role)]
            await asyncio.gather(*(child.stop() for child in children))


def _ended(child: Child) -> str:
    code = child.process.returncode or 0
    killed = supervisor.why_killed(code)
    return f"{child.name} was {killed}" if killed else f"{child.name} ended with exit code {code}"


def _router_name(number: int, routers: int) -> str:
    return "router" if routers == 1 else f"router-{number}"


_NOT_YET = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
