"""An answer as it comes.

made --(first iteration)--> sent --> pieces ... --> ended: `answer` is there
          ^ pause |                    | left, closed, failed: the call is cancelled, the router stops
          +-- nothing had come, and it may be tried again (retries.py)
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Self

import grpc.aio

from isthmus.errors import Cancelled, error_from
from isthmus.request import Call
from isthmus.retries import Attempts
from isthmus.values.answer import Answer, GrowingAnswers, Piece
from services.wire.isthmus.v1 import generation_pb2, generation_pb2_grpc


def is_cancelled() -> bool:
    """Whether it is the task that is cancelled, and not a call of it alone: grpc.aio raises CancelledError
    for both, and loses it where a cancellation of the task meets the failure of a call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def heed_cancellation() -> None:
    """To be called when a call has failed."""
    if is_cancelled():
        raise asyncio.CancelledError


Ended = Callable[[Answer], None]
Metadata = tuple[tuple[str, str], ...]


class AsyncStream:
    """Iterate over it once: nothing is sent before. Leaving the `async with` stops the answer at once;
    leaving the loop alone does when the loop of events comes to it."""

    def __init__(
        self,
        stub: generation_pb2_grpc.GenerationStub,
        call: Call,
        make_attempts: Callable[[], Attempts],
        metadata: Metadata,
        sleep: Callable[[float], Awaitable[None]],
        ended: Ended | None = None,
    ) -> None:
        self.request_id = call.request.request_id  # of the attempt that runs
        self._stub = stub
        self._call = call
        self._make_attempts = make_attempts
        self._metadata = metadata
        self._sleep = sleep
        self._ended = ended
        self._growing = GrowingAnswers(call.parse)
        self._running: grpc.aio.Call | None = None
        self._closed = self._begun = False

    async def __aiter__(self) -> AsyncGenerator[Piece, None]:
        """Raises what the call failed with."""
        if self._begun:
            raise RuntimeError("a stream is read once")
        self._begun = True
        async with aclosing(self._responses()) as responses:
            async for response in responses:
                yield self._growing.add(response)
        if self._ended is not None:
            self._ended(self.answer)

    async def texts(self) -> AsyncGenerator[str, None]:
        """What the answer says, without thinking and calls."""
        async with aclosing(aiter(self)) as pieces:
            async for piece in pieces:
                if piece.text:
                    yield piece.text

    async def read(self) -> Answer:
        """The whole answer, when it has ended."""
        async for _ in self:
            pass
        return self.answer

    @property
    def answer(self) -> Answer:
        """The first answer. Raises IncompleteAnswer before the end."""
        return self.answers[0]

    @property
    def answers(self) -> list[Answer]:
        """All of them, where `n` asked for several. Raises IncompleteAnswer before the end."""
        return self._growing.answers()

    def close(self) -> None:
        """Whoever iterates gets Cancelled. After the end it does nothing."""
        self._closed = True
        if self._running is not None:
            self._running.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _responses(self) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        attempts, begun = self._make_attempts(), False
        while True:
            request = self._call.attempt(attempts.failed)
            self.request_id = request.request_id
            call = self._stub.Generate(request, timeout=attempts.left_s(), metadata=self._metadata)
            self._running = call
            if self._closed:
                call.cancel()
            try:
                async for response in call:
                    begun = True
                    yield response
                return
            except grpc.aio.AioRpcError as failure:
                heed_cancellation()
                error = error_from(failure)
                if begun:
                    raise error from failure
            except asyncio.CancelledError as cancelled:
                if is_cancelled():
                    raise
                raise Cancelled("the stream was closed") from cancelled
            finally:
                call.cancel()
            await self._sleep(attempts.pause_s(error))
