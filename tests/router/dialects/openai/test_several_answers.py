"""Several answers to a prompt, and to each of several prompts, as choices."""

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest

from router.http.backend import FakeBackend, chat, complete, events, finished, response
from services.router.callers import Caller, calling
from services.router.dialects.json_body import InvalidParameter
from services.router.dialects.openai_call import read_completion_call
from services.values import errors
from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest, GenerateResponse


def of(index: int, told: GenerateResponse) -> GenerateResponse:
    told.index = index
    return told


TWO = (
    of(1, response("c", [3])),
    of(0, response("a", [1])),
    of(1, finished("d", [4])),
    of(0, finished("b", [2])),
)


class EachItsOwn(FakeBackend):
    """Answers each prompt with its own text, twice where two answers are asked for."""

    async def generate(
        self,
        request: GenerateRequest,
        timeout_s: float | None,
        traceparent: str,
        *,
        report_prompt: object = None,
    ) -> AsyncGenerator[GenerateResponse, None]:
        self.requests.append(request)
        if request.text == "fail":
            raise errors.NoCapacity("full", 3.0)
        for index in range(request.n or 1):
            yield of(index, response(request.text))
        for index in range(request.n or 1):
            yield of(index, finished(str(index)))


class AbortingOne(FakeBackend):
    """Somebody stops the first prompt; the second goes on until it is given up."""

    async def generate(
        self,
        request: GenerateRequest,
        timeout_s: float | None,
        traceparent: str,
        *,
        report_prompt: object = None,
    ) -> AsyncGenerator[GenerateResponse, None]:
        if request.text == "a":
            yield finished("", reason=common_pb2.FINISH_REASON_ABORTED)
            return
        try:
            await asyncio.sleep(3600)
            yield finished("b")
        finally:
            self.closed.set()


async def test_one_prompt_that_fails_fails_all(subtests: pytest.Subtests) -> None:
    with subtests.test("a prompt that is aborted ends the others"):
        backend = AbortingOne()
        async with asyncio.timeout(5):
            answer = await complete(backend, prompt=["a", "b"])
        assert answer.status_code == 499 and backend.closed.is_set()
    with subtests.test("one prompt that fails fails all with its status"):
        answer = await complete(EachItsOwn(), prompt=["p", "fail", "q"])
        assert answer.status_code == 429 and answer.headers["retry-after"] == "3"
    with subtests.test("behind the first chunk it is an event"):
        answer = await complete(EachItsOwn(), prompt=["p", "fail"], stream=True)
        *_, last = [line for line in answer.text.split("\n\n") if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 429


async def test_each_answer_is_a_choice_and_the_prompt_counts_once(subtests: pytest.Subtests) -> None:
    with subtests.test("each answer is a choice and the prompt counts once"):
        backend = FakeBackend(*TWO)
        body = (await chat(backend, n=2)).json()
        assert backend.requests[0].n == 2
        choices = [(choice["index"], choice["message"]["content"]) for choice in body["choices"]]
        assert choices == [(0, "ab"), (1, "cd")]
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (10, 6, 16)
        assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
        assert [each["computed_tokens"] for each in body["isthmus"]["answers"]] == [6, 6]
        assert body["isthmus"]["computed_tokens"] == 6
    with subtests.test("offsets of logprobs are counted for each choice"):
        body = (await complete(FakeBackend(*TWO), n=2, logprobs=0)).json()
        assert [choice["logprobs"]["text_offset"] for choice in body["choices"]] == [[], []]
    with subtests.test("an answer without an end is no answer"):
        assert (await chat(FakeBackend(*TWO[:3]), n=2)).status_code == 500


async def test_chunks_have_their_choices_indexes_and_usage_comes_once() -> None:
    answer = await chat(FakeBackend(*TWO), n=2, stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = events(answer)
    assert done == "[DONE]" and usage["usage"]["completion_tokens"] == 6
    told = [(c["choices"][0]["index"], c["choices"][0]["delta"].get("content")) for c in chunks]
    assert told == [(1, ""), (1, "c"), (0, ""), (0, "a"), (1, "d"), (0, "b")]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 4 + ["stop", "stop"]
    assert ["isthmus" in c for c in chunks] == [False] * 4 + [True, True]


async def test_what_best_of_left_out_is_billed() -> None:
    last = finished("a", [1])
    last.finish.left_out.completion_tokens = 20
    backend = FakeBackend(last)
    body = (await complete(backend, best_of=3)).json()
    assert backend.requests[0].best_of == 3 and not backend.requests[0].HasField("n")
    assert body["usage"]["completion_tokens"] == 23
    assert body["isthmus"]["left_out"]["completion_tokens"] == 20


async def test_each_prompt_of_a_list_is_a_request(subtests: pytest.Subtests) -> None:
    with subtests.test("each prompt of a list is a request and choices come prompt by prompt"):
        backend = EachItsOwn()
        body = (await complete(backend, prompt=["p", "q", "r"], n=2, top_k=5, user="u")).json()
        assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
            (0, "p0"),
            (1, "p1"),
            (2, "q0"),
            (3, "q1"),
            (4, "r0"),
            (5, "r1"),
        ]
        assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (30, 18)
        assert {(request.n, request.sampling.top_k) for request in backend.requests} == {(2, 5)}
        ids = [request.request_id for request in backend.requests]
        assert ids == [ids[0], f"{ids[0]}/1", f"{ids[0]}/2"]
        assert body["id"] == f"cmpl-{ids[0]}"
    with subtests.test("lists of ids are prompts too"):
        backend = FakeBackend(finished("a"))
        body = (await complete(backend, prompt=[[1, 2], [3]])).json()
        assert [list(request.token_ids.ids) for request in backend.requests] == [[1, 2], [3]]
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
    with subtests.test("each prompt of a list is the keys tenants"):
        backend = EachItsOwn()
        with calling(Caller(tenant="a")):
            assert (await complete(backend, prompt=["p", "q"])).status_code == 200
            assert (await complete(backend, prompt=["p", "q"], cache_salt="b")).status_code == 403
        assert [request.tenant for request in backend.requests] == ["a", "a"]


async def test_a_list_is_streamed_as_one() -> None:
    answer = await complete(EachItsOwn(), prompt=["p", "q"], stream=True)
    *chunks, done = events(answer)
    assert done == "[DONE]"
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "p0", 1: "q0"}
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_what_many_prompts_share_leaves_room_for_them(subtests: pytest.Subtests) -> None:
    for given in ["x" * 128, "x" * 126]:
        with subtests.test(num_chars=len(given)):
            call = read_completion_call({"prompt": ["p"] * 12}, {"x-request-id": given})
            ids = [request.request_id for request in (call.request, *call.more)]
            assert len(set(ids)) == 12 and max(map(len, ids)) == 128
    # Each prompt would have the long body of its own.
    for large in [
        {"conversation_id": "c" * (1 << 20)},
        {"guided_json": "j" * (1 << 20)},
        {"logit_bias": dict.fromkeys(map(str, range(100_000)), 1.0)},
        {"stop_token_ids": [2**32 - 1] * 100_000},
    ]:
        with subtests.test(next(iter(large))):
            read_completion_call({"prompt": ["p"] * 8, **large}, {})
            with pytest.raises(InvalidParameter, match="fewer at a time") as raised:
                read_completion_call({"prompt": ["p"] * 256, **large}, {})
            assert raised.value.param == "prompt"
