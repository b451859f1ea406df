import json

import pytest

from router.http.backend import (
    HI,
    FakeBackend,
    chat,
    client,
    complete,
    events,
    finished,
    logprobs_of,
    post,
    response,
)
from services.router.dialects.sampling import SamplingDefaults
from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.common_pb2 import TokenLogprob, TokenLogprobs
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest, GenerateResponse


async def test_an_answer_is_told_whole(subtests: pytest.Subtests) -> None:
    with subtests.test("a chat is answered whole"):
        backend = FakeBackend()
        answer = await chat(backend)
        assert answer.status_code == 200
        body = answer.json()
        isthmus = body.pop("isthmus")
        assert body == {
            "id": "chatcmpl-r1",
            "object": "chat.completion",
            "created": 1234,
            "model": "tiny",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Hello you!", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
            ],
            "usage": {
                "prompt_tokens": 10,
                "completion_tokens": 3,
                "total_tokens": 13,
                "prompt_tokens_details": {"cached_tokens": 4},
                "completion_tokens_details": {"reasoning_tokens": 0},
            },
        }
        assert isthmus["decode_prefix_len"] == 8
        assert isthmus["delta_tokens"] == 2
        assert isthmus["kv_bytes_moved"] == 2048
        assert isthmus["kv_bytes_saved"] == 2**33
        assert isthmus["carried_bytes"] == {"recurrent": 1024}
        assert (isthmus["decode_rank"], isthmus["prefill_rank"]) == ("d0/1", "p0/0")
        assert (isthmus["plan"], isthmus["matched_stop"]) == ("remote", "END")
        assert isthmus["stages"]["route_s"] == 0.25
        assert isthmus["drift_tokens"] is None
        assert backend.closed.is_set()
    with subtests.test("a completion is answered whole"):
        body = (
            await complete(FakeBackend(response("a"), finished("b", reason=common_pb2.FINISH_REASON_LENGTH)))
        ).json()
        assert (body["id"], body["object"]) == ("cmpl-r1", "text_completion")
        assert body["choices"] == [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length"}]
    with subtests.test("without a model the one that is served answers"):
        backend = FakeBackend()
        body = (await post(backend, "/v1/chat/completions", {"messages": HI})).json()
        assert (backend.requests[0].model, body["model"]) == ("", "tiny")


async def test_an_answer_is_streamed(subtests: pytest.Subtests) -> None:
    with subtests.test("a chat is streamed"):
        backend = FakeBackend(response("He", [72]), response("", [200]), finished("y", [33]))
        *chunks, done = events(await chat(backend, stream=True))
        assert done == "[DONE]"
        assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
            {"role": "assistant", "content": ""},
            {"content": "He"},
            {"content": "y"},
        ]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
        assert {(c["id"], c["object"], c["created"], c["model"]) for c in chunks} == {
            ("chatcmpl-r1", "chat.completion.chunk", 1234, "tiny")
        }
        assert [("isthmus" in chunk, "usage" in chunk) for chunk in chunks][-1] == (True, False)
    with subtests.test("a stream ends with an empty delta where no text is left"):
        *_, last, _done = events(await chat(FakeBackend(response("He"), finished()), stream=True))
        assert last["choices"][0]["delta"] == {}
    with subtests.test("an event is one line to every client"):
        text = "a\x85b\u2028c\u2029d\ne 語"
        answer = await complete(FakeBackend(response(text), finished()), stream=True)
        assert len(answer.text.splitlines()) == len(answer.text.split("\n")) - 1  # it ends with one
        assert "語" in answer.text
        assert events(answer)[0]["choices"][0]["text"] == text


async def test_usage_in_a_stream(subtests: pytest.Subtests) -> None:
    with subtests.test("usage comes in a chunk of its own"):
        answer = await complete(FakeBackend(), stream=True, stream_options={"include_usage": True})
        *chunks, usage, _ = events(answer)
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hello", " you", "!"]
        assert all(chunk["usage"] is None for chunk in chunks)
        assert usage["choices"] == []
        assert usage["usage"]["total_tokens"] == 13
    with subtests.test("usage so far comes with each chunk where it is asked for"):
        first = response("Hello", [72])
        first.prompt_token_ids.extend(range(10))
        backend = FakeBackend(first, response(" you", [73]), response("", [74]), finished("!", [33]))
        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last, _ = events(await chat(backend, stream=True, stream_options=options))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 4
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {10}
        assert all("prompt_token_ids" not in chunk for chunk in chunks)
        assert last["usage"]["total_tokens"] == 13  # as the engine counts it
        alone = await chat(FakeBackend(), stream=True, stream_options={"continuous_usage_stats": True})
        assert all("usage" not in chunk for chunk in events(alone)[:-1])  # as with vLLM


