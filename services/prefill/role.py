"""What makes a rank a prefill rank."""

from collections.abc import Sequence

import grpc
from prometheus_client import CollectorRegistry

from services.engine.base import PrefillEngine
from services.engine.choose import prefill_engines
from services.prefill.metrics import PrefillMetrics
from services.prefill.server import PrefillService
from services.rank.config import RankConfig
from services.rank.main import RankRole, Services
from services.values.rank import RankId, Role
from services.values.registration import NO_CACHE, NO_RESUME_POINTS, NO_TENANT_TURNS
from services.wire.isthmus.v1 import handshake_pb2, handshake_pb2_grpc, prefill_pb2, prefill_pb2_grpc


def prefill_roles(config: RankConfig, own_ids: Sequence[RankId]) -> list[RankRole]:
    """Of all ranks of this process. Raises ConfigError when the engine's settings cannot work."""
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
        return Services(register, names, service.intake, _nothing_to_close)

    lacks = {
        NO_CACHE: config.prefill_cache == "off",
        NO_RESUME_POINTS: not engine.tells_resume_points,
        NO_TENANT_TURNS: not engine.takes_turns,
    }
    return RankRole(Role.PREFILL, engine, make_services, tuple(name for name in lacks if lacks[name]))


async def _nothing_to_close() -> None:
    """What serves the Handshake belongs to the engine."""
