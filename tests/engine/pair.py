"""One decode and one prefill rank in this process, meeting over real gRPC on loopback."""

import asyncio
import secrets
import time
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, fields, replace
from functools import partial

from prometheus_client import CollectorRegistry

from services.decode.prefill_leg import PrefillChannels, PrefillLeg
from services.engine.choose import decode_engines, prefill_engines
from services.engine.engine_config import EngineConfig
from services.engine.paged.core import EngineCore
from services.engine.paged.shell.paged_engine import PagedEngine
from services.net import servers
from services.net.channels import TlsConfig
from services.prefill.prefill_service import PrefillService
from services.rank.rank_metrics import PrefillMetrics
from services.values.prompt_logprobs import PromptLogprobs
from services.values.rank import Plan, PullSource, RankAddress, RankId
from services.values.request import Admitted, FinishReason, GenerationRequest, SamplingParams
from services.wire.isthmus.v1 import handshake_pb2_grpc, prefill_pb2_grpc

FAKE = EngineConfig(
    engine="fake",
    num_threads=1,
    kv_pages=64,
    page_size=4,
    index_block=4,
    transport="local",
    max_running_requests=8,
    chunk_size=8,
    write_lease_s=4.0,
    fence_margin_s=0.5,
    kv_digest_share=1.0,
    self_check="off",  # of a tiny hybrid it takes 0.2 to 0.8 s a start; tests/engine/torch/model tries it
)


class EagerSettings(EngineConfig):
    """Of ranks that keep nothing back for the growth of what runs, from the first sequence on."""

    def limits(self, role):
        return replace(super().limits(role), expected_output=0.0)


def eager(settings):
    return EagerSettings(**{member.name: getattr(settings, member.name) for member in fields(settings)})


def _served(settings, dp_size, tls):
    settings = replace(settings, dp_size=dp_size)
    if tls is None:
        return settings
    files = {"tls_ca": tls.ca, "tls_cert": tls.cert, "tls_key": tls.key}
    return replace(settings, tls_mutual=tls.mutual, tls_server_name=tls.server_name, **files)


@dataclass
class Answer:
    tokens: list[int]
    admitted: Admitted
    finished: FinishReason
    prompt_logprobs: PromptLogprobs | None = None


