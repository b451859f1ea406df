"""An answer as it comes.

made --(first iteration)--> sent --> pieces ... --> ended: `answer` is there
          ^ pause |                    | left, closed, failed: the call is cancelled, the router stops
          +-- nothing had come, and it may be tried again (retries.py)
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from types import TracebackType
from typing import Self

import grpc

from isthmus.errors import error_from
from isthmus.request import Call
from isthmus.retries import Attempts
from isthmus.values.answer import Answer, GrowingAnswers, Piece
from services.wire.isthmus.v1 import generation_pb2, generation_pb2_grpc

Ended = Callable[[Answer], None]
Metadata = tuple[tuple[str, str], ...]


class Stream:
    """Iterate over it once: nothing is sent before. Leaving the loop, or the `with`, stops the answer."""

    def __init__(
        self,
        stub: generation_pb2_grpc.GenerationStub,
        call: Call,
        make_attempts: Callable[[], Attempts],
        metadata: Metadata,
        sleep: Callable[[float], None],
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
        self._running: grpc.Future | None = None
        self._closed = self._begun = False

    def __iter__(self) -> Generator[Piece, None, None]:
        """Raises what the call failed with."""
        if self._begun:
            raise RuntimeError("a stream is read once")
        self._begun = True
        with closing(self._responses()) as responses:
            for response in responses:
                yield self._growing.add(response)
        if self._ended is not None:
            self._ended(self.answer)

    def texts(self) -> Iterator[str]:
        """What the answer says, without thinking and calls."""
        with closing(iter(self)) as pieces:
            for piece in pieces:
                if piece.text:
                    yield piece.text

    def read(self) -> Answer:
        """The whole answer, when it has ended."""
        for _ in self:
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
        """Any thread may; the one that iterates gets Cancelled. After the end it does nothing."""
        self._closed = True
        if self._running is not None:
            self._running.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _responses(self) -> Generator[generation_pb2.GenerateResponse, None, None]:
        attempts, begun = self._make_attempts(), False
        while True:
            request = self._call.attempt(attempts.failed)
            self.request_id = request.request_id
            call = self._stub.Generate(request, timeout=attempts.left_s(), metadata=self._metadata)
            self._running = call
            if self._closed:
                call.cancel()
            try:
                for response in call:
                    begun = True
                    yield response
                return
            except grpc.RpcError as failure:
                error = error_from(failure)
                if begun:
                    raise error from failure
            finally:
                call.cancel()
            self._sleep(attempts.pause_s(error))
