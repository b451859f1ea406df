"""Bytes of a write that has failed harm nobody, however late they land."""

import asyncio
from dataclasses import replace

import pytest

from engine.pair import FAKE, Pair
from services.engine.fake import continuation
from services.engine.paged.shell import prefill_engine as prefill_module
from services.transfer.local import LocalTransport, _LandedWrite
from services.transfer.sending import transfers as transfers_module
from services.transfer.transport import Unsettled
from services.values.errors import PeerFailed

PROMPT = range(100, 140)  # ten pages
OTHERS = [range(first, first + 24) for first in range(300, 500, 30)]


class LateTransport(LocalTransport):
    """Its first write fails; the bytes are on their way all the same."""

    def __init__(self):
        super().__init__()
        self.late = None

    def write(self, peer, moves):
        if self.late is None:
            self.late = peer, moves
            raise Unsettled("connection reset")
        return super().write(peer, moves)

    def land(self):
        super().write(*self.late)


def pair_with(write_lease_s, fence_margin_s):
    settings = replace(FAKE, kv_pages=24, write_lease_s=write_lease_s, fence_margin_s=fence_margin_s)
    return Pair(settings, replace(settings, kv_pages=64))


@pytest.fixture
def late(monkeypatch):
    """The prefill rank's transport, once its engine has been started."""
    transports, start = [], prefill_module.PagedPrefillEngine.start

    async def start_late(engine):
        engine._open_writer = lambda: transports.append(LateTransport()) or transports[-1]
        await start(engine)

    monkeypatch.setattr(prefill_module.PagedPrefillEngine, "start", start_late)
    return transports


async def test_who_runs_meanwhile_gets_right_tokens_and_the_pages_come_back(late, monkeypatch):
    """The stream stands all the time, and the lease has minutes to go."""
    async with pair_with(write_lease_s=600.0, fence_margin_s=0.5) as pair:
        watches, begin = [], pair.decode.begin_quarantine

        def note(seq, watch):
            watches.append(watch)
            begin(seq, watch)

        monkeypatch.setattr(pair.decode, "begin_quarantine", note)
        with pytest.raises(PeerFailed, match="connection reset"):
            await pair.generate(PROMPT)
        running = [asyncio.create_task(pair.generate(prompt, 16)) for prompt in OTHERS]
        await running[0]  # these take what pages there are, and take them again
        late[0].land()
        answers = await asyncio.gather(*running)
        late[0].land()
        books, source = await pair.decode.books(), await pair.prefill.books()

        (watch,) = watches
        watch._lease_end_s = 0.0  # fence time is over
        watch._news.set()
        async with asyncio.timeout(20):
            await asyncio.gather(*pair.decode._quarantines)
        assert [answer.tokens for answer in answers] == [continuation(prompt, 16) for prompt in OTHERS]
        assert books.quarantined >= 10
        assert source.locked + source.private >= 2
        assert (await pair.decode.books()).quarantined == 0
        assert (await pair.generate(PROMPT, 16)).tokens == continuation(PROMPT, 16)


async def test_everything_comes_back_by_itself_on_both_ranks(late, monkeypatch):
    monkeypatch.setattr(transfers_module, "_UNSETTLED_S", 0.1)
    async with pair_with(write_lease_s=0.3, fence_margin_s=0.1) as pair:
        with pytest.raises(PeerFailed, match="connection reset"):
            await pair.generate(PROMPT)
        await pair.assert_nothing_held()
        assert (await pair.generate(PROMPT, 5)).tokens == continuation(PROMPT, 5)


async def test_a_write_that_does_not_end_fails_its_request_and_keeps_its_pages(monkeypatch, caplog):
    """The request may go elsewhere at once; the pages wait for the write, and no fence ends that."""
    monkeypatch.setattr(_LandedWrite, "poll", lambda write: False)
    settings = replace(FAKE, write_lease_s=0.3, fence_margin_s=0.1)
    async with Pair(settings) as pair:
        transfers = pair.prefill.sender._table
        transfers._max_post_s = 1.0
        with pytest.raises(PeerFailed, match="a write has not ended in 1 s"):
            await pair.generate(PROMPT)
        transfers._max_post_s = 1000.0  # or it would be given up
        (quarantine,) = pair.decode._quarantines
        async with asyncio.timeout(20):
            while "kv_abort_unanswered" not in caplog.text:  # lease and margin are over
                await asyncio.sleep(0.01)
        assert not quarantine.done() and (await pair.decode.books()).quarantined >= 10
        with pytest.raises(PeerFailed, match="others have not ended yet"):
            await pair.generate(PROMPT)
        monkeypatch.undo()
        await pair.assert_nothing_held()
        assert (await pair.generate(PROMPT, 5)).tokens == continuation(PROMPT, 5)