class Pair:
    """`async with Pair(settings) as pair: await pair.generate(...)`. With `dp_size` above 1 there are as many
    ranks of either role; `decode`, `prefill` and `peer` are the first."""

    def __init__(
        self,
        settings: EngineConfig = FAKE,
        prefill_settings: EngineConfig | None = None,
        tls: TlsConfig | None = None,
        dp_size: int = 1,
    ):
        self.settings = _served(settings, dp_size, tls)
        self.prefill_settings = _served(prefill_settings or settings, dp_size, tls)
        self.tls = tls
        self.dp_size = dp_size
        self.requests = 0
        self.servers: list[servers.RpcServer] = []
        self.peers: list[RankAddress] = []

    async def __aenter__(self) -> "Pair":
        self._stack = await AsyncExitStack().__aenter__()
        decode_ids, prefill_ids = (
            [RankId(worker, rank, secrets.randbits(64)) for rank in range(self.dp_size)]
            for worker in ("decode", "prefill")
        )
        self.decodes = decode_engines(self.settings, decode_ids)
        self.prefills = prefill_engines(self.prefill_settings, prefill_ids)
        async with asyncio.TaskGroup() as starts:  # at once: some engines take a minute
            for engine in (*self.prefills, *self.decodes):
                starts.create_task(engine.start())
        for engine in self.prefills:
            self._stack.push_async_callback(engine.stop)
        for own_id, engine in zip(prefill_ids, self.prefills, strict=True):
            await self._serve(own_id, engine)
        for engine in self.decodes:
            self._stack.push_async_callback(engine.stop)
        self.decode_peers = [
            await self._serve_handshake(own_id, engine)
            for own_id, engine in zip(decode_ids, self.decodes, strict=True)
        ]
        self.channels = PrefillChannels(self.tls)
        self._stack.push_async_callback(self.channels.close)
        self.decode, self.prefill = self.decodes[0], self.prefills[0]
        self.server = self.servers[0]
        return self

    @property
    def peer(self) -> RankAddress:
        """The prefill rank that is called unless another one is asked for; may be replaced."""
        return self.peers[0]

    @peer.setter
    def peer(self, address: RankAddress) -> None:
        self.peers[0] = address

    def source(self, engine, tokens: int) -> PullSource:
        """One of these ranks, of which it is said that it holds so many of a prompt."""
        places = zip((*self.decodes, *self.prefills), (*self.decode_peers, *self.peers), strict=True)
        return PullSource(next(address for other, address in places if other is engine), tokens)

    async def _serve(self, own_id, engine) -> None:
        service = PrefillService(engine, own_id, PrefillMetrics(CollectorRegistry(), engine))

        def register(server):
            prefill_pb2_grpc.add_PrefillServicer_to_server(service, server)
            handshake_pb2_grpc.add_HandshakeServicer_to_server(engine.handshake(), server)

        server = await servers.open_server("127.0.0.1:0", register, [], self.tls)
        self._stack.push_async_callback(server.stop)
        self.servers.append(server)
        self.peers.append(RankAddress(own_id, f"127.0.0.1:{server.port}"))

    async def _serve_handshake(self, own_id, engine) -> RankAddress:
        """A decode rank serves nothing else here, and nothing at all where it lends nothing."""
        servicer = engine.handshake()
        if servicer is None:
            return RankAddress(own_id, "")
        register = partial(handshake_pb2_grpc.add_HandshakeServicer_to_server, servicer)
        server = await servers.open_server("127.0.0.1:0", register, [], self.tls)
        self._stack.push_async_callback(server.stop)
        return RankAddress(own_id, f"127.0.0.1:{server.port}")

    async def __aexit__(self, *exc) -> None:
        await self._stack.aclose()

    def request(self, prompt, max_tokens=8, plan=Plan.REMOTE, **fields) -> GenerationRequest:
        self.requests += 1
        sampling = fields.pop("sampling", SamplingParams(temperature=0))
        sampling = replace(sampling, max_tokens=max_tokens)
        return GenerationRequest(f"r{self.requests}", tuple(prompt), sampling, plan=plan, **fields)

    def outputs(self, request: GenerationRequest, decode: int = 0, prefill: int = 0, tell=None):
        leg = (
            PrefillLeg(self.channels, self.peers[prefill], None, "") if request.plan is Plan.REMOTE else None
        )
        return aclosing(self.decodes[decode].generate(request, leg, tell))

    async def generate(
        self, prompt, max_tokens=8, plan=Plan.REMOTE, decode: int = 0, prefill: int = 0, **fields
    ) -> Answer:
        tokens, admitted, finished, told = [], None, None, None
        request, began = self.request(prompt, max_tokens, plan, **fields), time.monotonic()
        async with self.outputs(request, decode, prefill, tokens.append) as outputs:
            async for output in outputs:
                tokens += output.token_ids
                assert output.prompt_logprobs is None or output.admitted is not None
                told = told or output.prompt_logprobs
                if output.admitted is not None:
                    admitted = output.admitted
                    check_times(admitted, time.monotonic() - began)
                finished = output.finished
        return Answer(tokens, admitted, finished, told)

    async def assert_nothing_held(self) -> None:
        """Wait until all ranks hold nothing for anyone, then walk their books."""
        for engine in (*self.decodes, *self.prefills):
            books = [await settled(engine)]
            if isinstance(engine, PagedEngine):
                books += core_of(engine).carried.books()  # where only checkpoints are left
            for of_pool in books:
                assert of_pool.locked == of_pool.private == of_pool.quarantined == 0, books


def check_times(admitted: Admitted, took_s: float) -> None:
    """No moment is told twice, whatever a request waits for, and somebody has computed."""
    pull_s = 0.0 if admitted.pulled is None else admitted.pulled.seconds
    waits = admitted.decode_queue_s, admitted.prefill_queue_s, admitted.transfer_s, pull_s
    assert min(waits) >= 0 and admitted.prefill_compute_s > 0, admitted
    assert admitted.constraint_s <= admitted.decode_queue_s
    assert admitted.rank_s <= took_s, admitted


def core_of(engine) -> EngineCore:
    """Of a paged engine that has started. It is its thread's: a test may look, and prepare a fault."""
    return engine._core


async def has_crashed(engine) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            await engine.crashed()
            return True
    return False


async def settled(engine, timeout_s=45.0):
    """The engine's books once nothing is held, or as they are when the time is over."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        books = await engine.books()
        if books.locked == books.private == books.quarantined == 0:
            return books
        if asyncio.get_running_loop().time() > deadline:
            return books
        await asyncio.sleep(0.01)
