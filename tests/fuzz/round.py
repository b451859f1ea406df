"""One cluster's life under the fuzz: bursts of requests, kills of ranks, then the books."""

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import grpc

from bench.chaos.eager_router import eager_to_pull
from cluster.harness import FakeCluster
from cluster.metrics_page import moves
from engine.pair import core_of, settled
from exactness.reference import forced_logits
from fuzz.requests import Asked, Tree
from fuzz.setup import Setup
from fuzz.verdict import Answer, Text, find_faults
from services.engine.paged.admitting import OutputEstimate
from services.engine.torch.checkpoint import open_checkpoint
from services.wire.isthmus.v1 import common_pb2, generation_pb2

_TIMEOUT_S = 120.0
_BURSTS, _TIGHT_BURSTS = (1, 2, 5, 12, 20), (5, 12, 20, 40)


@dataclass(frozen=True)
class _Model:
    directory: Path
    eos_token_ids: tuple[int, ...]
    context: int
    capacity: int


class Round:
    """`counts` of what happened; `faults` in sentences, each with all that it takes to see it again."""

    def __init__(self, setup: Setup, chance: random.Random, label: str) -> None:
        self.setup, self._chance, self._label = setup, chance, label
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    async def play(self, etcd: str, name: str, num_requests: int) -> None:
        with ExitStack() as around:
            if self.setup.tight:
                around.enter_context(_nothing_expected())
            if self.setup.eager:
                around.enter_context(eager_to_pull())
            folder = Path(around.enter_context(TemporaryDirectory(prefix="isthmus-fuzz-tiers-")))
            async with self.setup.cluster(etcd, name, folder) as cluster:
                async with self._kills(cluster):
                    await self._ask(cluster, num_requests)
                await self._close_books(cluster)
            self._count_open_files(str(folder))

    async def _ask(self, cluster: FakeCluster, num_requests: int) -> None:
        (model,) = (await cluster.stubs[0].ListModels(generation_pb2.ListModelsRequest())).models
        tree = Tree(self._chance, model.max_context_tokens)
        directory = Path(cluster.router_config.model)
        answered_by = _Model(
            directory,
            cluster.routers[0].generator._tokenizer.eos_token_ids,
            open_checkpoint(directory).max_context_tokens,
            model.max_context_tokens,
        )
        while self.counts["requests"] < num_requests:
            burst = [
                tree.draw()
                for _ in range(self._chance.choice(_TIGHT_BURSTS if self.setup.tight else _BURSTS))
            ]
            answers = await asyncio.gather(*(self._one(cluster, asked) for asked in burst))
            for asked, answer in zip(burst, answers, strict=True):
                await asyncio.to_thread(self._check, answered_by, asked, answer)
                if answer.finish is not None:
                    tree.grow(asked.prompt_ids, answer.token_ids)

    async def _one(self, cluster: FakeCluster, asked: Asked) -> Answer:
        answer = Answer()
        self.counts["requests"] += 1
        call = cluster.stubs[0].Generate(asked.request, timeout=_TIMEOUT_S)
        try:
            async with asyncio.timeout(asked.leave_s):
                async for response in call:
                    answer.token_ids.extend(response.token_ids)
                    answer.logprobs.extend(response.logprobs)
                    if response.HasField("finish"):
                        answer.finish = response.finish
                    elif asked.leave_after is not None and len(answer.token_ids) > asked.leave_after:
                        break
        except TimeoutError:
            pass
        except grpc.aio.AioRpcError as error:
            self._lost(asked, error)
        finally:
            call.cancel()
        return answer

    def _lost(self, asked: Asked, error: grpc.aio.AioRpcError) -> None:
        self.counts["lost"] += 1
        self._fault(asked, f"lost: {error.code().name} {error.details()}")

    def _check(self, model: _Model, asked: Asked, answer: Answer) -> None:
        self.counts["tokens"] += len(answer.token_ids)
        self.counts["answers" if answer.finish is not None else "unfinished"] += 1
        if not answer.token_ids:
            return
        logits = forced_logits(model.directory, asked.prompt_ids, answer.token_ids).numpy()
        text = Text(
            asked.prompt_ids,
            asked.sampling,
            model.eos_token_ids,
            model.context,
            model.capacity,
            logits,
        )
        faults, near_ties = find_faults(text, answer)
        self.counts["near_ties"] += near_ties
        self.counts["wrong"] += bool(faults)
        for fault in faults:
            self._fault(asked, fault)
        if answer.finish is not None:
            self.counts["pulled"] += answer.finish.usage.pulled_tokens
            remote = answer.finish.placement.plan == common_pb2.PLAN_REMOTE
            self.counts["remote" if remote else "local"] += 1

    def _fault(self, asked: Asked, what: str) -> None:
        self.faults.append(f"{what}; {asked}; {self._label}: {self.setup}")

    @asynccontextmanager
    async def _kills(self, cluster: FakeCluster) -> AsyncIterator[None]:
        if not self.setup.kills:
            yield
            return
        over = asyncio.Event()
        killing = asyncio.create_task(self._kill_until(over, cluster))
        try:
            yield
        finally:
            over.set()
            await killing

    async def _kill_until(self, over: asyncio.Event, cluster: FakeCluster) -> None:
        """One rank at a time, so that one of each role is left; the router has it back before the next."""
        chance = random.Random(self._chance.random())
        while not over.is_set():
            name = chance.choice(sorted(cluster.ranks))
            await cluster.stop_rank(name)
            self.counts["kills"] += 1
            await asyncio.sleep(chance.choice([0.0, 0.3]))
            worker, _, index = name.partition("/")
            await cluster.start_rank(worker.partition("-")[0], worker, int(index))
            await cluster.until_placeable(timeout_s=60.0)
            await _first_of(over, chance.choice([0.5, 1.5]))

    async def _close_books(self, cluster: FakeCluster) -> None:
        """Nobody asks any more: ranks hold free and cached pages alone, and the router no request."""
        self.counts["moves"] += int(await moves(cluster, "retry", "migration", "outgrown"))
        for name, rank in cluster.ranks.items():
            self.counts["retractions"] += rank.engine.load().retractions
            self._count_tiers(rank.engine)
            books = await settled(rank.engine)
            if books.locked or books.private or books.quarantined or not books.balanced:
                self.counts["unbalanced"] += 1
                self.faults.append(f"rank {name} holds {books}; {self._label}: {self.setup}")
        if running := cluster.routers[0].generator.num_running:
            self.counts["unbalanced"] += 1
            self.faults.append(f"the router runs {running} requests; {self._label}: {self.setup}")

    def _count_tiers(self, engine: Any) -> None:
        if (tiers := core_of(engine).tiers) is not None:
            figures = tiers.figures()
            self.counts["stored"] += figures.tokens_down
            self.counts["read"] += figures.tokens_up
            self.counts["shared"] += figures.tokens_shared

    def _count_open_files(self, folder: str) -> None:
        """No rank is there any more, and neither may its tiers be."""
        links = [os.readlink(f"/proc/self/fd/{name}") for name in _open_files()]
        if left := [link for link in links if "memfd:isthmus-tier" in link or folder in link]:
            self.counts["unbalanced"] += 1
            self.faults.append(f"files are open: {left}; {self._label}: {self.setup}")


def _open_files() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{name}"):  # The listing itself is one.
            yield name


async def _first_of(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass


@contextmanager
def _nothing_expected() -> Iterator[None]:
    """Of what runs, so that more is let in than there are pages for."""
    with patch.object(OutputEstimate, "more_tokens", lambda self, allowed: 0):
        yield
