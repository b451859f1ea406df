"""SGLang's /generate, as its bench_serving asks it."""

import json
from typing import Any

import httpx
import pytest

from router.dialects.prompts_told import not_told, scored, told_in_pieces
from router.http.backend import FakeBackend, client, finished, post, response
from services.router.dialects.json_body import InvalidParameter
from services.router.dialects.sglang import read_generate_call
from services.values import errors
from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.common_pb2 import Constraint, SamplingParams
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest

# As version 0.5.23 sends it.
BENCH = {
    "text": "Hi",
    "sampling_params": {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True},
    "stream": True,
    "lora_path": "",
    "return_logprob": False,
    "return_routed_experts": False,
    "logprob_start_len": -1,
}


async def generate(backend: FakeBackend, **body: Any) -> httpx.Response:
    return await post(backend, "/generate", {**BENCH, **body})


def told(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_an_answer_is_told_whole_and_in_each_event_so_far(subtests: pytest.Subtests) -> None:
    with subtests.test("each event has all the text so far"):
        backend = FakeBackend()
        first, second, last = told(await generate(backend))
        assert [event["text"] for event in (first, second, last)] == ["Hello", "Hello you", "Hello you!"]
        assert [event["meta_info"]["completion_tokens"] for event in (first, second, last)] == [1, 2, 3]
        assert first["meta_info"] == {"id": "r1", "completion_tokens": 1, "finish_reason": None}
        isthmus = last["meta_info"].pop("isthmus")
        assert isthmus["decode_prefix_len"] == 8
        assert last["meta_info"] == {
            "id": "r1",
            "finish_reason": {"type": "stop", "matched": "END"},
            "completion_tokens": 3,
            "prompt_tokens": 10,
            "cached_tokens": 4,
        }
        (request,) = backend.requests
        assert request == GenerateRequest(
            request_id=request.request_id,
            text="Hi",
            sampling=SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
        )
    with subtests.test("an answer is told whole"):
        script = (response("a", [65]), finished("b", [66], common_pb2.FINISH_REASON_LENGTH))
        answer = (await generate(FakeBackend(*script), stream=False)).json()
        assert (answer["text"], answer["output_ids"]) == ("ab", [65, 66])
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


async def test_errors() -> None:
    answer = await generate(FakeBackend(errors.NoCapacity("full")))
    assert (answer.status_code, answer.json()["error"]["message"]) == (429, "full")
    answer = await generate(FakeBackend(response("He", [72]), errors.PeerFailed("gone")))
    assert json.loads(answer.text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]["code"] == 503
    aborted = finished(reason=common_pb2.FINISH_REASON_ABORTED)
    assert (await generate(FakeBackend(response("He", [72]), aborted), stream=False)).status_code == 499


def read(**body: Any) -> GenerateRequest:
    return read_generate_call({"text": "Hi", **body}, {}).request


def test_what_it_samples_by(subtests: pytest.Subtests) -> None:
    with subtests.test("what it samples by"):
        given = {
            **{
                "temperature": 0.5,
                "top_p": 0.25,
                "top_k": -1,
                "min_p": 0.125,
                "stop": "a",
                "stop_token_ids": [3],
            },
            **{"frequency_penalty": 1, "presence_penalty": 0.5, "repetition_penalty": 1.5},
            **{"max_new_tokens": 9, "min_new_tokens": 2, "sampling_seed": 7},
        }
        expected = SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=0,
            min_p=0.125,
            stop=["a"],
            stop_token_ids=[3],
            frequency_penalty=1,
            presence_penalty=0.5,
            repetition_penalty=1.5,
            max_tokens=9,
            min_tokens=2,
            seed=7,
        )
        assert read(sampling_params=given).sampling == expected
        assert read().sampling == SamplingParams(max_tokens=128)
    for name, constraint in [
        ("regex", Constraint(regex="a+")),
        ("ebnf", Constraint(grammar="a+")),
        ("json_schema", Constraint(json_schema="a+")),
    ]:
        with subtests.test(name=name):
            assert read(sampling_params={name: "a+"}).sampling.constraint == constraint
    with subtests.test("ids are a prompt too"):
        assert read(text=None, input_ids=[1, 2]).token_ids.ids == [1, 2]


