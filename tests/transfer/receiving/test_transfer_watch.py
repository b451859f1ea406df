"""These tests show when a decode rank may use pages again, by a clock of ours: after the writer's word, or
the fence."""

import asyncio

import pytest

from services.transfer.receiving.transfer_watch import TransferWatch
from services.values.errors import PeerFailed
from services.values.rank import Generation, RankAddress, RankId, TransferId
from transfer.receiving.link_pair import FakeLink


async def check_news(news):
    link, now_s, sought = FakeLink(), 0.0, []
    writer = RankAddress(RankId("prefill", 0, Generation(7)), "nowhere:1")
    watch = TransferWatch(TransferId(5), writer, link, 20_000.0, lambda: now_s, sought.append)
    stopped = asyncio.create_task(watch.writer_stopped(fence_s=1.0))
    await asyncio.sleep(0)
    if news == "acknowledged":
        watch.on_last_word("the transfer was aborted")
    else:
        watch.on_lost()
        if news == "lost again":
            await asyncio.sleep(0)
            watch.on_linked(link)
            await asyncio.sleep(0)
            now_s = 30_000.0
            watch.on_lost()
            assert link.asked == [5, 5]
        assert sought and not stopped.done()
        now_s += 20_001.0
    async with asyncio.timeout(10):
        await stopped


async def test_who_awaits_a_writers_end_hears_at_once_of_a_change(subtests):
    """The lease has hours to go."""
    for news in ("acknowledged", "lost", "lost again"):
        with subtests.test(news=news):
            await check_news(news)


async def check_fence(word):
    """The fence holds also while the stream stands; the transfer itself has failed at once."""
    link, now_s, sought = FakeLink(), 0.0, []
    writer = RankAddress(RankId("prefill", 0, Generation(7)), "nowhere:1")
    watch = TransferWatch(TransferId(5), writer, link, 10.0, lambda: now_s, sought.append)
    if word == "acknowledged":
        watch.abort()
    watch.on_unsettled("cut")
    with pytest.raises(PeerFailed, match="cut"):
        await watch.outcome()
    watch.abort()
    assert link.asked == [5] * (word == "acknowledged")  # there is nothing to ask any more
    for now_s in (0.0, 10.0, 14.9, 15.0):
        assert watch.is_over(fence_s=5.0) == (now_s == 15.0)
    await watch.writer_stopped(fence_s=5.0)
    assert sought == []


async def test_a_lease_and_the_fence_behind_it(subtests):
    for word in ("failed", "acknowledged"):
        with subtests.test("pages wait for the fence after a word that leaves the end open", word=word):
            await check_fence(word)

    with subtests.test("a lease grows by renewals and never shrinks"):
        now_s = 0.0
        writer = RankAddress(RankId("prefill", 0, Generation(7)), "nowhere:1")
        watch = TransferWatch(TransferId(5), writer, FakeLink(), 10.0, lambda: now_s, lambda watch: None)
        for until_s in (50.0, 20.0):  # what was granted stays granted
            watch.renew(until_s)
        watch.on_lost()
        watch.abort()
        for now_s in (10.0, 49.9, 50.0):
            assert watch.is_over(fence_s=0.0) == (now_s == 50.0)

    with subtests.test("a word that comes after the lease has the fence before it still"):
        now_s = 100.0
        writer = RankAddress(RankId("prefill", 0, Generation(7)), "nowhere:1")
        watch = TransferWatch(TransferId(5), writer, FakeLink(), 10.0, lambda: now_s, lambda watch: None)
        watch.on_unsettled("cut")
        for now_s in (104.9, 105.0):
            assert watch.is_over(fence_s=5.0) == (now_s == 105.0)
