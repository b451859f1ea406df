"""Answers to Anthropic's messages."""

import json
from typing import Any

import httpx
import pytest

from router.dialects.answers import LENGTH, TOOL_CALLS, agents_answer, called, ended, said
from router.http.backend import HI, FakeBackend, client, post
from services.router.api_keys import ApiKeys
from services.values import errors
from services.wire.isthmus.v1 import common_pb2

BODY = {"model": "tiny", "max_tokens": 64, "messages": HI}
THINKS = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
COUNTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")


def counts(*numbers: int, thinking: int = 0) -> dict[str, Any]:
    told: dict[str, Any] = dict(zip(COUNTS, numbers, strict=True))
    return {**told, "output_tokens_details": {"thinking_tokens": thinking}}


STARTED, USAGE = counts(0, 0, 0, 0), counts(6, 0, 4, 7, thinking=2)


async def message(backend: FakeBackend, **body: Any) -> httpx.Response:
    return await post(backend, "/v1/messages?beta=true", {**BODY, **body})


def events(answer: httpx.Response) -> list[Any]:
    """Each event's data; its name is the data's type."""
    told = []
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    return told


async def test_an_answer_of_an_agent_is_told_whole() -> None:
    backend = FakeBackend(*agents_answer())
    answer = (await message(backend, **THINKS)).json()
    assert answer.pop("id").startswith("msg_")
    assert answer.pop("isthmus")["finish_reason"] == "tool_calls"
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [
            {"type": "thinking", "thinking": "Hmm.", "signature": "h1"},
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "call_a", "name": "weather", "input": {"city": "Bern"}},
            {"type": "tool_use", "id": "call_b", "name": "time", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": USAGE,
    }
    assert backend.closed.is_set()


async def test_an_answer_of_an_agent_is_streamed() -> None:
    first, *told = events(await message(FakeBackend(*agents_answer()), stream=True, **THINKS))
    assert told[-2].pop("isthmus")["finish_reason"] == "tool_calls"
    assert first["message"].pop("id").startswith("msg_")
    assert first == {
        "type": "message_start",
        "message": {
            "type": "message",
            "role": "assistant",
            "model": "tiny",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": STARTED,
        },
    }

    def block(index: int, start: Any, *deltas: Any) -> list[Any]:
        opened = {"type": "content_block_start", "index": index, "content_block": start}
        grown = [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        return [opened, *grown, {"type": "content_block_stop", "index": index}]

    assert told == [
        {"type": "ping"},
        *block(
            0,
            {"type": "thinking", "thinking": "", "signature": ""},
            {"type": "thinking_delta", "thinking": "Hm"},
            {"type": "thinking_delta", "thinking": "m."},
            {"type": "signature_delta", "signature": "h1"},
        ),
        *block(
            1,
            {"type": "text", "text": ""},
            {"type": "text_delta", "text": "Let me "},
            {"type": "text_delta", "text": "look."},
        ),
        *block(
            2,
            {"type": "tool_use", "id": "call_a", "name": "weather", "input": {}},
            {"type": "input_json_delta", "partial_json": '{"city":'},
            {"type": "input_json_delta", "partial_json": ' "Bern"}'},
        ),
        *block(
            3,
            {"type": "tool_use", "id": "call_b", "name": "time", "input": {}},
            {"type": "input_json_delta", "partial_json": "{}"},
        ),
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": USAGE,
        },
        {"type": "message_stop"},
    ]


async def test_thinking_is_shown_as_it_is_asked_for(subtests: pytest.Subtests) -> None:
    with subtests.test("who does not ask for thinking is not shown it"):
        for asks in ({}, {"thinking": {"type": "disabled"}}):
            answer = (await message(FakeBackend(*agents_answer()), **asks)).json()
            assert answer["content"][0] == {"type": "text", "text": "Let me look."}
            told = events(await message(FakeBackend(*agents_answer()), stream=True, **asks))
            assert '"thinking"' not in json.dumps(told)
    with subtests.test("thinking may be asked for without its text"):
        asks = {"thinking": {"type": "adaptive", "display": "omitted"}}
        answer = (await message(FakeBackend(*agents_answer()), **asks)).json()
        assert answer["content"][0] == {"type": "thinking", "thinking": "", "signature": "h1"}
        told = events(await message(FakeBackend(*agents_answer()), stream=True, **asks))
        deltas = [event["delta"] for event in told if event.get("index") == 0 and "delta" in event]
        assert deltas == [{"type": "signature_delta", "signature": "h1"}]


async def test_why_it_ended(subtests: pytest.Subtests) -> None:
    for reason, matched, expected in [
        (common_pb2.FINISH_REASON_STOP, "", ("end_turn", None)),
        (common_pb2.FINISH_REASON_STOP, "<|end|>", ("end_turn", None)),
        (common_pb2.FINISH_REASON_STOP, "END", ("stop_sequence", "END")),
        (LENGTH, "", ("max_tokens", None)),
        (common_pb2.FINISH_REASON_CAPACITY, "", ("max_tokens", None)),
        (TOOL_CALLS, "", ("tool_use", None)),
    ]:
        with subtests.test(reason=reason):
            script = (said("a"), ended(reason, matched))
            answer = (await message(FakeBackend(*script), stop_sequences=["END"])).json()
            assert (answer["stop_reason"], answer["stop_sequence"]) == expected
            *_, delta, _ = events(await message(FakeBackend(*script), stop_sequences=["END"], stream=True))
            assert tuple(delta["delta"].values()) == expected


