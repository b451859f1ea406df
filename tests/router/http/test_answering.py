"""The loop over a stream: what is sent while there is nothing to tell."""

from collections.abc import AsyncGenerator, Iterator

from router.http.backend import finished, response
from services.router.dialects.answer import Event
from services.router.http.answering import events
from services.values.errors import Unavailable
from services.wire.isthmus.v1.generation_pb2 import GenerateResponse


class Telling:
    """Of each response its text, if it has any."""

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
