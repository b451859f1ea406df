"""This is the client for asyncio."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, Unpack

import grpc.aio

from isthmus.base import BaseClient, BaseConversation, BaseStream
from isthmus.errors import Cancelled, IncompleteAnswer, error_from
from isthmus.functions import result_of, text_of
from isthmus.request import Options, PromptOptions, prompt_and_options
from isthmus.values.answer import Answer, Piece
from isthmus.values.cluster import Explanation, Model, Ranks, TokenizedPrompt
from isthmus.values.message import ToolCall
from isthmus.values.reading import read
from isthmus.values.watch import ClusterNews
from services.wire.isthmus.v1 import generation_pb2 as pb
from services.wire.isthmus.v1 import generation_pb2_grpc


def _is_cancelled() -> bool:
    """Return whether the task itself was cancelled, and not only its call: grpc.aio raises CancelledError for
    both, and loses it if a cancellation of the task coincides with the failure of a call.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _heed_cancellation() -> None:
    """Raise CancelledError if the task was cancelled while its call failed."""
    if _is_cancelled():
        raise asyncio.CancelledError


class AsyncStream(BaseStream):
    """Yields an answer piece by piece. Iterate over it once; nothing is sent before.

    Leaving the `async with` stops the answer at once. Leaving only the loop stops it when the event loop
    finalizes the generator.
    """

    async def __aiter__(self) -> AsyncGenerator[Piece, None]:
        """Yield the answer's pieces. Raises the call's IsthmusError."""
        self._begin()
        async with aclosing(self._responses()) as responses:
            async for response in responses:
                yield self._growing.add(response)
        self._end()

    async def texts(self) -> AsyncGenerator[str, None]:
        """Yield the answer's text, without thinking and tool calls."""
        async with aclosing(aiter(self)) as pieces:
            async for piece in pieces:
                if piece.text:
                    yield piece.text

    async def read(self) -> Answer:
        """Return the whole answer once it has ended. Raises the call's IsthmusError."""
        async for _ in self:
            pass
        return self.answer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _responses(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        attempts, begun = self._make_attempts(), False
        while True:
            call = self._send(attempts)
            try:
                async for response in call:
                    begun = True
                    yield response
                return
            except grpc.aio.AioRpcError as failure:
                _heed_cancellation()
                error = error_from(failure)
                if begun:
                    raise error from failure
            except asyncio.CancelledError as cancelled:
                if _is_cancelled():
                    raise
                raise Cancelled("the stream was closed") from cancelled
            finally:
                call.cancel()
            await self._sleep(attempts.pause_s(error))


class AsyncConversation(BaseConversation[AsyncStream]):
    """An AsyncClient's `conversation` makes this object."""

    async def say(self, text: str | None = None, **options: Unpack[Options]) -> Answer:
        """Send the text, or without one the results of tools given since, and return the answer.

        Raises as a client's `generate`.
        """
        return await self.stream(text, **options).read()

    async def run(
        self,
        text: str | None = None,
        *,
        most_turns: int = 10,
        called: Callable[[ToolCall, str], None] | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """Send the text, call the functions that the model calls, and continue until it answers without a
        call.

        The functions may be plain or `async`. Takes and raises the same as `Conversation.run`.
        """
        for _ in range(most_turns):
            answer = await self.say(text, **options)
            if not answer.tool_calls:
                return answer
            text = None
            for call in answer.tool_calls:
                call_it, result = result_of(self.tools, call)
                if call_it is not None:
                    returned = call_it()
                    result = text_of(await returned if inspect.isawaitable(returned) else returned)
                self.tool_result(call, result)
                if called is not None:
                    called(call, result)
        raise IncompleteAnswer(f"the model still calls tools after {most_turns} turns")


class AsyncClient(BaseClient[AsyncStream, AsyncConversation]):
    """This is a client of a router; BaseClient documents its settings.

    Tasks may share it. `close` it, or use it in an `async with`.
    """

    _stream_type, _conversation_type = AsyncStream, AsyncConversation

    def __init__(
        self, *args: Any, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._sleep = sleep
        self._channel: grpc.aio.Channel | None = None
        self._open_stub: generation_pb2_grpc.GenerationStub | None = None

    @property
    def _stub(self) -> generation_pb2_grpc.GenerationStub:
        """The stub is made at its first use, because a channel belongs to the loop that runs then."""
        self._check_open()
        if self._channel is None or self._open_stub is None:
            self._channel = self._router.open_aio()
            self._open_stub = generation_pb2_grpc.GenerationStub(self._channel)
        return self._open_stub

    async def generate(self, prompt: str | None = None, **options: Unpack[PromptOptions]) -> Answer:
        """Return the answer to a plain text, to a chat, or to token ids. Takes and raises the same as
        `Client.generate`.
        """
        return await self.stream(prompt, **options).read()

    async def answers(self, prompt: str | None = None, **options: Unpack[PromptOptions]) -> list[Answer]:
        """Return the `n` answers to a prompt, which is computed once. Takes and raises the same as
        `generate`.
        """
        stream = self.stream(prompt, **options)
        await stream.read()
        return stream.answers

    async def explain(self, prompt: str | None = None, **options: Unpack[PromptOptions]) -> Explanation:
        """Return where such a request would be placed, and why; it is not run. Takes the same as
        `generate`.
        """
        call, timeout_s = self._prepared(*prompt_and_options(prompt, options))
        answered = await self._ask(self._stub.Explain, pb.ExplainRequest(request=call.request), timeout_s)
        return read(Explanation, answered)

    async def tokenize(self, prompt: str | None = None, **options: Unpack[PromptOptions]) -> TokenizedPrompt:
        """Return the token ids that such a request's prompt would have. Takes the same as `generate`."""
        call, timeout_s = self._prepared(*prompt_and_options(prompt, options))
        answered = await self._ask(self._stub.Tokenize, pb.TokenizeRequest(request=call.request), timeout_s)
        return read(TokenizedPrompt, answered)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", timeout: float | None = None
    ) -> str:
        """Return the tokens' text, including special tokens."""
        named = self._defaults | ({"model": model} if model else {})
        request = pb.DetokenizeRequest(token_ids=token_ids, **named)
        return str((await self._ask(self._stub.Detokenize, request, timeout or self._timeout_s)).text)

    async def models(self, *, timeout: float | None = None) -> list[Model]:
        """Return the models that the router serves."""
        answered = await self._ask(self._stub.ListModels, pb.ListModelsRequest(), timeout or self._timeout_s)
        return [read(Model, model) for model in answered.models]

    async def ranks(self, *, timeout: float | None = None) -> Ranks:
        """Return the router's report on every rank."""
        return read(
            Ranks, await self._ask(self._stub.ListRanks, pb.ListRanksRequest(), timeout or self._timeout_s)
        )

    async def abort(self, request_id: str, *, timeout: float | None = None) -> bool:
        """Stop a request as `Client.abort` does. Returns False if no such request runs there."""
        request = pb.AbortRequest(request_id=request_id, tenant=self._defaults["tenant"])
        return bool((await self._ask(self._stub.Abort, request, timeout or self._timeout_s)).found)

    async def watch(
        self,
        *,
        interval_s: float = 1.0,
        tenant: str | None = None,
        all_tenants: bool = False,
        timeout: float | None = None,
    ) -> AsyncGenerator[ClusterNews, None]:
        """Yield reports of ranks as they change, and of requests as they run and end, until the loop is left.
        Takes the same as `Client.watch`.
        """
        request = self._watch_request(interval_s, tenant, all_tenants)
        call = self._stub.WatchCluster(request, timeout=timeout, metadata=self._router.metadata)
        try:
            async for response in call:
                yield read(ClusterNews, response)
        except grpc.aio.AioRpcError as failure:
            _heed_cancellation()
            raise error_from(failure) from failure
        except asyncio.CancelledError as cancelled:
            if _is_cancelled():
                raise
            raise Cancelled("the client was closed") from cancelled
        finally:
            call.cancel()

    async def close(self) -> None:
        """End every call; callers that wait for one get Cancelled."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, method: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
        attempts = self._attempts(timeout_s)
        while True:
            try:
                return await method(request, timeout=attempts.left_s(), metadata=self._router.metadata)
            except grpc.aio.AioRpcError as failure:
                _heed_cancellation()
                error = error_from(failure)
            except asyncio.CancelledError as cancelled:
                if _is_cancelled():
                    raise
                raise Cancelled("the client was closed") from cancelled
            await self._sleep(attempts.pause_s(error))
