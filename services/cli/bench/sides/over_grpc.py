"""A load over our gRPC API."""

from collections.abc import AsyncIterator

import grpc

from services.cli.bench.sides.side import COUNTED, Asked, Came, Counts
from services.cli.client import responses
from services.net import grpc_errors
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1 import common_pb2, generation_pb2, generation_pb2_grpc


class GrpcSide:
    name = "gRPC"

    def __init__(
        self,
        channel: grpc.aio.Channel,
        metadata: tuple[tuple[str, str], ...],
        tenant: str,
        timeout_s: float,
    ) -> None:
        self._channel = channel
        self._metadata = metadata
        self._tenant = tenant
        self._timeout_s = timeout_s

    async def ask(self, asked: Asked) -> AsyncIterator[Came]:
        sampling = common_pb2.SamplingParams(temperature=0, max_tokens=asked.max_tokens, ignore_eos=True)
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=asked.token_ids),
            sampling=sampling,
            conversation_id=asked.conversation,
            tenant=self._tenant,
        )
        async for response in responses(self._channel, request, self._timeout_s, self._metadata):
            counts = None
            if response.HasField("finish"):
                usage = response.finish.usage
                counts = Counts(*(getattr(usage, name) for name in COUNTED))
            yield Came(len(response.token_ids), response.token_ids, counts)

    async def is_token(self, token_id: int) -> bool:
        stub = generation_pb2_grpc.GenerationStub(self._channel)
        request = generation_pb2.DetokenizeRequest(token_ids=[token_id])
        try:
            with grpc_errors.renaming():
                await stub.Detokenize(request, timeout=self._timeout_s, metadata=self._metadata)
        except InvalidRequest:
            return False
        return True

    async def close(self) -> None:
        await self._channel.close()
