"""This gRPC channel connects under the TLS files as they are whenever it does.

gRPC's own keep the credentials that they were made with, also to connect again. So this one is made of them:

    connected -----------------------------------> the same one, whatever the files hold by now
    not connected, files as they were -----------> the same one
    not connected, files have changed -----------> a new one; the old one goes on for the calls that it still
                                                   has, and is closed with the last of them
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from services.net.certificates import Certificates, Pem

_READY = grpc.ChannelConnectivity.READY


class ReloadingChannel(grpc.aio.Channel):
    """One event loop owns this channel. `connect` makes gRPC's channel for what the files hold."""

    def __init__(self, certificates: Certificates, connect: Callable[[Pem], grpc.aio.Channel]) -> None:
        self._certificates = certificates
        self._connect = connect
        self._pem = certificates.look()
        self._newest = _Used(connect(self._pem))
        self._older: set[_Used] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"ReloadingChannel(older={len(self._older)}, closed={self._closed})"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        self._closed = True
        await asyncio.gather(*(used.channel.close(grace) for used in (self._newest, *self._older)))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        state = self._newest.channel.get_state(try_to_connect)
        if state is _READY or not self._renewed():
            return state
        return self._newest.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        with self._using() as channel:
            await channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        while (state := self.get_state(try_to_connect=True)) is not _READY:
            await self.wait_for_state_change(state)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return partial(self._call, "unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return partial(self._call, "unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return partial(self._call, "stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return partial(self._call, "stream_stream", args, kwargs)

    def _call(
        self, kind: str, method: tuple[Any, ...], how: dict[str, Any], *args: Any, **kwargs: Any
    ) -> grpc.aio.Call:
        self.get_state()  # The files may have changed.
        used = self._newest
        call: grpc.aio.Call = getattr(used.channel, kind)(*method, **how)(*args, **kwargs)
        used.num_uses += 1
        call.add_done_callback(lambda _: self._release(used))
        return call

    @contextmanager
    def _using(self) -> Iterator[grpc.aio.Channel]:
        used = self._newest
        used.num_uses += 1
        try:
            yield used.channel
        finally:
            self._release(used)

    def _renewed(self) -> bool:
        """Say whether there is a new channel now, since the files have changed."""
        pem = self._certificates.look()
        if pem is self._pem or self._closed:
            return False
        old, self._pem = self._newest, pem
        self._newest = _Used(self._connect(pem))
        self._older.add(old)
        old.num_uses += 1
        self._release(old)
        return True

    def _release(self, used: "_Used") -> None:
        used.num_uses -= 1
        if used.num_uses == 0 and used in self._older and used.closing is None and not self._closed:
            used.closing = asyncio.create_task(used.channel.close(), name="close-channel")
            used.closing.add_done_callback(lambda _: self._older.discard(used))


class _Used:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.num_uses = 0
        self.closing: asyncio.Task[None] | None = None
