import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from services import errors
from services.router import openai, openai_request
from services.router.openai import openai_app
from services.wire.isthmus.v1 import common_pb2
from services.wire.isthmus.v1.common_pb2 import RankId, TokenLogprob, TokenLogprobs
from services.wire.isthmus.v1.generation_pb2 import (
    Finish,
    GenerateRequest,
    GenerateResponse,
    ListModelsResponse,
    Model,
    Placement,
    StageTimes,
    Usage,
)

DEADLINE_S = 10.0
HI = [{"role": "user", "content": "Hi"}]


class FakeBackend:
    """Plays a script: responses are yielded, errors raised, "wait" waits for ever.

    It holds on to what it plays, so that only closing closes it, never the garbage collector.
    """

    def __init__(
        self, *script: GenerateResponse | Exception | str, models: Sequence[str] = ("tiny",)
    ) -> None:
        self.script = script or (response("Hello", [72]), response(" you", [73]), finished("!", [33]))
        self.model_ids, self.decode_ranks = models, 1
        self.requests: list[GenerateRequest] = []
        self.timeouts_s: list[float | None] = []
        self.traceparents: list[str] = []
        self.rejections: list[str] = []
        self.waiting = asyncio.Event()
        self.closed = asyncio.Event()

    def generate(
        self, request: GenerateRequest, timeout_s: float | None, traceparent: str
    ) -> AsyncGenerator[GenerateResponse, None]:
        self.requests.append(request)
        self.timeouts_s.append(timeout_s)
        self.traceparents.append(traceparent)
        self.playing = self.play()
        return self.playing

    async def play(self) -> AsyncGenerator[GenerateResponse, None]:
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, str):
                    self.waiting.set()
                    await asyncio.Event().wait()
                else:
                    yield step
        finally:
            self.closed.set()

    def rejected(self, error: errors.IsthmusError) -> None:
        self.rejections.append(type(error).__name__)

    async def list_models(self) -> ListModelsResponse:
        models = [
            Model(id=name, max_context_tokens=512, decode_ranks=self.decode_ranks) for name in self.model_ids
        ]
        return ListModelsResponse(models=models)

    def token_text(self, token_id: int) -> str:
        return "\ufffd" if token_id > 127 else chr(token_id)


def response(text: str, ids: Sequence[int] = (), logprobs: Sequence[TokenLogprobs] = ()) -> GenerateResponse:
    return GenerateResponse(request_id="r1", text=text, token_ids=ids, logprobs=logprobs)


def finished(
    text: str = "", ids: Sequence[int] = (), reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_STOP
) -> GenerateResponse:
    finish = Finish(
        reason=reason,
        matched_stop="END",
        usage=Usage(
            prompt_tokens=10,
            completion_tokens=3,
            reused_tokens=4,
            computed_tokens=6,
            decode_prefix_len=8,
            delta_tokens=2,
            kv_bytes_moved=2048,
            kv_bytes_saved=2**33,
        ),
        placement=Placement(
            decode=RankId(worker="d0", rank=1),
            prefill=RankId(worker="p0", rank=0),
            plan=common_pb2.PLAN_REMOTE,
            reason="cheapest",
        ),
        stages=StageTimes(route_s=0.25),
    )
    return GenerateResponse(request_id="r1", text=text, token_ids=ids, finish=finish)


def logprobs_of(token_id: int, *others: int) -> TokenLogprobs:
    top = [TokenLogprob(token_id=other, logprob=-0.5) for other in others]
    return TokenLogprobs(chosen=TokenLogprob(token_id=token_id, logprob=-0.25), top=top)


def client(backend: FakeBackend, **options: Any) -> httpx.AsyncClient:
    app = openai_app(backend, clock=lambda: 1234.5, **options)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://router")


async def post(backend: FakeBackend, path: str, body: Any, **options: Any) -> httpx.Response:
    async with client(backend) as http:
        return await http.post(path, json=body, **options)


async def chat(backend: FakeBackend, **body: Any) -> httpx.Response:
    return await post(backend, "/v1/chat/completions", {"model": "tiny", "messages": HI, **body})


