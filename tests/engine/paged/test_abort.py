"""An abort, in whatever phase, reaches both legs and frees everything, quarantine included."""

import asyncio
from dataclasses import replace

import pytest

from engine.pair import FAKE, Pair, eager
from services.engine.fake import continuation, parse_carried
from services.engine.paged.sequence import Phase
from services.engine.paged.shell.delta import WriteLease
from services.transfer.local import _LandedWrite
from services.values.rank import Plan

SLOW = eager(replace(FAKE, kv_pages=24, fake_step_s=0.01))
PROMPT = range(100, 140)


class Watched(Pair):
    """Knows the decode rank's sequences by request."""

    async def __aenter__(self):
        await super().__aenter__()
        self.sequences = {}
        make = self.decode._sequence

        def note(request, **fields):
            seq = self.sequences[request.request_id] = make(request, **fields)
            return seq

        self.decode._sequence = note
        return self

    async def start(self, prompt, max_tokens=50, plan=Plan.REMOTE):
        """(task, its sequence on the decode rank)."""
        before = len(self.sequences)
        task = asyncio.create_task(self.generate(prompt, max_tokens, plan))
        await self.until(lambda: len(self.sequences) > before)
        return task, list(self.sequences.values())[-1]

    async def until(self, condition):
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.001)


async def waiting(pair):
    large, running = await pair.start(range(200, 280), 10, Plan.LOCAL)
    await pair.until(lambda: running.phase is Phase.DECODING)
    task, seq = await pair.start(PROMPT)
    await pair.until(lambda: seq.phase is Phase.WAITING)
    return task, [large]


async def before_the_ticket(pair):
    """No link stands yet."""
    links, asked = pair.decode._links, asyncio.Event()

    async def never(peer):
        asked.set()
        await asyncio.get_running_loop().create_future()

    link, links.link = links.link, never
    task, _ = await pair.start(PROMPT)
    await asyncio.wait_for(asked.wait(), 20)
    links.link = link
    return task, []


async def receiving(pair):
    task, seq = await pair.start(PROMPT)
    await pair.until(lambda: seq.phase is Phase.RECEIVING)
    await pair.until(lambda: pair.prefill.load().open_transfers)
    return task, []


async def prefill_half_done(pair):
    task, _ = await pair.start(PROMPT)
    await pair.until(lambda: pair.prefill.sender.bytes_moved_total > 0)
    return task, []


async def computing(pair):
    task, seq = await pair.start(PROMPT, plan=Plan.LOCAL)
    await pair.until(lambda: seq.phase is Phase.COMPUTING)
    return task, []


async def decoding(pair):
    task, seq = await pair.start(PROMPT)
    await pair.until(lambda: seq.num_output > 2)
    return task, []


async def retracted(pair):
    first, _ = await pair.start(range(40), 50, Plan.LOCAL)
    task, seq = await pair.start(PROMPT, 50, Plan.LOCAL)
    await pair.until(lambda: seq.retractions and seq.phase is Phase.WAITING)
    return task, [first]


@pytest.mark.parametrize(
    "phase",
    [waiting, before_the_ticket, receiving, prefill_half_done, computing, decoding, retracted],
    ids=lambda phase: phase.__name__,
)
@pytest.mark.parametrize("carried", ["", "window:6,state"])
async def test_an_abort_frees_everything_on_both_ranks(phase, carried):
    async with Watched(eager(replace(SLOW, fake_carried=carried))) as pair:
        task, others = await phase(pair)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.gather(*others)
        await pair.assert_nothing_held()
        async with asyncio.timeout(20):
            while pair.prefill.load().open_transfers:
                await asyncio.sleep(0.001)
        right = continuation(PROMPT, 5, parse_carried(carried))
        assert (await pair.generate(PROMPT, 5)).tokens == right


async def test_quarantine_ends_with_the_writers_word_not_with_the_fence():
    """The lease has minutes to go: only the abort's ack can have freed the pages."""
    async with Watched(replace(SLOW, write_lease_s=600.0)) as pair:
        task, _ = await prefill_half_done(pair)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await pair.assert_nothing_held()


async def test_a_stop_ends_though_a_writer_that_is_there_never_says_that_it_has_stopped(monkeypatch, caplog):
    """Its pages stay set aside while the link stands, long after the fence; a stop ends the link."""
    monkeypatch.setattr(_LandedWrite, "poll", lambda write: False)
    async with Watched(replace(SLOW, write_lease_s=600.0, fence_margin_s=0.1)) as pair:
        task, _ = await pair.start(PROMPT)
        await pair.until(lambda: pair.prefill.sender.writes_in_flight)
        (link,) = pair.decode._links._links.values()
        (watch,) = link._watches.values()
        watch._lease_end_s = 0.0
        pair.decode.lease = WriteLease(write_lease_s=0.1, fence_margin_s=0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        (quarantine,) = pair.decode._quarantines
        await pair.until(lambda: "kv_abort_unanswered" in caplog.text)
        assert not quarantine.done() and (await pair.decode.books()).quarantined

        async with asyncio.timeout(30):
            await pair.decode.stop()
        assert quarantine.done()
