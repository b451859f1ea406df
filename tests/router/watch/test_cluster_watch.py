"""The streams of watchers, over requests that a test begins and ends."""

import asyncio
from contextlib import aclosing

import pytest
from prometheus_client import CollectorRegistry

from services.router.watch_cluster import Watch, WatchMetrics, WatchOptions
from services.values.errors import NoCapacity, Unavailable
from services.wire.isthmus.v1.common_pb2 import RankId
from services.wire.isthmus.v1.generation_pb2 import ListRanksResponse, RankStatus

DEADLINE_S = 10.0
SLOW = WatchOptions(60.0, None)  # nothing comes of itself within a test


class Ranks:
    """`told` is what ListRanks would say."""

    def __init__(self):
        self.told, self.num_asked = ListRanksResponse(staleness_s=0.5, degraded="etcd is away"), 0

    def set(self, **generations):
        del self.told.ranks[:]
        for worker, generation in generations.items():
            self.told.ranks.append(RankStatus(rank=RankId(worker=worker, generation=generation)))

    def __call__(self):
        self.num_asked += 1
        copy = ListRanksResponse()
        copy.CopyFrom(self.told)
        return copy


@pytest.fixture
def ranks():
    return Ranks()


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def watch(requests, ranks, clock, registry):
    return Watch(requests, ranks, WatchMetrics(registry), 3, lambda: clock[0], lambda: 1e9)


async def next_of(responses):
    return await asyncio.wait_for(anext(responses), DEADLINE_S)


async def test_a_finished_request_does_not_wait_for_the_interval(watch, requests, clock):
    async with aclosing(watch.responses(SLOW)) as responses:
        progress = requests.begin("r")
        first = await next_of(responses)
        assert [each.request_id for each in first.running] == ["r"] and first.num_running == 1
        assert not first.finished and (first.staleness_s, first.degraded) == (0.5, "etcd is away")
        clock[0] = 107.0
        requests.end(progress)
        second = await next_of(responses)
    assert not second.running
    (finished,) = second.finished
    assert (finished.request_id, finished.model, finished.outcome) == ("r", "m", "ok")
    assert (finished.duration_s, finished.ended_at_s) == (7.0, 1e9)


async def test_the_interval_brings_what_runs_and_of_many_the_oldest(subtests, watch, requests):
    with subtests.test("the interval brings what runs"):
        async with aclosing(watch.responses(WatchOptions(0.01, None))) as responses:
            assert (await next_of(responses)).num_running == 0
            progress = requests.begin("r")
            assert (await next_of(responses)).num_running == 1
            requests.end(progress)
    with subtests.test("of many that run the oldest are told"):
        for number in range(1_003):
            requests.begin(f"{number}")
        async with aclosing(watch.responses(SLOW)) as responses:
            response = await next_of(responses)
        assert [int(each.request_id) for each in response.running] == list(range(1_000))
        assert response.num_running == 1_003


async def test_ranks_are_told_once_and_as_they_change(watch, ranks, requests, clock):
    ranks.set(d0=1, d1=1)
    async with aclosing(watch.responses(WatchOptions(0.01, None))) as responses:

        async def told():
            clock[0] += 1.0
            response = await next_of(responses)
            return [
                [(rank.worker, rank.generation) for rank in told]
                for told in ((status.rank for status in response.ranks), response.gone)
            ]

        assert await told() == [[("d0", 1), ("d1", 1)], []]
        assert await told() == [[], []]
        ranks.set(d0=2, d1=1)  # another incarnation is a change
        assert await told() == [[("d0", 2)], []]
        ranks.set(d1=1)
        assert await told() == [[], [("d0", 2)]]


async def test_watchers_share_a_picture_of_the_ranks(watch, ranks, clock):
    streams = [watch.responses(WatchOptions(0.01, None)) for _ in range(3)]
    for responses in (*streams, *streams):
        await next_of(responses)
    assert ranks.num_asked == 1
    clock[0] += 0.1
    for responses in streams:
        await next_of(responses)
    assert ranks.num_asked == 2
    for responses in streams:
        await responses.aclose()


