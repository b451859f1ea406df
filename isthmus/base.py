"""This is what the blocking and the asynchronous client have in common: everything but waiting.

The blocking client does not use the asynchronous one: once grpc.aio has run in a process, a forked child
crashes in gRPC (its poller keeps gRPC's fork handlers from running), but not with the blocking API.
"""

import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, Unpack

import grpc

from isthmus.channel import Router, Tls
from isthmus.errors import Cancelled, InvalidRequest
from isthmus.functions import text_of, tool_of
from isthmus.request import Call, Options, Prompt, PromptOptions, call_of, prompt_and_options
from isthmus.retries import Attempts, Retries
from isthmus.values.answer import Answer, GrowingAnswers
from isthmus.values.message import Message, ToolCall
from services.wire.isthmus.v1 import generation_pb2 as pb
from services.wire.isthmus.v1 import generation_pb2_grpc

_TIMEOUT_S = 600.0
Ended = Callable[[Answer], None]
Metadata = tuple[tuple[str, str], ...]
# This is time.sleep or asyncio.sleep.
Sleep = Callable[[float], Any]


class BaseStream:
    """An answer that comes in pieces.

    made --(first iteration)--> sent --> pieces ... --> ended: `answer` is there
              ^ pause |                    | left, closed, failed: the call is cancelled, the router stops
              +-- it failed without a piece, and may be retried (retries.py)
    """

    def __init__(
        self,
        stub: generation_pb2_grpc.GenerationStub,
        call: Call,
        make_attempts: Callable[[], Attempts],
        metadata: Metadata,
        sleep: Sleep,
        ended: Ended | None = None,
    ) -> None:
        self.request_id = call.request.request_id  # This is the id of the running attempt.
        self._stub = stub
        self._call = call
        self._make_attempts = make_attempts
        self._metadata = metadata
        self._sleep = sleep
        self._ended = ended
        self._growing = GrowingAnswers(call.parse)
        self._running: grpc.RpcContext | None = None
        self._closed = self._begun = False

    @property
    def answer(self) -> Answer:
        """Return the first answer. Raises IncompleteAnswer before the end."""
        return self.answers[0]

    @property
    def answers(self) -> list[Answer]:
        """Return all answers; `n` may request several. Raises IncompleteAnswer before the end."""
        return self._growing.answers()

    def close(self) -> None:
        """Stop the answer; iterating then raises Cancelled. After the end this does nothing."""
        self._closed = True
        if self._running is not None:
            self._running.cancel()

    def _begin(self) -> None:
        if self._begun:
            raise RuntimeError("a stream is read once")
        self._begun = True

    def _send(self, attempts: Attempts) -> Any:
        request = self._call.attempt(attempts.failed)
        self.request_id = request.request_id
        call = self._stub.Generate(request, timeout=attempts.left_s(), metadata=self._metadata)
        self._running = call
        if self._closed:
            call.cancel()
        return call

    def _end(self) -> None:
        if self._ended is not None:
            self._ended(self.answer)


StreamT_co = TypeVar("StreamT_co", bound=BaseStream, covariant=True)


class Asks(Protocol[StreamT_co]):
    def ask(self, messages: Sequence[Message], ended: Ended, options: Options) -> StreamT_co: ...


# The ids of an answer that these end include the stop, but its text does not.
_CUTTING = ("stop", "stop_token_ids")


class History:
    """`messages` is the whole conversation. Results of tools wait in it for the next question."""

    def __init__(self, messages: Sequence[Message] = ()) -> None:
        self.messages = list(messages)

    def with_question(self, text: str | None) -> list[Message]:
        """Return the messages of the next request. Raises InvalidRequest if there is nothing to answer."""
        question = [] if text is None else [Message("user", text)]
        messages = [*self.messages, *question]
        if not messages or messages[-1].role not in ("user", "tool"):
            raise InvalidRequest("there is nothing to answer: say something, or give a tool's result")
        return messages

    def keep(self, messages: Sequence[Message], answer: Answer, options: Mapping[str, Any]) -> None:
        """Keep the messages and their answer, unless it was aborted."""
        if answer.finish_reason == "aborted":
            return
        exact = not any(options.get(name) for name in _CUTTING)
        self.messages = [*messages, answer.message(exact)]

    def add_result(self, call: ToolCall | str, content: str) -> None:
        """Add the result of a call of the last answer. Raises InvalidRequest if no such call waits."""
        call_id = call if isinstance(call, str) else call.id
        if call_id not in self.waiting:
            raise InvalidRequest(f"no call {call_id!r} waits for a result")
        self.messages.append(Message("tool", content, tool_call_id=call_id, name=self.waiting[call_id].name))

    @property
    def waiting(self) -> dict[str, ToolCall]:
        """Return the last answer's calls without a result, by id."""
        calls: dict[str, ToolCall] = {}
        for message in self.messages:
            if message.role == "assistant":
                calls = {call.id: call for call in message.tool_calls}
            elif message.role == "tool":
                calls.pop(message.tool_call_id, None)
        return calls


def check_options(options: Mapping[str, Any]) -> None:
    """Raise InvalidRequest if several answers are requested: a conversation continues from one."""
    if options.get("n") not in (None, 1):
        raise InvalidRequest(
            "a conversation has one answer to each question: leave n out, or use client.answers"
        )


