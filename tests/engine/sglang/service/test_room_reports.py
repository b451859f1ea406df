"""What was told of rooms reaches who asks, before or after."""

import asyncio

import pytest

from services.engine.sglang.reports import Moved, TicketSent
from services.engine.sglang.service import process_connections
from services.engine.sglang.service.process_connections import RoomReports
from services.values.errors import PeerFailed
from services.values.rank import Room

ROOM = Room(7)


async def test_the_writes_of_a_room_are_those_of_all_processes(subtests):
    for asked in ["before", "after"]:
        with subtests.test(asked=asked):
            told = RoomReports()
            asking = asyncio.create_task(told.bytes_moved(ROOM, 2))
            if asked == "before":
                await asyncio.sleep(0)
            told.take(Moved(8, 1, 999, {}))
            told.take(Moved(7, 1, 10, {"swa": 1}))
            await asyncio.sleep(0)
            assert not asking.done()
            told.take(Moved(7, 1, 100, {}))
            assert await asking == 111


async def test_who_waits_for_a_ticket_gets_it_and_it_is_gone(monkeypatch):
    told, ticket = RoomReports(), TicketSent(7, 32, 3)
    asking = asyncio.create_task(told.ticket_of(ROOM))
    await asyncio.sleep(0)
    told.take(ticket)
    assert (await asking)[0] == ticket
    monkeypatch.setattr(process_connections, "_REPORT_TIMEOUT_S", 0.01)
    with pytest.raises(PeerFailed, match="no ticket was reported"):
        await told.ticket_of(ROOM)


async def test_rooms_that_nobody_asks_for_are_forgotten(monkeypatch):
    monkeypatch.setattr(process_connections, "_MAX_ROOMS", 2)
    told = RoomReports()
    for room in range(1, 6):
        told.take(TicketSent(room, 0, 1))
        told.take(Moved(room, 1, 1, {}))
    assert list(told._tickets) == list(told._moved) == [4, 5]
