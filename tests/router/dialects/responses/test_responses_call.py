"""Bodies of responses, and what they come to."""

import json
from typing import Any

import pytest

from services.router.dialects.json_body import InvalidParameter
from services.router.dialects.responses_call import ResponsesCall, read_responses_call, with_instructions
from services.wire.isthmus.v1.common_pb2 import Constraint, SamplingParams
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage, Tool, ToolCall, ToolChoice

WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}


def call_of(**body: Any) -> ResponsesCall:
    return read_responses_call({"input": "Hi", **body}, {})


def chat_of(**body: Any) -> Chat:
    return call_of(**body).request.chat


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth > 1 else []


def text(role: str, *texts: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": said} for said in texts]}


def test_a_tool_loop_comes_back_as_turns(subtests: pytest.Subtests) -> None:
    with subtests.test("a tool loop comes back as turns"):
        items = [
            text("developer", "Be brief."),
            text("developer", "Use tools."),
            {"role": "user", "content": "Weather?"},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Hmm."}],
                "encrypted_content": "h1",
            },
            text("assistant", "Let me ", "look.", kind="output_text"),
            {
                "type": "function_call",
                "call_id": "call_a",
                "name": "weather",
                "arguments": "{}",
                "id": "fc_1",
            },
            {"type": "function_call", "call_id": "call_b", "name": "time", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_a", "output": "rain"},
            {
                "type": "function_call_output",
                "call_id": "call_b",
                "output": [{"type": "input_text", "text": "no"}, {"type": "input_text", "text": "on"}],
            },
            {"type": "reasoning", "summary": [], "encrypted_content": "h2"},
            text("assistant", "Rain.", kind="output_text"),
            text("user", "And", "then?"),
        ]
        turns = with_instructions("You are Codex.", chat_of(input=items).messages)
        assert turns == [
            ChatMessage(role="system", content="You are Codex."),
            ChatMessage(role="developer", content="Be brief."),
            ChatMessage(role="developer", content="Use tools."),
            ChatMessage(role="user", content="Weather?"),
            ChatMessage(
                role="assistant",
                content="Let me look.",
                reasoning="Hmm.",
                answer_id="h1",
                tool_calls=[
                    ToolCall(id="call_a", name="weather", arguments="{}"),
                    ToolCall(id="call_b", name="time", arguments="{}"),
                ],
            ),
            ChatMessage(role="tool", tool_call_id="call_a", content="rain"),
            ChatMessage(role="tool", tool_call_id="call_b", parts=["no", "on"]),
            ChatMessage(role="assistant", content="Rain.", answer_id="h2"),
            ChatMessage(role="user", parts=["And", "then?"]),
        ]
    with subtests.test("thinking begins a turn"):
        items = [
            text("assistant", "a"),
            {"type": "reasoning", "summary": [], "encrypted_content": "not ours " * 20},
            text("assistant", "b"),
            text("user", "c"),
        ]
        assert list(chat_of(input=items).messages) == [
            ChatMessage(role="assistant", content="a"),
            ChatMessage(role="assistant", content="b"),
            ChatMessage(role="user", content="c"),
        ]
    with subtests.test("without instructions there is no system"):
        assert with_instructions("", [ChatMessage(role="user", content="Hi")])[0].role == "user"


def test_what_it_samples_by(subtests: pytest.Subtests) -> None:
    with subtests.test("what it samples by"):
        body = {"temperature": 0.5, "top_p": 0.25, "max_output_tokens": 9, "seed": 3, "top_k": 5}
        expected = SamplingParams(temperature=0.5, top_p=0.25, max_tokens=9, seed=3, top_k=5)
        assert call_of(**body).request.sampling == expected
    for form, constraint in [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Constraint(json_object=True)),
        (
            {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True},
            Constraint(json_schema='{"type": "object"}'),
        ),
    ]:
        with subtests.test(form=form):
            sampling = call_of(text={"format": form, "verbosity": "low"}).request.sampling
            assert (sampling.constraint if sampling.HasField("constraint") else None) == constraint


