"""Reports of SGLang's processes on transfers are kept here until somebody asks for them."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from services.engine.sglang.reports import Moved, TicketSent
from services.values.errors import PeerFailed
from services.values.rank import Room

_REPORT_TIMEOUT_S = 15.0  # A report is on its way when it is asked for; processes may be starved.
_MAX_ROOMS = 4096


class RoomReports:
    def __init__(self) -> None:
        self._tickets: dict[
            int, tuple[TicketSent, float]
        ] = {}  # By transfer there is the ticket, and when it was reported.
        self._moved: dict[int, tuple[int, int]] = {}  # It maps transfers to reports and bytes.
        self._waiting: dict[int, asyncio.Event] = {}  # The keys are transfers.

    def take(self, report: TicketSent | Moved) -> None:
        room = report.room
        if isinstance(report, TicketSent):
            self._tickets[room] = (report, time.monotonic())
            _bound(self._tickets)
        else:
            count, size = self._moved.get(room, (0, 0))
            self._moved[room] = (count + 1, size + report.size_bytes + sum(report.carried_bytes.values()))
            _bound(self._moved)
        if (told := self._waiting.get(room)) is not None:
            told.set()

    async def ticket_of(self, room: Room) -> tuple[TicketSent, float]:
        """Return what the decode side promised for a transfer, and when (monotonic).

        Raises PeerFailed when the plugin says nothing.
        """
        await self._until(room, lambda: room in self._tickets, f"no ticket was reported for {room:016x}")
        return self._tickets.pop(room)

    async def bytes_moved(self, room: Room, num_processes: int) -> int:
        """Return the bytes that all of the rank's processes wrote for a transfer. Raises PeerFailed
        likewise."""

        def all_told() -> bool:
            return self._moved.get(room, (0, 0))[0] >= num_processes

        await self._until(room, all_told, f"no writes were reported for {room:016x}")
        return self._moved.pop(room)[1]

    def forget(self, room: Room) -> None:
        self._tickets.pop(room, None)
        self._moved.pop(room, None)

    async def _until(self, room: Room, is_told: Callable[[], bool], problem: str) -> None:
        if is_told():
            return
        told = self._waiting[room] = asyncio.Event()
        try:
            async with asyncio.timeout(_REPORT_TIMEOUT_S):
                while not is_told():
                    told.clear()
                    await told.wait()
        except TimeoutError:
            raise PeerFailed(problem) from None
        finally:
            del self._waiting[room]


def _bound(rooms: dict[int, Any]) -> None:
    """Forget transfers of requests that failed before anybody asked."""
    while len(rooms) > _MAX_ROOMS:
        del rooms[next(iter(rooms))]
