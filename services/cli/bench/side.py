"""A load is sent through one of two sides: our gRPC API, or the OpenAI API over HTTP."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import grpc

from services.cli.client import responses
from services.net import grpc_errors
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1 import common_pb2, generation_pb2, generation_pb2_grpc


@dataclass(frozen=True, slots=True)
class LoadRequest:
    token_ids: Sequence[int]
    max_tokens: int
    conversation: str


@dataclass(frozen=True, slots=True)
class Counts:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_tokens: int = 0
    decode_prefix_len: int = 0
    delta_tokens: int = 0
    kv_bytes_moved: int = 0
    kv_bytes_saved: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


COUNTED = tuple(each.name for each in fields(Counts))


@dataclass(frozen=True, slots=True)
class Came:
    """These tokens came together; the last one has what the request counted.

    `token_ids` are empty where a server tells its text alone.
    """

    num_tokens: int = 0
    token_ids: Sequence[int] = ()
    counts: Counts | None = None


class LoadTarget(Protocol):
    name: str

    def ask(self, asked: LoadRequest) -> AsyncIterator[Came]:
        """Send the request. Raises an IsthmusError, or TimeoutError."""

    async def is_token(self, token_id: int) -> bool: ...

    async def close(self) -> None: ...


async def vocab_size_of(side: LoadTarget) -> int:
    """Find it by asking which ids are tokens: there is no call that tells it."""
    low, high = 0, 1
    while await side.is_token(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await side.is_token(middle) else (low, middle)
    return high


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

    async def ask(self, asked: LoadRequest) -> AsyncIterator[Came]:
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
