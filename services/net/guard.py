"""A guard wraps every handler of a server, and answers with what the handler raises (grpc_errors.py).

On a server with mutual TLS a door is placed before the guard. It admits only clients whose certificate
carries a given name:

    any certificate of the CA --> TLS --> carries the name   -> the call is admitted
                                          does not           -> PERMISSION_DENIED, before a message is read

A CA vouches for everyone whose certificate it has signed, also for tenants of the routers. Clients that may
command ranks are recognised by a name that only services get.
"""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import cache, partial
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc._cython import cygrpc

from services.net.bytes_in_flight import BytesInFlight, HeldBytes
from services.net.grpc_errors import ERROR_KEY, status_of
from services.observe import log_lines
from services.values.errors import (
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    IsthmusError,
    NoCapacity,
    let_frames_go,
    root_cause,
)

logger = logging.getLogger(__name__)

# The name is gRPC's own: its clients that retry by themselves follow it.
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
# gRPC drops a status with more than 8 KiB of metadata; a character may have three bytes there.
_MAX_DETAILS_BYTES = 2000
_INTERNAL = "internal error; the server's log has it"


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """This answers with what a handler raises: our errors by the table, all others as INTERNAL and logged."""

    def __init__(self, *, keeps: bool = True, in_flight: BytesInFlight | None = None) -> None:
        """Make an interceptor that wraps each handler once if it `keeps` handlers.

        It must not keep them if an inner interceptor makes handlers for each call: they would be kept with
        what they know of their calls, such as API keys. `in_flight` limits the messages that calls hold.
        """
        guarded = partial(_guarded, in_flight)
        self._around: Callable[[grpc.RpcMethodHandler, str], grpc.RpcMethodHandler] = (
            cache(guarded) if keeps else guarded
        )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None  # gRPC then answers UNIMPLEMENTED.
        return self._around(handler, handler_call_details.method)


# A receiver makes a behavior's first argument of a call's messages, and counts their bytes.
_Receive = Callable[[Any, grpc.aio.ServicerContext, HeldBytes | None], Awaitable[Any]]


def _guarded(
    in_flight: BytesInFlight | None, handler: grpc.RpcMethodHandler, method: str
) -> grpc.RpcMethodHandler:
    """Return a handler for a stream of messages, even if the inner one takes one: that is read within the
    guard.

    grpc.aio's own reading waits for ever if a client ends its call without a message, and answers UNKNOWN to
    bytes that are no message. On the wire there is no difference.
    """
    answers = "stream" if handler.response_streaming else "unary"
    asks = "stream" if handler.request_streaming else "unary"
    behavior = getattr(handler, f"{asks}_{answers}")
    receive: _Receive = _as_it_comes
    parse = handler.request_deserializer
    if not handler.request_streaming:
        receive, parse = _only_message(parse), None
    elif in_flight is not None:
        receive, parse = _counted_messages(parse), None
    guard = _guarded_generator if inspect.isasyncgenfunction(behavior) else _guarded_coroutine
    make_handler = getattr(grpc, f"stream_{answers}_rpc_method_handler")
    return make_handler(guard(behavior, receive, method, in_flight), parse, handler.response_serializer)


async def _as_it_comes(messages: Any, context: grpc.aio.ServicerContext, held: HeldBytes | None) -> Any:
    return messages


def _only_message(parse: Callable[[bytes], Any]) -> _Receive:
    async def receive(messages: Any, context: grpc.aio.ServicerContext, held: HeldBytes | None) -> Any:
        raw = await (context.read() if held is None else held.read(context.read))
        if raw is grpc.aio.EOF:
            raise InvalidRequest("the call ended without a message")
        return _parsed(parse, raw)

    return receive


def _counted_messages(parse: Callable[[bytes], Any]) -> _Receive:
    """Return a receiver that holds a message until the next one is requested."""

    async def each(context: grpc.aio.ServicerContext, held: HeldBytes) -> AsyncGenerator[Any, None]:
        while (raw := await held.read_next(context.read)) is not grpc.aio.EOF:
            yield _parsed(parse, raw)

    async def receive(messages: Any, context: grpc.aio.ServicerContext, held: HeldBytes | None) -> Any:
        assert held is not None, "they are counted"
        return each(context, held)

    return receive


