"""Responses joined to a whole."""

import threading
from collections.abc import AsyncGenerator, Sequence

import pytest

from router.dialects.prompts_told import scored
from router.http.backend import FakeBackend, chat, complete, finished
from services.router.dialects.dialect import Json
from services.router.http.generating import whole
from services.wire.isthmus.v1.generation_pb2 import GenerateResponse


class Telling:
    """Tells of a whole where it was made."""

    def whole(self, answers: Sequence[GenerateResponse]) -> Json:
        return {"in_thread": threading.current_thread() is not threading.main_thread()}


def of_prompt(num_tokens: int) -> GenerateResponse:
    told = scored(65, -1.0, 1, *range(20))
    return GenerateResponse(request_id="r1", prompt_token_ids=[65], prompt_logprobs=[told] * num_tokens)


async def responses_to(num_tokens: int) -> AsyncGenerator[GenerateResponse, None]:
    yield of_prompt(num_tokens)
    yield finished("a")


async def test_many_log_probabilities_are_written_down_in_a_thread(subtests: pytest.Subtests) -> None:
    for num_tokens, in_thread in [(10, False), (1000, True)]:
        with subtests.test(num_tokens=num_tokens):
            assert await whole(Telling(), responses_to(num_tokens)) == {"in_thread": in_thread}


async def test_more_of_them_than_a_router_can_hold_are_refused_and_the_generation_is_closed() -> None:
    """Each of `n` choices tells its prompt's."""
    asked = {"n": 128, "prompt_logprobs": 20}
    for ask in (complete, chat):
        backend = FakeBackend(of_prompt(512), "wait")
        answer = await ask(backend, **asked)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")
        assert backend.closed.is_set()