async def complete(backend: FakeBackend, **body: Any) -> httpx.Response:
    return await post(backend, "/v1/completions", {"model": "tiny", "prompt": "Hi", **body})


def events(answer: httpx.Response) -> list[Any]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_a_chat_is_answered_whole() -> None:
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
        },
    }
    assert isthmus["decode_prefix_len"] == 8
    assert isthmus["delta_tokens"] == 2
    assert isthmus["kv_bytes_moved"] == 2048
    assert isthmus["kv_bytes_saved"] == 2**33
    assert (isthmus["decode_rank"], isthmus["prefill_rank"]) == ("d0/1", "p0/0")
    assert (isthmus["plan"], isthmus["matched_stop"]) == ("remote", "END")
    assert isthmus["stages"]["route_s"] == 0.25
    assert isthmus["drift_tokens"] is None
    assert backend.closed.is_set()


async def test_a_completion_is_answered_whole() -> None:
    body = (
        await complete(FakeBackend(response("a"), finished("b", reason=common_pb2.FINISH_REASON_LENGTH)))
    ).json()
    assert (body["id"], body["object"]) == ("cmpl-r1", "text_completion")
    assert body["choices"] == [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length"}]


async def test_a_chat_is_streamed() -> None:
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


async def test_a_stream_ends_with_an_empty_delta_where_no_text_is_left() -> None:
    *_, last, _done = events(await chat(FakeBackend(response("He"), finished()), stream=True))
    assert last["choices"][0]["delta"] == {}


async def test_usage_comes_in_a_chunk_of_its_own() -> None:
    answer = await complete(FakeBackend(), stream=True, stream_options={"include_usage": True})
    *chunks, usage, _ = events(answer)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hello", " you", "!"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 13


async def test_chat_logprobs() -> None:
    backend = FakeBackend(response("A", [65], [logprobs_of(65, 65, 200)]), finished())
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
                    {"token": "\ufffd", "logprob": -0.5, "bytes": None},
                ],
            }
        ]
    }


async def test_completion_logprobs_count_on_through_a_stream() -> None:
    impossible = TokenLogprobs(chosen=TokenLogprob(token_id=66, logprob=float("-inf")))
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


async def test_token_ids_are_returned_when_asked_for() -> None:
    assert (await chat(FakeBackend(), return_token_ids=True)).json()["choices"][0]["token_ids"] == [
        72,
        73,
        33,
    ]
    chunks = events(await complete(FakeBackend(), return_token_ids=True, stream=True))[:-1]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[72], [73], [33]]


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
    expected.chat.messages.add(role="system", content="Be brief")
    expected.chat.messages.add(role="assistant", token_ids=[5, 6])
    assert backend.requests == [expected]
    assert backend.traceparents == ["00-of-the-caller"]


async def test_defaults_are_openais() -> None:
    backend = FakeBackend()
    await chat(backend)
    await complete(backend, conversation_id="c", stop="x", prompt=[1, 2], top_k=-1)
    of_chat, of_completion = backend.requests
    assert of_chat.sampling == common_pb2.SamplingParams(temperature=1.0)
    assert of_completion == GenerateRequest(
        model="tiny",
        conversation_id="c",
        token_ids={"ids": [1, 2]},
        sampling=common_pb2.SamplingParams(temperature=1.0, max_tokens=16, stop=["x"], top_k=0),
    )


async def test_what_asks_for_nothing_else_than_is_done_is_taken() -> None:
    harmless = {
        "n": 1,
        "logit_bias": {},
        "bad_words": [],
        "regex": None,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
    }
    assert (await chat(FakeBackend(), **harmless)).status_code == 200


