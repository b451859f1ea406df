"""These tests show what is carried between two engines: checked, counted, asked for anew, cut off, and kept
until it lands."""

import asyncio
import logging
from dataclasses import replace

import pytest

from engine.pair import FAKE, Pair, core_of
from services.engine import choose
from services.engine.fake import continuation, parse_carried
from services.engine.paged.shell import prefill_engine as prefill_module
from services.kv.ticket import StartsWithinPage
from services.kv.transfer_plan import moved_bytes
from services.transfer.local import LocalTransport
from services.transfer.sending import transfers
from services.transfer.sending.sending_transfer import SendingTransfer
from services.values.errors import KvCorrupt, PeerFailed
from services.values.rank import Plan
from transfer.spoiling_transport import SpoilingTransport

CARRIED = "window:6,state"
HYBRID = replace(FAKE, fake_carried=CARRIED)
PROMPT = list(range(40, 63))  # 6 pages; of the window 2 and a state
UNITS = 9


def right(prompt, count):
    return continuation(prompt, count, parse_carried(CARRIED))


@pytest.fixture
def spoiling(monkeypatch):
    monkeypatch.setattr(SpoilingTransport, "spoils", 0)
    monkeypatch.setattr(choose, "open_transport", lambda name, nixl: SpoilingTransport())
    return SpoilingTransport


# -- digests --------------------------------------------------------------------------------------------


async def test_what_moves_is_counted_and_compared(subtests):
    with subtests.test("every unit that moves is compared"):
        async with Pair(HYBRID) as pair:
            assert (await pair.generate(PROMPT)).admitted.digested_pages == UNITS
            assert (await pair.generate(PROMPT[:20])).admitted.digested_pages == 3  # a full hit
            assert (await pair.generate([7] * 9, plan=Plan.LOCAL)).admitted.digested_pages == 0
            await pair.assert_nothing_held()

    with subtests.test("what a cold prompt would have moved is told under either plan"):
        async with Pair(HYBRID) as pair:
            cold = moved_bytes(0, len(PROMPT), pair.decode.layout)
            first = (await pair.generate(PROMPT)).admitted
            assert first.kv_bytes_moved == first.kv_bytes_prompt == sum(cold)
            assert first.carried_bytes == {"sliding_window": cold[1], "recurrent": cold[2]}
            second = (await pair.generate(PROMPT)).admitted
            assert second.decode_prefix_len == 20
            assert second.kv_bytes_saved == 20 // 4 * pair.decode.layout.page_bytes
            local = (await pair.generate(PROMPT, plan=Plan.LOCAL)).admitted
            assert (local.kv_bytes_moved, local.carried_bytes) == (0, {})
            assert local.kv_bytes_saved == sum(cold)


async def test_a_unit_that_comes_changed(subtests, spoiling, monkeypatch, caplog):
    for group in (0, 1, 2):
        with subtests.test(group=group):
            caplog.clear()
            monkeypatch.setattr(spoiling, "group", group)
            await check_a_changed_unit(spoiling, caplog, group)

    # So that what the others prove is not for nothing.
    for group in (1, 2):
        with subtests.test(group=group):
            monkeypatch.setattr(spoiling, "group", group)
            await check_an_unseen_change(spoiling)


async def check_a_changed_unit(spoiling, caplog, group):
    async with Pair(HYBRID) as pair:
        spoiling.spoils = 1
        with caplog.at_level(logging.ERROR), pytest.raises(KvCorrupt, match="1 of 9 pages"):
            await pair.generate(PROMPT)
        (told,) = [r.getMessage() for r in caplog.records if "kv_digest_mismatch" in r.getMessage()]
        assert f"group={group} page=" in told
        await pair.assert_nothing_held()
        again = await pair.generate(PROMPT)
        assert again.admitted.decode_prefix_len == 0
        assert again.tokens == right(PROMPT, 8)
        await pair.assert_nothing_held()


async def check_an_unseen_change(spoiling):
    async with Pair(replace(HYBRID, kv_digest_share=0.0)) as pair:
        spoiling.spoils = 1
        prompt = [*PROMPT, 1, 2]  # the window's first page is seen from its first token on
        answer = await pair.generate(prompt)
        assert answer.tokens[1:] != right(prompt, 8)[1:]
        await pair.assert_nothing_held()


# -- bytes ----------------------------------------------------------------------------------------------


