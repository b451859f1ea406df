"""An etcd member that can fall silent: its connections stay, and nothing comes through them any more."""

import asyncio
import time
from types import TracebackType

_QUIET_S = 0.2


class SilentMember:
    """`async with SilentMember(endpoint) as member`: what goes to `member.endpoint` goes there, until
    `fall_silent`."""

    def __init__(self, endpoint: str) -> None:
        self._host, _, self._port = endpoint.rpartition(":")
        self._silent = False
        self._passed_at = time.monotonic()
        self._writers: list[asyncio.StreamWriter] = []
        self.endpoint = ""

    async def fall_silent(self) -> None:
        """Between two messages: where gRPC waits for the answer to a ping it finds out by itself."""
        while time.monotonic() - self._passed_at < _QUIET_S:
            await asyncio.sleep(_QUIET_S / 4)
        self._silent = True

    async def __aenter__(self) -> "SilentMember":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.endpoint = f"{host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [writer, there[1]]
        await asyncio.gather(self._pass_on(reader, there[1]), self._pass_on(there[0], writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1 << 16):
            self._passed_at = time.monotonic()
            if not self._silent:
                writer.write(chunk)
