"""Where the prefill processes of a worker serve their Handshake, told by its service over gRPC."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc

from services import rpc
from services.engine.sglang.reports import Active
from services.errors import ProtocolError, Unavailable
from services.kv.types import RankId
from services.wire import convert
from services.wire.isthmus.v1 import handshake_pb2, handshake_pb2_grpc

_TIMEOUT_S = 15.0  # as for a stream

Place = tuple[int, int, int, int]  # dp_rank, cp_rank, tp_rank, pp_rank


@dataclass(frozen=True, slots=True)
class Directory:
    """All processes of one prefill worker."""

    endpoints: dict[Place, str]
    topology: dict[str, Any]  # what SGLang's ranks tell each other


class DirectoryService(handshake_pb2_grpc.HandshakeServicer):
    """Answers at the service's endpoint; Connect is served by SGLang's processes themselves."""

    def __init__(self, response: handshake_pb2.DescribeRanksResponse) -> None:
        self._response = response

    async def DescribeRanks(
        self, request: handshake_pb2.DescribeRanksRequest, context: grpc.aio.ServicerContext
    ) -> handshake_pb2.DescribeRanksResponse:
        return self._response

    async def Connect(
        self,
        request_iterator: AsyncIterator[handshake_pb2.HandshakeMessage],
        context: grpc.aio.ServicerContext,
    ) -> None:
        raise ProtocolError("this engine is SGLang: DescribeRanks says where its processes serve Connect")


def directory_to_proto(actives: list[Active], ids: dict[int, RankId]) -> handshake_pb2.DescribeRanksResponse:
    """`ids` by DP rank."""
    return handshake_pb2.DescribeRanksResponse(
        ranks=[
            handshake_pb2.EngineRank(
                rank=convert.rank_id_to_proto(ids[active.dp_rank]),
                tp_rank=active.tp_rank,
                cp_rank=active.cp_rank,
                pp_rank=active.pp_rank,
                endpoint=active.endpoint,
            )
            for active in actives
        ],
        engine_topology=json.dumps(actives[0].topology).encode() if actives else b"",
    )


def directory_from_proto(response: handshake_pb2.DescribeRanksResponse) -> Directory:
    """Raises ProtocolError when a rank has no endpoint or the topology is not SGLang's."""
    endpoints = {
        (entry.rank.rank, entry.cp_rank, entry.tp_rank, entry.pp_rank): entry.endpoint
        for entry in response.ranks
    }
    if not endpoints or not all(endpoints.values()):
        raise ProtocolError("the prefill worker names no ranks, or ranks without an endpoint")
    try:
        topology = json.loads(response.engine_topology)
    except ValueError:
        raise ProtocolError("the prefill worker's topology is not SGLang's") from None
    return Directory(endpoints, topology)


async def look_up(endpoint: str, tls: rpc.TlsConfig | None) -> Directory:
    """Ask the service at HOST:PORT. Raises IsthmusError."""
    async with rpc.open_channel(endpoint, tls) as channel:
        with rpc.renaming():
            response = await handshake_pb2_grpc.HandshakeStub(channel).DescribeRanks(
                handshake_pb2.DescribeRanksRequest(), timeout=_TIMEOUT_S
            )
    if not response.ranks:
        raise Unavailable(f"{endpoint} names no ranks yet")
    return directory_from_proto(response)
