import json
import re

import pytest

from router.http.backend import HI, FakeBackend, chat, client, complete, events, finished, response
from services.router.dialects import json_body as bodies
from services.router.dialects import refused
from services.router.dialects.openai_call import read_chat_call, read_completion_call
from services.values import errors
from services.wire.isthmus.v1 import common_pb2


async def test_a_bad_chat_parameter_is_named(subtests: pytest.Subtests) -> None:
    for body, param in [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [*HI, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "messages[0].tool_calls[0]"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
            "messages[0].function_call",
        ),
        ({"messages": [{"role": "tool", "tool_call_id": 1}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "reasoning_content": {}}]}, "messages[0].reasoning_content"),
        ({"messages": [{"role": "user", "name": ["a"]}]}, "messages[0].name"),
        ({"messages": [{"role": "assistant", "token_ids": [-1]}]}, "messages[0].token_ids[0]"),
        ({"model": 5}, "model"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"tools": [{}]}, "tools[0].function"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": "x"}}]}, "tools[0].function.parameters"),
        ({"tools": [{"function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [{"function": {"name": "f", "description": 1}}]}, "tools[0].function.description"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"function": {"name": 1}}}, "tool_choice.function.name"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "regex", "pattern": "a"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": 1}, "guided_json"),
        ({"guided_json": {"const": "\ud800"}}, "guided_json"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ({"guided_grammar": {}}, "guided_grammar"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"regex": ["a+"]}, "regex"),
        ({"ebnf": 1}, "ebnf"),
        ({"json_schema": []}, "json_schema"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ({"bad_words": "a"}, "bad_words"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"custom_logit_processor": "x"}, "custom_logit_processor"),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"stop_regex": "a+"}, "stop_regex"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
        ({"no_stop_trim": "yes"}, "no_stop_trim"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"priority": -1}, "priority"),
        ({"extra_key": "k"}, "extra_key"),
        ({"thinking": {"type": "disabled"}}, "thinking"),
        ({"lora_path": "x"}, "lora_path"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"nvext": {"greed_sampling": True}}, "nvext"),
        ({"grammar": {"type": "json"}}, "grammar"),
        ({"length_penalty": 1.1}, "length_penalty"),
        ({"sampling_params": {"temperature": 0}}, "sampling_params"),
        ({"session_id": "s"}, "session_id"),
        ({"separate_reasoning": False}, "separate_reasoning"),
        ({"prompt": "Hi"}, "prompt"),
        ({"messages": [{**HI[0], "prefix": True}, *HI]}, "messages[0].prefix"),
        ({"messages": [*HI, {**HI[0], "partial": 1}]}, "messages[1].partial"),
        ({"continue_final_message": 1}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "\ud800"}}, "chat_template_kwargs"),
        ({"reasoning_effort": 1}, "reasoning_effort"),
        ({"cache_salt": ["a"]}, "cache_salt"),
        ({"cache_salt": "a" * 129}, "cache_salt"),
        ({"cache_salt": "a\n"}, "cache_salt"),
    ]:
        with subtests.test(body=body):
            backend = FakeBackend()
            # By hand: httpx would not send half a surrogate pair.
            content = json.dumps({"model": "tiny", "messages": HI, **body}).encode()
            async with client(backend) as http:
                answer = await http.post("/v1/chat/completions", content=content)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
            assert error["param"] == param
            assert error["message"].startswith(param + " ")
            assert backend.requests == []
            assert backend.rejections == ["InvalidRequest"]


