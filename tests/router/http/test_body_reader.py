import asyncio
import gzip
import itertools
import json
import threading
import time
import zlib
from typing import Any

import pytest
import zstandard

from router.http.backend import FakeBackend, app_of, client, complete
from services.net.bytes_in_flight import BytesInFlight
from services.router.dialects.http_errors import BodyTooLong
from services.router.http import body_reader
from services.values.errors import InvalidRequest


async def test_a_long_body_is_read_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    readers = []
    read = body_reader._fields_of

    def noted(body: bytearray) -> Any:
        readers.append(threading.current_thread())
        return read(body)

    monkeypatch.setattr(body_reader, "_fields_of", noted)
    for length in (1_000, 70_000):
        assert (await complete(FakeBackend(), prompt="a" * length)).status_code == 200
    assert [reader is not threading.main_thread() for reader in readers] == [False, True]


async def test_a_body_that_is_no_json_object_is_refused(subtests: pytest.Subtests) -> None:
    for content in [b"", b"{", b"[]", b"5", b"\xff", b"[" * 100_000]:
        with subtests.test(content=content):
            async with client(FakeBackend()) as http:
                answer = await http.post("/v1/completions", content=content)
            assert answer.status_code == 400
            assert "JSON" in answer.json()["error"]["message"]
    with subtests.test("what nobody reads may be anything"):
        async with client(FakeBackend()) as http:
            answer = await http.post("/v1/completions", content=b'{"prompt": "Hi", "nobody_reads_it": NaN}')
        assert answer.status_code == 200


async def test_a_body_that_is_too_large_is_refused(subtests: pytest.Subtests) -> None:
    with subtests.test("a body that is too large is refused"):
        backend = FakeBackend()
        async with client(backend, max_body_bytes=lambda: 100) as http:
            answer = await http.post("/v1/completions", json={"prompt": "a" * 100})
        assert answer.status_code == 413
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert "100 bytes" in answer.json()["error"]["message"]
        assert backend.rejections == ["InvalidRequest"]
    # Nothing of it is read.
    with subtests.test("a body is refused by the length that it states"):

        async def pieces():
            raise AssertionError("it is not read")
            yield b""

        async with client(FakeBackend(), max_body_bytes=lambda: 100) as http:
            headers = {"content-length": "101", "content-type": "application/json"}
            answer = await http.post("/v1/completions", content=pieces(), headers=headers)
        assert answer.status_code == 413


COMPRESS = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZIP": gzip.compress,
    "deflate": zlib.compress,
    "identity": bytes,
    "zstd": zstandard.compress,
}


async def test_a_body_that_was_compressed_is_read() -> None:
    plain = json.dumps({"prompt": "Hi" * 1000}).encode()
    raw_deflate = zlib.compressobj(wbits=-15)
    bodies = [(name, compress(plain)) for name, compress in COMPRESS.items()]
    bodies += [
        ("deflate", raw_deflate.compress(plain) + raw_deflate.flush()),
        ("gzip, identity", bodies[0][1]),
    ]
    for encoding, content in bodies:
        backend = FakeBackend()
        async with client(backend) as http:
            headers = {"content-encoding": encoding}
            answer = await http.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 200, (encoding, answer.text)
        assert backend.requests[0].text == "Hi" * 1000


