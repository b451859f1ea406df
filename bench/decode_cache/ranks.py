"""A prefill rank in a process of its own, and decode ranks in this one: the real engines and transport.

    start: python -m bench.decode_cache.ranks SETTINGS  --one line: endpoint, id-->  DecodeSide connects
    stop:  the end of stdin stops the prefill process; it dies with its parent anyway

Where a request may go either way, its plan is chosen as a router does, by the same price of the same measured
rates. The index is what the decode rank says of its tree, and what the prefill rank has been sent.
"""

import asyncio
import json
import logging
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Literal

import grpc
from prometheus_client import CollectorRegistry

from services.decode.prefill_leg import PrefillChannels, PrefillLeg
from services.engine.base import DecodeEngine
from services.engine.choose import decode_engine, prefill_engine
from services.engine.engine_config import EngineConfig
from services.engine.paged.drafters import Mode
from services.host.child_processes import dying_with_us
from services.kv.block_hash import scope_seed, sequence_hashes
from services.kv.tails import carried_bytes
from services.net import servers
from services.prefill.prefill_service import PrefillService
from services.rank.rank_metrics import PrefillMetrics
from services.router.placement.candidates import DecodeCandidate, PlacementRequest, PrefillCandidate
from services.router.placement.decision import place
from services.router.placement.price import PriceWeights
from services.router.ranks.balance import Balance
from services.values.kv import BlockHash, KvLayout
from services.values.rank import Generation, Plan, RankAddress, RankId
from services.values.rank_reports import RankLoad
from services.values.request import Admitted, GenerationRequest, Output
from services.wire.isthmus.v1 import handshake_pb2_grpc, prefill_pb2_grpc

_MODEL_NAME = "bench"


@dataclass(frozen=True, slots=True)
class RankSettings:
    model_path: str
    decode_pages: int
    prefill_pages: int
    page_size: int
    chunk_size: int
    max_running_requests: int
    num_threads: int  # of each rank
    transport: Literal["nixl", "local"]
    itl_target_s: float | None = None  # of the decode rank
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # None: the checkpoint's, float32
    digest_share: float = 0.0  # of the transfers whose pages are compared
    engine_name: Literal["torch", "fake"] = "torch"
    fake_carried: str = ""
    fake_step_s: float = 0.0
    fake_prompt_token_s: float = 0.0
    # Of the decode rank, as --state-slots and --window-pages.
    decode_slots: int | None = None
    decode_window_pages: int | None = None
    speculation: Mode = "off"  # of the decode rank
    draft_model: str = ""
    graph_mib: int | None = None

    def decode_engine(self, cache_enabled: bool) -> EngineConfig:
        settings = self.engine(self.decode_pages, cache_enabled=cache_enabled, itl_target_s=self.itl_target_s)
        return replace(settings, state_slots=self.decode_slots, window_pages=self.decode_window_pages)

    def engine(
        self, num_pages: int, *, cache_enabled: bool = True, itl_target_s: float | None = None
    ) -> EngineConfig:
        return EngineConfig(
            engine=self.engine_name,
            fake_carried=self.fake_carried,
            fake_step_s=self.fake_step_s,
            fake_prompt_token_s=self.fake_prompt_token_s,
            speculation=self.speculation,
            draft_model=self.draft_model,
            model=self.model_path,
            model_name=_MODEL_NAME,
            device=self.device,
            dtype=self.dtype,
            num_threads=self.num_threads,
            self_check="off",
            graph_mib=self.graph_mib,
            kv_pages=num_pages,
            page_size=self.page_size,
            index_block=self.page_size,
            decode_cache="on" if cache_enabled else "off",
            transport=self.transport,
            max_running_requests=self.max_running_requests,
            chunk_size=self.chunk_size,
            itl_target_ms=None if itl_target_s is None else 1e3 * itl_target_s,
            kv_digest_share=self.digest_share,
        )


class DecodeSide:
    """One decode rank and its prefill rank. Made by `open_side`."""

    def __init__(
        self, engine: DecodeEngine, peer: RankAddress, channels: PrefillChannels, planner: "Planner"
    ) -> None:
        self._engine = engine
        self._peer = peer
        self._channels = channels
        self._planner = planner

    @property
    def layout(self) -> KvLayout:
        return self._engine.layout

    def load(self) -> RankLoad:
        return self._engine.load()

    async def generate(self, request: GenerationRequest, plans: frozenset[Plan]) -> AsyncIterator[Output]:
        plan = self._planner.choose(request, plans)
        leg = PrefillLeg(self._channels, self._peer, None, "") if plan is Plan.REMOTE else None
        try:
            async with aclosing(self._engine.generate(request, leg)) as outputs:
                async for output in outputs:
                    if output.admitted is not None:
                        self._planner.admitted(request.request_id, output.admitted)
                    yield output
        finally:
            self._planner.ended(request.request_id)


