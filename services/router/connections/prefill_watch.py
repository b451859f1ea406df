"""A router hears from each prefill rank what is queued there, of all routers.

    run:  connect -> read loads -> (stream lost: the load is no longer known) -> connect ...
                               -> (silent: it hangs, until it reports again) -> connect ...

A prefill rank that never reported can be used all the same, and so can one whose stream broke: only our own
requests there are known then, and if they fail, the balance excludes it. But one that did report and falls
silent is stopped, or its host is gone: what is sent there fails after many seconds only.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import grpc

from services.net import channels, grpc_errors
from services.net.tls import TlsConfig
from services.router.connections.silence import SilenceLimit
from services.values.errors import IsthmusError
from services.values.load import RankLoad
from services.values.rank import RankAddress
from services.wire import convert
from services.wire.isthmus.v1 import prefill_pb2, prefill_pb2_grpc

log = logging.getLogger(__name__)

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.2, 30.0
_SILENT_RETRY_S = 1.0  # at most, of a rank that is to be used again as soon as it speaks
_SILENCE_S = 5.0  # ten missed reports


class PrefillWatch:
    """This is one WatchLoad stream to one incarnation of a prefill rank."""

    def __init__(
        self,
        address: RankAddress,
        tls: TlsConfig | None,
        on_load: Callable[[RankLoad], None],
        on_lost: Callable[[], None],
        on_silent: Callable[[], None],
    ) -> None:
        """`on_silent` is called when a rank that did report does so no more, until the next `on_load`."""
        self.address = address
        self._channel = channels.open_channel(address.endpoint, tls)
        self._on_load = on_load
        self._on_lost = on_lost
        self._on_silent = on_silent
        self._heard = self._silent = False
        self._silence = SilenceLimit()
        self._retry_s = _FIRST_RETRY_S
        self._task = asyncio.create_task(self._run(), name=f"watch-{address.id}")

    async def retire(self) -> None:
        """Close the stream: the rank is to be forgotten, or begins a new incarnation."""
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
            except TimeoutError:
                grpc_errors.heed_cancellation()
                self._note_silence()
            except (grpc.aio.AioRpcError, IsthmusError) as error:
                grpc_errors.heed_cancellation()
                # An older rank may not know the call, and one that starts or stops refuses it.
                log.debug("prefill_load_stream_failed rank=%s error=%r", self.address.id, error)
            self._on_lost()
            await asyncio.sleep(self._retry_s)
            self._retry_s = min(2 * self._retry_s, _SILENT_RETRY_S if self._silent else _LONGEST_RETRY_S)

    async def _read(self) -> None:
        request = prefill_pb2.WatchLoadRequest(generation=self.address.id.generation)
        call = prefill_pb2_grpc.PrefillStub(self._channel).WatchLoad(request)
        try:
            async with self._silence.bounded(_SILENCE_S):
                while (message := await call.read()) is not grpc.aio.EOF:
                    self._note_report(convert.load_from_proto(message.load))
        finally:
            call.cancel()

    def _note_report(self, load: RankLoad) -> None:
        if self._silent:
            log.info("prefill_rank_recovered rank=%s", self.address.id)
        self._heard, self._silent = True, False
        self._silence.heard()
        self._retry_s = _FIRST_RETRY_S
        self._on_load(load)

    def _note_silence(self) -> None:
        if self._heard and not self._silent:
            log.warning("prefill_rank_silent rank=%s silent_s=%g", self.address.id, _SILENCE_S)
            self._silent = True
            self._on_silent()
