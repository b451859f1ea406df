"""What a rank that leaves offers to others, and when it stops."""

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from services.rank import intake as intake_module
from services.rank.intake import Intake, Operations
from services.rank.leaving import Leaving
from services.rank.main import OpenRank
from services.rank.rank_metrics import HandOverMetrics
from services.values.errors import Unavailable
from services.values.rank import Generation, RankAddress, RankId
from services.wire.isthmus.v1 import rank_pb2

RANK = RankId("d", 0, Generation(7))


class Listing:
    """It counts how often it is asked what is cached, and answers once it is let."""

    def __init__(self):
        self.asked, self.let = 0, asyncio.Event()

    async def idle_prefixes(self):
        self.asked += 1
        await self.let.wait()
        return []


@pytest.fixture
def rank(monkeypatch):
    async def soon():
        pass

    async def told(_draining):
        return True

    monkeypatch.setattr(intake_module, "_be_noticed", soon)
    intake, listing = Intake(RANK), Listing()
    intake.tell = told
    leaving = Leaving(listing, intake, 5.0, None, HandOverMetrics(CollectorRegistry()))
    leaving.knows(RankAddress(RANK, "127.0.0.1:1"), told)
    return SimpleNamespace(intake=intake, listing=listing, leaving=leaving)


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("stopped", [False, True])
async def test_what_ends_in_the_first_round_is_offered_in_a_second(rank, stopped):
    rank.intake.took()
    rank.leaving.begin()
    stop = asyncio.create_task(rank.intake.stop(at_once=False) if stopped else rank.intake.drain())
    await until(lambda: rank.listing.asked)
    rank.intake.left()
    await stop
    ended = asyncio.create_task(rank.leaving.ended(nothing_more_ends=stopped))
    await asyncio.sleep(0)
    rank.listing.let.set()
    await ended
    assert rank.listing.asked == 2


async def test_where_nothing_ran_there_is_one_round(rank):
    rank.listing.let.set()
    rank.leaving.begin()
    await rank.intake.drain()
    await rank.leaving.ended()
    assert rank.listing.asked == 1


async def test_one_that_is_being_stopped_goes_on_though_somebody_undrains_it(rank):
    rank.leaving.begin()
    await rank.intake.stop(at_once=False)
    operations = Operations(rank.intake, rank.listing, rank.leaving)
    with pytest.raises(Unavailable, match="is being stopped"):
        await operations.Undrain(rank_pb2.UndrainRequest(generation=7), None)
    assert rank.leaving.told() is not None and not rank.leaving.told().over
    rank.listing.let.set()
    await rank.leaving.ended(nothing_more_ends=True)
    assert rank.leaving.told().over


@pytest.mark.parametrize("fails", [False, True])
async def test_an_engine_that_answers_no_more_holds_up_no_exit(rank, fails):
    """It had a hand-over begun, and crashed."""
    failed = asyncio.Event()
    opened = OpenRank(None, None, None, rank.intake, rank.leaving, 0, failed)
    rank.leaving.begin(None if fails else 0.05)
    await until(lambda: rank.listing.asked)
    if fails:
        failed.set()
    async with asyncio.timeout(3):
        await opened.drain(1.0)