async def test_what_an_odd_answer_is_told_as(subtests: pytest.Subtests) -> None:
    with subtests.test("an answer that says nothing is an empty text"):
        assert (await message(FakeBackend(ended()))).json()["content"] == [{"type": "text", "text": ""}]
    with subtests.test("arguments that broke off are none"):
        for arguments in ("{", "[]"):
            script = called(0, arguments, "c", "f"), ended(common_pb2.FINISH_REASON_LENGTH)
            answer = (await message(FakeBackend(*script))).json()
            assert answer["content"] == [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]
            assert answer["stop_reason"] == "max_tokens"
    for arguments, told in [
        (r'{"x": "\ud83d"}', {"x": "\ufffd"}),
        (r'{"x": "\ud83d\ude00"}', {"x": "\U0001f600"}),
        ('{"x": 1e999}', {}),
    ]:
        with subtests.test(arguments=arguments):
            script = called(0, arguments, "c", "f"), ended(common_pb2.FINISH_REASON_TOOL_CALLS)
            answer = await message(FakeBackend(*script))
            assert answer.status_code == 200
            assert answer.json()["content"] == [{"type": "tool_use", "id": "c", "name": "f", "input": told}]


async def test_errors_are_told_in_its_words(subtests: pytest.Subtests) -> None:
    for stream in [False, True]:
        for error, status, kind in [
            (errors.InvalidRequest("bad"), 400, "invalid_request_error"),
            (errors.ContextExceeded("prompt is too long: it has 9 tokens"), 400, "invalid_request_error"),
            (errors.NotFound("no such model"), 404, "not_found_error"),
            (errors.NoCapacity("full", 2.1), 429, "rate_limit_error"),
            (errors.Unavailable("draining"), 503, "overloaded_error"),
            (errors.DeadlineExceeded("late"), 504, "timeout_error"),
            (errors.ProtocolError("nonsense"), 500, "api_error"),
        ]:
            with subtests.test(stream=stream, error=error):
                answer = await message(FakeBackend(error), stream=stream)
                assert answer.status_code == status
                assert answer.json() == {"type": "error", "error": {"type": kind, "message": str(error)}}
                assert answer.headers.get("Retry-After") == ("3" if status == 429 else None)
    with subtests.test("what is too long is a member of the body"):
        for kind in (errors.InvalidRequest, errors.ContextExceeded):
            answer = await message(FakeBackend(kind("chat.messages", "must be at most 5 bytes")))
            assert answer.json()["error"]["message"] == "messages must be at most 5 bytes"
    with subtests.test("an error within a stream is its last event"):
        for last in (errors.PeerFailed("gone"), ended(common_pb2.FINISH_REASON_ABORTED)):
            *_, error = events(await message(FakeBackend(said("He"), last), stream=True))
            assert error["type"] == "error"
            assert error["error"]["type"] in ("overloaded_error", "api_error")
    with subtests.test("unknown paths are told in its words too"):
        async with client(FakeBackend()) as http:
            for path, status, kind in (
                ("/v1/messages", 405, "invalid_request_error"),
                ("/v1/messages/batches", 404, "not_found_error"),
            ):
                answer = await http.get(path)
                assert (answer.status_code, answer.json()["type"]) == (status, "error")
                assert answer.json()["error"]["type"] == kind
    with subtests.test("fields are named in its words"):
        for message_, told in (
            ("sampling.top_p must be above 0", "top_p must be above 0"),
            ("chat.tools[0].parameters must be", "tools[0].parameters must be"),
            ("the chat. is", "the chat. is"),
        ):
            answer = await message(FakeBackend(errors.InvalidRequest.received(message_)))
            assert answer.json()["error"]["message"] == told


async def test_keys(subtests: pytest.Subtests, tmp_path: Any) -> None:
    for headers, status in [
        ({"x-api-key": "key"}, 200),
        ({"authorization": "Bearer key"}, 200),
        ({"x-api-key": "another"}, 401),
        ({}, 401),
    ]:
        with subtests.test(headers=headers):
            (file := tmp_path / "keys").write_text("key")
            async with client(FakeBackend(), keys=ApiKeys(file)) as http:
                answer = await http.post("/v1/messages", json=BODY, headers=headers)
            assert answer.status_code == status
            if status == 401:
                assert answer.json()["error"]["type"] == "authentication_error"


async def test_its_clients_are_told_the_models_in_its_words() -> None:
    headers = {"anthropic-version": "2023-06-01"}
    model = {
        "type": "model",
        "id": "tiny",
        "display_name": "tiny",
        "created_at": "1970-01-01T00:20:34Z",
    }
    async with client(FakeBackend()) as http:
        models = (await http.get("/v1/models", headers=headers)).json()
        assert models == {"data": [model], "has_more": False, "first_id": "tiny", "last_id": "tiny"}
        assert (await http.get("/v1/models/tiny", headers=headers)).json() == model
    async with client(FakeBackend(models=())) as http:
        assert (await http.get("/v1/models", headers=headers)).json()["first_id"] is None


async def test_tokens_are_counted() -> None:
    backend = FakeBackend()
    asked = {"model": "tiny", "messages": HI, "system": "Be brief."}
    answer = await post(backend, "/v1/messages/count_tokens?beta=true", asked)
    assert (answer.status_code, answer.json()) == (200, {"input_tokens": 3})
    (request,) = backend.requests
    assert [turn.role for turn in request.chat.messages] == ["system", "user"]
    refused = await post(backend, "/v1/messages/count_tokens", {"messages": []})
    assert (refused.status_code, refused.json()["type"]) == (400, "error")
