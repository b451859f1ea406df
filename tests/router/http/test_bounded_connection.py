"""A real uvicorn on loopback, and clients that are slow, silent, many or ambiguous."""

import asyncio
import json
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import uvicorn

from router.http.backend import FakeBackend, app_of, finished, response
from services.router.http.bounded_connection import BoundedConnection, HttpBounds

DEADLINE_S = 20.0
LONG_S = 1000.0
HEALTH = b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n"
BODY = json.dumps({"prompt": "Hi"}).encode()


def post(body=BODY, *, length=None, more=b""):
    length = len(body) if length is None else length
    head = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n%b\r\n" % (length, more)
    return head + body


async def until(condition):
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


class Front:
    def __init__(self, backend, port, server, told):
        self.backend, self.port, self.server, self.told = backend, port, server, told
        self.clients = []

    @property
    def num_connections(self):
        return len(self.server.server_state.connections)

    async def open(self):
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        return client

    async def connect(self):
        """A connection that the server knows of."""
        before = self.num_connections
        client = await self.open()
        await until(lambda: self.num_connections > before)
        return client

    async def until_left(self, num_connections):
        await until(lambda: self.num_connections <= num_connections)


class Client:
    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    async def answer(self, request=b""):
        """(status, headers, body) of the next answer."""
        self.writer.write(request)
        async with asyncio.timeout(DEADLINE_S):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
            body = await self.reader.readexactly(int(headers["content-length"]))
        return int(lines[0].split()[1]), headers, json.loads(body)

    async def is_closed(self):
        async with asyncio.timeout(DEADLINE_S):
            return await self.reader.read() == b""