def test_an_effort_and_variables_are_the_templates_business(subtests: pytest.Subtests) -> None:
    for reasoning, variables in [
        (None, None),
        ({"summary": "auto"}, None),
        ({"effort": "high"}, {"reasoning_effort": "high"}),
        (
            {"effort": "none"},
            {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"},
        ),
    ]:
        with subtests.test(reasoning=reasoning):
            assert json.loads(chat_of(reasoning=reasoning).chat_template_kwargs or "null") == variables
    with subtests.test("variables may be given by name"):
        given = {"chat_template_kwargs": {"reasoning_effort": "low", "x": 1}, "reasoning": {"effort": "high"}}
        assert json.loads(chat_of(**given).chat_template_kwargs) == {"reasoning_effort": "low", "x": 1}


def test_tools_and_which_is_called(subtests: pytest.Subtests) -> None:
    with subtests.test("functions are offered and other kinds left out"):
        call = call_of(tools=[{"type": "custom", "name": "patch"}, WEATHER], parallel_tool_calls=False)
        chat = call.request.chat
        assert list(chat.tools) == [Tool(name="weather", parameters='{"type": "object"}', strict=True)]
        assert call.left_out == ("custom",)
        assert chat.HasField("parallel_tool_calls")
        assert not chat.parallel_tool_calls
    for choice, expected in [
        ("auto", ToolChoice(mode=ToolChoice.MODE_AUTO)),
        ("none", ToolChoice(mode=ToolChoice.MODE_NONE)),
        ("required", ToolChoice(mode=ToolChoice.MODE_REQUIRED)),
        ({"type": "function", "name": "weather"}, ToolChoice(name="weather")),
    ]:
        with subtests.test(choice=choice):
            assert chat_of(tools=[WEATHER], tool_choice=choice).tool_choice == expected


def test_what_changes_no_answer_is_taken(subtests: pytest.Subtests) -> None:
    # As recorded: hints that change no answer, and includes of what is always there.
    with subtests.test("what codex sends is taken"):
        call = call_of(
            stream=True,
            store=False,
            include=["reasoning.encrypted_content"],
            prompt_cache_key="s",
            service_tier="auto",
            text={"verbosity": "medium"},
            reasoning={"effort": "medium", "summary": "auto"},
            parallel_tool_calls=False,
            tool_choice="auto",
            client_metadata={"a": "b"},
            stream_options={"include_obfuscation": False},
        )
        assert (call.stream, call.is_stored) == (True, False)
    with subtests.test("what is nested somewhat comes back"):
        metadata = {"a" * 64: "b" * 512} | {str(number): "" for number in range(15)}
        call = call_of(user=nested(200), metadata=metadata)
        assert (call.echo["user"], call.echo["metadata"]) == (nested(200), metadata)


def test_what_is_wrong_is_named(subtests: pytest.Subtests) -> None:
    for body, param in [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["Hi"]}, "input[0]"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "Hi"}]}, "input[0].role"),
        ({"input": [text("user", "x", kind="input_image")]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"messages": [{}]}, "messages"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"n": 2}, "n"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"a": float("nan")}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"reasoning": "high"}, "reasoning"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": "x"}]}, "tools[0].parameters"),
        ({"metadata": {"a": "\ud800"}}, "metadata"),
        ({"metadata": {"a": float("nan")}}, "metadata"),
        ({"user": "\ud800"}, "user"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"store": "yes"}, "store"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"metadata": "x"}, "metadata"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"metadata": {"a" * 65: "b"}}, "metadata"),
        ({"metadata": {str(number): "b" for number in range(17)}}, "metadata"),
        ({"user": nested(201)}, "user"),
        ({"input": [{}] * 65_537}, "input"),
    ]:
        with subtests.test(body=body):
            with pytest.raises(InvalidParameter) as raised:
                call_of(**body)
            assert raised.value.param == param
            assert str(raised.value).startswith(f"{param} ")