async def test_a_bad_completion_parameter_is_named(subtests: pytest.Subtests) -> None:
    for body, param in [
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a"] * 9, "n": 128}, "prompt"),
        ({"prompt": ["a"] * 9, "best_of": 128}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], [2, "a"]]}, "prompt[1]"),
        ({"prompt": [[[1]]]}, "prompt[0]"),
        ({"prompt": [["a"]]}, "prompt[0]"),
        ({"prompt": [[1, -1]]}, "prompt[0][1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [1, 2**32, 2.5]}, "prompt[1]"),
        ({"best_of": 129}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"echo": "yes"}, "echo"),
        ({"echo": True, "logprobs": 1, "n": 2, "stream": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"add_special_tokens": 1}, "add_special_tokens"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"messages": HI}, "messages"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
    ]:
        with subtests.test(body=body):
            answer = await complete(FakeBackend(), **body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    with subtests.test("a number that is none is refused"):
        async with client(FakeBackend()) as http:
            answer = await http.post("/v1/completions", content=b'{"prompt": "a", "temperature": NaN}')
        assert answer.json()["error"]["param"] == "temperature"


async def test_who_is_refused_is_told_what_to_do_instead(subtests: pytest.Subtests) -> None:
    for body, instead in [
        ({"max_new_tokens": 5}, "use max_tokens"),
        ({"max_completion_tokens": 5}, "use max_tokens"),
        ({"stop_sequences": ["a"]}, "use stop"),
        ({"sampling_params": {"top_k": 5}}, "send what it holds as parameters of the body itself"),
        ({"system": "You are a pirate."}, "use a message of role system"),
        ({"repeat_penalty": 1.1}, "use repetition_penalty"),
        ({"do_sample": False}, "use temperature 0"),
        ({"session_id": "s"}, "use conversation_id"),
        ({"mirostat": 2}, "leave it out"),
    ]:
        with subtests.test(body=body):
            answer = await complete(FakeBackend(), **body)
            (name,) = body
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == f"{name} is not supported by this server; {instead}"
    with subtests.test("nobody is sent from one refusal to another"):
        in_chats, in_completions = refused.IN_CHATS.keys(), refused.IN_COMPLETIONS.keys()
        assert refused.INSTEAD.keys() <= in_chats | in_completions
        for name, instead in refused.INSTEAD.items():
            used = re.fullmatch(r"use (\w+)", instead)
            assert used is None or used[1] not in in_chats & in_completions, name


def test_what_asks_for_nothing_changes_nothing(subtests: pytest.Subtests) -> None:
    for read, body, names in [
        (read_chat_call, {"messages": HI}, refused.IN_CHATS),
        (read_completion_call, {"prompt": "Hi"}, refused.IN_COMPLETIONS),
    ]:
        with subtests.test(read=read):
            plain = read(body, {})
            for name, harmless in names.items():
                for value in (None, *harmless):
                    assert read({name: value, **body}, {}) == plain, (name, value)


async def test_of_many_ids_only_a_wrong_one_is_given_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """To name millions takes seconds, in which no stream goes on."""
    named = []
    check = bodies.check_integer

    def noted(value: object, name: str, low: int, high: int) -> int:
        named.append(name)
        return check(value, name, low, high)

    monkeypatch.setattr(bodies, "check_integer", noted)
    backend = FakeBackend()
    assert (await complete(backend, prompt=[*range(500)], max_tokens=None)).status_code == 200
    assert backend.requests[0].token_ids.ids == [*range(500)]
    assert (await complete(backend, prompt=[*range(500), -1], max_tokens=None)).status_code == 400
    assert named == ["prompt[500]"]


ERRORS = [
    (errors.InvalidRequest("bad"), 400),
    (errors.NotFound("no such model"), 404),
    (errors.AlreadyRunning("taken"), 409),
    (errors.NoCapacity("full"), 429),
    (errors.Aborted("stopped"), 499),
    (errors.Unavailable("draining"), 503),
    (errors.PeerFailed("gone"), 503),
    (errors.StaleGeneration("restarted"), 503),
    (errors.DeadlineExceeded("late"), 504),
    (errors.ProtocolError("nonsense"), 500),
]


async def test_an_error_before_the_first_token_has_its_status(subtests: pytest.Subtests) -> None:
    for stream in [False, True]:
        for error, status in ERRORS:
            with subtests.test(stream=stream, error=error):
                backend = FakeBackend(error)
                answer = await chat(backend, stream=stream)
                assert answer.status_code == status
                assert answer.json()["error"] == {
                    **answer.json()["error"],
                    "message": str(error),
                    "code": status,
                }
                assert backend.closed.is_set()
    # By the error's class, whatever it says: clients shorten the conversation then.
    for stream in [False, True]:
        for ask, param in [(chat, "messages"), (complete, "prompt")]:
            with subtests.test(stream=stream, ask=ask):
                answer = await ask(FakeBackend(errors.ContextExceeded("text is long")), stream=stream)
                assert answer.status_code == 400
                assert answer.json()["error"] == {
                    "message": "text is long",
                    "type": "invalid_request_error",
                    "param": param,
                    "code": "context_length_exceeded",
                }
    for stream in [False, True]:
        for retry_after_s, header in [(None, None), (2.1, "3")]:
            with subtests.test(stream=stream, retry_after_s=retry_after_s):
                answer = await chat(FakeBackend(errors.NoCapacity("full", retry_after_s)), stream=stream)
                assert (answer.status_code, answer.headers.get("Retry-After")) == (429, header)
    for stream in [False, True]:
        with subtests.test(stream=stream):
            answer = await chat(FakeBackend(KeyError("secret")), stream=stream)
            assert answer.status_code == 500
            assert answer.json()["error"]["message"] == "internal error"


async def test_fields_are_named_in_this_apis_words(subtests: pytest.Subtests) -> None:
    for message, param in [
        ("sampling.top_p must be above 0", "top_p"),
        ("chat.messages[2].role must be one of", "messages[2].role"),
        ("prompt is too long", "prompt"),
        ("chat.chat_template_kwargs must be a JSON object", "chat_template_kwargs"),
        ("token_ids.ids[3] must be below", "prompt"),
        ("prompt[1] must be below the vocabulary's size", "prompt"),
        ("sampling.logprobs: none here", "logprobs"),
        ("chat.tools, as a grammar, is too large", "tools"),
        ("The request cannot work", None),
    ]:
        with subtests.test(message=message):
            answer = await chat(FakeBackend(errors.InvalidRequest.received(message)))
            error = answer.json()["error"]
            assert (error["message"], error["param"]) == (message, param)


async def test_an_error_behind_the_first_token(subtests: pytest.Subtests) -> None:
    for last in [
        errors.PeerFailed("gone"),
        finished(reason=common_pb2.FINISH_REASON_ABORTED),
        response(" and no finish"),
    ]:
        with subtests.test(last=last):
            backend = FakeBackend(response("He"), last)
            answer = await chat(backend, stream=True)
            assert answer.status_code == 200
            *_, error = events(answer)
            assert list(error) == ["error"]
            assert error["error"]["code"] in (499, 500, 503)
            assert backend.closed.is_set()
    for script, status in [
        ([response("He"), finished(reason=common_pb2.FINISH_REASON_ABORTED)], 499),
        ([response("He")], 500),
        ([response("He"), errors.PeerFailed("gone")], 503),
    ]:
        with subtests.test(script=script):
            assert (await chat(FakeBackend(*script))).status_code == status
