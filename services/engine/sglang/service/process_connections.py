"""SGLang's processes connect here: they send reports, receive orders, and get requests as token ids.

A stream sends Generate to its scheduler. Outputs bring chunks until one with a finish reason, or tokens for a
callback. A stream that is left before its end sends Abort. When SGLang ends, streams get Unavailable. Reports
on transfers are kept until they are needed.

A stream that was left may still be computed, with its adapter, until SGLang reports its end.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Set
from dataclasses import dataclass
from typing import Any

from services.engine.sglang import reports
from services.engine.sglang.reports import (
    REPORTS,
    Abort,
    AdapterChanged,
    Generate,
    LoadAdapter,
    Moved,
    Order,
    Outputs,
    Report,
    TicketSent,
    UnloadAdapter,
)
from services.values.errors import (
    ConfigError,
    InvalidRequest,
    IsthmusError,
    PeerFailed,
    ProtocolError,
    Unavailable,
)
from services.values.rank import TransferId

log = logging.getLogger(__name__)

Send = Callable[[Order], None]  # It raises InvalidRequest.


async def serve_reports(
    path: str,
    take: Callable[[Report, Send], None],
    unreadable: Callable[[ProtocolError], None],
    ended: Callable[[], None],
) -> asyncio.Server:
    """Serve on the running loop.

    `take` gets every report and a function that answers, or `unreadable` gets the error of a line; `ended` is
    called when a reporting process ends.
    """

    def connection() -> asyncio.Protocol:
        return Process(take, unreadable, ended)

    return await asyncio.get_running_loop().create_unix_server(connection, path)


class Process(asyncio.Protocol):
    """This is one of SGLang's processes, at its Unix socket or at the end of a node's stream."""

    _transport: asyncio.WriteTransport

    def __init__(
        self,
        take: Callable[[Report, Send], None],
        unreadable: Callable[[ProtocolError], None],
        ended: Callable[[], None],
    ) -> None:
        self._take = take
        self._unreadable = unreadable
        self._ended = ended
        self._splitter = reports.LineSplitter()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, received: bytes) -> None:
        for line in self._splitter.feed(received):
            try:
                report = reports.decode(line, REPORTS)
            except ProtocolError as error:
                self._unreadable(error)
                continue
            self._take(report, self._send)

    def connection_lost(self, error: Exception | None) -> None:
        """End; a process that was killed may leave half a line."""
        if error is not None:
            log.info("sglang_reports_reset error=%s", error)
        self._ended()

    def _send(self, order: Order) -> None:
        """Send an order.

        Raises InvalidRequest where its line is too long to be read, which would end the scheduler.
        """
        if len(line := reports.encode(order)) > reports.MAX_LINE_BYTES:
            limit = reports.MAX_LINE_BYTES
            raise InvalidRequest(f"engine sglang takes requests of {limit} bytes as JSON, got {len(line)}")
        self._transport.write(line)


Chunk = dict[str, Any]


class TokenCallback:
    """This passes tokens to a callback instead of a chunk, where they come alone and are not in `stops`."""

    def __init__(self, callback: Callable[[int], None], stops: Set[int]) -> None:
        self._callback = callback
        self._stops = stops
        self._is_on = False

    def begin(self) -> None:
        """Pass tokens on from now on, since all earlier chunks have been read."""
        self._is_on = True

    def take(self, ids: list[int]) -> bool:
        if not self._stops.isdisjoint(ids):
            self._is_on = False  # A stop token ends the request for us.
        if self._is_on:
            for token_id in ids:
                self._callback(token_id)
        return self._is_on


class _Open:
    def __init__(self, callback: TokenCallback | None) -> None:
        self.chunks: asyncio.Queue[Chunk | IsthmusError] = asyncio.Queue()
        self._callback = callback

    def put_tokens(self, rid: str, ids: list[int]) -> None:
        if self._callback is None or not self.chunks.empty() or not self._callback.take(ids):
            self.chunks.put_nowait({"rid": rid, "output_ids": ids, "meta_info": {"finish_reason": None}})


@dataclass(frozen=True, slots=True)
class Needs:
    """`begin` is called before SGLang gets a request, and may raise; `end` once SGLang has ended it."""

    begin: Callable[[], None]
    end: Callable[[], None]


class Door:
    def __init__(self) -> None:
        self._schedulers: dict[int, Send] = {}  # The keys are DP ranks.
        self._open: dict[str, _Open] = {}  # The keys are rids.
        self._ends: dict[str, Callable[[], None]] = {}  # The keys are rids.
        self._changes: dict[str, asyncio.Future[AdapterChanged]] = {}

    def __repr__(self) -> str:
        return f"Door(ranks={sorted(self._schedulers)} open={len(self._open)})"

    def connect(self, dp_rank: int, send: Send) -> None:
        self._schedulers[dp_rank] = send

    def is_open(self, dp_rank: int) -> bool:
        return dp_rank in self._schedulers

    async def change(self, dp_rank: int, order: LoadAdapter | UnloadAdapter) -> None:
        """Return once a scheduler has done it.

        Raises ConfigError where SGLang refuses it, and Unavailable where SGLang is gone.
        """
        send = self._send_to(dp_rank)
        changed = self._changes[order.change] = asyncio.get_running_loop().create_future()
        try:
            send(order)
            error = (await changed).error
        finally:
            del self._changes[order.change]
        if error:
            raise ConfigError(f"SGLang refuses adapter {order.name}: {error}")

    def changed(self, report: AdapterChanged) -> None:
        if (waiting := self._changes.get(report.change)) is not None and not waiting.done():
            waiting.set_result(report)

    def _send_to(self, dp_rank: int) -> Send:
        if (send := self._schedulers.get(dp_rank)) is None:
            raise Unavailable("SGLang is not connected")
        return send

    async def stream(
        self, body: dict[str, Any], callback: TokenCallback | None = None, needs: Needs | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Yield a request's chunks that `callback` does not take; closing this early aborts the request.

        Raises InvalidRequest or PeerFailed where SGLang gives the request up, for instance when a transfer
        failed; also InvalidRequest where it is larger than a scheduler's line, or its rid is in use. Raises
        Unavailable where SGLang is gone.
        """
        send = self._send_to(body["routed_dp_rank"])
        rid, ended = body["rid"], False
        if rid in self._open:
            raise InvalidRequest(f"request {rid} is under way already")
        if needs is not None:
            needs.begin()
            self._ends[rid] = needs.end
        opened = self._open[rid] = _Open(callback)
        try:
            self._begin(send, body)
            while not ended:
                chunk = await opened.chunks.get()
                ended = isinstance(chunk, IsthmusError) or chunk["meta_info"]["finish_reason"] is not None
                yield _read(chunk)
        finally:
            del self._open[rid]
            if not ended:
                send(Abort(rid))

    def _begin(self, send: Send, body: dict[str, Any]) -> None:
        try:
            send(Generate(body))
        except InvalidRequest:
            self._end(body["rid"])
            raise

    def _end(self, rid: str) -> None:
        if (end := self._ends.pop(rid, None)) is not None:
            end()

    def take(self, outputs: Outputs) -> None:
        """Pass outputs on; those of requests that were left are dropped."""
        for chunk in outputs.chunks:
            if chunk["meta_info"]["finish_reason"] is not None:
                self._end(chunk["rid"])
            if (opened := self._open.get(chunk["rid"])) is not None:
                opened.chunks.put_nowait(chunk)
        for rid, ids in outputs.tokens.items():
            if (opened := self._open.get(rid)) is not None:
                opened.put_tokens(rid, ids)

    def close(self, reason: str) -> None:
        """End all requests with Unavailable, and accept no new ones."""
        self._schedulers.clear()
        for opened in self._open.values():
            opened.chunks.put_nowait(Unavailable(reason))
        for waiting in self._changes.values():
            if not waiting.done():
                waiting.set_exception(Unavailable(reason))


