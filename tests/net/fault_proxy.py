"""A TCP proxy before one gRPC server, whose connections a test cuts or stalls, and heals again.

    passing --cut(service)----> its connections are reset, and so is each new one that turns out to carry it
    passing --stall(service)--> nothing of them arrives any more, on either side, and nothing ends
    either  --heal()----------> passing; what was stalled goes on where it stopped

A connection shows what it carries by the paths of its requests, which gRPC sends as they are. So a service
can be cut from a server whose other services go on. The end of either side ends both.
"""

import asyncio
import re
from collections.abc import Iterable

_PATH = re.compile(rb"/isthmus\.v1\.(\w+)/\w")
_LONGEST_PATH = 64  # bytes; a path may come in two pieces
_PIECE_BYTES = 1 << 16


class FaultProxy:
    """`async with FaultProxy("127.0.0.2", port, "127.0.0.1", port) as proxy`. Port 0: a free one."""

    def __init__(self, host: str, port: int, server_host: str, server_port: int) -> None:
        self.port = port
        self._host = host
        self._server = server_host, server_port
        self._cut: set[str] = set()
        self._stalled: set[str] = set()
        self._healed = asyncio.Event()
        self._connections: dict[asyncio.Task[None], _Carried] = {}

    async def __aenter__(self) -> "FaultProxy":
        self._listener = await asyncio.start_server(self._accept, self._host, self.port)
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._listener.close()
        tasks = list(self._connections)
        _cancel(tasks)
        await asyncio.gather(*tasks, return_exceptions=True)

    def cut(self, service: str) -> None:
        self._cut.add(service)
        _cancel([task for task, carried in self._connections.items() if service in carried.services])

    def stall(self, service: str) -> None:
        self._stalled.add(service)
        self._healed.clear()

    def heal(self) -> None:
        self._cut.clear()
        self._stalled.clear()
        self._healed.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task, carried = asyncio.current_task(), _Carried()
        assert task is not None
        self._connections[task] = carried
        try:
            await self._pass_on(reader, writer, carried)
        except (ConnectionError, asyncio.CancelledError):
            pass  # the server is away, or we have cut it
        finally:
            del self._connections[task]
            writer.transport.abort()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, carried: "_Carried"
    ) -> None:
        """Until either side ends."""
        server_reader, server_writer = await asyncio.open_connection(*self._server)
        ways = [
            asyncio.create_task(self._pump(reader, server_writer, carried, upwards=True)),
            asyncio.create_task(self._pump(server_reader, writer, carried, upwards=False)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            _cancel(ways)
            await asyncio.gather(*ways, return_exceptions=True)
            server_writer.transport.abort()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        carried: "_Carried",
        *,
        upwards: bool,
    ) -> None:
        while piece := await reader.read(_PIECE_BYTES):
            if upwards:
                carried.note(piece)
            while carried.services & self._stalled:
                await self._healed.wait()
            if carried.services & self._cut:
                return
            writer.write(piece)
            await writer.drain()


class _Carried:
    """The services whose requests a connection has carried."""

    def __init__(self) -> None:
        self.services: set[str] = set()
        self._end = b""

    def note(self, piece: bytes) -> None:
        self.services.update(name.decode() for name in _PATH.findall(self._end + piece))
        self._end = (self._end + piece)[-_LONGEST_PATH:]


def _cancel(tasks: Iterable["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
