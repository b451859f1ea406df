"""Responses joined to a whole, and the loop over a stream: what is sent while there is nothing to tell."""

import threading
from collections.abc import AsyncGenerator, Iterator, Sequence

import pytest

from router.dialects.prompts_told import scored
from router.http.backend import FakeBackend, chat, complete, finished, response
from services.router.dialects.answer import Event, Json
from services.router.http.answering import events, whole
from services.values.errors import Unavailable
from services.wire.isthmus.v1.generation_pb2 import GenerateResponse


class Telling:
    """Of each response its text, if it has any; of a whole, where it was made."""

    def whole(self, answers: Sequence[GenerateResponse]) -> Json:
        return {"in_thread": threading.current_thread() is not threading.main_thread()}

    def events(self, response: GenerateResponse) -> list[Event]:
        return [Event(response.text)] if response.text else []

    def failure(self, error: Exception) -> list[Event]:
        return [Event(str(error))]


async def told(*steps: GenerateResponse | Exception, seconds_each: float) -> list[str]:
    async def responses() -> AsyncGenerator[GenerateResponse, None]:
        for step in steps:
            if isinstance(step, Exception):
                raise step
            yield step

    def clock() -> float:
        return next(times)

    times: Iterator[float] = iter(float(n) * seconds_each for n in range(1000))
    return [each.decode().strip() async for each in events(Telling(), responses(), clock=clock)]


async def test_long_silence_is_broken_by_comments() -> None:
    quiet = [response("")] * 20
    lines = await told(response("a"), *quiet, response("b"), finished("c"), seconds_each=5.0)
    comments = [line for line in lines if line.startswith(":")]
    assert [line for line in lines if line not in comments] == ["data: a", "data: b", "data: c"]
    assert 4 <= len(comments) < 10
    assert not [
        line for line in await told(response("a"), *quiet, finished("c"), seconds_each=0.1) if line[0] == ":"
    ]


async def test_what_fails_behind_a_comment_is_an_event() -> None:
    lines = await told(*[response("")] * 9, Unavailable("gone"), seconds_each=5.0)
    assert lines[-1] == "data: gone" and lines[0].startswith(":")


def of_prompt(num_tokens: int) -> GenerateResponse:
    told = scored(65, -1.0, 1, *range(20))
    return GenerateResponse(request_id="r1", prompt_token_ids=[65], prompt_logprobs=[told] * num_tokens)


@pytest.mark.parametrize(("num_tokens", "in_thread"), [(10, False), (1000, True)])
async def test_many_log_probabilities_are_written_down_in_a_thread(num_tokens: int, in_thread: bool) -> None:
    async def responses() -> AsyncGenerator[GenerateResponse, None]:
        yield of_prompt(num_tokens)
        yield finished("a")

    assert await whole(Telling(), responses()) == {"in_thread": in_thread}


async def test_more_of_them_than_a_router_can_hold_are_refused_and_the_generation_is_closed() -> None:
    """Each of `n` choices tells its prompt's."""
    asked = {"n": 128, "prompt_logprobs": 20}
    for ask in (complete, chat):
        backend = FakeBackend(of_prompt(512), "wait")
        answer = await ask(backend, **asked)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")
        assert backend.closed.is_set()
