"""The Prefill service of one rank. Its engine's sender serves the Handshake beside it."""

import asyncio

import grpc

from services import rpc, telemetry
from services.engine.base import PrefillEngine
from services.errors import AlreadyRunning, Unavailable
from services.wire import convert_request
from services.wire.isthmus.v1 import prefill_pb2, prefill_pb2_grpc


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, engine: PrefillEngine) -> None:
        self._engine = engine
        self._rooms: set[int] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.PrefillResponse:
        if self.draining:
            raise Unavailable("this prefill rank is draining")
        generation, rendezvous = convert_request.prefill_request_from_proto(request)
        if rendezvous.room in self._rooms:
            raise AlreadyRunning(f"room {rendezvous.room:016x} is in use")
        with telemetry.request_context(generation.request_id):
            self._rooms.add(rendezvous.room)
            self._idle.clear()
            try:
                async with asyncio.timeout(rpc.remaining_s(context)):
                    result = await self._engine.prefill(generation, rendezvous)
            finally:
                self._rooms.remove(rendezvous.room)
                if not self._rooms:
                    self._idle.set()
        return convert_request.prefill_result_to_proto(result)

    async def DrainPrefill(
        self, request: prefill_pb2.DrainPrefillRequest, context: grpc.aio.ServicerContext
    ) -> prefill_pb2.DrainPrefillResponse:
        await self.drained()
        return prefill_pb2.DrainPrefillResponse()

    async def drained(self) -> None:
        """Refuse newcomers from now on; returns when nothing is running."""
        self.draining = True
        await self._idle.wait()