class Planner:
    """services.router.cluster for one rank of each role, without etcd between them."""

    def __init__(self, engine: DecodeEngine, decode: RankId, prefill: RankId, settings: RankSettings) -> None:
        self._engine = engine
        self._decode, self._prefill = decode, prefill
        self._settings = settings
        self._balance = Balance(time.monotonic, chunk_tokens=settings.chunk_size)
        self._held: set[BlockHash] = set()  # by the decode rank's tree
        self._sent: set[BlockHash] = set()  # prompts that the prefill rank has computed
        # Of both, where the rank can go on, if the model carries anything.
        self._resumable: set[BlockHash] = set()
        self._ends: set[BlockHash] = set()

    async def follow(self) -> None:
        """Learn what the decode rank's tree holds, until its engine stops."""
        async for events in self._engine.cache_events():
            self._held.difference_update(events.removed)
            self._held.update(events.stored)
            self._resumable.difference_update(events.resumable_removed)
            self._resumable.update(events.resumable_stored)

    def choose(self, request: GenerationRequest, plans: frozenset[Plan]) -> Plan:
        ids = request.all_ids
        hashes = sequence_hashes(ids, self._settings.page_size, scope_seed(_MODEL_NAME, request.cache_salt))
        decode, prefill = self._candidates(hashes)
        layout = self._engine.layout
        wanted = PlacementRequest(
            prompt_tokens=len(ids),
            kv_bytes_per_token=layout.page_bytes / layout.page_size,
            chunk_tokens=self._settings.chunk_size,
            plans=plans,
            carried_bytes=carried_bytes(layout, len(ids)),
        )
        decision = place(wanted, [decode], [prefill], self._balance.bandwidth, PriceWeights(), 0.0)
        is_remote = decision.chosen.plan is Plan.REMOTE
        hit = prefill.reused_tokens if is_remote else decode.reused_tokens
        self._balance.sent(
            request.request_id,
            decode.id.key,
            prefill.id.key if is_remote else None,
            max(0, len(ids) - hit),
        )
        if is_remote:
            self._sent.update(hashes)
            last = (len(ids) - 1) // self._settings.page_size
            self._ends.update(hashes[last - 1 : last])
        return decision.chosen.plan

    def admitted(self, request_id: str, admitted: Admitted) -> None:
        prefill = self._prefill.key if admitted.plan is Plan.REMOTE else None
        self._balance.admitted(request_id)
        self._balance.observe_admitted(self._decode.key, prefill, admitted)

    def ended(self, request_id: str) -> None:
        self._balance.ended(request_id)

    def _candidates(self, hashes: Sequence[BlockHash]) -> tuple[DecodeCandidate, PrefillCandidate]:
        load, balance, page_size = self._engine.load(), self._balance, self._settings.page_size
        balance.report(self._decode.key, load)
        at_decode, at_prefill = balance.now(self._decode.key), balance.now(self._prefill.key)
        decode = DecodeCandidate(
            id=self._decode,
            hit_tokens=_match(hashes, self._held) * page_size,
            resume_tokens=self._resume_tokens(hashes, self._held, self._resumable),
            pending_tokens=at_decode.pending_tokens,
            prefill_tokens_per_s=at_decode.tokens_per_s,
            running=load.running,
            token_s=load.token_s,
            free_tokens=load.books.free * page_size,
            evictable_tokens=load.books.cached * page_size,
            queued=at_decode.queued,
            waiting_tokens=load.waiting_tokens,
        )
        prefill = PrefillCandidate(
            id=self._prefill,
            hit_tokens=_match(hashes, self._sent) * page_size,
            resume_tokens=self._resume_tokens(hashes, self._sent, self._ends),
            pending_tokens=at_prefill.pending_tokens,
            prefill_tokens_per_s=at_prefill.tokens_per_s,
            queued=at_prefill.queued,
        )
        return decode, prefill

    def _resume_tokens(
        self, hashes: Sequence[BlockHash], held: set[BlockHash], resumable: set[BlockHash]
    ) -> int | None:
        """None: wherever it holds, for the model carries nothing."""
        if not self._engine.layout.carried:
            return None
        matched = range(_match(hashes, held), 0, -1)
        return self._settings.page_size * next((n for n in matched if hashes[n - 1] in resumable), 0)


def _match(hashes: Iterable[BlockHash], held: set[BlockHash]) -> int:
    return sum(1 for _ in takewhile(held.__contains__, hashes))


@asynccontextmanager
async def open_side(settings: RankSettings, *, decode_cache: bool) -> AsyncIterator[DecodeSide]:
    """Prefill's cache is always on, as in the runs that this follows."""
    decode_id = RankId("decode", 0, Generation(secrets.randbits(64)))
    engine = decode_engine(settings.decode_engine(decode_cache), decode_id)
    async with AsyncExitStack() as stack:
        peer = await stack.enter_async_context(_prefill_process(settings))
        await engine.start()
        channels = PrefillChannels(None)
        planner = Planner(engine, decode_id, peer.id, settings)
        follower = asyncio.create_task(planner.follow())
        stack.push_async_callback(lambda: follower)
        stack.push_async_callback(channels.close)
        stack.push_async_callback(engine.stop)
        yield DecodeSide(engine, peer, channels, planner)


@asynccontextmanager
async def _prefill_process(settings: RankSettings) -> AsyncIterator[RankAddress]:
    command = [sys.executable, "-m", "bench.decode_cache.ranks", json.dumps(asdict(settings))]
    process = await asyncio.create_subprocess_exec(
        *dying_with_us(command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        facts = json.loads(await process.stdout.readline())
        yield RankAddress(RankId("prefill", 0, Generation(facts["generation"])), facts["endpoint"])
    finally:
        process.stdin.close()
        await process.wait()


async def serve_prefill(settings: RankSettings) -> None:
    """The prefill process: says where it is, then serves until the end of stdin."""
    own_id = RankId("prefill", 0, Generation(secrets.randbits(64)))
    engine = prefill_engine(settings.engine(settings.prefill_pages), own_id)
    await engine.start()

    service = PrefillService(engine, own_id, PrefillMetrics(CollectorRegistry(), engine))

    def register(server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(service, server)
        handshake_pb2_grpc.add_HandshakeServicer_to_server(engine.handshake(), server)

    server = await servers.open_server("127.0.0.1:0", register, [])
    print(json.dumps({"generation": own_id.generation, "endpoint": f"127.0.0.1:{server.port}"}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()
    await engine.stop()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(serve_prefill(RankSettings(**json.loads(sys.argv[1]))))
