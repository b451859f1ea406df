"""What makes a rank a decode rank."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from services.decode.metrics import DecodeMetrics
from services.decode.server import DecodeService
from services.engine.base import DecodeEngine
from services.engine.choose import decode_engines
from services.rank.config import RankConfig
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


def decode_roles(config: RankConfig, own_ids: Sequence[RankId]) -> list[RankRole]:
    """Of all ranks of this process. Raises ConfigError when the engine's settings cannot work."""
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
