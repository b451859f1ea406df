import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from router.http.backend import DEADLINE_S, HI, FakeBackend, app_of, chat, finished, response

PROMPTS = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 5},
    "/generate": {"text": "Hi"},
}


async def test_a_client_that_leaves_closes_the_generation(subtests: pytest.Subtests) -> None:
    for path in PROMPTS:
        for stream in (False, True):
            for script in (["wait"], [response("He"), "wait"]):
                with subtests.test(path=path, stream=stream, num_responses=len(script) - 1):
                    await leave(path, stream, script)


async def leave(path: str, stream: bool, script: list[Any]) -> None:
    """Ask, leave where the script waits, and check that the generation is closed."""
    backend = FakeBackend(*script)
    body = json.dumps({**PROMPTS[path], "stream": stream}).encode()
    sent: list[dict[str, Any]] = []
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await backend.waiting.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    await asyncio.wait_for(app_of(backend)(scope, receive, send), DEADLINE_S)
    assert backend.closed.is_set()
    assert all(message.get("status") != 500 for message in sent)


async def test_a_client_that_leaves_without_reading_closes_the_generation() -> None:
    backend = FakeBackend(response("He"), response("llo"), finished())
    body = json.dumps({"prompt": "Hi", "stream": True}).encode()
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    blocked = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await blocked.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            blocked.set()
            await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    await asyncio.wait_for(app_of(backend)(scope, receive, send), DEADLINE_S)
    assert backend.closed.is_set()


async def test_a_client_that_stops_reading_is_not_waited_for_longer_than_its_request_may_take() -> None:
    backend = FakeBackend(response("He"), response("llo"), finished())
    backend.unread_s = 0.2
    body = json.dumps({"prompt": "Hi", "stream": True}).encode()
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return incoming.pop() if incoming else await asyncio.Future()

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    await asyncio.wait_for(app_of(backend)(scope, receive, send), DEADLINE_S)
    assert sent == ["http.response.start", "http.response.body"]
    assert backend.closed.is_set()


async def test_a_stream_that_never_begins_is_answered_when_its_time_is_over() -> None:
    backend = FakeBackend("wait")
    backend.unread_s = 0.2
    answer = await asyncio.wait_for(chat(backend, stream=True), DEADLINE_S)
    assert answer.status_code == 504
    assert backend.closed.is_set()


@asynccontextmanager
async def serving(backend: FakeBackend) -> AsyncIterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app_of(backend), log_level="critical", lifespan="off"))
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


async def test_a_closed_connection_closes_the_generation() -> None:
    backend = FakeBackend(response("He"), "wait")
    body = {"model": "tiny", "messages": HI, "stream": True}
    async with serving(backend) as url, httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as http:
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if "He" in line:
                    break
            assert not backend.closed.is_set()
        await asyncio.wait_for(backend.closed.wait(), DEADLINE_S)


async def test_a_stream_that_is_cancelled_by_the_server_closes_the_generation() -> None:
    backend = FakeBackend(response("He"), "wait")
    answering = asyncio.create_task(chat(backend, stream=True))
    await asyncio.wait_for(backend.waiting.wait(), DEADLINE_S)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert backend.closed.is_set()