def test_each_text_is_a_request(subtests: pytest.Subtests) -> None:
    with subtests.test("each text is a request alike in all else"):
        call = read_generate_call(
            {"text": ["a", "b"], "sampling_params": {"n": 2, "top_k": 3}}, {"x-request-id": "r"}
        )
        assert [request.text for request in (call.request, *call.more)] == ["a", "b"]
        assert [request.request_id for request in (call.request, *call.more)] == ["r", "r/1"]
        assert {(request.n, request.sampling.top_k) for request in (call.request, *call.more)} == {(2, 3)}
        params = [{"max_new_tokens": 1}, {"max_new_tokens": 2}]
        call = read_generate_call({"input_ids": [[1], [2]], "sampling_params": params}, {})
        assert [request.sampling.max_tokens for request in (call.request, *call.more)] == [1, 2]
    with subtests.test("each prompts constraint is its own"):
        params = [{"regex": "a"}, {}, {"regex": "b"}]
        call = read_generate_call({"text": ["p", "q", "r"], "sampling_params": params}, {})
        assert [request.sampling.constraint.regex for request in call.requests] == ["a", "", "b"]
        last = read_generate_call({"text": ["p", "q"], "sampling_params": params[:2]}, {})
        assert call.constraint_param == "sampling_params[2].regex"
        assert last.constraint_param == "sampling_params[0].regex"
    with subtests.test("many texts beside a long body are refused"):
        params = {"logit_bias": dict.fromkeys(map(str, range(100_000)), 1.0)}
        with pytest.raises(InvalidParameter, match="fewer at a time") as raised:
            read_generate_call({"text": ["p"] * 256, "sampling_params": params}, {})
        assert raised.value.param == "text"


async def test_several_answers_are_a_list(subtests: pytest.Subtests) -> None:
    with subtests.test("several answers are a list and their events have indexes"):
        first, second = response("a", [65]), finished("b", [66])
        other = finished("c", [67])
        other.index = 1
        backend = FakeBackend(first, other, second)
        params = {"n": 2, "max_new_tokens": 4}
        answers = (await generate(backend, stream=False, sampling_params=params)).json()
        assert [(answer["text"], answer["output_ids"]) for answer in answers] == [
            ("ab", [65, 66]),
            ("c", [67]),
        ]
        events = told(await generate(backend, sampling_params=params))
        assert [(event["index"], event["text"]) for event in events] == [(0, "a"), (1, "c"), (0, "ab")]
    with subtests.test("a list of one is answered by a list"):
        (answer,) = (await generate(FakeBackend(finished("a")), stream=False, text=["Hi"])).json()
        assert answer["text"] == "a"


def test_what_is_wrong_is_named(subtests: pytest.Subtests) -> None:
    for body, param in [
        ({"text": None}, "text"),
        ({"input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", 1]}, "text[1]"),
        ({"text": None, "input_ids": [[1], [-2]]}, "input_ids[1][0]"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"n": 2}]}, "sampling_params[1].n"),
        ({"text": ["a"] * 257}, "text"),
        ({"return_logprob": 1}, "return_logprob"),
        ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"token_ids_logprob": [3]}, "token_ids_logprob"),
        ({"lora_path": "x"}, "lora_path"),
        ({"image_data": ["x"]}, "image_data"),
        ({"sampling_params": []}, "sampling_params"),
        ({"sampling_params": {"n": 129}}, "sampling_params.n"),
        ({"sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf"),
        ({"sampling_params": {"skip_special_tokens": False}}, "sampling_params.skip_special_tokens"),
    ]:
        with subtests.test(body=body):
            with pytest.raises(InvalidParameter) as raised:
                read(**body)
            assert raised.value.param == param


async def test_what_bench_serving_asks_beside() -> None:
    async with client(FakeBackend(), model_path="/models/tiny") as http:
        assert (await http.get("/model_info")).json()["tokenizer_path"] == "/models/tiny"
        info = (await http.get("/server_info")).json()
        assert (info["served_model_name"], info["internal_states"]) == ("tiny", [])
        assert info["version"] == (await http.get("/version")).json()["version"] != "none"
        flushed = await http.post("/flush_cache")
    assert flushed.status_code == 501  # it raises, and measures nothing that is not so
    assert "cache_salt" in flushed.json()["error"]["message"]


