"""These tests show when the headers of a stream go out, and what is sent while there is nothing to tell."""

import asyncio
import json
from typing import Any

import pytest

from router.http.backend import DEADLINE_S, HI, FakeBackend, app_of, finished, response
from services.router.http import event_stream
from services.router.http.event_stream import EventStream
from services.values.errors import NoCapacity, Unavailable
from services.wire.isthmus.v1.generation_pb2 import GenerateResponse, WatchClusterResponse

BODIES = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 5},
    "/generate": {"text": "Hi"},
}
COMMENT = ": at it\n\n"
PING = 'event: ping\ndata: {"type":"ping"}\n\n'


class Stream:
    """One stream as its client gets it, who leaves when it has had `enough` events."""

    def __init__(self, enough: int = 1000) -> None:
        self.sent: list[str] = []
        self._enough = enough
        self._has_enough = asyncio.Event()

    async def read(self, backend: FakeBackend, path: str) -> list[str]:
        """The status, and the events."""
        is_watch = path not in BODIES
        body = b"" if is_watch else json.dumps({**BODIES[path], "stream": True}).encode()
        self._incoming = [{"type": "http.request", "body": body, "more_body": False}]
        method = "GET" if is_watch else "POST"
        scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
        await asyncio.wait_for(app_of(backend)(scope, self._receive, self._send), DEADLINE_S)
        return self.sent

    async def _receive(self) -> dict[str, Any]:
        if self._incoming:
            return self._incoming.pop()
        await self._has_enough.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.sent.append(str(message["status"]))
        elif message["body"]:
            self.sent.append(message["body"].decode())
        if len(self.sent) > self._enough:
            self._has_enough.set()


@pytest.fixture
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "HEADERS_S", 0.02)
    monkeypatch.setattr(event_stream, "SILENCE_S", 0.02)


@pytest.mark.long
@pytest.mark.usefixtures("in_a_hurry")
async def test_a_stream_that_waits_has_headers_and_pings(subtests: pytest.Subtests) -> None:
    for path in [*BODIES, "/v1/cluster/watch"]:
        for begins in [False, True]:
            with subtests.test(path=path, begins=begins):
                backend = FakeBackend(*[response("He", [72])] * begins, "wait")
                backend.watch_script = [*[WatchClusterResponse()] * begins, "wait"]
                sent = await Stream(enough=7).read(backend, path)
                assert sent[0] == "200"
                assert sent[-2:] == [PING if path == "/v1/messages" else COMMENT] * 2
                assert backend.closed.is_set()


@pytest.mark.usefixtures("in_a_hurry")
async def test_a_stream_in_which_little_is_told_has_pings_between() -> None:
    """Responses come, but while a call is written they have nothing for the client."""

    class Quiet(FakeBackend):
        async def play(self, script: Any) -> Any:
            for _ in range(6):
                await asyncio.sleep(0.02)
                yield GenerateResponse(request_id="r1")
            yield finished("c")

    sent = await Stream().read(Quiet(), "/v1/completions")
    assert COMMENT in sent and sent[-1] == "data: [DONE]\n\n"


class Late(FakeBackend):
    async def play(self, script: Any) -> Any:
        await asyncio.sleep(0.1)
        raise Unavailable("all are gone")
        yield


@pytest.mark.usefixtures("in_a_hurry")
async def test_what_fails_behind_the_headers_is_an_event(subtests: pytest.Subtests) -> None:
    for path in BODIES:
        with subtests.test(path=path):
            sent = await Stream().read(Late(), path)
            assert sent[0] == "200" and "all are gone" in sent[-1]


async def test_what_fails_at_once_has_its_status(subtests: pytest.Subtests) -> None:
    for path in BODIES:
        with subtests.test(path=path):
            sent = await Stream().read(FakeBackend(Unavailable("all are gone")), path)
            assert sent[0] == "503" and "all are gone" in sent[1]


async def test_nothing_is_added_to_a_stream_that_goes_on() -> None:
    sent = await Stream().read(FakeBackend(response("a"), response("b"), finished()), "/v1/completions")
    assert COMMENT not in sent and sent[-1] == "data: [DONE]\n\n"


@pytest.mark.usefixtures("in_a_hurry")
async def test_a_client_that_does_not_read_is_sent_no_pings() -> None:
    sent: list[str] = []

    async def events() -> Any:
        yield b"data: 1\n\n"

    async def send(message: Any) -> None:
        sent.append(message.get("body", b"").decode())
        if message.get("body"):
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.sleep(0.2)
        return {"type": "http.disconnect"}

    await asyncio.wait_for(EventStream(events())({"type": "http"}, receive, send), DEADLINE_S)
    assert sent == ["", "data: 1\n\n"]


@pytest.mark.usefixtures("in_a_hurry")
async def test_no_ping_comes_behind_the_last_message() -> None:
    ended: list[bool] = []

    async def events() -> Any:
        yield b"data: 1\n\n"

    async def send(message: Any) -> None:
        assert not ended, "the answer has ended"
        if message["type"] == "http.response.body" and not message.get("more_body"):
            ended.append(True)
            await asyncio.sleep(0.2)

    async def receive() -> Any:
        await asyncio.Event().wait()

    await asyncio.wait_for(EventStream(events())({"type": "http"}, receive, send), DEADLINE_S)
    assert ended


async def test_an_error_of_the_connection_is_not_taken_for_a_client_that_left() -> None:
    async def receive() -> Any:
        raise NoCapacity("there is no room")

    with pytest.raises(NoCapacity):
        await event_stream.until_disconnect(receive, asyncio.sleep(10))
