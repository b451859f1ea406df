"""Ranks whose lease has lapsed are asked whether they live, for etcd no longer says.

key gone --answers SERVING--> LIVE, asked again --misses three times in a row--> dead
                                 ^     (while etcd is away: SUSPECT and left alone for a while)
key back, or rank forgotten --> asked no more
"""

import asyncio
import logging
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.index.read.mirror import Mirror, RankView
from services.net import channels, grpc_errors
from services.net.tls import TlsConfig
from services.values.errors import ConfigError
from services.values.rank import RankId, RankKey

log = logging.getLogger(__name__)

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
        """Ask again and again until cancelled."""
        try:
            while True:
                asked = [view for view in self._mirror.ranks.values() if not view.registered]
                await self._close_all_but({view.registration.id for view in asked})
                await asyncio.gather(*(self._ask(view) for view in asked))
                await asyncio.sleep(self._interval_s)
        finally:
            await self._close_all_but(set())

    async def _ask(self, view: RankView) -> None:
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
        except ConfigError as error:  # a certificate that is being replaced, perhaps
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
