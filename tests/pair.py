"""One decode and one prefill rank in this process, meeting over real gRPC on loopback."""

import secrets
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace

from services import rpc
from services.decode.prefill_leg import PrefillChannels, PrefillLeg
from services.engine.choose import EngineSettings, decode_engine, prefill_engine
from services.engine.paged.core import Limits
from services.engine.paged.decode import Lease
from services.kv.types import Plan, RankAddress, RankId
from services.prefill.server import PrefillService
from services.request import Admitted, FinishReason, GenerationRequest, SamplingParams
from services.transfer.handshake_server import HandshakeService
from services.wire.isthmus.v1 import handshake_pb2_grpc, prefill_pb2_grpc

FAKE = EngineSettings(
    engine="fake",
    model_path="",
    model_name="fake",
    device="cpu",
    dtype=None,
    num_threads=1,
    num_pages=64,
    page_size=4,
    index_block=4,
    cache_enabled=True,
    transport="local",
    limits=Limits(max_running_requests=8, chunk_size=8),
    lease=Lease(write_lease_s=2.0, fence_margin_s=0.5),
)


@dataclass
class Answer:
    tokens: list[int]
    admitted: Admitted
    finished: FinishReason


class Pair:
    """`async with Pair(settings) as pair: await pair.generate(...)`."""

    def __init__(self, settings: EngineSettings = FAKE, prefill_settings: EngineSettings | None = None):
        self.settings = settings
        self.prefill_settings = prefill_settings or settings
        self.requests = 0

    async def __aenter__(self) -> "Pair":
        self._stack = await AsyncExitStack().__aenter__()
        self.decode_id = RankId("decode", 0, secrets.randbits(64))
        self.prefill_id = RankId("prefill", 0, secrets.randbits(64))
        self.decode = decode_engine(self.settings, self.decode_id)
        self.prefill = prefill_engine(self.prefill_settings, self.prefill_id)
        await self.prefill.start()
        self._stack.push_async_callback(self.prefill.stop)
        self.prefill_service = PrefillService(self.prefill)

        def register(server):
            prefill_pb2_grpc.add_PrefillServicer_to_server(self.prefill_service, server)
            handshake_pb2_grpc.add_HandshakeServicer_to_server(HandshakeService(self.prefill.sender), server)

        self.server = await rpc.open_server("127.0.0.1:0", register, [])
        self._stack.push_async_callback(self.server.stop)
        await self.decode.start()
        self._stack.push_async_callback(self.decode.stop)
        self.channels = PrefillChannels(None)
        self._stack.push_async_callback(self.channels.close)
        self.peer = RankAddress(self.prefill_id, f"127.0.0.1:{self.server.port}")
        return self

    async def __aexit__(self, *exc) -> None:
        await self._stack.aclose()

    def request(self, prompt, max_tokens=8, plan=Plan.REMOTE, **fields) -> GenerationRequest:
        self.requests += 1
        sampling = fields.pop("sampling", SamplingParams(temperature=0))
        sampling = replace(sampling, max_tokens=max_tokens)
        return GenerationRequest(f"r{self.requests}", tuple(prompt), sampling, plan=plan, **fields)

    def outputs(self, request: GenerationRequest):
        leg = PrefillLeg(self.channels, self.peer, None, "") if request.plan is Plan.REMOTE else None
        return aclosing(self.decode.generate(request, leg))

    async def generate(self, prompt, max_tokens=8, plan=Plan.REMOTE, **fields) -> Answer:
        tokens, admitted, finished = [], None, None
        async with self.outputs(self.request(prompt, max_tokens, plan, **fields)) as outputs:
            async for output in outputs:
                tokens += output.token_ids
                admitted = admitted or output.admitted
                finished = output.finished
        return Answer(tokens, admitted, finished)

    async def assert_nothing_held(self) -> None:
        """Wait until both ranks hold nothing for anyone, then walk their books."""
        for engine in (self.decode, self.prefill):
            books = await settled(engine)
            assert books.locked == books.private == books.quarantined == 0, books


async def settled(engine, timeout_s=10.0):
    """The engine's books once nothing is held, or as they are when the time is over."""
    import asyncio

    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        books = await engine.books()
        if books.locked == books.private == books.quarantined == 0:
            return books
        if asyncio.get_running_loop().time() > deadline:
            return books
        await asyncio.sleep(0.01)
