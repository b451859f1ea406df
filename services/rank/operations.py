"""What operators ask of a rank, beside its role's own service: to be drained, and put back into service."""

import grpc

from services.rank.intake import Intake
from services.wire.fields import finite
from services.wire.isthmus.v1 import rank_pb2, rank_pb2_grpc

NAME = rank_pb2.DESCRIPTOR.services_by_name["Rank"].full_name


class Operations(rank_pb2_grpc.RankServicer):
    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def Drain(
        self, request: rank_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> rank_pb2.DrainResponse:
        self._intake.check_life(request.generation)
        wait_s = finite("drain.wait_s", request.wait_s) if request.HasField("wait_s") else None
        return rank_pb2.DrainResponse(running=await self._intake.drain(wait_s, request.only_wait))

    async def Undrain(
        self, request: rank_pb2.UndrainRequest, context: grpc.aio.ServicerContext
    ) -> rank_pb2.UndrainResponse:
        self._intake.check_life(request.generation)
        await self._intake.undrain()
        return rank_pb2.UndrainResponse()
