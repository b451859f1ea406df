"""Pages come back once their writer has stopped: by its word, its next life, or the end of fence time."""

import asyncio
from dataclasses import replace

import pytest

from services.kv.handshake import ReservationState
from services.kv.transfer_plan import runs_of
from services.transfer.receiving import transfer_watch
from services.transfer.sending.sending_transfer import Outcome
from services.values.errors import PeerFailed, StaleGeneration
from services.values.kv import KvTicket, PageId
from services.values.rank import Generation
from transfer.receiving.link_pair import until


async def test_an_abort_is_acknowledged_after_the_last_write(pair, prefill, link):
    prefill.transport.gate.clear()
    watch = pair.send_ticket(link, (1, 2, 3))
    ended = prefill.request(watch.transfer_id, 10, (1, 2, 3))
    await until(lambda: prefill.sender.writes_in_flight == 1)
    watch.abort()
    pair.send_ticket(link, (4,), prompt_len=3)  # a word after the abort, on the same stream
    await until(lambda: prefill.sender.open_transfers == 2)
    assert not ended.done()

    stopped = asyncio.create_task(watch.writer_stopped(60.0))
    prefill.transport.gate.set()

    await stopped
    assert (await ended).outcome is Outcome.ABORTED
    with pytest.raises(PeerFailed, match="aborted"):
        await watch.outcome()


async def test_the_same_life_is_asked_again_when_the_stream_is_lost(pair, prefill, link):
    prefill.transport.gate.clear()
    watch = pair.send_ticket(link, (1, 2, 3))
    prefill.request(watch.transfer_id, 10, (1, 2, 3))
    await until(lambda: prefill.sender.writes_in_flight == 1)
    port = prefill.server.port
    await prefill.stop_listening()
    with pytest.raises(PeerFailed, match="lost"):
        await watch.outcome()
    with pytest.raises(PeerFailed):
        pair.send_ticket(link, (1, 2, 3))
    watch.abort()
    stopped = asyncio.create_task(watch.writer_stopped(60.0))

    await prefill.listen(port)
    await until(lambda: pair.links._links and not pair.links._orphans)
    (await pair.links.link(link.address)).send_ticket(ticket_of(pair, link))
    await until(lambda: prefill.sender.open_transfers == 2)
    assert not stopped.done(), "the write is under way still"
    prefill.transport.gate.set()
    await stopped


async def test_the_next_life_proves_the_last_one_dead(pair, prefill, link):
    watch = pair.send_ticket(link, (1, 2, 3), lease_s=60.0)
    await until(lambda: prefill.sender.open_transfers == 1)
    port = prefill.server.port
    await prefill.stop_listening()
    stopped = asyncio.create_task(watch.writer_stopped(60.0))
    await pair.prefill(generation=9).listen(port)

    await stopped

    with pytest.raises(StaleGeneration):
        await pair.links.link(link.address)
    next_life = replace(link.address, id=replace(prefill.id, generation=Generation(9)))
    assert (await pair.links.link(next_life)).alive


async def test_fence_time_ends_the_wait_for_a_writer_that_says_nothing(pair, prefill, link):
    end_s = pair.clock() + 60.0
    watch = pair.send_ticket(link, (1, 2, 3), lease_s=60.0)
    await until(lambda: prefill.sender.open_transfers == 1)
    await prefill.stop_listening()
    await until(lambda: not link.alive)
    pair.skipped_s = 59.9
    await watch.writer_stopped(fence_s=0.1)
    assert pair.clock() >= end_s + 0.1
    assert watch.state is ReservationState.EXPIRED


async def test_fence_time_ends_nothing_while_the_link_stands(pair, prefill, link, monkeypatch, caplog):
    """A writer that is there and does not acknowledge may be writing; it is asked again, and told of once."""
    monkeypatch.setattr(transfer_watch, "_ASK_AGAIN_S", 0.01)
    prefill.transport.gate.clear()
    asked = []
    monkeypatch.setattr(
        prefill.sender, "abort", lambda link_id, transfer_id: asked.append(transfer_id)
    )  # it is deaf
    watch = pair.send_ticket(link, (1, 2, 3), lease_s=60.0)
    ended = prefill.request(watch.transfer_id, 10, (1, 2, 3))
    await until(lambda: prefill.sender.writes_in_flight == 1)
    pair.skipped_s = 1_000.0  # it is over long ago, by our clock

    stopped = asyncio.create_task(watch.writer_stopped(fence_s=0.0))
    await until(lambda: len(asked) >= 3)
    assert not stopped.done()
    assert prefill.sender.writes_in_flight == 1
    told = [record.message for record in caplog.records if "kv_abort_unanswered" in record.message]
    assert told == [f"kv_abort_unanswered room={watch.transfer_id:016x} writer={prefill.id}"]

    prefill.transport.gate.set()
    await stopped
    assert (await ended).outcome is Outcome.LANDED


async def test_a_link_that_is_lost_late_wakes_who_waits_and_leaves_the_posts_their_time(pair, prefill, link):
    prefill.transport.gate.clear()
    watch = pair.send_ticket(link, (1, 2, 3), lease_s=60.0)
    prefill.request(watch.transfer_id, 10, (1, 2, 3))
    await until(lambda: prefill.sender.writes_in_flight == 1)
    pair.skipped_s = 1_000.0
    stopped = asyncio.create_task(watch.writer_stopped(fence_s=0.3))
    await asyncio.sleep(0)
    assert not stopped.done()

    began_s = pair.clock()
    await prefill.stop_listening()
    async with asyncio.timeout(transfer_watch._ASK_AGAIN_S + 20):
        await stopped
    assert pair.clock() >= began_s + 0.3
    assert watch.state is ReservationState.EXPIRED


async def test_a_failed_write_whose_end_is_not_known_keeps_pages_on_both_sides(pair, prefill, link):
    """The stream stands all the time."""
    prefill.transport.fails = True
    watch = pair.send_ticket(link, (1, 2, 3), lease_s=600.0)
    ended = prefill.request(watch.transfer_id, 10, (1, 2, 3))
    with pytest.raises(PeerFailed, match="failed: the network"):
        await watch.outcome()
    prefill.transport.fails = False
    other = pair.send_ticket(link, (4, 5, 6))
    prefill.request(other.transfer_id, 10, (1, 2, 3))
    await other.outcome()  # the peer is reached anew
    assert link.alive and not watch.is_over(fence_s=60.0) and not ended.done()
    await asyncio.to_thread(prefill.sender.stop)
    assert (await ended).outcome is Outcome.FAILED


def ticket_of(pair, link):
    until_s = link.write_until_s(10.0)
    return KvTicket(next(pair.transfers), link.address.id.generation, 3, 0, runs_of([PageId(9)]), until_s)
