"""This is the client whose calls block; threads may share it."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from isthmus.base import BaseClient, BaseConversation, BaseStream
from isthmus.errors import IncompleteAnswer, error_from
from isthmus.functions import result_of, text_of
from isthmus.request import Options, PromptOptions, prompt_and_options
from isthmus.values.answer import Answer, Piece
from isthmus.values.cluster import Explanation, Model, Ranks, TokenizedPrompt
from isthmus.values.message import ToolCall
from isthmus.values.reading import read
from isthmus.values.watch import ClusterNews
from services.wire.isthmus.v1 import generation_pb2 as pb
from services.wire.isthmus.v1 import generation_pb2_grpc


class Stream(BaseStream):
    """Yields an answer piece by piece. Iterate over it once; nothing is sent before.

    Leaving the loop, or the `with`, stops the answer. Any thread may close it.
    """

    def __iter__(self) -> Generator[Piece, None, None]:
        """Yield the answer's pieces. Raises the call's IsthmusError."""
        self._begin()
        with closing(self._responses()) as responses:
            for response in responses:
                yield self._growing.add(response)
        self._end()

    def texts(self) -> Iterator[str]:
        """Yield the answer's text, without thinking and tool calls."""
        with closing(iter(self)) as pieces:
            for piece in pieces:
                if piece.text:
                    yield piece.text

    def read(self) -> Answer:
        """Return the whole answer once it has ended. Raises the call's IsthmusError."""
        for _ in self:
            pass
        return self.answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _responses(self) -> Generator[pb.GenerateResponse, None, None]:
        attempts, begun = self._make_attempts(), False
        while True:
            call = self._send(attempts)
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


class Conversation(BaseConversation[Stream]):
    """A Client's `conversation` makes this object."""

    def say(self, text: str | None = None, **options: Unpack[Options]) -> Answer:
        """Send the text, or without one the results of tools given since, and return the answer.

        Raises as a client's `generate`.
        """
        return self.stream(text, **options).read()

    def run(
        self,
        text: str | None = None,
        *,
        most_turns: int = 10,
        called: Callable[[ToolCall, str], None] | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """Send the text, call the functions that the model calls, and continue until it answers without a
        call.

        A call that no function accepts is returned to the model as an error; an exception of a function is
        raised.

        Args:
            text: The first message, as for `say`.
            most_turns: The number of turns after which the model must not call any more.
            called: It receives each call and its result.
            options: The options of each turn, as for `say`.

        Raises:
            IncompleteAnswer: The model still calls after `most_turns`.
        """
        for _ in range(most_turns):
            answer = self.say(text, **options)
            if not answer.tool_calls:
                return answer
            text = None
            for call in answer.tool_calls:
                call_it, result = result_of(self.tools, call)
                result = result if call_it is None else text_of(call_it())
                self.tool_result(call, result)
                if called is not None:
                    called(call, result)
        raise IncompleteAnswer(f"the model still calls tools after {most_turns} turns")


class Client(BaseClient[Stream, Conversation]):
    """This is a client of a router; BaseClient documents its settings.

    Threads may share it. `close` it, or use it in a `with`.
    """

    _stream_type, _conversation_type = Stream, Conversation

    def __init__(self, *args: Any, sleep: Callable[[float], None] = time.sleep, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sleep = sleep
        self._channel = self._router.open()
        self._open_stub = generation_pb2_grpc.GenerationStub(self._channel)

    @property
    def _stub(self) -> generation_pb2_grpc.GenerationStub:
        self._check_open()
        return self._open_stub

    def generate(self, prompt: str | None = None, **options: Unpack[PromptOptions]) -> Answer:
        """Return the answer to a plain text, to a chat, or to token ids.

        Args:
            prompt: The text, if neither messages nor ids are given.
            options: `messages` for a chat, `token_ids` for a prompt's ids, and those of `isthmus.Options`;
                None is the same as leaving one out.

        Raises:
            IsthmusError: The call failed.
        """
        return self.stream(prompt, **options).read()

    def answers(self, prompt: str | None = None, **options: Unpack[PromptOptions]) -> list[Answer]:
        """Return the `n` answers to a prompt, which is computed once. Takes and raises the same as
        `generate`.
        """
        stream = self.stream(prompt, **options)
        stream.read()
        return stream.answers

    def explain(self, prompt: str | None = None, **options: Unpack[PromptOptions]) -> Explanation:
        """Return where such a request would be placed, and why; it is not run. Takes the same as
        `generate`.
        """
        call, timeout_s = self._prepared(*prompt_and_options(prompt, options))
        answered = self._ask(self._stub.Explain, pb.ExplainRequest(request=call.request), timeout_s)
        return read(Explanation, answered)

    def tokenize(self, prompt: str | None = None, **options: Unpack[PromptOptions]) -> TokenizedPrompt:
        """Return the token ids that such a request's prompt would have. Takes the same as `generate`."""
        call, timeout_s = self._prepared(*prompt_and_options(prompt, options))
        answered = self._ask(self._stub.Tokenize, pb.TokenizeRequest(request=call.request), timeout_s)
        return read(TokenizedPrompt, answered)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout: float | None = None) -> str:
        """Return the tokens' text, including special tokens."""
        named = self._defaults | ({"model": model} if model else {})
        request = pb.DetokenizeRequest(token_ids=token_ids, **named)
        return str(self._ask(self._stub.Detokenize, request, timeout or self._timeout_s).text)

    def models(self, *, timeout: float | None = None) -> list[Model]:
        """Return the models that the router serves."""
        answered = self._ask(self._stub.ListModels, pb.ListModelsRequest(), timeout or self._timeout_s)
        return [read(Model, model) for model in answered.models]

    def ranks(self, *, timeout: float | None = None) -> Ranks:
        """Return the router's report on every rank."""
        return read(Ranks, self._ask(self._stub.ListRanks, pb.ListRanksRequest(), timeout or self._timeout_s))

    def abort(self, request_id: str, *, timeout: float | None = None) -> bool:
        """Stop a request of the client's tenant, or of any if it has none: its stream ends with finish_reason
        aborted.

        Returns:
            False if no such request runs there.
        """
        request = pb.AbortRequest(request_id=request_id, tenant=self._defaults["tenant"])
        return bool(self._ask(self._stub.Abort, request, timeout or self._timeout_s).found)

    def watch(
        self,
        *,
        interval_s: float = 1.0,
        tenant: str | None = None,
        all_tenants: bool = False,
        timeout: float | None = None,
    ) -> Generator[ClusterNews, None, None]:
        """Yield reports of ranks as they change, and of requests as they run and end, until the loop is left.

        Args:
            interval_s: The most seconds between two reports.
            tenant: The tenant whose requests are reported; None means the client's own.
            all_tenants: Report requests of all tenants; a router with API keys wants an operator's for this.
            timeout: The seconds after which the watch ends with DeadlineExceeded; None means never.
        """
        request = self._watch_request(interval_s, tenant, all_tenants)
        call = self._stub.WatchCluster(request, timeout=timeout, metadata=self._router.metadata)
        try:
            for response in call:
                yield read(ClusterNews, response)
        except grpc.RpcError as failure:
            raise error_from(failure) from failure
        finally:
            call.cancel()

    def close(self) -> None:
        """End every call; callers that wait for one get Cancelled."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, method: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
        attempts = self._attempts(timeout_s)
        while True:
            try:
                return method(request, timeout=attempts.left_s(), metadata=self._router.metadata)
            except grpc.RpcError as failure:
                error = error_from(failure)
            self._sleep(attempts.pause_s(error))