async def test_without_a_model_the_one_that_is_served_answers() -> None:
    backend = FakeBackend()
    body = (await post(backend, "/v1/chat/completions", {"messages": HI})).json()
    assert (backend.requests[0].model, body["model"]) == ("", "tiny")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [*HI, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
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
        ({"stream": True, "stream_options": {"include_usage": 1}}, "include_usage"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"tools": [{}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"regex": "a+"}, "regex"),
        ({"ebnf": "root ::= 'a'"}, "ebnf"),
        ({"json_schema": "{}"}, "json_schema"),
        ({"structural_tag": "{}"}, "structural_tag"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"custom_logit_processor": "x"}, "custom_logit_processor"),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"stop_regex": "a+"}, "stop_regex"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"no_stop_trim": True}, "no_stop_trim"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ],
)
async def test_a_bad_chat_parameter_is_named(body: dict[str, Any], param: str) -> None:
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


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1]]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [1, 2**32, 2.5]}, "prompt[1]"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
    ],
)
async def test_a_bad_completion_parameter_is_named(body: dict[str, Any], param: str) -> None:
    answer = await complete(FakeBackend(), **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_of_many_ids_only_a_wrong_one_is_given_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """To name millions takes seconds, in which no stream goes on."""
    named = []
    check = openai_request._check_integer

    def noted(value: object, name: str, low: int, high: int) -> int:
        named.append(name)
        return check(value, name, low, high)

    monkeypatch.setattr(openai_request, "_check_integer", noted)
    backend = FakeBackend()
    assert (await complete(backend, prompt=[*range(500)], max_tokens=None)).status_code == 200
    assert backend.requests[0].token_ids.ids == [*range(500)]
    assert (await complete(backend, prompt=[*range(500), -1], max_tokens=None)).status_code == 400
    assert named == ["prompt[500]"]


@pytest.mark.parametrize(("length", "in_a_thread"), [(1_000, False), (70_000, True)])
async def test_a_long_body_is_read_off_the_loop(
    monkeypatch: pytest.MonkeyPatch, length: int, in_a_thread: bool
) -> None:
    readers = []
    read = openai.read_completion_call

    def noted(fields: Any, headers: Any) -> openai_request.GenerationCall:
        readers.append(threading.current_thread())
        return read(fields, headers)

    monkeypatch.setattr(openai, "read_completion_call", noted)
    assert (await complete(FakeBackend(), prompt="a" * length)).status_code == 200
    assert [reader is not threading.main_thread() for reader in readers] == [in_a_thread]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"5", b"\xff", b"[" * 100_000])
async def test_a_body_that_is_no_json_object_is_refused(content: bytes) -> None:
    async with client(FakeBackend()) as http:
        answer = await http.post("/v1/completions", content=content)
    assert answer.status_code == 400
    assert "JSON" in answer.json()["error"]["message"]


async def test_a_number_that_is_none_is_refused() -> None:
    async with client(FakeBackend()) as http:
        answer = await http.post("/v1/completions", content=b'{"prompt": "a", "temperature": NaN}')
    assert answer.json()["error"]["param"] == "temperature"


async def test_a_body_that_is_too_large_is_refused() -> None:
    backend = FakeBackend()
    async with client(backend, max_body_bytes=100) as http:
        answer = await http.post("/v1/completions", json={"prompt": "a" * 100})
    assert answer.status_code == 413
    assert "100 bytes" in answer.json()["error"]["message"]


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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status"), ERRORS)
async def test_an_error_before_the_first_token_has_its_status(
    error: errors.IsthmusError, status: int, stream: bool
) -> None:
    backend = FakeBackend(error)
    answer = await chat(backend, stream=stream)
    assert answer.status_code == status
    assert answer.json()["error"] == {**answer.json()["error"], "message": str(error), "code": status}
    assert backend.closed.is_set()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("retry_after_s", "header"), [(None, None), (2.1, "3")])
