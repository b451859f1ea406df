"""A whole cluster in this process: real etcd, gRPC, handshakes and pages; the fake engine computes."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from types import MappingProxyType

import grpc

from engine.pair import settled
from services.decode.decode_service import decode_roles
from services.net import channels
from services.prefill.prefill_service import prefill_roles
from services.rank.main import open_rank, own_rank_id, serving_metrics
from services.rank.rank_config import RankConfig
from services.router.app import open_router
from services.router.router_config import RouterConfig
from services.wire.isthmus.v1 import common_pb2, generation_pb2, generation_pb2_grpc

BLOCK = 4
FAKE_RANK = RankConfig(
    worker="w",
    engine="fake",
    model_name="fake",
    transport="local",
    page_size=BLOCK,
    index_block=BLOCK,
    kv_pages=512,
    chunk_size=32,
    max_running_requests=16,
    write_lease_s=2.0,
    fence_margin_s=0.3,
    kv_digest_share=1.0,
    grace_s=1.0,
)


def prompt_of(number, length=21):
    return [(number * 37 + i * 5) % 500 for i in range(length)]


class FakeCluster:
    """`async with FakeCluster(etcd, model_dir, name) as cluster`. Ranks are `cluster.ranks["decode-0/1"]`.

    `etcd`: an endpoint, or a tuple of them.
    """

    def __init__(
        self,
        etcd,
        model_dir,
        name,
        *,
        routers=1,
        prefill=(1,),
        decode=(2,),
        plans=("remote",),
        tls: Mapping = MappingProxyType({}),  # the tls_... settings of every service, and of our client
        pools: Mapping[str, int] = MappingProxyType({}),  # pages, of workers that have not kv_pages
        **rank,
    ):
        endpoints = (etcd,) if isinstance(etcd, str) else etcd
        self.base = replace(FAKE_RANK, etcd=endpoints, cluster=name, **tls, **rank)
        self.router_config = RouterConfig(
            model=str(model_dir),
            model_name="fake",
            etcd=endpoints,
            cluster=name,
            index_block=self.base.index_block,
            plans=plans,
            grace_s=1.0,
            **tls,
        )
        self.shape = {"prefill": prefill, "decode": decode}
        self.pools = pools
        self.num_routers = routers
        self.ranks, self.routers, self.channels, self.stubs = {}, [], [], []
        self._stacks: dict[str, AsyncExitStack] = {}

    async def __aenter__(self):
        self._stack = await AsyncExitStack().__aenter__()
        try:
            starts = [
                self.start_rank(role, f"{role}-{number}", index)
                for role, workers in self.shape.items()
                for number, dp_size in enumerate(workers)
                for index in range(dp_size)
            ]
            await asyncio.gather(*starts)
            for number in range(self.num_routers):
                await self._start_router(f"router-{number}")
            await self.until_placeable()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc):
        await self._stack.aclose()
        await asyncio.gather(*(self.stop_rank(name) for name in list(self._stacks)))

    def with_models(self, path):
        """The router's settings, with a file of further models."""
        return replace(self.router_config, models=path)

    async def start_rank(self, role, worker, index, port=0, **settings):
        kv_pages = self.pools.get(worker, self.base.kv_pages)
        config = replace(self.base, worker=worker, rank_index=index, port=port, kv_pages=kv_pages, **settings)
        own_id = own_rank_id(config)
        (own_role,) = (decode_roles if role == "decode" else prefill_roles)(config, [own_id])
        stack = AsyncExitStack()
        page = await stack.enter_async_context(serving_metrics(config, own_role.role, own_id))
        self.ranks[f"{worker}/{index}"] = await stack.enter_async_context(
            open_rank(config, own_id, own_role, page)
        )
        self._stacks[f"{worker}/{index}"] = stack

    async def stop_rank(self, name):
        """As SIGKILL would, as far as others can tell: the stream breaks, nothing is drained."""
        rank = self.ranks.pop(name)
        await rank.server.stop(0)
        await self._stacks.pop(name).aclose()
        return rank

    async def _start_router(self, name):
        router = await self._stack.enter_async_context(open_router(self.router_config, name))
        endpoint = f"127.0.0.1:{router.server.port}"
        channel = await self._stack.enter_async_context(channels.open_channel(endpoint, self.base.tls()))
        self.routers.append(router)
        self.stubs.append(generation_pb2_grpc.GenerationStub(channel))

    async def until_placeable(self, timeout_s=10.0):
        """Every router sees and reaches every rank."""
        async with asyncio.timeout(timeout_s):
            for stub in self.stubs:
                while not await self._placeable(stub):
                    await asyncio.sleep(0.02)

    async def _placeable(self, stub):
        wanted = {role: sum(workers) for role, workers in self.shape.items()}
        probe = generation_pb2.ExplainRequest(request=ids_request([0]))
        model = (await stub.ListModels(generation_pb2.ListModelsRequest())).models[0]
        if (model.decode_ranks, model.prefill_ranks) != (wanted["decode"], wanted["prefill"]):
            return False
        try:
            explanation = await stub.Explain(probe)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return False
            raise
        reasons = {candidate.excluded for candidate in explanation.candidates}
        return all(not reason or "KV layout differs" in reason for reason in reasons)

    async def generate(self, ids, max_tokens=8, router=0, timeout=20, **fields):
        """(token ids, Finish) of a request with token ids."""
        tokens = []
        async for response in self.stubs[router].Generate(
            ids_request(ids, max_tokens, **fields), timeout=timeout
        ):
            tokens.extend(response.token_ids)
            if response.HasField("finish"):
                return tokens, response.finish
        raise AssertionError("the stream ended without a finish")

    async def until_indexed(self, decode, ids, router=0, timeout_s=5.0, **fields):
        """The router's mirror knows that the rank holds every full block of `ids`."""
        async with asyncio.timeout(timeout_s):
            while True:
                explanation = await self.stubs[router].Explain(
                    generation_pb2.ExplainRequest(request=ids_request(ids, **fields))
                )
                hits = {(c.decode.worker, c.decode.rank): c.decode_hit_tokens for c in explanation.candidates}
                if hits.get((decode.worker, decode.rank), 0) >= len(ids) // BLOCK * BLOCK:
                    return
                await asyncio.sleep(0.01)

    async def assert_nothing_held(self):
        for name, rank in self.ranks.items():
            books = await settled(rank.engine)
            assert books.locked == books.private == books.quarantined == 0, (name, books)
        for router in self.routers:
            assert router.generator.num_running == 0


def ids_request(ids, max_tokens=8, **fields):
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=ids), sampling=sampling, **fields
    )
