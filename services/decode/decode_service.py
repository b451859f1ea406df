"""The Decode service of one rank, and what makes a rank a decode rank."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import grpc
from prometheus_client import CollectorRegistry

from services.decode.attach import AttachSession, RunningRequests
from services.decode.decode_metrics import DecodeMetrics
from services.decode.prefill_leg import PrefillChannels
from services.engine.base import DecodeEngine
from services.engine.choose import decode_engines
from services.net.tls import TlsConfig
from services.rank.config import RankConfig
from services.rank.intake import Intake
from services.rank.main import RankRole, Services
from services.values.rank import Plan, RankId, Role
from services.values.registration import (
    NO_CACHE,
    NO_MOVED_PENALTIES,
    NO_RESUME_POINTS,
    NO_TENANT_TURNS,
    REMOTE_ONLY,
)
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


def decode_roles(config: RankConfig, own_ids: Sequence[RankId]) -> list[RankRole]:
    """Return the roles of all ranks of this process. Raises ConfigError when the engine's settings cannot
    work."""
    engines = decode_engines(config, own_ids)
    return [_role(config, own_id, engine) for own_id, engine in zip(own_ids, engines, strict=True)]


def _role(config: RankConfig, own_id: RankId, engine: DecodeEngine) -> RankRole:
    def make_services(registry: CollectorRegistry) -> Services:
        metrics = DecodeMetrics(registry, engine)
        service = DecodeService(engine, own_id, config.tls(), metrics)
        return Services(
            register=lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(service, server),
            names=[decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name],
            intake=service.intake,
            close=service.close,
        )

    lacks = {
        REMOTE_ONLY: Plan.LOCAL not in engine.plans,
        NO_CACHE: config.decode_cache == "off",
        NO_MOVED_PENALTIES: not engine.moves_penalties,
        NO_RESUME_POINTS: not engine.tells_resume_points,
        NO_TENANT_TURNS: not engine.takes_turns,
    }
    return RankRole(Role.DECODE, engine, make_services, tuple(name for name in lacks if lacks[name]))
