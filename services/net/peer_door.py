"""A server with mutual TLS lets in those clients whose certificate carries a name that it asks for.

    any certificate of the CA --> TLS --> carries the name   -> the call is taken
                                          does not           -> PERMISSION_DENIED, before a message is read

A CA vouches for whoever it has signed for, tenants of the routers too. Those who are to command ranks are
told apart by a name that services alone are given.
"""

import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import cache
from typing import Any

import grpc
import grpc.aio

from services.net.grpc_errors import ERROR_KEY
from services.observe import log_lines
from services.values.errors import Forbidden

log = logging.getLogger(__name__)

_ALTERNATIVE_NAMES = "x509_subject_alternative_name"  # gRPC calls the peer's property so.
_MOST_TOLD = 3


def carries(names: Iterable[str], asked: str) -> bool:
    """Say whether a certificate's alternative names have this one, whole or by a wildcard for its first
    label.

    RFC 6125, section 6.4.3, has the rule. Letters of either size are the same.
    """
    asked = asked.lower()
    label, _, domain = asked.partition(".")
    wildcard = f"*.{domain}" if label and domain else asked
    return any(name.lower() in (asked, wildcard) for name in names)


class PeerDoor(grpc.aio.ServerInterceptor):
    """This door stands around the guard, whose handlers all take streams: nothing of a stranger's is read."""

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
            log, "peer_refused", level=logging.WARNING, peer=context.peer(), names=shown, wants=self._name
        )
        refusal = f"a client of this server must show a certificate for {self._name!r} (--tls-peer-name)"
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, refusal, ((ERROR_KEY, Forbidden.__name__),))