def logprobs_asked(**body: Any) -> SamplingParams:
    sampling = read(**body).sampling
    sampling.ClearField("temperature")
    sampling.ClearField("max_tokens")
    return sampling


def test_logprobs_are_asked_for_by_their_flag_alone() -> None:
    rest = {"top_logprobs_num": 2, "logprob_start_len": 1}
    assert logprobs_asked(**rest) == SamplingParams()
    assert logprobs_asked(return_logprob=True) == SamplingParams(logprobs=0)
    expected = SamplingParams(logprobs=2, prompt_logprobs=2, prompt_logprobs_start=1)
    assert logprobs_asked(return_logprob=True, **rest) == expected


async def test_logprobs_of_the_prompt_begin_with_null(subtests: pytest.Subtests) -> None:
    """Where it is not the first of the prompt either."""
    for stream in [False, True]:
        for start in [0, 1]:
            with subtests.test(stream=stream, start=start):
                script = told_in_pieces()
                asked = {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 2}
                answer = await generate(
                    FakeBackend(*script), **asked, return_text_in_logprobs=True, stream=stream
                )
                meta = (told(answer)[-1] if stream else answer.json())["meta_info"]
                unknown = [[None, 72, "H"], [None, 105, "i"]][start]
                known = [[-1.5, 105, "i"], [-0.5, 33, "!"]]
                assert meta["input_token_logprobs"] == [unknown, *known[start:]]
                tops = [None, [[-0.5, 97, "a"], [-0.5, 98, "b"]], [[-0.5, 33, "!"], [-0.5, 98, "b"]]]
                assert meta["input_top_logprobs"] == (tops if start == 0 else [None, tops[2]])
                assert meta["output_token_logprobs"] == [[-0.25, 97, "a"], [-0.25, 98, "b"]]
                assert len(meta["output_top_logprobs"]) == 2


async def test_long_lists_come_with_the_last_event_alone() -> None:
    """To each token the whole prompt again, with twenty others of each: that kept the loop for seconds."""
    prompt, *_, last = told_in_pieces()
    del prompt.prompt_logprobs[1:]
    prompt.prompt_logprobs.extend([scored(33, -0.5, 1, 33, 98)] * 400)
    tokens = [response("a", [97], [scored(97, -0.25, 0, 97, 98)] * 200) for _ in range(3)]
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    events = [
        event["meta_info"] for event in told(await generate(FakeBackend(prompt, *tokens, last), **asked))
    ]
    names = ("input_token_logprobs", "input_top_logprobs", "output_token_logprobs", "output_top_logprobs")
    lengths = [[len(event[name]) if name in event else None for name in names] for event in events]
    assert lengths[-1] == [402, 402, 601, 601]
    assert [each[:2] for each in lengths[:-1]] == [[None, None]] * 4
    assert [each[2] for each in lengths[:-1]] == [0, 200, None, None]


async def test_logprobs_of_the_answer_and_of_several(subtests: pytest.Subtests) -> None:
    with subtests.test("logprobs of the answer alone have no text"):
        script = told_in_pieces()
        script[0].ClearField("prompt_token_ids")
        for response_ in script:
            response_.ClearField("prompt_logprobs")
        meta = (await generate(FakeBackend(*script), return_logprob=True, stream=False)).json()["meta_info"]
        assert meta["input_token_logprobs"] == []
        assert meta["output_token_logprobs"] == [[-0.25, 97, None], [-0.25, 98, None]]
        assert "output_top_logprobs" not in meta
    with subtests.test("all answers to a prompt tell of it"):
        script = [*told_in_pieces(0), *not_told(1)]
        asked = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"n": 2}}
        first, second = (await generate(FakeBackend(*script), **asked, stream=False)).json()
        assert len(first["meta_info"]["input_token_logprobs"]) == 3
        assert second["meta_info"]["input_token_logprobs"] == first["meta_info"]["input_token_logprobs"]
