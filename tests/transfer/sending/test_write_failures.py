"""These tests show when a rank on which no write lands ends itself, and when it must not."""

import asyncio

import pytest

from services.transfer.sending import receivers as failures_module
from services.transfer.sending.receivers import MAX_FAILURES, MIN_SPAN_S, TransportBroken
from services.transfer.transport import Unsettled
from services.values.rank import Generation, RankId, TransferId
from transfer.receiving.link_pair import Pair
from transfer.sending.sending_rank import DECODE, OTHER_DECODE, Rank

LIVES = [RankId("decode", 0, Generation(20 + life)) for life in range(20)]


class Transfers(Rank):
    """Transfers to any decode rank, each with an id of its own."""

    last_transfer = 0

    def __init__(self):
        super().__init__()
        self.link_up(2, OTHER_DECODE)

    def begin(self, link_id=1, decode=DECODE):
        self.last_transfer += 1
        transfer_id = TransferId(self.last_transfer)
        self.ticket(transfer_id, link_id=link_id, until_s=self.now_s + 1000)
        self.request(transfer_id, decode=decode)
        self.pages(0, 10, transfer_id)
        self.turn()

    def fail(self, link_id=1, decode=DECODE, after_s=10.0):
        self.now_s += after_s
        self.transport.fails_posts = Unsettled
        self.begin(link_id, decode)
        self.transport.fails_posts = None

    def land(self, link_id=1, decode=DECODE):
        self.begin(link_id, decode)
        self.transport.land()
        self.turn()


@pytest.fixture
def rank():
    return Transfers()


def test_a_rank_that_cannot_write_ends(subtests):
    with subtests.test("a rank that cannot write to two others ends"):
        # They are there, and ask again and again.
        rank = Transfers()
        with pytest.raises(TransportBroken, match="tried decode/0, decode/1"):
            for _ in range(MAX_FAILURES):
                rank.fail(after_s=MIN_SPAN_S / 4)
                rank.fail(2, OTHER_DECODE, after_s=0)
        rank.turn()  # what is left to be done at the end is done

    with subtests.test("with nobody to compare with the rank ends"):
        rank = Transfers()
        rank.transfers.link_lost(2)
        with pytest.raises(TransportBroken):
            for _ in range(MAX_FAILURES + 3):
                rank.fail(after_s=MIN_SPAN_S / 4)

    for others in [True, False]:
        with subtests.test("writes that do not end count each time they turn somebody away", others=others):
            rank = Transfers()
            if not others:
                rank.transfers.link_lost(2)
            rank.begin()
            rank.now_s += 30.0
            rank.turn()
            rank.now_s += MIN_SPAN_S

            def ask(rank=rank):
                for _ in range(MAX_FAILURES):
                    rank.begin()

            if others:
                ask()
            else:
                with pytest.raises(TransportBroken):
                    ask()


def test_what_proves_nothing_against_the_transport_ends_nobody(subtests):
    with subtests.test("one decode rank alone that cannot be reached ends nobody"):
        rank = Transfers()
        for _ in range(50):
            rank.fail()

    with subtests.test("a failure of anothers long ago does not make it two"):
        rank = Transfers()
        rank.fail(2, OTHER_DECODE)
        for _ in range(50):
            rank.fail()

    with subtests.test("what lands proves the transport"):
        rank = Transfers()
        for _ in range(20):
            rank.fail()
            rank.fail(2, OTHER_DECODE)
            rank.fail()
            rank.land(2, OTHER_DECODE)

    with subtests.test("a network that is away for a moment ends nobody"):
        rank = Transfers()
        for _ in range(20):
            rank.fail(after_s=MIN_SPAN_S / 50)
            rank.fail(2, OTHER_DECODE, after_s=MIN_SPAN_S / 50)
        rank.land()


def test_decode_ranks_that_die_end_nobody(subtests):
    for others in [True, False]:
        with subtests.test("a decode rank that dies with many writes under way ends nobody", others=others):
            rank = Transfers()
            if not others:
                rank.transfers.link_lost(2)
            for _ in range(20):
                rank.begin()
            for write in rank.transport.writes:
                write.failure, write.unsettled = "connection reset", True
                rank.now_s += 10.0  # it takes its time
                rank.turn()
            rank.transfers.link_lost(1)
            rank.now_s += MIN_SPAN_S
            rank.turn()

    with subtests.test("a decode rank that dies again and again ends nobody"):
        rank = Transfers()
        rank.transfers.link_lost(1)
        rank.transfers.link_lost(2)
        for link_id, life in enumerate(LIVES, start=3):
            rank.link_up(link_id, life)
            rank.fail(link_id, life, after_s=MIN_SPAN_S)
            rank.transfers.link_lost(link_id)

    with subtests.test("two decode ranks that die together end nobody"):
        # Their host is gone; what was under way fails, and their streams a little later.
        rank = Transfers()
        for _ in range(10):
            rank.begin()
            rank.begin(2, OTHER_DECODE)
        for write in rank.transport.writes:
            write.failure = "connection reset"
            rank.turn()
        rank.now_s += MIN_SPAN_S
        rank.turn()
        rank.transfers.link_lost(1)
        rank.transfers.link_lost(2)
        rank.turn()


async def test_a_sender_whose_transport_is_broken_says_so_and_ends(make_pool, monkeypatch):
    monkeypatch.setattr(failures_module, "MIN_SPAN_S", 0.0)
    pair = Pair(make_pool)
    prefill = pair.prefill()
    crashed, loop = asyncio.get_running_loop().create_future(), asyncio.get_running_loop()
    prefill.sender._on_crash = lambda error: loop.call_soon_threadsafe(crashed.set_result, error)
    link = await pair.links.link(await prefill.listen())
    prefill.transport.fails = True
    ends = []
    for _ in range(MAX_FAILURES):
        watch = pair.send_ticket(link, (1, 2, 3))
        ends.append(prefill.request(watch.transfer_id, 10, (1, 2, 3)))
        with pytest.raises(Exception, match="the network is down"):
            await watch.outcome()
    async with asyncio.timeout(20):
        assert isinstance(await crashed, TransportBroken)
        await asyncio.gather(*ends)  # nobody waits for it for ever
    await pair.close()
