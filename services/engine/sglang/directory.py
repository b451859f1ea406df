"""A worker's service reports over gRPC where its prefill processes serve their Handshake."""

import json
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import grpc

from services.engine.sglang.reports import Active
from services.net import channels, grpc_errors
from services.net.channels import TlsConfig
from services.values.errors import IsthmusError, ProtocolError, Unavailable
from services.values.rank import RankId
from services.wire import convert
from services.wire.isthmus.v1 import handshake_pb2, handshake_pb2_grpc

_TIMEOUT_S = 15.0  # A stream has the same timeout.
_FRESH_S = 3.0  # SGLang asks every second while a request waits.

Place = tuple[int, int, int, int]  # The parts are dp_rank, cp_rank, tp_rank and pp_rank.


@dataclass(frozen=True, slots=True)
class Directory:
    endpoints: dict[Place, str]
    topology: dict[str, Any]  # SGLang's ranks exchange this.


class DirectoryService(handshake_pb2_grpc.HandshakeServicer):
    """This answers at the service's endpoint; SGLang's processes serve Connect themselves."""

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
    """Return the directory.

    Raises ProtocolError where a rank has no endpoint or the topology is not SGLang's.
    """
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


async def look_up(endpoint: str, tls: TlsConfig | None) -> Directory:
    """Request the directory of the service at HOST:PORT. Raises IsthmusError."""
    async with channels.open_channel(endpoint, tls) as channel:
        with grpc_errors.renaming():
            response = await handshake_pb2_grpc.HandshakeStub(channel).DescribeRanks(
                handshake_pb2.DescribeRanksRequest(), timeout=_TIMEOUT_S
            )
    if not response.ranks:
        raise Unavailable(f"{endpoint} names no ranks yet")
    return directory_from_proto(response)


@dataclass(slots=True, eq=False)
class _Lookup:
    future: "Future[Directory]"
    answered_s: float | None = None


class Lookups:
    """This requests directories in the background, by HOST:PORT.

    A request that waits for one can end before the answer comes. The next request does not use that answer if
    it is old: the worker may have had another incarnation since, at the same address.
    """

    def __init__(
        self, request: Callable[[str], "Future[Directory]"], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._request = request
        self._clock = clock
        self._lookups: dict[str, _Lookup] = {}

    def take(self, endpoint: str, wait_s: float) -> Directory | None:
        """Return the answer, once, or None while it is still to come. Raises IsthmusError."""
        lookup = self._lookups.get(endpoint)
        if lookup is None or self._is_stale(lookup):
            lookup = self._lookups[endpoint] = self._begin(endpoint)
        try:
            directory = lookup.future.result(wait_s)
        except TimeoutError:
            return None
        except IsthmusError:
            del self._lookups[endpoint]
            raise
        del self._lookups[endpoint]
        return directory

    def _begin(self, endpoint: str) -> _Lookup:
        lookup = _Lookup(self._request(endpoint))

        def note(_: object) -> None:
            lookup.answered_s = self._clock()

        lookup.future.add_done_callback(note)
        return lookup

    def _is_stale(self, lookup: _Lookup) -> bool:
        return lookup.answered_s is not None and self._clock() - lookup.answered_s > _FRESH_S
