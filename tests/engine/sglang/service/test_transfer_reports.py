"""What was told of transfers reaches who asks, before or after."""

import asyncio

import pytest

from services.engine.sglang.reports import Moved, TicketSent
from services.engine.sglang.service import process_connections
from services.engine.sglang.service.process_connections import TransferReports
from services.values.errors import PeerFailed
from services.values.rank import TransferId

TRANSFER = TransferId(7)


async def test_the_writes_of_a_transfer_are_those_of_all_processes(subtests):
    for asked in ["before", "after"]:
        with subtests.test(asked=asked):
            told = TransferReports()
            asking = asyncio.create_task(told.bytes_moved(TRANSFER, 2))
            if asked == "before":
                await asyncio.sleep(0)
            told.take(Moved(8, 1, 999, {}))
            told.take(Moved(7, 1, 10, {"swa": 1}))
            await asyncio.sleep(0)
            assert not asking.done()
            told.take(Moved(7, 1, 100, {}))
            assert await asking == 111


async def test_who_waits_for_a_ticket_gets_it_and_it_is_gone(monkeypatch):
    told, ticket = TransferReports(), TicketSent(7, 32, 3)
    asking = asyncio.create_task(told.ticket_of(TRANSFER))
    await asyncio.sleep(0)
    told.take(ticket)
    assert (await asking)[0] == ticket
    monkeypatch.setattr(process_connections, "_REPORT_TIMEOUT_S", 0.01)
    with pytest.raises(PeerFailed, match="no ticket was reported"):
        await told.ticket_of(TRANSFER)


async def test_transfers_that_nobody_asks_for_are_forgotten(monkeypatch):
    monkeypatch.setattr(process_connections, "_MAX_TRANSFERS", 2)
    told = TransferReports()
    for transfer_id in range(1, 6):
        told.take(TicketSent(transfer_id, 0, 1))
        told.take(Moved(transfer_id, 1, 1, {}))
    assert list(told._tickets) == list(told._moved) == [4, 5]