def _read(chunk: Chunk | IsthmusError) -> Chunk:
    if isinstance(chunk, IsthmusError):
        raise chunk
    reason = chunk["meta_info"]["finish_reason"] or {}
    if reason.get("type") == "abort":
        raise _failure(int(reason.get("status_code") or 500), str(reason.get("message")))
    return chunk


def _failure(status: int, message: str) -> IsthmusError:
    if status == 400:
        return InvalidRequest(f"SGLang refuses the request: {message}")
    return PeerFailed(f"SGLang failed the request: {message}")


# A report that is awaited is on its way already, but processes may get little CPU time.
_REPORT_TIMEOUT_S = 15.0
_MAX_TRANSFERS = 4096


class TransferReports:
    def __init__(self) -> None:
        # It maps transfers to the ticket, and the time of its report.
        self._tickets: dict[int, tuple[TicketSent, float]] = {}
        self._moved: dict[int, tuple[int, int]] = {}  # It maps transfers to the numbers of reports and bytes.
        self._waiting: dict[int, asyncio.Event] = {}  # The keys are transfers.

    def take(self, report: TicketSent | Moved) -> None:
        transfer_id = report.transfer_id
        if isinstance(report, TicketSent):
            self._tickets[transfer_id] = (report, time.monotonic())
            _bound(self._tickets)
        else:
            count, size = self._moved.get(transfer_id, (0, 0))
            self._moved[transfer_id] = (
                count + 1,
                size + report.size_bytes + sum(report.carried_bytes.values()),
            )
            _bound(self._moved)
        if (reported := self._waiting.get(transfer_id)) is not None:
            reported.set()

    async def ticket_of(self, transfer_id: TransferId) -> tuple[TicketSent, float]:
        """Return the decode side's ticket for a transfer, and when it was sent (monotonic).

        Raises PeerFailed where the plugin reports none.
        """
        await self._until(
            transfer_id,
            lambda: transfer_id in self._tickets,
            f"no ticket was reported for {transfer_id:016x}",
        )
        return self._tickets.pop(transfer_id)

    async def bytes_moved(self, transfer_id: TransferId, num_processes: int) -> int:
        """Return the bytes that all of the rank's processes wrote for a transfer.

        Raises PeerFailed without reports.
        """

        def all_reported() -> bool:
            return self._moved.get(transfer_id, (0, 0))[0] >= num_processes

        await self._until(transfer_id, all_reported, f"no writes were reported for {transfer_id:016x}")
        return self._moved.pop(transfer_id)[1]

    def forget(self, transfer_id: TransferId) -> None:
        self._tickets.pop(transfer_id, None)
        self._moved.pop(transfer_id, None)

    async def _until(self, transfer_id: TransferId, is_reported: Callable[[], bool], problem: str) -> None:
        if is_reported():
            return
        reported = self._waiting[transfer_id] = asyncio.Event()
        try:
            async with asyncio.timeout(_REPORT_TIMEOUT_S):
                while not is_reported():
                    reported.clear()
                    await reported.wait()
        except TimeoutError:
            raise PeerFailed(problem) from None
        finally:
            del self._waiting[transfer_id]


