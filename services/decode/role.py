"""What makes a rank a decode rank."""

from prometheus_client import CollectorRegistry

from services.decode.metrics import DecodeMetrics
from services.decode.server import DecodeService
from services.engine.choose import decode_engine
from services.kv.types import RankId, Role
from services.rank import RankConfig, RankRole, Services
from services.wire.isthmus.v1 import decode_pb2, decode_pb2_grpc


def decode_role(config: RankConfig, own_id: RankId) -> RankRole:
    """Raises ConfigError when the engine's settings cannot work."""
    engine = decode_engine(config.engine_settings(), own_id, config.tls())

    def make_services(registry: CollectorRegistry) -> Services:
        metrics = DecodeMetrics(registry, engine)
        service = DecodeService(engine, own_id, config.tls(), metrics.admitted)
        return Services(
            register=lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(service, server),
            names=[decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name],
            drain=service.running.drained,
            close=service.close,
        )

    return RankRole(Role.DECODE, engine, make_services)
