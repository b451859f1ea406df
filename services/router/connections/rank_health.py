"""This module monitors ranks: those that report load, and those whose leases have expired.

Silence on a stream is counted in ticks of our own, as a router that was stopped could not receive.

A router receives the queue of each prefill rank, which includes all routers' requests.

    run:  connect -> read loads -> (stream lost: the load is no longer known) -> connect ...
                               -> (silent: it hangs, until it reports again) -> connect ...

A prefill rank that never reported can still be used, and so can one whose stream broke: then only our own
requests there are known, and if they fail, the balance excludes it. But one that did report and becomes
silent is stopped, or its host is gone: requests to it would fail only after many seconds.

Ranks whose lease has expired get health checks, as etcd no longer knows whether they live.

key gone --answers SERVING--> LIVE, checked again --misses three times in a row--> dead
                                 ^     (while etcd is away: SUSPECT, and not checked for a while)
key back, or rank forgotten --> no more checks
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.index.read.mirror import Mirror, RankView
from services.net import channels, grpc_errors
from services.net.channels import TlsConfig
from services.values.errors import ConfigError, IsthmusError
from services.values.rank import RankAddress, RankId, RankKey
from services.values.rank_reports import RankLoad
from services.wire import convert
from services.wire.isthmus.v1 import prefill_pb2, prefill_pb2_grpc

SILENCE_S = 5.0  # These are ten missed reports.
_TICK_S = 0.5


class SilenceLimit:
    """A stream has one limit. Its reader calls `received` for each message."""

    def __init__(self) -> None:
        self._ticks = 0

    def received(self) -> None:
        self._ticks = 0

    @asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """Raise TimeoutError in the reader when nothing was received for SILENCE_S."""
        limit = asyncio.timeout(None)
        watch = asyncio.create_task(self._count(limit))
        try:
            async with limit:
                yield
        finally:
            watch.cancel()

    async def _count(self, limit: asyncio.Timeout) -> None:
        self._ticks = 0
        while self._ticks * _TICK_S < SILENCE_S:
            await asyncio.sleep(_TICK_S)
            self._ticks += 1
        limit.reschedule(asyncio.get_running_loop().time())


log = logging.getLogger(__name__)

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.2, 30.0
_SILENT_RETRY_S = 1.0  # This is the longest; a silent rank is used again as soon as it reports.


class PrefillWatch:
    def __init__(
        self,
        address: RankAddress,
        tls: TlsConfig | None,
        on_load: Callable[[RankLoad], None],
        on_lost: Callable[[], None],
        on_silent: Callable[[], None],
    ) -> None:
        """`on_silent` is called when a rank stops reporting, until the next `on_load`."""
        self.address = address
        self._channel = channels.open_channel(address.endpoint, tls)
        self._on_load = on_load
        self._on_lost = on_lost
        self._on_silent = on_silent
        self._has_reported = self._silent = False
        self._silence = SilenceLimit()
        self._retry_s = _FIRST_RETRY_S
        self._task = asyncio.create_task(self._run(), name=f"watch-{address.id}")

    async def retire(self) -> None:
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
            async with self._silence.bounded():
                while (message := await call.read()) is not grpc.aio.EOF:
                    self._note_report(convert.load_from_proto(message.load))
        finally:
            call.cancel()

    def _note_report(self, load: RankLoad) -> None:
        if self._silent:
            log.info("prefill_rank_recovered rank=%s", self.address.id)
        self._has_reported, self._silent = True, False
        self._silence.received()
        self._retry_s = _FIRST_RETRY_S
        self._on_load(load)

    def _note_silence(self) -> None:
        if self._has_reported and not self._silent:
            log.warning("prefill_rank_silent rank=%s silent_s=%g", self.address.id, SILENCE_S)
            self._silent = True
            self._on_silent()


_MAX_MISSES = 3


class SuspectChecks:
    """`dead` is called with the incarnation of a rank that does not answer. One event loop owns this."""

    def __init__(
        self,
        mirror: Mirror,
        tls: TlsConfig | None,
        dead: Callable[[RankId], None],
        *,
        interval_s: float = 1.0,
        timeout_s: float = 1.0,
    ) -> None:
        self._mirror = mirror
        self._tls = tls
        self._dead = dead
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._channels: dict[RankId, grpc.aio.Channel] = {}
        self._misses: dict[RankId, int] = {}

    async def run(self) -> None:
        try:
            while True:
                suspects = [view for view in self._mirror.ranks.values() if not view.registered]
                await self._close_all_but({view.registration.id for view in suspects})
                await asyncio.gather(*(self._check(view) for view in suspects))
                await asyncio.sleep(self._interval_s)
        finally:
            await self._close_all_but(set())

    async def _check(self, view: RankView) -> None:
        incarnation = view.registration.id
        if await self._serves(view):
            self._misses.pop(incarnation, None)
            if self._is_present(incarnation.key, incarnation):
                self._mirror.mark_live(incarnation.key)
            return
        misses = self._misses[incarnation] = self._misses.get(incarnation, 0) + 1
        if misses == _MAX_MISSES:
            log.warning("suspect_dead rank=%s misses=%d", incarnation, misses)
        if misses >= _MAX_MISSES:
            self._dead(incarnation)

    async def _serves(self, view: RankView) -> bool:
        incarnation = view.registration.id
        try:
            if incarnation not in self._channels:
                self._channels[incarnation] = channels.open_channel(
                    view.registration.address.endpoint, self._tls
                )
            stub = health_pb2_grpc.HealthStub(self._channels[incarnation])
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError:
            grpc_errors.heed_cancellation()
            return False
        except ConfigError as error:  # A certificate may be about to be replaced.
            log.warning("suspect_check_failed rank=%s error=%s", incarnation, error)
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _is_present(self, rank: RankKey, incarnation: RankId) -> bool:
        view = self._mirror.ranks.get(rank)
        return view is not None and view.registration.id == incarnation

    async def _close_all_but(self, lives: set[RankId]) -> None:
        for incarnation in [incarnation for incarnation in self._channels if incarnation not in lives]:
            self._misses.pop(incarnation, None)
            await self._channels.pop(incarnation).close()
