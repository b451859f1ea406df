"""The client."""

import time
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from isthmus.base import BaseClient
from isthmus.blocking.conversation import Conversation
from isthmus.blocking.stream import Ended, Stream
from isthmus.errors import error_from
from isthmus.request import Messages, Options, Prompt
from isthmus.values.answer import Answer
from isthmus.values.cluster import Explanation, Model, Ranks, TokenizedPrompt
from isthmus.values.message import Message
from isthmus.values.reading import read
from isthmus.values.watch import ClusterNews
from services.wire.isthmus.v1 import generation_pb2 as pb
from services.wire.isthmus.v1 import generation_pb2_grpc


class Client(BaseClient):
    """Talks to a router. Threads may share one; `close` it, or use it in a `with`.

    Unavailable and Overloaded are tried again, as `retries` says, while nothing of an answer has come. Every
    call raises an IsthmusError. `sleep` is for tests.
    """

    def __init__(self, *args: Any, sleep: Callable[[float], None] = time.sleep, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sleep = sleep
        self._channel = self._router.open()
        self._open_stub = generation_pb2_grpc.GenerationStub(self._channel)

    @property
    def _stub(self) -> generation_pb2_grpc.GenerationStub:
        self._check_open()
        return self._open_stub

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """The answer to a text as it is, to a chat, or to token ids."""
        return self.stream(prompt, messages=messages, token_ids=token_ids, **options).read()

    def answers(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> list[Answer]:
        """The `n` answers; the prompt is computed once."""
        stream = self.stream(prompt, messages=messages, token_ids=token_ids, **options)
        stream.read()
        return stream.answers

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """The same as it comes. Nothing is sent before it is read."""
        return self._stream(Prompt(prompt, messages, token_ids), options)

    def conversation(
        self,
        system: str = "",
        *,
        messages: Sequence[Message] = (),
        **options: Unpack[Options],
    ) -> Conversation:
        """`messages` were said before; `options` are of each turn, and what may be Tools or functions with
        type hints is `tools`."""
        turns = [*([Message("system", system)] if system else ()), *messages]
        return Conversation(self, turns, options)

    def ask(self, messages: Sequence[Message], ended: Ended, options: Options) -> Stream:
        """A conversation's next answer; `ended` gets it."""
        return self._stream(Prompt(messages=messages), options, ended)

    def explain(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> Explanation:
        """Where such a request would go, and why; it is not run."""
        call, timeout_s = self._prepared(Prompt(prompt, messages, token_ids), options)
        answered = self._ask(self._stub.Explain, pb.ExplainRequest(request=call.request), timeout_s)
        return read(Explanation, answered)

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        **options: Unpack[Options],
    ) -> TokenizedPrompt:
        """The prompt that such a request would have."""
        call, timeout_s = self._prepared(Prompt(prompt, messages, token_ids), options)
        answered = self._ask(self._stub.Tokenize, pb.TokenizeRequest(request=call.request), timeout_s)
        return read(TokenizedPrompt, answered)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout: float | None = None) -> str:
        """Their text; special tokens are written out."""
        request = pb.DetokenizeRequest(model=model or self._defaults["model"], token_ids=token_ids)
        return str(self._ask(self._stub.Detokenize, request, timeout or self._timeout_s).text)

    def models(self, *, timeout: float | None = None) -> list[Model]:
        answered = self._ask(self._stub.ListModels, pb.ListModelsRequest(), timeout or self._timeout_s)
        return [read(Model, model) for model in answered.models]

    def ranks(self, *, timeout: float | None = None) -> Ranks:
        """What the router knows of every rank."""
        return read(Ranks, self._ask(self._stub.ListRanks, pb.ListRanksRequest(), timeout or self._timeout_s))

    def abort(self, request_id: str, *, timeout: float | None = None) -> bool:
        """Stop that request, the client's tenant's if it has one: its stream ends, with finish_reason
        aborted. False: none such runs there."""
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
        """Ranks as they change, requests as they run and end, until the loop is left. `tenant` is the
        client's own unless given; `all_tenants` needs an operator's key, where keys are asked for."""
        whose = "" if all_tenants else self._defaults["tenant"] if tenant is None else tenant
        request = pb.WatchClusterRequest(interval_s=interval_s, tenant=whose, all_tenants=all_tenants)
        call = self._stub.WatchCluster(request, timeout=timeout, metadata=self._router.metadata)
        try:
            for response in call:
                yield read(ClusterNews, response)
        except grpc.RpcError as failure:
            raise error_from(failure) from failure
        finally:
            call.cancel()

    def close(self) -> None:
        """Ends every call; those who wait get Cancelled."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, prompt: Prompt, options: Options, ended: Ended | None = None) -> Stream:
        call, timeout_s = self._prepared(prompt, options)
        return Stream(
            self._stub,
            call,
            lambda: self._attempts(timeout_s),
            self._router.metadata,
            self._sleep,
            ended,
        )

    def _ask(self, method: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
        attempts = self._attempts(timeout_s)
        while True:
            try:
                return method(request, timeout=attempts.left_s(), metadata=self._router.metadata)
            except grpc.RpcError as failure:
                error = error_from(failure)
            self._sleep(attempts.pause_s(error))