async def test_a_watcher_sees_its_tenants_requests_alone(watch, requests):
    a, b = (watch.responses(WatchOptions(60.0, tenant)) for tenant in "ab")
    everybodys = watch.responses(SLOW)
    both = [requests.begin(tenant, tenant=tenant) for tenant in "ab"]
    names = []
    for responses in (a, b, everybodys):
        names.append([each.request_id for each in (await next_of(responses)).running])
    assert names == [["a"], ["b"], ["a", "b"]]
    for progress in both:
        requests.end(progress)
    names = []
    for responses in (a, b, everybodys):
        names.append([each.request_id for each in (await next_of(responses)).finished])
        await responses.aclose()
    assert names == [["a"], ["b"], ["a", "b"]]


async def test_prices_are_written_down_only_where_somebody_wants_them(watch, requests, placed):
    async def told(*streams):
        for responses in streams:
            await next_of(responses)
        progress = requests.begin("r")
        progress.placed = placed()
        requests.end(progress)
        responses = [(await next_of(responses)).finished[0] for responses in streams]
        for each in streams:
            await each.aclose()
        return [bool(finished.candidates) for finished in responses]

    plain = WatchOptions(60.0, None, wants_candidates=False)
    assert await told(watch.responses(plain)) == [False]
    assert await told(watch.responses(SLOW)) == [True]
    assert all(await told(watch.responses(plain), watch.responses(SLOW)))


async def test_who_does_not_read_loses_the_oldest_and_is_told_how_many(watch, requests, registry):
    slow, quick = watch.responses(SLOW), watch.responses(SLOW)
    for responses in (slow, quick):
        await next_of(responses)
    for number in range(300):
        requests.end(requests.begin(f"{number}"))
        if number % 100 == 99:
            assert len((await next_of(quick)).finished) == 100
    late = await next_of(slow)
    assert [int(each.request_id) for each in late.finished] == list(range(44, 300))
    assert late.dropped == 44
    assert registry.get_sample_value("isthmus_watch_dropped_total") == 44
    for responses in (slow, quick):
        await responses.aclose()


async def test_while_nobody_watches_nothing_is_made_of_a_request(watch, requests, ranks):
    requests.end(requests.begin("r"))
    assert requests.listeners == [] and ranks.num_asked == 0
    first, second = watch.responses(SLOW), watch.responses(SLOW)
    for responses in (first, second):
        await next_of(responses)
    assert len(requests.listeners) == 1
    await first.aclose()
    assert len(requests.listeners) == 1
    await second.aclose()
    assert requests.listeners == []


async def test_one_too_many_is_refused_until_another_leaves(watch, registry):
    streams = [watch.responses(SLOW) for _ in range(3)]
    for responses in streams:
        await next_of(responses)
    assert registry.get_sample_value("isthmus_watchers") == 3
    with pytest.raises(NoCapacity, match="3 watch this router already"):
        await next_of(watch.responses(SLOW))
    assert registry.get_sample_value("isthmus_watchers_refused_total") == 1
    await streams.pop().aclose()
    streams.append(watch.responses(SLOW))
    await next_of(streams[-1])
    for responses in streams:
        await responses.aclose()
    assert registry.get_sample_value("isthmus_watchers") == 0


async def test_a_router_that_stops_ends_its_watches(watch, requests):
    responses = watch.responses(SLOW)
    await next_of(responses)
    waiting = asyncio.create_task(next_of(responses))
    await asyncio.sleep(0)
    progress = requests.begin("r")
    requests.end(progress)
    watch.close()
    assert [each.request_id for each in (await waiting).finished] == ["r"]
    with pytest.raises(StopAsyncIteration):
        await next_of(responses)
    assert requests.listeners == []
    with pytest.raises(Unavailable, match="stopping"):
        await next_of(watch.responses(SLOW))


async def test_a_watcher_that_is_cancelled_is_gone(watch, requests, registry):
    async def follow():
        async with aclosing(watch.responses(SLOW)) as responses:
            async for _ in responses:
                pass

    following = asyncio.create_task(follow())
    while not requests.listeners:
        await asyncio.sleep(0)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert requests.listeners == [] and registry.get_sample_value("isthmus_watchers") == 0
