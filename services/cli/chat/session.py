"""A session is a conversation with a router: turns, prices, and a way to stop an answer.

a turn --Ctrl-C--> Abort to the router, the answer ends as it stands
       --again---> the call is cancelled, and so is the turn
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import grpc

from services.cli.chat.conversation import ChatTurn, Conversation
from services.cli.chat.display import Display
from services.cli.chat.streamed_answer import StreamedAnswer
from services.cli.client import naming, responses
from services.wire.isthmus.v1 import generation_pb2, generation_pb2_grpc

_ANSWER_TIMEOUT_S = 10.0
_NOT_YET = "no decode rank is there yet: does the cluster still start?"
_Metadata = Sequence[tuple[str, str]]


@dataclass(slots=True)
class Session:
    """`timeout_s` bounds a turn."""

    channel: grpc.aio.Channel
    conversation: Conversation
    display: Display
    router: str
    timeout_s: float
    metadata: _Metadata = ()
    clock: Callable[[], float] = time.monotonic
    _request_id: str = ""  # It belongs to the turn that runs.
    _task: "asyncio.Task[None] | None" = None
    _abort: "asyncio.Task[None] | None" = None
    _stub: generation_pb2_grpc.GenerationStub = field(init=False)

    def __post_init__(self) -> None:
        self._stub = generation_pb2_grpc.GenerationStub(self.channel)

    async def greeting(self) -> str:
        """Say what is served. Raises the router's error as one of ours."""
        with naming(self.router):
            request = generation_pb2.ListModelsRequest()
            answer = await self._stub.ListModels(request, timeout=_ANSWER_TIMEOUT_S, metadata=self.metadata)
        served = (
            f"{m.id}: {m.prefill_ranks} prefill and {m.decode_ranks} decode ranks" for m in answer.models
        )
        has_ranks = any(model.decode_ranks for model in answer.models)
        return "\n".join([*served, *([] if has_ranks else [_NOT_YET])])

    async def turn(self, question: str) -> None:
        """Ask, show the answer, remember both. Raises the router's error as one of ours; then neither is."""
        answer = StreamedAnswer(self.clock)
        self._request_id, self._task = f"chat-{secrets.token_hex(8)}", asyncio.current_task()
        request = self.conversation.request(question, self._request_id)
        try:
            async for response in responses(
                self.channel, request, self.timeout_s, self.metadata, router=self.router
            ):
                answer.take(response)
                self.display.piece(response)
        except asyncio.CancelledError:
            if self._abort is not None:
                self._abort.cancel()
            raise
        finally:
            self._task, self._abort = None, None
        self.display.end(answer)
        self.conversation.turns.append(ChatTurn(question, answer))

    def interrupt(self) -> None:
        """Stop the turn that runs; at once, if that has been asked for already."""
        if self._task is None:
            return
        if self._abort is None:
            self._abort = asyncio.create_task(self._send_abort())
        else:
            self._task.cancel()

    async def _send_abort(self) -> None:
        """Send it. A router that does not take it any more has ended the turn, or cannot be asked: the next
        interrupt leaves.
        """
        request = generation_pb2.AbortRequest(request_id=self._request_id)
        with suppress(grpc.aio.AioRpcError):
            await self._stub.Abort(request, timeout=_ANSWER_TIMEOUT_S, metadata=self.metadata)

    async def explain(self, question: str) -> generation_pb2.ExplainResponse:
        """Ask where the next turn would go, if that were asked. Raises the router's error as one of ours."""
        request = generation_pb2.ExplainRequest(request=self.conversation.request(question))
        with naming(self.router):
            answer = await self._stub.Explain(request, timeout=_ANSWER_TIMEOUT_S, metadata=self.metadata)
        assert isinstance(answer, generation_pb2.ExplainResponse)
        return answer