async def test_a_body_that_cannot_be_unpacked_is_refused(subtests: pytest.Subtests) -> None:
    with subtests.test("an encoding that is not read is 415 and names those that are"):
        for encoding in ("br", "gzip, gzip"):
            async with client(FakeBackend()) as http:
                headers = {"content-encoding": encoding}
                answer = await http.post("/v1/completions", content=b"{}", headers=headers)
            assert answer.status_code == 415 and encoding in answer.json()["error"]["message"]
            assert "zstd" in answer.headers["accept-encoding"]
    with subtests.test("what is no such encoding is refused"):
        for encoding, compress in COMPRESS.items():
            whole = compress(b'{"prompt": "Hi"}')
            for content in (b"nonsense", whole[: len(whole) // 2]):
                async with client(FakeBackend()) as http:
                    headers = {"content-encoding": encoding}
                    answer = await http.post("/v1/completions", content=content, headers=headers)
                assert answer.status_code == 400, (encoding, content)
    with subtests.test("a small body that unpacks to a large one is refused"):
        plain = json.dumps({"prompt": "a" * 100_000}).encode()
        for encoding in ("gzip", "deflate", "zstd"):
            async with client(FakeBackend(), max_body_bytes=lambda: 10_000) as http:
                headers = {"content-encoding": encoding}
                answer = await http.post(
                    "/v1/completions", content=COMPRESS[encoding](plain), headers=headers
                )
            assert answer.status_code == 413, encoding


def test_gzip_may_have_a_few_members_and_no_more() -> None:
    members = gzip.compress(b"Hi") + bytes(9) + gzip.compress(b"") + gzip.compress(b" you")
    assert body_reader.decoded(bytearray(members), "gzip", 100) == b"Hi you"
    assert body_reader.decoded(bytearray(members), "gzip", 6) == b"Hi you"
    with pytest.raises(BodyTooLong):
        body_reader.decoded(bytearray(members), "gzip", 5)
    for wrong in (members[:-1], members + b"a", gzip.compress(b"") * 1000):
        with pytest.raises(InvalidRequest, match="as gzip"):
            body_reader.decoded(bytearray(wrong), "gzip", 100)


async def test_the_time_that_a_client_gives_is_a_header(subtests: pytest.Subtests) -> None:
    for value in ["0", "-1", "nan", "inf", "soon"]:
        with subtests.test(value=value):
            backend = FakeBackend()
            async with client(backend) as http:
                for headers in ({}, {"x-isthmus-timeout-s": "2.5"}):
                    answer = await http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
                    assert answer.status_code == 200
                assert backend.timeouts_s == [None, 2.5]
                answer = await http.post(
                    "/v1/completions", json={"prompt": "a"}, headers={"x-isthmus-timeout-s": value}
                )
            assert answer.status_code == 400
            assert "x-isthmus-timeout-s" in answer.json()["error"]["message"]
            assert len(backend.requests) == 2
            assert backend.rejections == ["InvalidRequest"]


async def test_bodies_are_held_until_they_are_answered_and_no_more_than_may_be() -> None:
    backend = FakeBackend("wait")
    refused: list[int] = []
    in_flight = BytesInFlight(1000, 500, lambda: refused.append(1))  # 500 beside those on their way
    body = json.dumps({"prompt": "a" * 300})
    async with client(backend, in_flight=in_flight) as http:
        first = asyncio.create_task(http.post("/v1/completions", content=body))
        await backend.waiting.wait()
        assert in_flight.held == len(body)
        answer = await http.post("/v1/completions", content=body)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert refused == [1]
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert in_flight.held == 0
        backend.script = FakeBackend().script
        assert (await http.post("/v1/completions", content=body)).status_code == 200
    assert in_flight.held == 0


async def test_of_a_compressed_body_is_counted_what_it_unpacks_to() -> None:
    backend = FakeBackend("wait")
    in_flight = BytesInFlight(50_000, 20_000)  # 30,000 beside those on their way
    plain = json.dumps({"prompt": "a" * 18_000}).encode()
    async with client(backend, in_flight=in_flight) as http:
        post = {"url": "/v1/completions", "content": gzip.compress(plain)}
        first = asyncio.create_task(http.post(**post, headers={"content-encoding": "gzip"}))
        await backend.waiting.wait()
        assert in_flight.held == len(plain)
        assert (await http.post(**post, headers={"content-encoding": "gzip"})).status_code == 429
        assert in_flight.held == len(plain)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    assert in_flight.held == 0


async def test_what_nobody_keeps_of_a_body_is_not_counted() -> None:
    """A watch looks only for its client's leaving. What comes meanwhile is thrown away."""
    backend = FakeBackend()
    backend.watch_script = ["wait"]
    in_flight = BytesInFlight(1000, 500)
    pieces = [{"type": "http.request", "body": b"a" * 400, "more_body": True} for _ in range(5)]
    held: list[int] = []

    async def receive() -> dict[str, Any]:
        await backend.waiting.wait()
        held.append(in_flight.held)
        return pieces.pop() if pieces else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        assert message.get("status", 200) == 200

    scope = {"type": "http", "method": "GET", "path": "/v1/cluster/watch", "headers": [], "query_string": b""}
    async with asyncio.timeout(10):
        await app_of(backend, in_flight=in_flight)(scope, receive, send)
    assert held == [0] * 6


async def test_long_bodies_are_read_one_at_a_time_with_a_pause_between_them(monkeypatch) -> None:
    read, began_and_ended = body_reader._fields_of, []

    def slow(body: bytearray) -> Any:
        began_s = time.monotonic()
        time.sleep(0.05)
        began_and_ended.append((began_s, time.monotonic()))
        return read(body)

    monkeypatch.setattr(body_reader, "_fields_of", slow)
    async with client(FakeBackend()) as http:
        body = json.dumps({"prompt": "a" * 70_000})
        posts = [http.post("/v1/completions", content=body) for _ in range(3)]
        assert [answer.status_code for answer in await asyncio.gather(*posts)] == [200, 200, 200]
    pairs = itertools.pairwise(began_and_ended)
    assert all(later[0] - earlier[1] >= 0.04 for earlier, later in pairs)


async def test_more_items_than_the_context_has_tokens_are_refused_by_their_number(
    subtests: pytest.Subtests,
) -> None:
    """Not one of them is looked at: each is wrong, too."""
    for path, body, param in [
        ("/v1/chat/completions", {"messages": [{}] * 101}, "messages"),
        ("/v1/chat/completions", {"messages": [{}], "tools": [{}] * 101}, "tools"),
        ("/v1/completions", {"prompt": [1] * 101}, "prompt"),
        ("/v1/responses", {"input": [{}] * 101}, "input"),
        ("/v1/messages", {"messages": [{}] * 101, "max_tokens": 1}, "messages"),
        ("/generate", {"input_ids": [1] * 101}, "input_ids"),
    ]:
        with subtests.test(path=path):
            backend = FakeBackend()
            backend.context = 100
            async with client(backend) as http:
                answer = await http.post(path, json=body)
            assert answer.status_code == 400
            assert f"{param} must be at most 100 items, got 101" in answer.text
            assert backend.rejections == ["InvalidRequest"]


CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
IMAGE_URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
INPUT_IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "high"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
WITH_IMAGES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Look"}, IMAGE_URL]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": [IMAGE_URL]},
        ]
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Look"}, INPUT_IMAGE]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [INPUT_IMAGE]},
        ]
    },
    "/v1/messages": {
        "max_tokens": 9,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Look"}, IMAGE]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}]},
        ],
    },
}
NOTE = "[image left out: this model reads text]"


async def test_an_image_ends_no_session_where_a_text_stands_for_it(subtests: pytest.Subtests) -> None:
    for path in WITH_IMAGES:
        with subtests.test(path=path):
            for leaves_images_out in (False, True):
                backend = FakeBackend()
                async with client(backend, leaves_images_out=leaves_images_out) as http:
                    answer = await http.post(path, json=WITH_IMAGES[path])
                if not leaves_images_out:
                    assert (answer.status_code, backend.requests) == (400, [])
                    continue
                assert answer.status_code == 200, answer.text
                user, _, result = backend.requests[0].chat.messages
                assert (list(user.parts), result.content or next(iter(result.parts))) == (
                    ["Look", NOTE],
                    NOTE,
                )
    with subtests.test("a body that is nested deeply is not searched for images to its end"):
        content: Any = "Hi"
        for _ in range(300):
            content = [{"type": "text", "content": content}]
        async with client(FakeBackend(), leaves_images_out=True) as http:
            body = {"messages": [{"role": "user", "content": content}]}
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 400
