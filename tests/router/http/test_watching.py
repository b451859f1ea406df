"""The watch over HTTP: what is asked for, the events, and who leaves."""

import asyncio
import json
import time

from router.http.backend import DEADLINE_S, FakeBackend, app_of, client
from services.router.http import endpoints
from services.router.http.endpoints import _events
from services.router.watch_cluster import WatchPace
from services.values.errors import Forbidden, InvalidRequest, NoCapacity
from services.wire.isthmus.v1.common_pb2 import RankId
from services.wire.isthmus.v1.generation_pb2 import (
    RankStatus,
    RunningRequest,
    WatchClusterRequest,
    WatchClusterResponse,
)

PATH = "/v1/cluster/watch"


async def asked(query="", headers=None):
    backend = FakeBackend()
    backend.watch_script = [WatchClusterResponse()]
    async with client(backend) as http:
        answer = await http.get(PATH + query, headers=headers)
        assert answer.status_code == 200, answer.text
    (request,) = backend.watches
    return request


async def refused(query="", headers=None, *script):
    backend = FakeBackend()
    backend.watch_script = list(script)
    async with client(backend) as http:
        answer = await http.get(PATH + query, headers=headers)
    return answer.status_code, answer.json()["error"]


async def test_events_are_responses_with_the_protos_names():
    backend = FakeBackend()
    ranks = [RankStatus(rank=RankId(worker="d0", rank=1, generation=2**60), index_blocks=7)]
    backend.watch_script = [
        WatchClusterResponse(ranks=ranks, staleness_s=0.25),
        WatchClusterResponse(running=[RunningRequest(request_id="r", prompt_tokens=3)], num_running=1),
    ]
    async with client(backend) as http:
        answer = await http.get(PATH)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    told = [json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n") if event]
    assert told == [
        # A number of 64 bits is text: browsers' numbers hold 53.
        {
            "ranks": [{"rank": {"worker": "d0", "rank": 1, "generation": str(2**60)}, "index_blocks": "7"}],
            "staleness_s": 0.25,
        },
        {"running": [{"request_id": "r", "prompt_tokens": 3}], "num_running": 1},
    ]
    assert backend.closed.is_set()


async def test_the_query_is_the_request(subtests):
    for query, request_ in [
        ("", WatchClusterRequest()),
        ("?interval_s=0.5&tenant=a", WatchClusterRequest(interval_s=0.5, tenant="a")),
        ("?all_tenants=true", WatchClusterRequest(all_tenants=True)),
        ("?no_candidates=1", WatchClusterRequest(no_candidates=True)),
        ("?all_tenants=0&interval_s=2", WatchClusterRequest(interval_s=2)),
    ]:
        with subtests.test(query=query):
            assert await asked(query) == request_
    with subtests.test("a tenant may be named by the header as elsewhere"):
        headers = {"x-isthmus-tenant": "a"}
        for query in ("", "?tenant=a"):
            assert (await asked(query, headers)).tenant == "a"
        status, error = await refused("?tenant=b", headers)
        assert (status, error["param"]) == (400, "tenant")


async def test_what_is_refused_before_the_first_event(subtests):
    for query, param in [
        ("?interval_s=soon", "interval_s"),
        ("?all_tenants=yes", "all_tenants"),
        ("?every=1", "every"),
    ]:
        with subtests.test(query=query):
            status, error = await refused(query)
            assert (status, error["param"]) == (400, param) and error["message"].startswith(param)
    for error, status in [
        (NoCapacity("full"), 429),
        (Forbidden("no"), 403),
        (InvalidRequest("interval_s must be"), 400),
    ]:
        with subtests.test(error=error):
            assert (await refused("", None, error))[0] == status
    with subtests.test("what cannot be is named as well"):

        class Strict(FakeBackend):
            def follow(self, request):
                raise InvalidRequest("interval_s", "must be less")

        async with client(Strict()) as http:
            error = (await http.get(PATH)).json()["error"]
        assert (error["param"], error["message"]) == ("interval_s", "interval_s must be less")


async def test_who_only_looks_or_leaves_does_not_watch(subtests):
    with subtests.test("a head does not watch"):
        backend = FakeBackend()
        async with client(backend) as http:
            answer = await http.head(PATH)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        assert not backend.waiting.is_set()
    with subtests.test("a client that leaves ends its watch"):
        backend = FakeBackend()
        backend.watch_script = [WatchClusterResponse(), "wait"]

        async def receive():
            await backend.waiting.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            pass

        scope = {"type": "http", "method": "GET", "path": PATH, "headers": [], "query_string": b""}
        before = asyncio.all_tasks()
        await asyncio.wait_for(app_of(backend)(scope, receive, send), DEADLINE_S)
        assert backend.closed.is_set() and asyncio.all_tasks() == before


async def test_events_that_take_long_to_write_down_leave_the_loop_to_others(monkeypatch):
    """However many read them: together they have a tenth of it."""

    def slow(event, sse=endpoints.sse):
        time.sleep(0.005)
        return sse(event)

    monkeypatch.setattr(endpoints, "sse", slow)
    pace, began_s = WatchPace(), time.perf_counter()

    async def read():
        backend = FakeBackend()
        backend.watch_script = [WatchClusterResponse()] * 2
        return [event async for event in _events(backend.follow(WatchClusterRequest()), pace)]

    told = await asyncio.wait_for(asyncio.gather(read(), read()), DEADLINE_S)
    assert told == [[b"data: {}\n\n"] * 2] * 2
    assert time.perf_counter() - began_s > 3 * 0.005 / 0.1
