"""The ids of requests over HTTP: theirs where they can be, unique, and told in every answer."""

import asyncio
from typing import Any

import httpx
import pytest

from router.http.backend import DEADLINE_S, FakeBackend, client, finished, response
from services.values import errors
from services.values.request import MAX_ID_CHARS


async def ask(http: httpx.AsyncClient, request_id: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if request_id is None else {"x-request-id": request_id}
    return await http.post("/v1/completions", json={"prompt": "Hi", **body}, headers=headers)


async def test_an_id_of_the_clients_is_kept_where_it_will_do(subtests: pytest.Subtests) -> None:
    for stream in [False, True]:
        with subtests.test(stream=stream):
            backend = FakeBackend()
            async with client(backend) as http:
                for _ in range(2):  # it is free again
                    answer = await ask(http, "mine", stream=stream)
                    assert answer.headers.get_list("x-request-id") == ["mine"]
            assert [request.request_id for request in backend.requests] == ["mine", "mine"]
    for odd in [None, "", "a" * (MAX_ID_CHARS + 1), "a\tb"]:
        with subtests.test(odd=odd):
            backend = FakeBackend()
            async with client(backend) as http:
                answers = [await ask(http, odd) for _ in range(2)]
            told = [answer.headers["x-request-id"] for answer in answers]
            assert [answer.status_code for answer in answers] == [200, 200]
            assert told == [request.request_id for request in backend.requests]
            assert len(set(told)) == 2 and all(told)


async def test_an_id_that_is_taken_gets_a_suffix(subtests: pytest.Subtests) -> None:
    """A proxy gives all requests of a trace the same one."""
    for given in ["trace", "t" * MAX_ID_CHARS]:
        with subtests.test(given=given):
            backend = FakeBackend("wait")
            async with client(backend) as http:
                first = asyncio.create_task(ask(http, given))
                await asyncio.wait_for(backend.waiting.wait(), DEADLINE_S)
                backend.script = (finished(),)
                second = await ask(http, given)
                first.cancel()
                backend.running.add(("", "of gRPC"))
                third = await ask(http, "of gRPC")
            assert backend.requests[0].request_id == given
            for answer, taken in ((second, given), (third, "of gRPC")):
                told = answer.headers["x-request-id"]
                assert told != taken and told.startswith(taken[:100]) and len(told) <= MAX_ID_CHARS
                assert answer.status_code == 200
            assert len({request.request_id for request in backend.requests}) == 3


async def test_errors_tell_it_too(subtests: pytest.Subtests) -> None:
    for error in [errors.NoCapacity("full"), KeyError("a bug")]:
        for stream in [False, True]:
            with subtests.test(error=error, stream=stream):
                async with client(FakeBackend(error)) as http:
                    assert (await ask(http, "mine", stream=stream)).headers["x-request-id"] == "mine"
                    assert (await ask(http, "mine", prompt=None)).headers["x-request-id"] == "mine"
                    assert (await http.get("/nowhere", headers={"x-request-id": "mine"})).headers[
                        "x-request-id"
                    ] == "mine"
                    assert (await http.get("/v1/models")).headers["x-request-id"]
    with subtests.test("a stream that is cut off by an error had told it"):
        async with client(FakeBackend(response("He"), errors.PeerFailed("gone"))) as http:
            assert (await ask(http, "mine", stream=True)).headers["x-request-id"] == "mine"