def _parsed(parse: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        return parse(raw)
    except DecodeError as error:  # A string of the message may not be UTF-8.
        raise InvalidRequest(f"the message cannot be read: {error}") from error


def _holding(in_flight: BytesInFlight | None) -> contextlib.AbstractContextManager[HeldBytes | None]:
    return contextlib.nullcontext() if in_flight is None else in_flight.call()


# The frames below give a call's messages no name: grpc.aio keeps the error that `abort` raised, and these
# frames with it, in a reference cycle until the garbage collector runs.


def _guarded_coroutine(
    behavior: Callable[..., Awaitable[Any]], receive: _Receive, method: str, in_flight: BytesInFlight | None
) -> Callable[..., Awaitable[Any]]:
    async def call(messages: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            with _holding(in_flight) as held:
                return await behavior(await receive(messages, context, held), context)
        except Exception as error:
            return await _answer(context, method, error)

    return call


def _guarded_generator(
    behavior: Callable[..., AsyncGenerator[Any, None]],
    receive: _Receive,
    method: str,
    in_flight: BytesInFlight | None,
) -> Callable[..., AsyncGenerator[Any, None]]:
    async def stream(messages: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
        try:
            with _holding(in_flight) as held:
                responses = behavior(await receive(messages, context, held), context)
                async with contextlib.aclosing(responses):
                    async for response in responses:
                        yield response
        except Exception as error:
            await _answer(context, method, error)

    return stream


async def _answer(context: grpc.aio.ServicerContext, method: str, error: Exception) -> NoReturn:
    cause = root_cause(error)  # A handler may run a TaskGroup.
    if isinstance(cause, grpc.aio.BaseError):  # The handler aborted the call itself, or the call is over.
        raise cause
    if isinstance(cause, TimeoutError):  # asyncio.timeout(remaining_s(context)) raises this.
        cause = DeadlineExceeded("the deadline has passed")
    if not isinstance(cause, IsthmusError):
        logger.error("handler_failed method=%s", method, exc_info=error)
        let_frames_go(error)
        await _abort(context, grpc.StatusCode.INTERNAL, _INTERNAL)
    let_frames_go(error)
    details = str(cause).encode(errors="replace")[:_MAX_DETAILS_BYTES].decode(errors="ignore")
    metadata = [(ERROR_KEY, type(cause).__name__)]
    if isinstance(cause, NoCapacity) and cause.retry_after_s is not None:
        metadata.append((_PUSHBACK_KEY, str(round(1e3 * cause.retry_after_s))))
    await _abort(context, status_of(cause), details, tuple(metadata))


async def _abort(
    context: grpc.aio.ServicerContext,
    code: grpc.StatusCode,
    details: str,
    metadata: tuple[tuple[str, str], ...] = (),
) -> NoReturn:
    try:
        await context.abort(code, details, metadata)
    except grpc.aio.InternalError as error:
        # The call has ended, perhaps by its deadline: grpc.aio cannot send this, and would log it as our bug.
        raise asyncio.CancelledError from error
    raise AssertionError("abort raises")  # grpc.aio's types do not express this.


def _is_of_a_living_call(record: logging.LogRecord) -> bool:
    """Return False for a record that grpc.aio logs as a servicer's bug, though only the call had ended before
    its status could be sent.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], cygrpc.ExecuteBatchError))


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_of_a_living_call)


_ALTERNATIVE_NAMES = "x509_subject_alternative_name"  # This is gRPC's name of the peer's property.
_MOST_TOLD = 3


def carries(names: Iterable[str], wanted: str) -> bool:
    """Return whether a certificate's alternative names contain `wanted`, exactly or by a wildcard for its
    first label, as RFC 6125, section 6.4.3, defines it. Case does not matter.
    """
    wanted = wanted.lower()
    label, _, domain = wanted.partition(".")
    wildcard = f"*.{domain}" if label and domain else wanted
    return any(name.lower() in (wanted, wildcard) for name in names)


class PeerDoor(grpc.aio.ServerInterceptor):
    """This door is placed before the guard, whose handlers all take streams: no message of an unknown client
    is read.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._around = cache(self._guarded)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        return None if handler is None else self._around(handler)

    def _guarded(self, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        answers = "stream" if handler.response_streaming else "unary"
        behavior = getattr(handler, f"stream_{answers}")

        async def call(messages: Any, context: grpc.aio.ServicerContext) -> Any:
            await self._check(context)
            return await behavior(messages, context)

        async def stream(messages: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
            await self._check(context)
            async with aclosing(behavior(messages, context)) as responses:
                async for response in responses:
                    yield response

        make_handler = getattr(grpc, f"stream_{answers}_rpc_method_handler")
        checked = stream if inspect.isasyncgenfunction(behavior) else call
        return make_handler(checked, handler.request_deserializer, handler.response_serializer)

    async def _check(self, context: grpc.aio.ServicerContext) -> None:
        names = [name.decode(errors="replace") for name in context.auth_context().get(_ALTERNATIVE_NAMES, ())]
        if carries(names, self._name):
            return
        shown = ",".join(names[:_MOST_TOLD])
        log_lines.event(
            logger, "peer_refused", level=logging.WARNING, peer=context.peer(), names=shown, wants=self._name
        )
        refusal = f"a client of this server must show a certificate for {self._name!r} (--tls-peer-name)"
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, refusal, ((ERROR_KEY, Forbidden.__name__),))
