"""These tests show what a rank that leaves offers to others, and when it stops."""

import asyncio
from types import SimpleNamespace

import grpc
import pytest
from prometheus_client import CollectorRegistry

from services.kv.hand_over import IdlePrefix
from services.rank import intake as intake_module
from services.rank import leaving as leaving_module
from services.rank.intake import Intake, Operations, RankAdapters
from services.rank.leaving import Leaving
from services.rank.rank_metrics import DigestMetrics, HandOverMetrics
from services.rank.rank_role import OpenRank
from services.rank.role_change import RoleChange
from services.values.errors import Unavailable
from services.values.rank import Generation, RankAddress, RankId, Role
from services.wire.isthmus.v1 import rank_pb2, rank_pb2_grpc

RANK = RankId("d", 0, Generation(7))


def metrics_of(registry):
    return HandOverMetrics(registry, DigestMetrics(registry))


class Listing:
    """It counts how often it is asked what is cached, and answers once it is let."""

    def __init__(self, *prefixes):
        self.asked, self.let, self.prefixes, self.spelled = 0, asyncio.Event(), list(prefixes), 0
        self.kept_after = []  # what was asked before its tier was to store all

    async def idle_prefixes(self):
        self.asked += 1
        await self.let.wait()
        return self.prefixes

    async def spell(self, prefix):
        self.spelled += 1
        return tuple(range(prefix.tokens))

    async def keep(self, within_s):
        assert within_s >= 2.0
        self.kept_after.append(self.asked)


@pytest.fixture
def rank(monkeypatch):
    async def soon():
        pass

    async def told(_draining):
        return True

    monkeypatch.setattr(intake_module, "_be_noticed", soon)
    intake, listing = Intake(RANK), Listing()
    intake.tell = told
    leaving = Leaving(listing, intake, 5.0, None, metrics_of(CollectorRegistry()))
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
    assert rank.listing.asked == 2 and rank.listing.kept_after == [2]


async def test_where_nothing_ran_there_is_one_round(rank):
    rank.listing.let.set()
    rank.leaving.begin()
    await rank.intake.drain()
    await rank.leaving.ended()
    assert rank.listing.asked == 1 and rank.listing.kept_after == [1]


async def test_what_nobody_can_take_is_kept_all_the_same(rank, caplog):
    async def away():
        raise Unavailable("etcd is away")

    rank.leaving.knows(RankAddress(RANK, "127.0.0.1:1"), away)
    rank.listing.prefixes = [IdlePrefix(None, "", 8, 0, 1.0)]
    rank.listing.let.set()
    rank.leaving.begin()
    await rank.leaving.ended()
    assert rank.listing.kept_after == [1] and "etcd is away" in caplog.text


async def test_one_that_is_being_stopped_goes_on_though_somebody_undrains_it(rank):
    rank.leaving.begin()
    await rank.intake.stop(at_once=False)
    operations = Operations(rank.intake, rank.listing, rank.leaving, RankAdapters(None, None), None)
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
    role_change = RoleChange(Role.DECODE, rank.intake, rank.leaving, RankAdapters(None, None), None)
    opened = OpenRank(None, None, None, rank.intake, rank.leaving, role_change, 0, failed)
    rank.leaving.begin(None if fails else 0.05)
    await until(lambda: rank.listing.asked)
    if fails:
        failed.set()
    async with asyncio.timeout(3):
        await opened.drain(1.0)


class Successor(rank_pb2_grpc.RankServicer):
    """It is busy so many times, then takes what it is offered; or it never answers."""

    def __init__(self, busy=0, answers=True):
        self.busy, self.answers, self.asked = busy, answers, []

    async def TakeOver(self, request, context):
        self.asked.append(request)
        if not self.answers:
            await asyncio.Event().wait()
        if len(self.asked) <= self.busy:
            return rank_pb2.TakeOverResponse(refused="busy")
        return rank_pb2.TakeOverResponse(held_tokens=len(request.token_ids) // 4, room_tokens=100)


@pytest.fixture
async def among(rank):
    """Call it with those that may take over what the rank has."""
    servers = []

    async def start(*successors):
        ranks = []
        for number, successor in enumerate(successors):
            server = grpc.aio.server()
            rank_pb2_grpc.add_RankServicer_to_server(successor, server)
            endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            servers.append(server)
            address = RankAddress(RankId(f"s{number}", 0, Generation(1)), endpoint)
            ranks.append(SimpleNamespace(address=address))

        async def listed():
            return ranks

        rank.listing.prefixes = [IdlePrefix(object(), "", 64, 0, float(age)) for age in range(2)]
        rank.listing.let.set()
        rank.leaving.knows(RankAddress(RANK, "127.0.0.1:1"), listed)

    yield start
    for server in servers:
        await server.stop(None)


async def test_a_prefix_is_spelled_once_however_busy_its_successor_is(rank, among):
    successor = Successor(busy=4)
    await among(successor)
    rank.leaving.begin()
    await rank.leaving.ended()
    assert len(successor.asked) == 6 and rank.listing.spelled == 2
    assert rank.leaving.told().handed_tokens == 128


async def test_a_successor_that_is_stopped_leaves_time_for_another(rank, among, monkeypatch):
    monkeypatch.setattr(leaving_module, "_LEAST_OFFER_S", 0.1)
    monkeypatch.setattr(leaving_module, "_ANSWER_S", 0.1)
    stopped, successor = Successor(answers=False), Successor()
    await among(stopped, successor)
    rank.leaving.begin(2.0)
    await rank.leaving.ended()
    assert stopped.asked and len(successor.asked) == 2
    assert (rank.leaving.told().handed_tokens, rank.leaving.told().left_tokens) == (128, 0)


async def test_what_an_operator_asked_for_holds_at_the_stop(rank, among):
    await among(Successor())
    rank.leaving.begin(0.0)
    rank.leaving.begin()
    assert rank.leaving.told() is None
    rank.leaving.undo()
    rank.leaving.begin()
    await rank.leaving.ended()
    assert rank.leaving.told().handed_tokens == 128


@pytest.mark.parametrize(("holds", "moved"), [(100, 1), (99, 0)])
async def test_what_runs_is_moved_where_another_rank_holds_as_much(rank, among, holds, moved):
    await among(Successor())
    (successor,) = await rank.leaving._successors()
    successor.max_context_tokens = holds
    leaving = Leaving(
        *(rank.listing, rank.intake, 5.0, None, metrics_of(CollectorRegistry())),
        moves=True,
    )
    leaving.knows(RankAddress(RANK, "127.0.0.1:1"), rank.leaving._successors, 100)
    moves = []
    rank.intake.move_all = lambda: (moves.append(rank.intake.draining), rank.intake.left())
    rank.intake.took()
    draining = asyncio.create_task(rank.intake.drain())
    await until(lambda: rank.intake.draining)
    leaving.begin()
    if not moved:
        await until(lambda: leaving.told().handed_tokens)
        rank.intake.left()
    await asyncio.gather(draining, leaving.ended())
    assert moves == [True] * moved