async def test_logprobs(subtests: pytest.Subtests) -> None:
    with subtests.test("chat logprobs"):
        backend = FakeBackend(response("A", [65], [logprobs_of(65, 65, 200, 300)]), finished())
        body = (await chat(backend, logprobs=True, top_logprobs=2)).json()
        assert backend.requests[0].sampling.logprobs == 2
        assert body["choices"][0]["logprobs"] == {
            "content": [
                {
                    "token": "A",
                    "logprob": -0.25,
                    "bytes": [65],
                    "top_logprobs": [
                        {"token": "A", "logprob": -0.5, "bytes": [65]},
                        {"token": "\ufffd", "logprob": -0.5, "bytes": [200]},
                        {"token": "\ufffd", "logprob": -0.5, "bytes": None},
                    ],
                }
            ]
        }
    for no_number in ["-inf", "nan"]:
        with subtests.test(no_number=no_number):
            impossible = TokenLogprobs(chosen=TokenLogprob(token_id=66, logprob=float(no_number)))
            backend = FakeBackend(
                response("A", [65], [logprobs_of(65, 67)]), response("B", [66], [impossible]), finished()
            )
            first, second, *_ = events(await complete(backend, logprobs=1, stream=True))
            assert first["choices"][0]["logprobs"] == {
                "tokens": ["A"],
                "token_logprobs": [-0.25],
                "top_logprobs": [{"C": -0.5}],
                "text_offset": [0],
            }
            assert second["choices"][0]["logprobs"]["text_offset"] == [1]
            assert second["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


async def test_ids_of_tokens_are_returned_where_they_are_asked_for(subtests: pytest.Subtests) -> None:
    with subtests.test("token ids are returned when asked for"):
        assert (await chat(FakeBackend(), return_token_ids=True)).json()["choices"][0]["token_ids"] == [
            72,
            73,
            33,
        ]
        chunks = events(await complete(FakeBackend(), return_token_ids=True, stream=True))[:-1]
        assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[72], [73], [33]]
    with subtests.test("the prompts ids are the answers in chats"):
        script = first_of(1, 7, 8), first_of(0), last_of(1), last_of(0)
        backend = FakeBackend(*script)
        asked = {"return_token_ids": True, "n": 2}
        whole = (await chat(backend, **asked)).json()
        assert whole["prompt_token_ids"] == [7, 8]
        assert "prompt_token_ids" not in str(whole["choices"])
        chunks = events(await chat(backend, stream=True, **asked))[:-1]
        told = [(chunk["choices"][0]["index"], chunk.get("prompt_token_ids")) for chunk in chunks]
        assert [each for each in told if each[1]] == [(1, [7, 8]), (0, [7, 8])]
        assert told[0] == (1, [7, 8])  # with the first chunk
        assert "prompt_token_ids" not in (await chat(backend, n=2)).text
    with subtests.test("the prompts ids are each choices in completions"):
        script = first_of(1, 7), first_of(0), last_of(1), last_of(0)
        asked = {"return_token_ids": True, "n": 2, "prompt": "a"}
        whole = (await complete(FakeBackend(*script), **asked)).json()
        assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [[7], [7]]
        assert "prompt_token_ids" not in {key for key in whole if key != "choices"}
        chunks = events(await complete(FakeBackend(*script), stream=True, **asked))[:-1]
        told = [
            (chunk["choices"][0]["index"], chunk["choices"][0].get("prompt_token_ids")) for chunk in chunks
        ]
        assert [each for each in told if each[1]] == [(1, [7]), (0, [7])]


def first_of(index: int, *prompt: int) -> GenerateResponse:
    return GenerateResponse(request_id="r1", text="a", token_ids=[5], index=index, prompt_token_ids=prompt)


def last_of(index: int) -> GenerateResponse:
    last = finished()
    last.index = index
    return last


async def test_every_parameter_reaches_the_backend() -> None:
    backend = FakeBackend()
    body = {
        "model": "tiny",
        "messages": [
            {
                "role": "system",
                "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief"}],
            },
            {"role": "assistant", "content": None, "token_ids": [5, 6]},
        ],
        "max_tokens": 1,
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 5,
        "min_p": 0.125,
        "seed": -1,
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "min_tokens": 2,
        "frequency_penalty": 1,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "n": 1,
        "user": "somebody",
        "tools": [],
        "response_format": {"type": "text"},
        "store": False,
    }
    headers = {
        "x-isthmus-tenant": "t",
        "x-isthmus-conversation": "c",
        "x-request-id": "mine",
        "traceparent": "00-of-the-caller",
    }
    assert (await post(backend, "/v1/chat/completions", body, headers=headers)).status_code == 200
    expected = GenerateRequest(
        request_id="mine",
        model="tiny",
        tenant="t",
        n=1,
        conversation_id="c",
        sampling=common_pb2.SamplingParams(
            max_tokens=7,
            temperature=0.5,
            top_p=0.25,
            top_k=5,
            min_p=0.125,
            seed=2**64 - 1,
            stop=["a", "b"],
            stop_token_ids=[3],
            ignore_eos=True,
            min_tokens=2,
            frequency_penalty=1,
            presence_penalty=-0.5,
            repetition_penalty=1.5,
        ),
    )
    expected.chat.messages.add(role="system", parts=["Be ", "brief"])
    expected.chat.messages.add(role="assistant", token_ids=[5, 6])
    assert backend.requests == [expected]
    assert backend.traceparents == ["00-of-the-caller"]


