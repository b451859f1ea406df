"""What was promised between two ranks is kept or renegotiated: no error without need, no corruption."""

import asyncio
from dataclasses import replace

import pytest

from engine.pair import FAKE, Pair, core_of, settled
from services.engine.fake import continuation
from services.kv.ticket import StartsWithinPage
from services.transfer.sending import transfers
from services.values.errors import PeerFailed
from services.values.rank import Plan, RankAddress, RankId

PROMPT = list(range(20, 45))  # six whole pages of four, and a token
PAGE_BYTES = FAKE.page_size * 8


@pytest.fixture
def wants_earlier(monkeypatch):
    """Prefill sends a ticket back, as an engine would that writes in larger units than a page."""
    check_ticket, asked = transfers.check_ticket, []

    def until(start, times=1):
        def check(ticket, *facts):
            if len(asked) < times and ticket.decode_prefix_len > 0:
                asked.append((start, ticket.decode_prefix_len))
                raise StartsWithinPage(start, ticket.decode_prefix_len)
            check_ticket(ticket, *facts)

        monkeypatch.setattr(transfers, "check_ticket", check)
        return asked

    return until


async def test_a_delta_starts_earlier_when_prefill_asks_for_it(wants_earlier):
    async with Pair() as pair:
        await pair.generate(PROMPT, 2)
        asked = wants_earlier(8)
        answer = await pair.generate([*PROMPT, 1, 2, 3], 6)
        assert asked == [(8, 24)]
        assert answer.tokens == continuation([*PROMPT, 1, 2, 3], 6)
        assert answer.admitted.decode_prefix_len == 8
        assert answer.admitted.kv_bytes_moved == 5 * PAGE_BYTES
        await pair.assert_nothing_held()


async def test_asked_again_it_starts_earlier_again(wants_earlier):
    async with Pair() as pair:
        await pair.generate(PROMPT, 2)
        wants_earlier(8)
        answer = await pair.generate(PROMPT, 6)
        wants_earlier(0, times=2)
        answer = await pair.generate(PROMPT, 6)
        assert answer.tokens == continuation(PROMPT, 6)
        assert answer.admitted.decode_prefix_len == 0
        await pair.assert_nothing_held()


@pytest.mark.long
async def test_what_is_no_earlier_start_is_a_failed_peer(subtests, wants_earlier):
    for start in (3, 24, 28):
        async with Pair() as pair:
            with subtests.test(start=start):
                await pair.generate(PROMPT, 2)
                wants_earlier(start).clear()
                with pytest.raises(PeerFailed, match=f"start at token {start}"):
                    await pair.generate([*PROMPT, 1], 6)
                await pair.assert_nothing_held()
                assert (await pair.generate(PROMPT, 6)).tokens == continuation(PROMPT, 6)


async def test_renegotiated_in_a_pool_without_room_it_waits(wants_earlier):
    """Others took what it had: its own prefix and pages come back when they end."""
    async with Pair(replace(FAKE, kv_pages=16, fake_step_s=0.005)) as pair:
        await pair.generate(PROMPT, 2)
        asked = wants_earlier(0)
        others = [asyncio.create_task(pair.generate([i, i + 1], 20, Plan.LOCAL)) for i in range(3)]
        answer = await pair.generate(PROMPT, 6)
        assert len(asked) <= 1  # its prefix may have been evicted before it was admitted
        assert answer.tokens == continuation(PROMPT, 6)
        for i, other in enumerate(await asyncio.gather(*others)):
            assert other.tokens == continuation([i, i + 1], 20)
        await pair.assert_nothing_held()


async def test_cancelled_between_two_tickets_it_leaves_nothing(wants_earlier, monkeypatch):
    async with Pair() as pair:
        await pair.generate(PROMPT, 2)
        wants_earlier(8)
        core, loop, reopened = core_of(pair.decode), asyncio.get_running_loop(), asyncio.Event()
        renegotiate, one_more_runs = core.renegotiate, core._slots.one_more_runs

        def reopen(seq, start):
            monkeypatch.setattr(core._slots, "one_more_runs", lambda _: False)  # as if the batch were full
            renegotiate(seq, start)
            loop.call_soon_threadsafe(reopened.set)

        monkeypatch.setattr(core, "renegotiate", reopen)
        task = asyncio.create_task(pair.generate([*PROMPT, 1], 6))
        async with asyncio.timeout(10):
            await reopened.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        monkeypatch.setattr(core._slots, "one_more_runs", one_more_runs)
        await pair.assert_nothing_held()
        assert (await pair.generate(PROMPT, 6)).tokens == continuation(PROMPT, 6)


async def test_what_decode_holds_when_it_locks_counts(subtests):
    with subtests.test("a prefix evicted since the router matched it is moved instead"):
        # The router's match is a hint: the ticket says what decode had when it locked.
        async with Pair(replace(FAKE, kv_pages=16)) as pair:
            await pair.generate(PROMPT, 2)
            assert (await pair.generate(PROMPT, 2)).admitted.decode_prefix_len == 24
            await pair.generate(range(100, 158), 2, Plan.LOCAL)  # needs nearly every page
            answer = await pair.generate(PROMPT, 6)
            assert answer.admitted.decode_prefix_len < 24
            assert answer.tokens == continuation(PROMPT, 6)
            await pair.assert_nothing_held()

    for plan in list(Plan):
        with subtests.test(plan=plan):
            async with Pair() as pair:
                await pair.generate(PROMPT[:24], 2)
                answer = await pair.generate(PROMPT[:24], 6, plan)
                assert answer.tokens == continuation(PROMPT[:24], 6)
                assert answer.admitted.kv_bytes_moved == 0
                await pair.assert_nothing_held()


async def test_prefill_restarted_between_handshake_and_write():
    """Its next life refuses what was meant for the last one; with the new address it goes through."""
    async with Pair(replace(FAKE, fake_step_s=0.02, write_lease_s=1.0, fence_margin_s=0.2)) as pair:
        task = asyncio.create_task(pair.generate(range(60), 4))
        while not (pair.prefill.sender._transfers and pair.prefill.sender._transfers.open_transfers):
            await asyncio.sleep(0.001)
        await pair.server.stop()
        with pytest.raises(PeerFailed):
            await task
        assert (await settled(pair.decode)).quarantined == 0
        async with Pair() as next_life:
            pair.peer = RankAddress(RankId("prefill", 0, 1), next_life.peer.endpoint)
            with pytest.raises(PeerFailed):
                await pair.generate(range(60), 4)
            pair.peer = next_life.peer
            assert (await pair.generate(range(60), 4)).tokens == continuation(range(60), 4)
            await settled(pair.decode)
