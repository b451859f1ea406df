"""The router's ear at one prefill rank: what is queued there, of all routers.

    run:  connect -> read loads -> (stream lost: the load is no longer known) -> connect ...

A prefill rank that reports nothing can be used all the same: then only our own requests there are known.
So nothing is excluded by this; a rank that fails a request is, by the balance.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import grpc

from services import rpc
from services.errors import IsthmusError
from services.kv.types import RankAddress, RankLoad
from services.wire import convert
from services.wire.isthmus.v1 import prefill_pb2, prefill_pb2_grpc

log = logging.getLogger(__name__)

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.2, 30.0
_SILENCE_S = 5.0  # ten missed reports


class PrefillWatch:
    """One WatchLoad stream to one life of a prefill rank."""

    def __init__(
        self,
        address: RankAddress,
        tls: rpc.TlsConfig | None,
        on_load: Callable[[RankLoad], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.address = address
        self._channel = rpc.open_channel(address.endpoint, tls)
        self._on_load = on_load
        self._on_lost = on_lost
        self._retry_s = _FIRST_RETRY_S
        self._task = asyncio.create_task(self._run(), name=f"watch-{address.id}")

    async def retire(self) -> None:
        """The rank is to be forgotten, or begins a new life."""
        await self.close()

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._channel.close()

    async def _run(self) -> None:
        while True:
            try:
                await self._read()
            except (grpc.aio.AioRpcError, IsthmusError, TimeoutError) as error:
                rpc.heed_cancellation()
                # An older rank may not know the call, and one that starts or stops refuses it.
                log.debug("prefill_load_unknown rank=%s error=%r", self.address.id, error)
            self._on_lost()
            await asyncio.sleep(self._retry_s)
            self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)

    async def _read(self) -> None:
        request = prefill_pb2.WatchLoadRequest(generation=self.address.id.generation)
        call = prefill_pb2_grpc.PrefillStub(self._channel).WatchLoad(request)
        try:
            while True:
                async with asyncio.timeout(_SILENCE_S):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    return
                self._retry_s = _FIRST_RETRY_S
                self._on_load(convert.load_from_proto(message.load))
        finally:
            call.cancel()
