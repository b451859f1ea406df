"""The Decode service of one rank."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc

from services.decode.attach import AttachSession, RunningRequests
from services.decode.metrics import DecodeMetrics
from services.decode.prefill_leg import PrefillChannels
from services.engine.base import DecodeEngine
from services.net.tls import TlsConfig
from services.rank.intake import Intake
from services.values.rank import RankId
from services.wire.isthmus.v1 import decode_pb2, decode_pb2_grpc

# A router that hears nothing for a few of these knows that the rank is gone.
IDLE_REPORT_S = 0.5


class DecodeService(decode_pb2_grpc.DecodeServicer):
    def __init__(
        self,
        engine: DecodeEngine,
        own_id: RankId,
        tls: TlsConfig | None,
        metrics: DecodeMetrics,
    ) -> None:
        self._engine = engine
        self._own_id = own_id
        self._channels = PrefillChannels(tls)
        self._metrics = metrics
        self.intake = Intake(own_id)
        self._running = RunningRequests(self.intake)

    async def Attach(
        self, request_iterator: AsyncIterator[decode_pb2.Command], context: grpc.aio.ServicerContext
    ) -> None:
        session = AttachSession(self._engine, self._own_id, self._channels, self._running, self._metrics)
        writer = asyncio.create_task(_write(session, context))
        try:
            await session.read(request_iterator)
        finally:
            writer.cancel()
            await session.close()
            with contextlib.suppress(asyncio.CancelledError):
                await writer

    async def close(self) -> None:
        await self._channels.close()


async def _write(session: AttachSession, context: grpc.aio.ServicerContext) -> None:
    async with contextlib.aclosing(session.messages(IDLE_REPORT_S)) as messages:
        async for message in messages:
            await context.write(message)
