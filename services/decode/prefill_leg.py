"""The prefill leg of a decode request is one call to the prefill rank that the router chose."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc

from services.net import channels, grpc_errors
from services.net.channels import TlsConfig
from services.values.errors import (
    DeadlineExceeded,
    InvalidRequest,
    IsthmusError,
    NoCapacity,
    PeerFailed,
    ProtocolError,
)
from services.values.rank import RankAddress, Rendezvous
from services.values.request import GenerationRequest, PrefillResult
from services.wire import convert_request
from services.wire.isthmus.v1 import prefill_pb2_grpc

# These errors are about the request itself; any other error means that this peer failed.
_OF_THE_REQUEST = (InvalidRequest, NoCapacity, DeadlineExceeded)


@dataclass(slots=True)
class _Kept:
    channel: grpc.aio.Channel
    num_calls: int = 0

    @property
    def idle(self) -> bool:
        """Return whether it has no calls and no connection, so its rank may be gone for good."""
        return self.num_calls == 0 and self.channel.get_state() is not grpc.ChannelConnectivity.READY

    @property
    def failing(self) -> bool:
        """Return whether it could not connect; then calls fail until gRPC tries again, up to two seconds
        later."""
        return self.channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE


class PrefillChannels:
    """It keeps one channel for each prefill endpoint, and replaces one that could not connect.

    A caller has reason to think that the rank is back. Each new channel closes those that have become idle,
    so that ranks that are gone leave no channels behind.
    """

    def __init__(self, tls: TlsConfig | None) -> None:
        self._tls = tls
        self._channels: dict[str, _Kept] = {}

    def __len__(self) -> int:
        return len(self._channels)

    @asynccontextmanager
    async def lend(self, endpoint: str) -> AsyncIterator[grpc.aio.Channel]:
        kept, idle = self._channels.get(endpoint), {}
        if kept is None or kept.failing:
            idle = {name: other for name, other in self._channels.items() if other.idle}
            kept = _Kept(channels.open_channel(endpoint, self._tls))
            left = {name: other for name, other in self._channels.items() if name not in idle}
            self._channels = left | {endpoint: kept}
        kept.num_calls += 1
        try:
            for other in idle.values():
                await other.channel.close()
            yield kept.channel
        finally:
            kept.num_calls -= 1
            if kept.num_calls == 0 and self._channels.get(endpoint) is not kept:
                await kept.channel.close()  # It was failing, and has been replaced.

    async def close(self) -> None:
        for kept in self._channels.values():
            await kept.channel.close()


class PrefillLeg:
    """It implements services.engine.base.RemotePrefill for one request.

    `prefill_request_to_proto` explains `sampling`.
    """

    def __init__(
        self,
        channels: PrefillChannels,
        peer: RankAddress,
        timeout_s: float | None,
        traceparent: str,
        sampling: bytes | None = None,
    ) -> None:
        self._channels = channels
        self.peer = peer
        self._timeout_s = timeout_s
        self._traceparent = traceparent
        self._sampling = sampling
        self._began_s = time.monotonic()

    async def __call__(self, request: GenerationRequest, rendezvous: Rendezvous) -> PrefillResult:
        if request.left_s is not None:
            waited_s = time.monotonic() - self._began_s
            request = replace(request, left_s=max(0.0, request.left_s - waited_s))
        message = convert_request.prefill_request_to_proto(
            request, rendezvous, self._traceparent, self._sampling
        )
        try:
            async with self._channels.lend(self.peer.endpoint) as channel:
                response = await prefill_pb2_grpc.PrefillStub(channel).Prefill(
                    message, timeout=self._timeout_s
                )
        except grpc.aio.AioRpcError as error:
            grpc_errors.heed_cancellation()
            raise self._renamed(grpc_errors.error_from(error)) from error
        try:
            return convert_request.prefill_result_from_proto(response)
        except ProtocolError as error:
            raise self._renamed(error) from error

    def _renamed(self, error: IsthmusError) -> IsthmusError:
        if isinstance(error, _OF_THE_REQUEST):
            return error
        return PeerFailed(f"prefill rank {self.peer.id} failed: {error}")
