"""A terminal's end of the gRPC Generate API."""

from collections.abc import AsyncIterator

import grpc

from services import rpc
from services.wire.isthmus.v1 import generation_pb2, generation_pb2_grpc


async def responses(
    channel: grpc.aio.Channel, request: generation_pb2.GenerateRequest, timeout_s: float | None = None
) -> AsyncIterator[generation_pb2.GenerateResponse]:
    """The answer as it comes. Raises the router's error as one of ours."""
    call = generation_pb2_grpc.GenerationStub(channel).Generate(request, timeout=timeout_s)
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as error:
        raise rpc.error_from(error) from error
    finally:
        call.cancel()
