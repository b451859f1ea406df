"""This module finds the ranks of a cluster for commands: a router is asked, or etcd is read."""

from dataclasses import dataclass
from pathlib import Path

from services.cli.client import key_metadata, naming
from services.net import channels
from services.settings.cluster import ClusterConfig
from services.settings.flags import setting
from services.wire.isthmus.v1 import generation_pb2, generation_pb2_grpc

_ANSWER_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksConfig(ClusterConfig):
    router: str = setting("127.0.0.1:7777", "HOST:PORT of a router's gRPC API")
    api_key_file: Path | None = setting(None, "file that begins with the key to show the router")


async def ask_router(config: RanksConfig) -> generation_pb2.ListRanksResponse:
    """Return what the router knows of every rank of its model. Raises its error as one of ours."""
    metadata = key_metadata(config.api_key_file)
    async with channels.open_channel(config.router, config.tls()) as channel:
        list_ranks = generation_pb2_grpc.GenerationStub(channel).ListRanks
        with naming(config.router):
            answer = await list_ranks(
                generation_pb2.ListRanksRequest(), timeout=_ANSWER_TIMEOUT_S, metadata=metadata
            )
    assert isinstance(answer, generation_pb2.ListRanksResponse)
    return answer