async def test_what_is_not_said_is_openais_or_the_models(subtests: pytest.Subtests) -> None:
    with subtests.test("defaults are openais"):
        backend = FakeBackend()
        await chat(backend)
        await complete(backend, conversation_id="c", stop="x", prompt=[1, 2], top_k=-1)
        of_chat, of_completion = backend.requests
        assert of_chat.sampling == common_pb2.SamplingParams()
        assert of_completion == GenerateRequest(
            request_id=of_completion.request_id,  # drawn
            model="tiny",
            conversation_id="c",
            token_ids={"ids": [1, 2]},
            sampling=common_pb2.SamplingParams(max_tokens=16, stop=["x"], top_k=0),
        )
    with subtests.test("what is not said is the models"):
        backend = FakeBackend()
        defaults = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.05)
        said = {"temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
        async with client(backend, defaults=defaults) as http:
            for path, prompt in (
                ("/v1/completions", {"prompt": "a"}),
                ("/v1/chat/completions", {"messages": HI}),
            ):
                for more in ({}, {"temperature": None, "top_k": None}, said):
                    body = {**prompt, "max_tokens": 4, **more}
                    assert (await http.post(path, json=body)).status_code == 200
        models = common_pb2.SamplingParams(
            temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.05, max_tokens=4
        )
        own = common_pb2.SamplingParams(
            temperature=0, top_p=0.5, top_k=0, min_p=0, repetition_penalty=1, max_tokens=4
        )
        assert [request.sampling for request in backend.requests] == [models, models, own] * 2


async def test_variables_of_the_template(subtests: pytest.Subtests) -> None:
    for body, variables in [
        ({}, None),
        ({"chat_template_kwargs": None}, None),
        ({"chat_template_kwargs": {}}, None),
        ({"chat_template_kwargs": {"enable_thinking": False, "n": 5}}, {"enable_thinking": False, "n": 5}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "none", "enable_thinking": True},
        ),
    ]:
        with subtests.test(body=body):
            backend = FakeBackend()
            assert (await chat(backend, **body)).status_code == 200
            (request,) = backend.requests
            assert (json.loads(request.chat.chat_template_kwargs or "null")) == variables


async def test_prompts_and_what_asks_for_nothing_else_than_is_done(subtests: pytest.Subtests) -> None:
    for prompt, expected in [
        (["Hi"], GenerateRequest(text="Hi")),
        ([[1, 2, 3]], GenerateRequest(token_ids={"ids": [1, 2, 3]})),
        ([7], GenerateRequest(token_ids={"ids": [7]})),
    ]:
        with subtests.test(prompt=prompt):
            backend = FakeBackend()
            assert (await complete(backend, prompt=prompt)).status_code == 200
            (request,) = backend.requests
            assert (request.text, request.token_ids) == (expected.text, expected.token_ids)
    with subtests.test("what asks for nothing else than is done is taken"):
        harmless = {
            "n": 1,
            "logit_bias": {},
            "bad_words": [],
            "regex": None,
            "include_stop_str_in_output": False,
            "skip_special_tokens": True,
            "priority": 0,
            "documents": [],
            "add_special_tokens": False,
            "length_penalty": 1.0,
            "logprobs": False,
            "top_logprobs": 0,
            "prompt_cache_key": "k",
        }
        assert (await chat(FakeBackend(), **harmless)).status_code == 200
    for wanted in [True, False, None]:
        with subtests.test(wanted=wanted):
            backend = FakeBackend()
            await complete(backend, add_special_tokens=wanted)
            (request,) = backend.requests
            assert request.HasField("add_special_tokens") is (wanted is not None)
            assert request.add_special_tokens is bool(wanted)


async def test_whose_it_is_and_of_which_conversation(subtests: pytest.Subtests) -> None:
    for body, header, tenant in [
        ({}, None, ""),
        ({"cache_salt": "a"}, None, "a"),
        ({"cache_salt": None}, "b", "b"),
        ({"cache_salt": ""}, "b", "b"),
        ({"cache_salt": "b"}, "b", "b"),
        ({"cache_salt": "a"}, "b", None),
    ]:
        with subtests.test(body=body):
            backend = FakeBackend()
            headers = {} if header is None else {"x-isthmus-tenant": header}
            answer = await post(backend, "/v1/completions", {"prompt": "Hi", **body}, headers=headers)
            if tenant is None:
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")
                assert backend.requests == []
            else:
                assert backend.requests[0].tenant == tenant
    with subtests.test("a cache key names the conversation"):
        backend = FakeBackend()
        assert (await chat(backend, prompt_cache_key="k")).status_code == 200
        assert (await chat(backend, prompt_cache_key="k", conversation_id="c")).status_code == 200
        assert [request.conversation_id for request in backend.requests] == ["k", "c"]
        assert (await chat(backend, prompt_cache_key=5)).json()["error"]["param"] == "prompt_cache_key"
