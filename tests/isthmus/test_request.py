"""Keyword arguments as the API's request."""

import pytest

from isthmus import InvalidRequest, Message, Tool, ToolCall
from isthmus.request import MAX_ID_CHARS, Options, Prompt, Sampling, call_of
from services.values.request import MAX_ID_CHARS as ROUTERS_MAX_ID_CHARS
from services.wire.isthmus.v1 import common_pb2, generation_pb2

HI = Prompt("Hello")


def test_every_field_has_an_option(subtests):
    with subtests.test("every field of sampling has an option"):
        fields = {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields}
        formats = {field.name for field in common_pb2.Constraint.DESCRIPTOR.fields}
        # bad_token_ids are a router's word to its ranks.
        assert set(Sampling.__annotations__) == (fields - {"constraint", "bad_token_ids"}) | formats
    with subtests.test("every field of a request and of a chat has an option"):
        fields = {field.name for field in generation_pb2.GenerateRequest.DESCRIPTOR.fields}
        chat = {field.name for field in generation_pb2.Chat.DESCRIPTOR.fields}
        wanted = (fields | chat) - {"text", "chat", "token_ids", "messages", "sampling"}
        assert set(Options.__annotations__) - set(Sampling.__annotations__) == wanted | {"timeout"}


def test_what_is_given_is_there_and_nothing_else(subtests):
    with subtests.test("what is not given is unset"):
        request = call_of(HI, {"temperature": None, "stop": None}).request
        assert request.text == "Hello" and len(request.request_id) == 16
        assert not request.sampling.ListFields()
        assert call_of(HI, {}).request.request_id != request.request_id
    with subtests.test("what is given is there"):
        options = {
            "temperature": 0,
            "max_tokens": 8,
            "stop": "\n",
            "logit_bias": {7: -1.0},
            "n": 2,
            "tenant": "t",
        }
        request = call_of(Prompt(token_ids=[1, 2]), options).request
        assert list(request.token_ids.ids) == [1, 2] and request.n == 2 and request.tenant == "t"
        sampling = request.sampling
        assert sampling.HasField("temperature") and sampling.max_tokens == 8
        assert list(sampling.stop) == ["\n"] and dict(sampling.logit_bias) == {7: -1.0}


def test_a_chat():
    weather = Tool("weather", "How warm it is.", {"type": "object"}, strict=True)
    call = ToolCall("c1", "weather", '{"city": "Corinth"}')
    messages = [
        {"role": "user", "content": "Is it warm?"},
        Message("assistant", token_ids=[5, 6], tool_calls=[call], answer_id="a"),
        Message("tool", "21", tool_call_id="c1"),
    ]
    options = {
        "tools": [weather],
        "tool_choice": "required",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    chat = call_of(Prompt(messages=messages), options).request.chat
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool"]
    assert list(chat.messages[1].token_ids) == [5, 6] and chat.messages[1].answer_id == "a"
    assert chat.messages[1].tool_calls[0].arguments == '{"city": "Corinth"}'
    assert chat.tools[0].strict and chat.tools[0].parameters == '{"type": "object"}'
    assert chat.tool_choice.mode == generation_pb2.ToolChoice.MODE_REQUIRED
    assert chat.chat_template_kwargs == '{"enable_thinking": false}'
    assert not chat.HasField("parallel_tool_calls")
    named = call_of(Prompt(messages=messages), {"tool_choice": "weather", "parallel_tool_calls": False})
    assert named.request.chat.tool_choice.name == "weather" and named.request.chat.HasField(
        "parallel_tool_calls"
    )


def test_what_is_wrong_is_named(subtests):
    for options, names in [
        ({"temprature": 0}, "temprature"),
        ({"top_k": -1}, "sampling.top_k"),
        ({"max_tokens": "many"}, "sampling.max_tokens"),
        ({"priority": 2**40}, "priority"),
        ({"tools": [Tool("f")]}, "tools"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"json_schema": 3}, "json_schema"),
        ({"choice": "yes"}, "choice"),
    ]:
        with subtests.test(options=options), pytest.raises(InvalidRequest, match=names):
            call_of(HI, options)
    for wrong in [{"role": "user", "contents": ""}, {"content": "Hello"}]:
        with subtests.test(wrong=wrong), pytest.raises(InvalidRequest, match=r"messages\[0\]"):
            call_of(Prompt(messages=[wrong]), {})
    for given in [{}, {"text": "a", "token_ids": [1]}]:
        with subtests.test(given=given), pytest.raises(InvalidRequest, match="one of them"):
            Prompt(**given)
    with subtests.test("a prompt that is no text is refused"):
        for prompt in (
            Prompt("\ud800"),
            Prompt(token_ids=[-1]),
            Prompt(messages=[Message("user", "\ud800")]),
        ):
            with pytest.raises(InvalidRequest):
                call_of(prompt, {})


def test_each_attempt_has_an_id_of_its_own():
    call = call_of(HI, {"request_id": "r" * MAX_ID_CHARS})
    ids = [call.attempt(number).request_id for number in range(12)]
    assert ids[0] == "r" * MAX_ID_CHARS and len(set(ids)) == 12
    assert max(map(len, ids)) == MAX_ID_CHARS == ROUTERS_MAX_ID_CHARS
    assert call.attempt(3).text == "Hello"
