"""This module takes up a method's calls several at a time.

grpc.aio's server asks its core for one call of a method, and for the next one some iterations of the loop
after that has come. A loop that is busy has long iterations: of a thousand clients that ask at once it serves
a few, and the others wait where neither metrics nor admission see them. Takers ask for calls beside it, and
each call then goes the way that grpc.aio's own go:

    core --> grpc.aio's loop: one call ---+
         --> taker: one call -------------+--> _handle_rpc: interceptors, handler, status
         --> taker: one call -------------+

That way is not public. `find` says whether the grpcio that is installed has it; without it everything works,
and calls are taken up one by one.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc

_NAMES = ("_MethodResolver", "_RequestCallError")
_ARGUMENTS = {
    "_handle_rpc": (
        "method_name",
        "method_resolver",
        "interceptors",
        "rpc_state",
        "loop",
        "concurrency_exceeded",
    ),
    "_schedule_rpc_coro": ("rpc_coro", "rpc_state", "loop", "method_name"),
}

log = logging.getLogger(__name__)


class CallTakers:
    """These takers serve one method of a server that has started; they end when it stops."""

    def __init__(
        self,
        server: Any,
        method: str,
        handler: grpc.RpcMethodHandler,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        count: int,
    ) -> None:
        """Start `count` takers of `method` (/package.Service/Method), which is registered at a `server` from
        `find`.
        """
        self._server = server
        self._method = method
        self._resolver = cygrpc._MethodResolver([], {method: handler})
        self._interceptors = tuple(interceptors)
        self._loop = asyncio.get_running_loop()
        self._calls = set[asyncio.Task[None]]()  # The loop itself does not keep them.
        self._takers = [self._loop.create_task(self._take()) for _ in range(count)]

    async def ended(self) -> None:
        """Return when the server, which has stopped, has told all of them."""
        await asyncio.gather(*self._takers)

    async def _take(self) -> None:
        name = self._method.encode()
        while True:
            try:
                # The call gets no name here: a taker that waits keeps no call that is over, nor what came
                # with it.
                self._handle(await self._server._request_registered_call(name))
            except cygrpc._RequestCallError:
                if not self._server.is_running():
                    return
            except Exception:  # Calls still come to the others, and to grpc.aio's own loop.
                log.exception("call_taker_failed method=%s", self._method)
                return

    def _handle(self, state: Any) -> None:
        way = cygrpc._handle_rpc(self._method, self._resolver, self._interceptors, state, self._loop, False)
        task = self._loop.create_task(cygrpc._schedule_rpc_coro(way, state, self._loop, self._method))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)


def find(server: grpc.aio.Server) -> Any:
    """Return the inner server that takers ask, or None where this grpcio has another one."""
    within = getattr(server, "_server", None)
    known = all(hasattr(cygrpc, name) for name in _NAMES)
    known = known and all(_arguments(name) == arguments for name, arguments in _ARGUMENTS.items())
    if not known or not hasattr(within, "_request_registered_call"):
        log.warning("grpcio_unknown version=%s calls=one_by_one", grpc.__version__)
        return None
    return within


def _arguments(name: str) -> tuple[str, ...]:
    """Return the names of a grpcio function's arguments, or () where there is no such function."""
    code = getattr(getattr(cygrpc, name, None), "__code__", None)
    return () if code is None else tuple(code.co_varnames[: code.co_argcount])