def _bound(transfers: dict[int, Any]) -> None:
    """Forget transfers of requests that failed before anybody needed their reports."""
    while len(transfers) > _MAX_TRANSFERS:
        del transfers[next(iter(transfers))]


_LOOK_S = 1.0
_SILENT_LOOKS = 60  # A supervisor waits as long for a rank.
_Beating = tuple[str, int]  # The parts are the node's address and the pid.


class Beats:
    """SGLang's processes send beats while the loop runs that serves the Handshake in them.

    Time is counted in looks, since this process may have been stopped itself. SGLang watches its schedulers
    (`--watchdog-timeout`), but not our thread beside them, without which its transfers would wait for ever.
    """

    def __init__(self) -> None:
        self._looks: dict[_Beating, int] = {}  # It maps processes to the looks since the last beat.

    def received(self, process: _Beating) -> None:
        self._looks[process] = 0

    def look(self) -> list[_Beating]:
        """Return the processes that have sent beats before and are silent now."""
        self._looks = {process: looks + 1 for process, looks in self._looks.items()}
        return [process for process, looks in self._looks.items() if looks >= _SILENT_LOOKS]

    async def until_silent(self) -> list[_Beating]:
        """Wait until some processes that have sent beats are silent, and return them."""
        while not (silent := self.look()):
            await asyncio.sleep(_LOOK_S)
        return silent