async def test_a_refusal_says_when_to_come_again(
    retry_after_s: float | None, header: str | None, stream: bool
) -> None:
    answer = await chat(FakeBackend(errors.NoCapacity("full", retry_after_s)), stream=stream)
    assert (answer.status_code, answer.headers.get("Retry-After")) == (429, header)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_tells_the_client_nothing(stream: bool) -> None:
    answer = await chat(FakeBackend(KeyError("secret")), stream=stream)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "internal error"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("sampling.top_p must be above 0", "top_p"),
        ("chat.messages[2].role must be one of", "messages[2].role"),
        ("prompt is too long", "prompt"),
        ("token_ids.ids[3] must be below", "prompt"),
        ("The request cannot work", None),
    ],
)
async def test_fields_are_named_in_this_apis_words(message: str, param: str | None) -> None:
    answer = await chat(FakeBackend(errors.InvalidRequest(message)))
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "last",
    [
        errors.PeerFailed("gone"),
        finished(reason=common_pb2.FINISH_REASON_ABORTED),
        response(" and no finish"),
    ],
)
async def test_an_error_within_a_stream_is_its_last_event(last: GenerateResponse | Exception) -> None:
    backend = FakeBackend(response("He"), last)
    answer = await chat(backend, stream=True)
    assert answer.status_code == 200
    *_, error = events(answer)
    assert list(error) == ["error"]
    assert error["error"]["code"] in (499, 500, 503)
    assert backend.closed.is_set()


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ([response("He"), finished(reason=common_pb2.FINISH_REASON_ABORTED)], 499),
        ([response("He")], 500),
        ([response("He"), errors.PeerFailed("gone")], 503),
    ],
)
async def test_an_answer_that_is_not_complete_is_an_error(
    script: list[GenerateResponse | Exception], status: int
) -> None:
    assert (await chat(FakeBackend(*script))).status_code == status


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
async def test_the_time_that_a_client_gives_is_a_header(value: str) -> None:
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


async def test_models_and_health() -> None:
    async with client(FakeBackend()) as http:
        models = (await http.get("/v1/models")).json()
        assert (await http.get("/health")).status_code == 200
    assert models["object"] == "list"
    assert models["data"] == [
        {"id": "tiny", "object": "model", "created": 1234, "owned_by": "isthmus", "max_model_len": 512}
    ]
    backend = FakeBackend()
    backend.decode_ranks = 0  # a router has a name for its model before it knows any rank
    async with client(backend) as http:
        assert (await http.get("/health")).status_code == 503
    async with client(FakeBackend(models=())) as http:
        assert (await http.get("/v1/models")).json()["data"] == []
        assert (await http.get("/health")).status_code == 503


async def test_unknown_paths_and_methods_answer_with_error_objects() -> None:
    async with client(FakeBackend()) as http:
        for answer, status in (
            (await http.get("/v1/nothing"), 404),
            (await http.get("/v1/completions"), 405),
        ):
            assert answer.status_code == status
            assert answer.json()["error"]["code"] == status


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [["wait"], [response("He"), "wait"]])
async def test_a_client_that_leaves_closes_the_generation(
    stream: bool, script: list[GenerateResponse | str]
) -> None:
    backend = FakeBackend(*script)
    body = json.dumps({"prompt": "Hi", "stream": stream}).encode()
    sent: list[dict[str, Any]] = []
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await backend.waiting.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    await asyncio.wait_for(openai_app(backend)(scope, receive, send), DEADLINE_S)
    assert backend.closed.is_set()
    assert all(message.get("status") != 500 for message in sent)


async def test_a_client_that_leaves_without_reading_closes_the_generation() -> None:
    backend = FakeBackend(response("He"), response("llo"), finished())
    body = json.dumps({"prompt": "Hi", "stream": True}).encode()
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    blocked = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await blocked.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            blocked.set()
            await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    await asyncio.wait_for(openai_app(backend)(scope, receive, send), DEADLINE_S)
    assert backend.closed.is_set()


@asynccontextmanager
async def serving(backend: FakeBackend) -> AsyncIterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(openai_app(backend), log_level="critical", lifespan="off"))
        task = asyncio.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


async def test_a_closed_connection_closes_the_generation() -> None:
    backend = FakeBackend(response("He"), "wait")
    body = {"model": "tiny", "messages": HI, "stream": True}
    async with serving(backend) as url, httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as http:
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if "He" in line:
                    break
            assert not backend.closed.is_set()
        await asyncio.wait_for(backend.closed.wait(), DEADLINE_S)


async def test_a_stream_that_is_cancelled_by_the_server_closes_the_generation() -> None:
    backend = FakeBackend(response("He"), "wait")
    answering = asyncio.create_task(chat(backend, stream=True))
    await asyncio.wait_for(backend.waiting.wait(), DEADLINE_S)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert backend.closed.is_set()