class BaseConversation(Generic[StreamT_co]):
    """A conversation's turns find the KV of earlier ones; a client's `conversation` makes it.

    Past answers are sent as their generated ids, under one conversation id, so the rank that holds the KV of
    earlier turns gets the next one. There is one turn at a time. A turn that fails, or is left before its
    end, has no effect: `messages` stays as it was.
    """

    def __init__(self, client: Asks[StreamT_co], messages: Sequence[Message], options: Options) -> None:
        check_options(options)
        self.id = options.get("conversation_id") or secrets.token_hex(8)
        self.tools = [tool_of(tool) for tool in options.get("tools") or ()]
        self._client = client
        self._history = History(messages)
        self._options: Options = {**options, "tools": self.tools, "conversation_id": self.id}

    @property
    def messages(self) -> list[Message]:
        """Return all messages so far, the oldest first."""
        return list(self._history.messages)

    def stream(self, text: str | None = None, **options: Unpack[Options]) -> StreamT_co:
        """Send the text, or without one the results of tools given since, and stream the answer.

        Raises:
            InvalidRequest: There is nothing to answer, or an option is not allowed in a turn.
        """
        check_options(options)
        messages = self._history.with_question(text)
        merged: Options = {**self._options, **options}
        return self._client.ask(messages, lambda answer: self._history.keep(messages, answer, merged), merged)

    def tool_result(self, call: ToolCall | str, result: Any) -> None:
        """Give the result of a tool call; a result that is no text is sent as JSON.

        Raises:
            InvalidRequest: No such call waits for a result.
        """
        self._history.add_result(call, text_of(result))


ConversationT_co = TypeVar("ConversationT_co", bound=BaseConversation[Any], covariant=True)


class BaseClient(Generic[StreamT_co, ConversationT_co]):
    """This is what both clients of a router have in common.

    Unavailable and Overloaded are retried, as `retries` says, if no piece of an answer has come. Every failed
    call raises an IsthmusError.

    Args:
        target: HOST:PORT of a router's gRPC API.
        api_key: The key that is sent with every call; without TLS it is not encrypted.
        tls: True trusts the system's authorities; a Tls names files.
        model: The model of every request that names no other.
        tenant: The tenant of every request that names no other.
        timeout: The seconds that a call with all its attempts may take; None leaves that to the router.
        retries: The rules for retrying a failed call.
        clock: A monotonic clock in seconds, for tests.
        chance: A source of random numbers in [0, 1), for tests.
    """

    _stream_type: type[StreamT_co]
    _conversation_type: type[ConversationT_co]
    _sleep: Sleep

    def __init__(
        self,
        target: str = "127.0.0.1:7777",
        *,
        api_key: str | None = None,
        tls: Tls | bool = False,
        model: str = "",
        tenant: str = "",
        timeout: float | None = _TIMEOUT_S,
        retries: Retries = Retries(),  # noqa: B008  frozen
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        known = tls if isinstance(tls, Tls) else Tls() if tls else None
        self._router = Router(target, known, api_key)
        self._defaults = {"model": model, "tenant": tenant}
        self._timeout_s = timeout
        self._retries = retries
        self._clock = clock
        self._chance = chance
        self._closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._router.target!r})"

    def stream(self, prompt: str | None = None, **options: Unpack[PromptOptions]) -> StreamT_co:
        """Stream the answer to a plain text, to a chat, or to token ids; `generate` documents the arguments.

        Nothing is sent before the first iteration.
        """
        return self._stream(*prompt_and_options(prompt, options))

    def conversation(
        self, system: str = "", *, messages: Sequence[Message] = (), **options: Unpack[Options]
    ) -> ConversationT_co:
        """Return a conversation that begins with a system message and earlier messages.

        Args:
            system: The system message; empty means none.
            messages: The earlier messages.
            options: The options of each turn. `tools` may be Tools, or functions with type hints.
        """
        before = [Message("system", system)] if system else []
        return self._conversation_type(self, [*before, *messages], options)

    def ask(self, messages: Sequence[Message], ended: Ended, options: Options) -> StreamT_co:
        """Stream a conversation's next answer; `ended` is called with it."""
        return self._stream(Prompt(messages=messages), options, ended)

    def _stream(self, prompt: Prompt, options: Options, ended: Ended | None = None) -> StreamT_co:
        call, timeout_s = self._prepared(prompt, options)
        make_attempts = partial(self._attempts, timeout_s)
        return self._stream_type(self._stub, call, make_attempts, self._router.metadata, self._sleep, ended)

    @property
    def _stub(self) -> generation_pb2_grpc.GenerationStub:
        raise NotImplementedError

    def _check_open(self) -> None:
        if self._closed:
            raise Cancelled("the client is closed")

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(self._retries, timeout_s, self._clock, self._chance, self._check_open)

    def _prepared(self, prompt: Prompt, options: Mapping[str, Any]) -> tuple[Call, float | None]:
        given = {**self._defaults, **options}
        timeout_s = given.pop("timeout", self._timeout_s)
        return call_of(prompt, given), timeout_s

    def _watch_request(
        self, interval_s: float, tenant: str | None, all_tenants: bool
    ) -> pb.WatchClusterRequest:
        whose = "" if all_tenants else self._defaults["tenant"] if tenant is None else tenant
        return pb.WatchClusterRequest(interval_s=interval_s, tenant=whose, all_tenants=all_tenants)
