"""The prefill leg of a decode request: one call to the prefill rank that the router chose."""

import grpc

from services import rpc
from services.errors import DeadlineExceeded, InvalidRequest, IsthmusError, NoCapacity, PeerFailed
from services.kv.types import RankAddress, Rendezvous
from services.request import GenerationRequest, PrefillResult
from services.wire import convert_request
from services.wire.isthmus.v1 import prefill_pb2_grpc

# What says something about the request itself; anything else means that this peer failed.
_OF_THE_REQUEST = (InvalidRequest, NoCapacity, DeadlineExceeded)


class PrefillChannels:
    """One channel per prefill endpoint, kept while it works."""

    def __init__(self, tls: rpc.TlsConfig | None) -> None:
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}

    def get(self, endpoint: str) -> grpc.aio.Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = rpc.open_channel(endpoint, self._tls)
        return self._channels[endpoint]

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


class PrefillLeg:
    """Implements services.engine.base.RemotePrefill for one request."""

    def __init__(
        self, channels: PrefillChannels, peer: RankAddress, timeout_s: float | None, traceparent: str
    ) -> None:
        self._stub = prefill_pb2_grpc.PrefillStub(channels.get(peer.endpoint))
        self._peer = peer
        self._timeout_s = timeout_s
        self._traceparent = traceparent

    @property
    def peer(self) -> RankAddress:
        return self._peer

    async def __call__(self, request: GenerationRequest, rendezvous: Rendezvous) -> PrefillResult:
        message = convert_request.prefill_request_to_proto(request, rendezvous)
        message.traceparent = self._traceparent
        try:
            response = await self._stub.Prefill(message, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._renamed(rpc.error_from(error)) from error
        return convert_request.prefill_result_from_proto(response)

    def _renamed(self, error: IsthmusError) -> IsthmusError:
        if isinstance(error, _OF_THE_REQUEST):
            return error
        return PeerFailed(f"prefill rank {self._peer.id} failed: {error}")
