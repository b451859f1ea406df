"""A worker's SGLang may have several nodes. One's service is the worker, the others' follow it.

    follower: Join --> the worker's Incarnation --> its part of SGLang starts --> each of its processes has a
              stream that carries its reports to the first node, and orders back
              its SGLang ends, or the first node does --> its part is stopped; its supervisor starts it again
    first:    a follower's stream ends --> the worker is broken, as if a process of its own had ended

The calls are gRPC's with the TLS of the services; what they carry are the lines of the Unix socket.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial

import grpc

from services.engine.engine_config import EngineConfig
from services.engine.sglang import reports
from services.engine.sglang.reports import Incarnation, Joining
from services.engine.sglang.service.launch import Launch
from services.engine.sglang.service.leftovers import RunFolder
from services.engine.sglang.service.process_connections import Process
from services.engine.sglang.service.sglang_process import SglangHttp, SglangProcess, require_entry_point
from services.engine.sglang.service.sglang_settings import Nodes, SglangSettings
from services.host.ports import bindable, held_ports, host_port
from services.net import channels, grpc_errors, poller, servers
from services.process import signals
from services.process.events import first_of
from services.process.notify import Notifier
from services.values.errors import ConfigError, IsthmusError, Unavailable

log = logging.getLogger(__name__)

_SERVICE = "isthmus.sglang.Nodes"
_PIECE_BYTES = 1 << 20
_HEALTH_POLL_S = 0.5
_GOODBYE_S = 1.0  # So long others have to take in that the end is in order.


class NodeDoor:
    """The first node's service has one."""

    def __init__(
        self,
        nodes: Nodes,
        incarnation: Incarnation,
        make_process: Callable[[], Process],
        ended: Callable[[], None],
    ) -> None:
        self._nodes = nodes
        self._incarnation = incarnation
        self._make_process = make_process
        self._ended = ended
        self._joined: set[int] = set()
        self._closing = asyncio.Event()
        self._server: servers.RpcServer | None = None

    def __repr__(self) -> str:
        return f"NodeDoor(joined={sorted(self._joined)} of={self._nodes.size})"

    async def open(self, engine: EngineConfig) -> None:
        """Listen. Raises ConfigError where the port is in use."""
        listen = host_port(bindable(engine.host), self._nodes.port)
        self._server = await servers.open_server(listen, self._register, [], engine.tls())

    async def close(self) -> None:
        self._closing.set()
        if self._server is not None:
            await self._server.stop(_GOODBYE_S)

    def _register(self, server: grpc.aio.Server) -> None:
        handlers = {
            "Join": grpc.unary_stream_rpc_method_handler(self._join, bytes),
            "Report": grpc.stream_stream_rpc_method_handler(self._report),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))

    async def _join(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        joining: Joining = reports.decode(request, reports.JOININGS)
        rank = joining.node_rank
        if joining.fingerprint != self._incarnation.fingerprint:
            raise ConfigError(f"node {rank} has another checkpoint than the first one")
        if not 0 < rank < self._nodes.size:
            raise ConfigError(f"there is no node {rank}: --nnodes is {self._nodes.size} here")
        if rank in self._joined:  # The end of its part is yet to be noticed.
            raise Unavailable(f"node {rank} is here already")
        self._joined.add(rank)
        log.info("sglang_node_joined node=%d of=%d peer=%s", rank, self._nodes.size, context.peer())
        try:
            yield reports.encode(self._incarnation)
            await self._closing.wait()
        finally:
            if not self._closing.is_set():
                log.warning("sglang_node_left node=%d", rank)
                self._ended()

    async def _report(self, pieces: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        process, orders = self._make_process(), Orders()
        process.connection_made(orders)
        writer = asyncio.create_task(_write(orders, context))
        spoke = False  # Whoever says nothing is none of ours.
        try:
            async for piece in pieces:
                process.data_received(piece)
                spoke = True
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            if spoke:
                process.connection_lost(None)


class Orders(asyncio.WriteTransport):
    """Orders to a process of another node wait here."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: asyncio.Queue[bytes] = asyncio.Queue()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        for begin in range(0, len(data), _PIECE_BYTES):
            self.waiting.put_nowait(bytes(data[begin : begin + _PIECE_BYTES]))


async def _write(orders: Orders, context: grpc.aio.ServicerContext) -> None:
    while True:
        await context.write(await orders.waiting.get())


class Follower:
    """Another node's service is one."""

    def __init__(self, settings: SglangSettings, nodes: Nodes) -> None:
        """Raises ConfigError where SGLang would run without our plugin, or the checkpoint cannot be read."""
        require_entry_point()
        self._tls = settings.engine.tls()
        self._nodes = nodes
        self._launch = Launch(settings)

    async def serve(self, notifier: Notifier, grace_s: float) -> None:
        """Run until SIGTERM, and report to the process that started us. Returns and raises as `run`."""
        stopping = signals.stop_on_signals()
        poller.start()
        beating = asyncio.create_task(notifier.beat_until(stopping), name="beats")
        try:
            await self.run(stopping, notifier.serves, grace_s)
        finally:
            beating.cancel()

    async def run(self, stopping: asyncio.Event, serves: Callable[[], None], grace_s: float) -> None:
        """Return after SIGTERM, once the first node is done too, or `grace_s` are over.

        `serves` is called when this part of SGLang has loaded. Raises Unavailable where SGLang or the first
        node ends otherwise, and ConfigError where the first node refuses this one.
        """
        endpoint = host_port(self._nodes.host, self._nodes.port)
        async with AsyncExitStack() as stack:
            channel = await stack.enter_async_context(channels.open_channel(endpoint, self._tls))
            joining = reports.encode(Joining(self._nodes.rank, self._launch.fingerprint))
            call = channel.unary_stream(f"/{_SERVICE}/Join")(joining, wait_for_ready=True)
            stack.callback(call.cancel)
            worker = _Joined(call)
            await first_of(worker.known, worker.left, stopping)
            if worker.incarnation is not None:
                log.info("sglang_node_follows first=%s", endpoint)
                part = await self._start(stack, channel, worker.incarnation, serves)
                await first_of(part.ended, worker.left, stopping)
                with suppress(TimeoutError):
                    async with asyncio.timeout(grace_s if stopping.is_set() else 0):
                        await first_of(part.ended, worker.left)
                await part.stop(in_order=stopping.is_set() or worker.is_done)
            if not stopping.is_set():
                raise worker.why_ended()

    async def _start(
        self,
        stack: AsyncExitStack,
        channel: grpc.aio.Channel,
        incarnation: Incarnation,
        serves: Callable[[], None],
    ) -> SglangProcess:
        folder = RunFolder.open()
        stack.callback(folder.close)
        path = str(folder.path / "reports")
        relay = await asyncio.start_unix_server(partial(_relay, channel), path)
        stack.callback(relay.close)
        (port,) = stack.enter_context(held_ports("127.0.0.1", 1))
        part = SglangProcess(*await self._launch.command(folder, port, incarnation, path))
        await part.start()
        loading = asyncio.create_task(_until_loaded(SglangHttp(port), part, serves), name="sglang-loading")
        stack.callback(loading.cancel)
        return part


class _Joined:
    """The first node says who the worker is, and that it has ended."""

    def __init__(self, call: grpc.aio.UnaryStreamCall) -> None:
        self.incarnation: Incarnation | None = None
        self.known, self.left = asyncio.Event(), asyncio.Event()
        self.is_done = False  # The first node has stopped in order.
        self.error: IsthmusError | None = None
        self._reading = asyncio.create_task(self._read(call), name="sglang-first-node")

    def why_ended(self) -> ConfigError | Unavailable:
        if isinstance(self.error, ConfigError):
            return self.error
        reason = f": {self.error}" if self.error is not None else ""
        return Unavailable(f"the first node, or this one's part of SGLang, has ended{reason}")

    async def _read(self, call: grpc.aio.UnaryStreamCall) -> None:
        try:
            with grpc_errors.renaming():
                while (line := await call.read()) is not grpc.aio.EOF:
                    self.incarnation = reports.decode(line, reports.INCARNATIONS)
                    self.known.set()
                self.is_done = await call.code() is grpc.StatusCode.OK
        except IsthmusError as error:
            self.error = error
        finally:
            self.left.set()


async def _until_loaded(http: SglangHttp, part: SglangProcess, serves: Callable[[], None]) -> None:
    try:
        while not await http.healthy():
            part.note_tree()
            await asyncio.sleep(_HEALTH_POLL_S)
        part.note_tree()
        serves()
    finally:
        await http.close()


async def _relay(
    channel: grpc.aio.Channel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Carry what a process of this node's reports to the first node, and orders back, until either ends."""
    call = channel.stream_stream(f"/{_SERVICE}/Report")()
    reporting = asyncio.create_task(_report(reader, call), name="sglang-reports")
    try:
        with grpc_errors.renaming():
            while (piece := await call.read()) is not grpc.aio.EOF:
                writer.write(piece)
                await writer.drain()
    except (IsthmusError, ConnectionError) as error:
        log.info("sglang_node_stream_ended error=%r", str(error))
    finally:
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)
        call.cancel()
        writer.close()


async def _report(reader: asyncio.StreamReader, call: grpc.aio.StreamStreamCall) -> None:
    while piece := await reader.read(_PIECE_BYTES):
        await call.write(piece)
    await call.done_writing()