async def test_other_bytes_than_are_due_are_a_failed_peer(subtests):
    for told, sentence in [
        ([192, 56, 16], r"192 \+ 56 \+ 16 bytes landed where 192 \+ 64 \+ 8 were due"),  # the sum is right
        ([192, 64], "256 bytes landed where"),
        ([1] * 1000, " 1000 bytes landed where"),  # however many there are
        ([], "264 bytes landed where"),  # as from who knows of no groups
    ]:
        with subtests.test(told=told, sentence=sentence), pytest.MonkeyPatch.context() as monkeypatch:
            say = SendingTransfer._send

            def lie(transfer_id, message, told=told, say=say):
                if message.status.group_bytes:
                    message.status.group_bytes[:] = told
                say(transfer_id, message)

            async with Pair(HYBRID) as pair:
                assert moved_bytes(0, len(PROMPT), pair.decode.layout) == (192, 64, 8)
                with monkeypatch.context() as patch:
                    patch.setattr(SendingTransfer, "_send", lie)
                    with pytest.raises(PeerFailed, match=sentence):
                        await pair.generate(PROMPT)
                await pair.assert_nothing_held()
                assert (await pair.generate(PROMPT)).tokens == right(PROMPT, 8)


# -- another ticket -------------------------------------------------------------------------------------


async def test_a_ticket_that_is_asked_for_anew_has_its_targets(monkeypatch):
    check_ticket, tickets = transfers.check_ticket, []

    def check(ticket, *facts):
        tickets.append(ticket)
        if len(tickets) == 2:
            raise StartsWithinPage(8, ticket.decode_prefix_len)
        check_ticket(ticket, *facts)

    monkeypatch.setattr(transfers, "check_ticket", check)
    async with Pair(HYBRID) as pair:
        await pair.generate(PROMPT, 2)
        answer = await pair.generate([*PROMPT, 1, 2, 3], 6)
        _, late, earlier = tickets
        assert (late.decode_prefix_len, earlier.decode_prefix_len) == (20, 8)
        assert [target.start_token for target in late.targets] == [20, 26]
        assert [target.start_token for target in earlier.targets] == [20, 26]
        assert answer.tokens == right([*PROMPT, 1, 2, 3], 6)
        assert answer.admitted.decode_prefix_len == 8
        await pair.assert_nothing_held()


# -- late bytes -----------------------------------------------------------------------------------------


class DeferringTransport(LocalTransport):
    """The first write that carries anything reads and writes memory when it is let, and no sooner."""

    def __init__(self):
        super().__init__()
        self.deferred = None

    def write(self, peer, moves):
        if self.deferred is None and any(move.group for move in moves):
            self.deferred = DeferredWrite(lambda: super(DeferringTransport, self).write(peer, moves))
            return self.deferred
        return super().write(peer, moves)


class DeferredWrite:
    def __init__(self, copy):
        self._copy, self.let = copy, asyncio.Event()

    def poll(self):
        return self.let.is_set()

    @property
    def group_bytes(self):
        return self._copied.group_bytes

    def release(self):
        self._copied = self._copy()


@pytest.fixture
def deferring(monkeypatch):
    """The prefill rank's transport, once its engine has been started."""
    transports, start = [], prefill_module.PagedPrefillEngine.start

    async def start_deferring(engine):
        engine._open_writer = lambda: transports.append(DeferringTransport()) or transports[-1]
        await start(engine)

    monkeypatch.setattr(prefill_module.PagedPrefillEngine, "start", start_deferring)
    return transports


async def deferred_by(transports):
    """The write, once it is posted."""
    async with asyncio.timeout(20):
        while not (transports and transports[0].deferred):
            await asyncio.sleep(0.001)
    return transports[0].deferred


async def test_tail_and_state_stay_as_they_are_until_they_have_been_read(deferring):
    """Others compute on both ranks meanwhile, more than the pools hold."""
    settings = replace(HYBRID, kv_pages=40, max_running_requests=3)
    async with Pair(settings) as pair:
        first = asyncio.create_task(pair.generate(PROMPT, 12))
        write = await deferred_by(deferring)
        others = [range(first, first + 30) for first in range(100, 480, 30)]
        for prompt in others:
            assert (await pair.generate(prompt, 6)).tokens == right(list(prompt), 6)
        held = [books.locked + books.private for books in core_of(pair.prefill).carried.books()]
        assert held >= [2, 1]
        write.let.set()
        assert (await first).tokens == right(PROMPT, 12)
        await pair.assert_nothing_held()


async def test_units_of_an_aborted_transfer_wait_for_their_writer(deferring):
    """Its write of the tail and the state is under way when the client leaves."""
    async with Pair(replace(HYBRID, kv_pages=40, max_running_requests=3, write_lease_s=600.0)) as pair:
        task = asyncio.create_task(pair.generate(PROMPT, 12))
        write = await deferred_by(deferring)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(20):
            while not (await pair.decode.books()).quarantined:
                await asyncio.sleep(0.001)
        assert [books.quarantined for books in core_of(pair.decode).carried.books()] == [2, 1]
        for first in range(100, 480, 30):
            prompt = list(range(first, first + 30))
            assert (await pair.generate(prompt, 6)).tokens == right(prompt, 6)
        assert [books.quarantined for books in core_of(pair.decode).carried.books()] == [2, 1]
        write.let.set()
        await pair.assert_nothing_held()
        assert (await pair.generate(PROMPT, 5)).tokens == right(PROMPT, 5)