@asynccontextmanager
async def serving(
    header_s=LONG_S, body_s=LONG_S, max_connections=100, keep_alive_s=LONG_S, surplus=64, **app
):
    backend, told = FakeBackend(), []
    config = uvicorn.Config(
        app_of(backend, **app),
        http=partial(BoundedConnection, HttpBounds(header_s, body_s, max_connections, surplus), told.append),
        port=0,
        log_config=None,
        lifespan="off",
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    server.capture_signals = lambda: asyncio.timeout(None)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    (listener,) = server.servers[0].sockets
    front = Front(backend, listener.getsockname()[1], server, told)
    try:
        yield front
    finally:
        for client in front.clients:
            client.writer.close()
        await server.shutdown()


@pytest.mark.long
async def test_what_does_not_come_to_an_end_is_given_up(subtests, caplog):
    for begun in [b"G", HEALTH[:-2], post()[:30]]:
        with subtests.test(begun=begun):
            async with serving(header_s=0.05) as front:
                client = await front.connect()
                status, headers, body = await client.answer(begun)
                assert (status, headers["connection"]) == (408, "close")
                assert body["error"]["message"] == "the request's head did not come within 0.05 s"
                assert await client.is_closed()
                assert front.told == ["slow_head"] and front.backend.requests == []
    for begun in [post(length=50), post(b"", length=1)]:
        with subtests.test(begun=begun):
            async with serving(body_s=0.05) as front:
                client = await front.connect()
                status, headers, body = await client.answer(begun)
                assert (status, headers["connection"]) == (408, "close")
                assert body["error"]["message"] == "the request's body did not come within 0.05 s"
                assert await client.is_closed()
                assert front.told == ["slow_body"] and front.backend.requests == []
                await front.until_left(0)
            assert not caplog.records
    with subtests.test("a body that nobody waits for is given up too"):
        async with serving(body_s=0.05, max_body_bytes=lambda: 10) as front:
            client = await front.connect()
            assert (await client.answer(post(b"x" * 20, length=1 << 30)))[0] == 413
            assert await client.is_closed()
            assert front.told == ["slow_body"]


async def test_drops_do_not_keep_a_connection(caplog):
    """A byte now and then is no sign of incarnation."""
    async with serving(header_s=0.2) as front:
        client = await front.connect()
        async with asyncio.timeout(DEADLINE_S):
            while not front.told:
                client.writer.write(b"x")
                await asyncio.sleep(0.01)
        await front.until_left(0)
        assert front.told == ["slow_head"]
    assert not caplog.records


async def test_a_connection_that_sends_nothing_is_idle_from_the_start():
    async with serving(keep_alive_s=0.05) as front:
        new, used = await front.connect(), await front.connect()
        assert (await used.answer(HEALTH))[0] == 200
        assert await new.is_closed() and await used.is_closed()
        assert front.told == []


async def test_time_is_counted_for_each_request_anew():
    async with serving() as front:
        client, ends = await front.connect(), []
        (connection,) = front.server.server_state.connections

        async def send(request, part):
            client.writer.write(request)
            await until(lambda: (connection._reading or ("",))[0] == part)
            ends.append(connection._timer.when())

        whole = post()
        await send(whole[:20], "head")
        await send(whole[20:-5], "body")
        assert (await client.answer(whole[-5:] + HEALTH[:7]))[0] == 200  # and the beginning of another
        await send(HEALTH[7:9], "head")
        assert (await client.answer(HEALTH[9:]))[0] == 200
        await until(lambda: connection._timer is None)
        await send(whole[:-5], "body")
        assert (await client.answer(whole[-5:]))[0] == 200
        assert ends == sorted(set(ends)) and front.told == []


async def test_requests_that_come_together_are_answered_in_order():
    async with serving(header_s=LONG_S) as front:
        client = await front.connect()
        client.writer.write(post() + HEALTH + post(b"{"))
        assert [(await client.answer())[0] for _ in range(3)] == [200, 200, 400]
        assert (await client.answer(b"no HTTP\r\n\r\n"))[0] == 400
        assert await client.is_closed()


async def test_one_connection_more_than_there_may_be_is_refused_politely_and_soon(subtests, caplog):
    with subtests.test("one connection more than there may be is refused politely"):
        async with serving(max_connections=2) as front:
            first, second, third = [await front.connect() for _ in range(3)]
            status, headers, body = await third.answer(post())
            assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
            assert body["error"]["type"] == "unavailable_error"
            assert await third.is_closed()
            assert front.told == ["full"] and front.backend.requests == []
            assert (await first.answer(post()))[0] == (await second.answer(HEALTH))[0] == 200
            waiting = await front.connect()
            first.writer.close()
            await front.until_left(2)
            for _ in range(2):
                assert (await waiting.answer(HEALTH))[0] == 200
        assert not caplog.records
    with subtests.test("a refused connection is not held for as long as others"):
        async with serving(max_connections=1, header_s=0.05) as front:
            kept, surplus = await front.connect(), await front.connect()
            assert await surplus.is_closed()
            assert (await kept.answer(HEALTH))[0] == 200


async def test_far_more_connections_than_there_may_be_cost_nothing():
    async with serving(max_connections=1, surplus=3) as front:
        for _ in range(4):
            await front.connect()
        for _ in range(20):
            client = await front.open()
            assert (await client.answer())[0] == 503
            assert await client.is_closed()
        await front.until_left(4)
        assert front.told == ["full"] * 20
        assert (await front.clients[0].answer(HEALTH))[0] == 200


ANSWER_BYTES = 16 << 20  # more than the sockets' buffers hold


async def test_who_does_not_read_his_answer_is_not_waited_for(subtests, caplog):
    for stream in [False, True]:
        with subtests.test(stream=stream):
            async with serving(keep_alive_s=0.1) as front:
                front.backend.script = [response("x" * ANSWER_BYTES), finished()]
                client = await front.connect()
                client.writer.transport.pause_reading()
                client.writer.write(post(json.dumps({"prompt": "Hi", "stream": stream}).encode()))
                await front.until_left(0)
                assert front.told == ["unread"]
                await asyncio.wait_for(front.backend.closed.wait(), DEADLINE_S)
            assert not caplog.records


async def test_who_reads_something_is_waited_for():
    async with serving() as front:
        front.backend.script = [response("x" * ANSWER_BYTES), finished()]
        client = await front.connect()
        (connection,) = front.server.server_state.connections
        client.writer.transport.pause_reading()
        client.writer.write(post())
        await until(lambda: connection._unread_timer is not None)
        num_bytes = connection.transport.get_write_buffer_size()
        connection._check_read(num_bytes + 1)
        assert front.told == [] and connection._unread_timer is not None
        client.writer.transport.resume_reading()
        assert (await client.answer())[0] == 200
        await until(lambda: connection._unread_timer is None)


async def test_a_request_of_two_lengths_is_refused(subtests):
    for more in [b"Transfer-Encoding: chunked\r\n", b"transfer-encoding: Chunked\r\n"]:
        with subtests.test(more=more):
            async with serving() as front:
                client = await front.connect()
                body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
                smuggled = HEALTH
                status, headers, error = await client.answer(post(body, length=3, more=more) + smuggled)
                assert (status, headers["connection"]) == (400, "close")
                assert "both Content-Length and Transfer-Encoding" in error["error"]["message"]
                assert await client.is_closed()
                assert front.backend.requests == []
                client = await front.connect()
                chunked = post(body, more=more).replace(b"Content-Length: %d\r\n" % len(body), b"")
                assert (await client.answer(chunked))[0] == 200


async def test_an_offer_of_http_2_is_passed_over_and_the_body_read(subtests):
    """Java's HttpClient makes it in each request; of servers that read by httptools the body is lost then
    (Kludex/uvicorn#2722)."""
    for is_chunked in [False, True]:
        with subtests.test(is_chunked=is_chunked):
            offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
            offer += b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
            request = post(more=offer)
            if is_chunked:
                chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
                request = post(chunk, more=offer + b"Transfer-Encoding: chunked\r\n")
                request = request.replace(b"Content-Length: %d\r\n" % len(chunk), b"")
            async with serving() as front:
                client = await front.connect()
                for _ in range(2):
                    status, _, body = await client.answer(request)
                    assert (status, body["object"]) == (200, "text_completion")
                assert len(front.backend.requests) == 2


# Serves with 128 descriptors to have; at each line it is told, it opens 32 files of its own.
FEW_DESCRIPTORS = """
import asyncio, resource, sys
from services.host import descriptors
from router.http.test_bounded_connection import serving

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
    assert descriptors.raise_limit() == descriptors.limit() == 128
    async with serving(max_connections=descriptors.limit() // 2, surplus=16) as front:
        print(front.port, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            opened = [open("/dev/null") for _ in range(32)]
            print(front.num_connections, len(front.told), flush=True)

asyncio.run(main())
"""


async def test_more_idle_connections_than_there_are_descriptors_take_nobody_down():
    tests = Path(__file__).parents[2]
    server = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        FEW_DESCRIPTORS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}"},
    )
    try:
        async with asyncio.timeout(60):
            front = Front(None, int(await server.stdout.readline()), None, None)
            clients = [await front.open() for _ in range(300)]
            assert [(await client.answer())[0] for client in clients[80:]] == [503] * 220
            server.stdin.write(b"go on\n")
            assert await server.stdout.readline() == b"80 220\n"
            assert [(await client.answer(HEALTH))[0] for client in clients[:80]] == [200] * 64 + [503] * 16
            assert (await (await front.open()).answer(HEALTH))[0] == 503
            clients[0].writer.close()
            while (await (await front.open()).answer(HEALTH))[0] == 503:
                await asyncio.sleep(0.01)
    finally:
        server.kill()
        await server.wait()
        for client in front.clients:
            client.writer.close()
