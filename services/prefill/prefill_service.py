"""This is the Prefill service of one rank, and what makes a rank a prefill rank.

The engine's sender serves the Handshake beside it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence

import grpc
from prometheus_client import CollectorRegistry

from services.engine.base import PrefillEngine
from services.engine.choose import prefill_engines
from services.net import servers
from services.observe import log_lines, traces
from services.rank.intake import Intake
from services.rank.rank_config import RankConfig
from services.rank.rank_metrics import PrefillMetrics
from services.rank.rank_role import RankRole, Services
from services.values.errors import AlreadyRunning
from services.values.rank import RankId, Role, TransferId
from services.values.rank_reports import LENDS, NO_CACHE, NO_CHECKPOINTS, NO_TENANT_TURNS, PULLS
from services.values.request import PrefillResult
from services.wire import convert, convert_request
from services.wire.isthmus.v1 import (
    common_pb2,
    handshake_pb2,
    handshake_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

# A report costs a router 0.1 ms, and there may be hundreds of ranks. Between reports the router estimates.
_TICK_S = 0.1
_SILENT_TICKS = 5


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, engine: PrefillEngine, own_id: RankId, metrics: PrefillMetrics) -> None:
        self._engine = engine
        self._own_id = own_id
        self._metrics = metrics
        self._transfers: set[TransferId] = set()
        self.intake = Intake(own_id)

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.PrefillResponse:
        self.intake.check()
        generation, rendezvous = convert_request.prefill_request_from_proto(request)
        with (
            log_lines.request_context(generation.request_id),
            traces.span("prefill.prefill", request.traceparent) as span,
            self._metrics.counted(),
            self._in_transfer(rendezvous.transfer_id),
        ):
            span.set_attributes({"request_id": generation.request_id, "rank": str(self._own_id)})
            async with asyncio.timeout(servers.remaining_s(context)):
                result = await self._engine.prefill(generation, rendezvous)
            span.set_attributes(_attributes(result))
            self._metrics.prefilled(result, traces.exemplar(span))
        return convert_request.prefill_result_to_proto(result)

    async def WatchLoad(
        self, request: prefill_pb2.WatchLoadRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[prefill_pb2.WatchLoadResponse]:
        self.intake.check_life(request.generation)
        while True:
            load = self._load()
            yield prefill_pb2.WatchLoadResponse(load=load)
            for _ in range(_SILENT_TICKS):
                await asyncio.sleep(_TICK_S)
                if self._load() != load:
                    break

    def _load(self) -> common_pb2.RankLoad:
        load = convert.load_to_proto(self._engine.load())
        load.draining = self.intake.draining
        return load

    @contextlib.contextmanager
    def _in_transfer(self, transfer_id: TransferId) -> Iterator[None]:
        if transfer_id in self._transfers:
            raise AlreadyRunning(f"transfer {transfer_id:016x} is in use")
        self._transfers.add(transfer_id)
        self.intake.took()
        try:
            yield
        finally:
            self._transfers.remove(transfer_id)
            self.intake.left()


def _attributes(result: PrefillResult) -> dict[str, int | float]:
    names = ("prefill_prefix_len", "computed_tokens", "kv_bytes_moved", "queue_s", "compute_s")
    return {name: getattr(result, name) for name in names}


def prefill_roles(config: RankConfig, own_ids: Sequence[RankId]) -> list[RankRole]:
    """Return the roles of all ranks of this process. Raises ConfigError if the engine's settings cannot
    work."""
    engines = prefill_engines(config, own_ids)
    return [_role(config, own_id, engine) for own_id, engine in zip(own_ids, engines, strict=True)]


def _role(config: RankConfig, own_id: RankId, engine: PrefillEngine) -> RankRole:
    def make_services(registry: CollectorRegistry) -> Services:
        metrics = PrefillMetrics(registry, engine, expects_rdma=config.expect_kv_path == "rdma")
        service = PrefillService(engine, own_id, metrics)

        def register(server: grpc.aio.Server) -> None:
            prefill_pb2_grpc.add_PrefillServicer_to_server(service, server)
            handshake_pb2_grpc.add_HandshakeServicer_to_server(engine.handshake(), server)

        names = [
            prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name,
            handshake_pb2.DESCRIPTOR.services_by_name["Handshake"].full_name,
        ]
        return Services(register, names, service.intake, metrics.digests, _nothing_to_close)

    capabilities = {
        LENDS: engine.lends,
        PULLS: engine.pulls,
        NO_CACHE: config.prefill_cache == "off",
        NO_CHECKPOINTS: not engine.reports_checkpoints,
        NO_TENANT_TURNS: not engine.takes_turns,
    }
    return RankRole(
        Role.PREFILL, engine, make_services, tuple(name for name in capabilities if capabilities[name])
    )


async def _nothing_to_close() -> None:
    """The engine closes the service of the Handshake."""
