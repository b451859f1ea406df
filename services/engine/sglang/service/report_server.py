"""SGLang's processes connect here to report what they have to, and hear what to do."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from services.engine.sglang import message_lines
from services.engine.sglang.reports import REPORTS, Order, Report
from services.values.errors import InvalidRequest, ProtocolError

log = logging.getLogger(__name__)

Say = Callable[[Order], None]  # It raises InvalidRequest.


async def serve_reports(
    path: str,
    take: Callable[[Report, Say], None],
    unreadable: Callable[[ProtocolError], None],
    ended: Callable[[], None],
) -> asyncio.Server:
    """Serve on the running loop.

    `take` gets every report and how to answer, or `unreadable` why it is none; `ended` is called when a
    process that reports ends.
    """

    def connection() -> asyncio.Protocol:
        return _Process(take, unreadable, ended)

    return await asyncio.get_running_loop().create_unix_server(connection, path)


class _Process(asyncio.Protocol):
    _transport: asyncio.WriteTransport

    def __init__(
        self,
        take: Callable[[Report, Say], None],
        unreadable: Callable[[ProtocolError], None],
        ended: Callable[[], None],
    ) -> None:
        self._take = take
        self._unreadable = unreadable
        self._ended = ended
        self._splitter = message_lines.LineSplitter()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, received: bytes) -> None:
        for line in self._splitter.feed(received):
            try:
                report = message_lines.decode(line, REPORTS)
            except ProtocolError as error:
                self._unreadable(error)
                continue
            self._take(report, self._say)

    def connection_lost(self, error: Exception | None) -> None:
        """End; half a line may be left of a process that was killed."""
        if error is not None:
            log.info("sglang_reports_reset error=%s", error)
        self._ended()

    def _say(self, order: Order) -> None:
        """Send an order. Raises InvalidRequest for what the other end would not read: a scheduler ends with
        such a line."""
        if len(line := message_lines.encode(order)) > message_lines.MAX_LINE_BYTES:
            limit = message_lines.MAX_LINE_BYTES
            raise InvalidRequest(f"engine sglang takes requests of {limit} bytes as JSON, got {len(line)}")
        self._transport.write(line)
