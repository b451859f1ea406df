"""Answers to OpenAI's responses."""

import json
from typing import Any

import httpx
import pytest

from router.dialects.answers import LENGTH, agents_answer, ended, said
from router.http.backend import FakeBackend, client, post
from services.values import errors
from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.generation_pb2 import ChatMessage

BODY = {"model": "tiny", "input": "Hi"}


async def respond(backend: FakeBackend, **body: Any) -> httpx.Response:
    return await post(backend, "/v1/responses", {**BODY, **body})


def events(answer: httpx.Response) -> list[Any]:
    """Each event's data; its name is the data's type, and they are numbered."""
    told = []
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    assert [event.pop("sequence_number") for event in told] == list(range(len(told)))
    return told


def items(stem: str) -> list[Any]:
    """Of agents_answer, done."""
    text = {"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}
    done = {"status": "completed"}
    return [
        {
            **done,
            "id": f"rs_{stem}_0",
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hmm."}],
            "encrypted_content": "h1",
        },
        {**done, "id": f"msg_{stem}_1", "type": "message", "role": "assistant", "content": [text]},
        {
            **done,
            "id": f"fc_{stem}_2",
            "type": "function_call",
            "call_id": "call_a",
            "name": "weather",
            "arguments": '{"city": "Bern"}',
        },
        {
            **done,
            "id": f"fc_{stem}_3",
            "type": "function_call",
            "call_id": "call_b",
            "name": "time",
            "arguments": "{}",
        },
    ]


USAGE = {
    "input_tokens": 10,
    "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
    "output_tokens": 7,
    "output_tokens_details": {"reasoning_tokens": 2},
    "total_tokens": 17,
}


async def test_an_answer_of_an_agent_is_told_whole() -> None:
    backend = FakeBackend(*agents_answer())
    tools = [{"type": "function", "name": "weather"}, {"type": "function", "name": "time"}]
    asks = {"tools": tools, "metadata": {"a": "b"}, "temperature": 0.7, "reasoning": {"effort": "low"}}
    answer = (await respond(backend, **asks)).json()
    stem = answer.pop("id").removeprefix("resp_")
    assert answer.pop("isthmus")["finish_reason"] == "tool_calls"
    assert answer == {
        "object": "response",
        "created_at": 1234,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": "tiny",
        "output": items(stem),
        "usage": USAGE,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "safety_identifier": None,
        "service_tier": None,
        "user": None,
        "temperature": 0.7,
        "top_p": 1.0,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "reasoning": {"effort": "low", "summary": None},
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": tools,
        "truncation": "disabled",
        "background": False,
        "store": True,
    }
    assert backend.closed.is_set()


async def test_an_answer_of_an_agent_is_streamed() -> None:
    answer = await respond(FakeBackend(*agents_answer()), stream=True)
    created, in_progress, *told, completed = events(answer)
    stem = created["response"]["id"].removeprefix("resp_")
    for event, kind in ((created, "created"), (in_progress, "in_progress")):
        assert event["type"] == f"response.{kind}"
        assert event["response"]["status"] == "in_progress"
        assert (event["response"]["output"], event["response"]["usage"]) == ([], None)
    thought, spoke, first, second = items(stem)

    def place(item: Any, index: int) -> Any:
        return {"item_id": item["id"], "output_index": index}

    def item_events(item: Any, index: int, empty: Any, *between: Any) -> list[Any]:
        added = {**item, "status": "in_progress", **empty}
        added.pop("encrypted_content", None)
        return [
            {"type": "response.output_item.added", "output_index": index, "item": added},
            *between,
            {"type": "response.output_item.done", "output_index": index, "item": item},
        ]

    def text_events(item: Any, index: int, name: str, deltas: list[str], more: Any) -> list[Any]:
        at = {**place(item, index), "content_index": 0}
        (part,) = item["content"]
        return item_events(
            item,
            index,
            {"content": []},
            {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
            *({"type": f"response.{name}.delta", **at, "delta": delta, **more} for delta in deltas),
            {"type": f"response.{name}.done", **at, "text": part["text"], **more},
            {"type": "response.content_part.done", **at, "part": part},
        )

    def call_events(item: Any, index: int, deltas: list[str]) -> list[Any]:
        at, name = place(item, index), "response.function_call_arguments"
        whole = {"name": item["name"], "arguments": item["arguments"]}
        return item_events(
            item,
            index,
            {"arguments": ""},
            *({"type": f"{name}.delta", **at, "delta": delta} for delta in deltas),
            {"type": f"{name}.done", **at, **whole},
        )

    assert told == [
        *text_events(thought, 0, "reasoning_text", ["Hm", "m."], {}),
        *text_events(spoke, 1, "output_text", ["Let me ", "look."], {"logprobs": []}),
        *call_events(first, 2, ['{"city":', ' "Bern"}']),
        *call_events(second, 3, ["{}"]),
    ]
    assert completed["type"] == "response.completed"
    assert completed["response"]["output"] == items(stem)
    assert completed["response"]["usage"] == USAGE
    assert "[DONE]" not in answer.text


async def test_an_answer_that_was_cut_off_is_incomplete(subtests: pytest.Subtests) -> None:
    for reason in [LENGTH, common_pb2.FINISH_REASON_CAPACITY]:
        with subtests.test(reason=reason):
            script = (said(reasoning="Hm"), said("Let"), ended(reason))
            answer = (await respond(FakeBackend(*script))).json()
            assert answer["status"] == "incomplete"
            assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
            assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]
            *told, last = events(await respond(FakeBackend(*script), stream=True))
            assert last["type"] == "response.incomplete"
            done = [event["item"]["status"] for event in told if event["type"] == "response.output_item.done"]
            assert done == ["completed", "incomplete"]


async def test_errors_are_told_in_its_words(subtests: pytest.Subtests) -> None:
    for last, code in [
        (errors.PeerFailed("gone"), "server_error"),
        (errors.NoCapacity("full"), "rate_limit_exceeded"),
        (ended(common_pb2.FINISH_REASON_ABORTED), "server_error"),
        (said(" and no finish"), "server_error"),
    ]:
        with subtests.test(last=last):
            *_, failed = events(await respond(FakeBackend(said("He"), last), stream=True))
            assert failed["type"] == "response.failed"
            assert (failed["response"]["status"], failed["response"]["error"]["code"]) == ("failed", code)
    with subtests.test("an error before the first token has its status"):
        for stream in (False, True):
            answer = await respond(FakeBackend(errors.ContextExceeded("prompt is too long")), stream=stream)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            assert answer.json()["error"]["param"] == "input"
    for message, param in [
        ("chat.messages[2].role must be one of", "input"),
        ("chat.tools[0].parameters must be a schema", "tools[0].parameters"),
        ("sampling.top_p must be above 0", "top_p"),
    ]:
        with subtests.test(message=message):
            answer = await respond(FakeBackend(errors.InvalidRequest.received(message)))
            assert answer.json()["error"]["param"] == param


# -- what is kept ---------------------------------------------------------------------------------


async def test_a_response_goes_on_from_the_one_before_it() -> None:
    backend = FakeBackend(*agents_answer())
    outputs = [
        {"type": "function_call_output", "call_id": call, "output": said}
        for call, said in (("call_a", "rain"), ("call_b", "noon"))
    ]
    async with client(backend) as http:
        first = (await http.post("/v1/responses", json={**BODY, "instructions": "Be brief."})).json()
        body = {"input": outputs, "previous_response_id": first["id"], "instructions": "Be quick."}
        second = (await http.post("/v1/responses", json=body)).json()
        body = {"input": "More", "previous_response_id": second["id"]}
        assert (await http.post("/v1/responses", json=body)).status_code == 200
        looked = await http.get(f"/v1/responses/{second['id']}")
        assert (looked.status_code, looked.json()) == (200, second)
    assert second["previous_response_id"] == first["id"]
    model = ChatMessage(role="assistant", content="Let me look.", reasoning="Hmm.", answer_id="h1")
    model.tool_calls.add(id="call_a", name="weather", arguments='{"city": "Bern"}')
    model.tool_calls.add(id="call_b", name="time", arguments="{}")
    user = ChatMessage(role="user", content="Hi")
    results = [
        ChatMessage(role="tool", tool_call_id="call_a", content="rain"),
        ChatMessage(role="tool", tool_call_id="call_b", content="noon"),
    ]
    of_first, of_second, of_third = (list(request.chat.messages) for request in backend.requests)
    assert of_first == [ChatMessage(role="system", content="Be brief."), user]
    assert of_second == [ChatMessage(role="system", content="Be quick."), user, model, *results]
    assert of_third == [user, model, *results, model, ChatMessage(role="user", content="More")]
    assert [request.conversation_id for request in backend.requests] == ["", first["id"], first["id"]]


def reference(item: Any) -> Any:
    return {"type": "item_reference", "id": item["id"]}


async def test_a_client_may_refer_to_the_items_of_a_stored_response(subtests: pytest.Subtests) -> None:
    """The AI SDK sends a history so: thinking and texts as references, calls themselves."""
    backend = FakeBackend(*agents_answer())
    user = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    results = [
        {"type": "function_call_output", "call_id": call, "output": "rain"} for call in ("call_a", "call_b")
    ]
    async with client(backend) as http:

        async def ask(*history: Any, **body: Any) -> Any:
            return (await http.post("/v1/responses", json={"input": list(history), **body})).json()

        first = await ask(user)
        thought, spoke, *calls = first["output"]
        second = await ask(user, reference(thought), reference(spoke), *calls, *results)
        spoken = map(reference, [thought, spoke, *calls])
        again = map(reference, second["output"])
        await ask(user, *spoken, *results, *again, user)
        await ask(*results, previous_response_id=first["id"])
    _, of_second, of_third, of_chain = (list(request.chat.messages) for request in backend.requests)
    assert of_second == of_chain
    assert of_third == [*of_second, of_second[1], ChatMessage(role="user", content="Hi")]
    assert [request.conversation_id for request in backend.requests] == ["", *[first["id"]] * 3]


async def test_a_reference_to_what_is_not_stored_is_refused(subtests: pytest.Subtests) -> None:
    backend = FakeBackend(*agents_answer())
    async with client(backend) as http:
        item, *_ = (await http.post("/v1/responses", json=BODY)).json()["output"]
        for what, headers, ids, status in (
            ("it is another tenant's", {"x-isthmus-tenant": "b"}, [item["id"]], 404),
            ("the response has no such item", {}, [item["id"][:-1] + "9"], 404),
            ("its id is none of ours", {}, ["x"], 404),
            ("it has no id", {}, [""], 404),
            ("an item is named twice", {}, [item["id"]] * 2, 400),
        ):
            with subtests.test(what):
                body = {"input": [reference({"id": each}) for each in ids]}
                answer = await http.post("/v1/responses", json=body, headers=headers)
                assert answer.status_code == status
                if status == 404:
                    assert f"item {ids[0]!r} is not known here" in answer.json()["error"]["message"]
                else:
                    assert answer.json()["error"]["param"] == "input"
    assert len(backend.requests) == 1


async def test_a_response_may_be_gone_on_from_without_anything_new() -> None:
    """langchain-openai sends an empty input then, which OpenAI accepts."""
    backend = FakeBackend()
    async with client(backend) as http:
        first = (await http.post("/v1/responses", json=BODY)).json()
        for body in ({"input": []}, {}):
            answer = await http.post("/v1/responses", json={**body, "previous_response_id": first["id"]})
            assert answer.status_code == 200
    assert [[turn.role for turn in request.chat.messages] for request in backend.requests] == [
        ["user"],
        *[["user", "assistant"]] * 2,
    ]


async def test_what_is_not_stored_cannot_be_gone_on_from() -> None:
    backend = FakeBackend()
    async with client(backend) as http:
        first = (await http.post("/v1/responses", json={**BODY, "store": False})).json()
        body = {**BODY, "previous_response_id": first["id"]}
        for answer in (
            await http.post("/v1/responses", json=body),
            await http.get(f"/v1/responses/{first['id']}"),
            await http.delete(f"/v1/responses/{first['id']}"),
        ):
            assert answer.status_code == 404
            assert "is not known here" in answer.json()["error"]["message"]
    assert first["store"] is False
    assert backend.rejections == ["NotFound"]
    assert [request.conversation_id for request in backend.requests] == [""]


async def test_another_tenant_finds_nothing() -> None:
    async with client(FakeBackend()) as http:
        mine = {"x-isthmus-tenant": "a"}
        first = (await http.post("/v1/responses", json=BODY, headers=mine)).json()
        path, body = f"/v1/responses/{first['id']}", {**BODY, "previous_response_id": first["id"]}
        for headers, status in (({}, 404), ({"x-isthmus-tenant": "b"}, 404), (mine, 200)):
            assert (await http.get(path, headers=headers)).status_code == status
            assert (await http.post("/v1/responses", json=body, headers=headers)).status_code == status
        assert (await http.delete(path)).status_code == 404
        deleted = await http.delete(path, headers=mine)
        assert deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
        assert (await http.get(path, headers=mine)).status_code == 404


async def test_a_stream_is_kept_too_and_under_an_id_of_its_own(subtests: pytest.Subtests) -> None:
    with subtests.test("a stream is kept too once it has ended"):
        backend = FakeBackend(said("a"), ended())
        async with client(backend) as http:
            *_, completed = events(await http.post("/v1/responses", json={**BODY, "stream": True}))
            looked = await http.get(f"/v1/responses/{completed['response']['id']}")
        assert looked.json() == completed["response"]
    with subtests.test("an id is not the requests which others may have too"):
        async with client(FakeBackend()) as http:
            headers = {"x-request-id": "trace"}
            ids = [
                (await http.post("/v1/responses", json=BODY, headers=headers)).json()["id"] for _ in range(2)
            ]
        assert len(set(ids)) == 2


async def test_a_clients_own_key_is_the_conversation() -> None:
    backend = FakeBackend()
    for body, headers in (
        ({"prompt_cache_key": "k"}, {}),
        ({"store": False}, {"session-id": "s"}),
        ({"conversation_id": "c"}, {"session-id": "s"}),
    ):
        await post(backend, "/v1/responses", {**BODY, **body}, headers=headers)
    assert [request.conversation_id for request in backend.requests] == ["k", "s", "c"]


async def test_kinds_of_tools_that_cannot_be_served_are_named_in_the_log(caplog: Any) -> None:
    backend = FakeBackend()
    tools = [{"type": "web_search"}, {"type": "function", "name": "f"}, {"type": "namespace", "tools": []}]
    with caplog.at_level("INFO"):
        answer = await respond(backend, tools=tools)
    assert answer.json()["tools"] == [{"type": "function", "name": "f"}]  # what was offered
    assert [tool.name for tool in backend.requests[0].chat.tools] == ["f"]
    assert "names=web_search,namespace" in caplog.text
