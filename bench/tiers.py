"""This benchmark measures what a tier below the KV pool gains and costs: with one against without, on the
same requests, in one run.

    PYTHONPATH=.:tests python -m bench.tiers --json FILE

Each side is a decode rank of the torch engine that computes its prompts itself (plan local). Both stand at
the same time and take turns: without, with, with, without, ... Conversations of agents' shape (long contexts,
short additions) go round robin, one request at a time, so that of an LRU pool nothing is left when a
conversation comes again. TTFT counts from the submission.

    agents 1.3x, 3x    the conversations take so many times what the pool holds; tier in memory
    agents 3x, file    tier in a file below --directory
    agents 10x, file   the same, with as many conversations as that takes
    slow tier          reads take twice as long as computing the same tokens: nothing may be slower
    all fits           .8 times the pool: nothing may be stored, and nothing may be slower
    moved, file        each turn of a conversation comes to another of three ranks of a side, which all have
                       their files in one directory. Only those of the side "with" read each other's
    restart            both ranks are stopped and started again; the memory of the tier is held meanwhile
    router knows       two clusters of 4 decode ranks of the fake engine (.5 ms a token), each with a tier,
                       whose pools hold a third of the conversations; the requests name no conversation. The
                       router of the side "without" does not hear what lies below the pools
    router, shared     the same, with files that two ranks each share; before each turn another rank is
                       drained, and what its conversations cost elsewhere counts. The router of the side
                       "without" does not hear who shares

Only ratios of one run say anything. Where answers of the two sides differ, prompts were computed in other
chunks, and two tokens were next to equally likely: how often is told.
"""

import argparse
import asyncio
import logging
import math
import os
import random
import secrets
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from prometheus_client.core import Metric

from bench.checkpoint import Size, checkpoint
from bench.report import Row, parser_of, table, verdict, write_json
from cluster.harness import FakeCluster
from services.engine.choose import decode_engine
from services.engine.engine_config import EngineConfig
from services.engine.paged.shell.tiers import TierSettings
from services.etcd.embedded import EmbeddedEtcd
from services.tier.slab import FileCalls
from services.values.rank import Generation, Plan, RankId
from services.values.rank_reports import Registration
from services.values.request import GenerationRequest, SamplingParams
from services.wire.isthmus.v1.generation_pb2 import Finish

PAGE, BLOCK = 16, 64
VOCABULARY = 500
SIDES = ("without", "with")


@dataclass(frozen=True, slots=True)
class Cell:
    name: str
    working_set: float  # Of the pool's pages.
    goal: float  # Mean TTFT without over with.
    in_file: bool = False
    restarts: bool = False
    is_slow: bool = False
    moves: bool = False


KNOWS = Cell("router knows", 3.0, 3.0)
KNOWS_SHARED = Cell("router, shared", 3.0, 2.0, in_file=True, moves=True)
CELLS = (
    Cell("agents 1.3x", 1.3, 5.0),
    Cell("agents 3x", 3.0, 5.0),
    Cell("agents 3x, file", 3.0, 3.0, in_file=True),
    Cell("agents 10x, file", 10.0, 3.0, in_file=True),
    Cell("moved, file", 3.0, 3.0, in_file=True, moves=True),
    Cell("slow tier", 3.0, 0.97, is_slow=True),
    Cell("all fits", 0.8, 0.98),
    Cell("restart", 1.3, 5.0, restarts=True),
    KNOWS,
    KNOWS_SHARED,
)


@dataclass(frozen=True, slots=True)
class Load:
    conversations: int
    context: int  # It counts the first prompt's tokens.
    delta: int  # It counts those that each turn adds.
    answer: int
    turns: int  # They are measured; the first one, in which all is computed, is not.

    @property
    def longest(self) -> int:
        return self.context + (self.turns + 1) * (self.delta + self.answer)

    def pool_pages(self, working_set: float) -> int:
        return int(self.conversations * -(-self.longest // PAGE) / working_set)


class Throttle:
    """It makes the reads of slots take so long."""

    delay_s = 0.0

    def pread(self, fd: int, buffers: Sequence[memoryview], at: int) -> int:
        time.sleep(self.delay_s)
        return os.preadv(fd, buffers, at)


class ThrottledConfig(EngineConfig):
    throttle = Throttle()

    @property
    def tiers(self) -> TierSettings:
        return replace(super().tiers, calls=FileCalls(pread=self.throttle.pread))


@dataclass
class Side:
    """It is a rank, and what that answered."""

    settings: EngineConfig
    index: int = 0
    ttft_s: list[float] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    reused: int = 0
    prompted: int = 0

    async def start(self) -> None:
        self.engine = decode_engine(
            self.settings, RankId("bench", self.index, Generation(secrets.randbits(64)))
        )
        await self.engine.start()

    async def stop(self) -> None:
        await self.engine.stop()

    async def ask(self, ids: Sequence[int], max_tokens: int, *, measured: bool) -> list[int]:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = GenerationRequest(secrets.token_hex(8), tuple(ids), sampling, plan=Plan.LOCAL)
        began, tokens = time.monotonic(), list[int]()
        async with aclosing(self.engine.generate(request, None)) as outputs:
            async for output in outputs:
                if output.admitted is not None and measured:
                    self.ttft_s.append(time.monotonic() - began)
                    self.reused += output.admitted.decode_prefix_len
                    self.prompted += len(ids)
                tokens += output.token_ids
        if measured:
            self.answers.append(tokens)
        return tokens

    def counted(self, name: str) -> float:
        samples = [s for metric in _named(self.engine.metrics(), name) for s in metric.samples]
        return sum(sample.value for sample in samples)


def _named(metrics: object, name: str) -> list[Metric]:
    assert isinstance(metrics, object)
    return [metric for metric in metrics if metric.name == name]  # type: ignore[attr-defined]


@dataclass
class RoutedSide:
    """It is a cluster, and what its clients were told."""

    cluster: FakeCluster
    turns: list[Finish] = field(default_factory=list)
    homes: dict[int, str] = field(default_factory=dict)  # The ranks of conversations.

    def hear_of_pools_alone(self) -> None:
        async def ignore(key: object, change: object) -> None:
            """Take no record of what lies below a pool."""

        [router] = self.cluster.routers
        vars(router.mirror.below)["apply"] = ignore

    def hear_of_no_sharing(self) -> None:
        placer = self.cluster.routers[0].cluster._placer
        set_ranks = placer.set_ranks

        def set_alone(*roles: Sequence[Registration]) -> None:
            set_ranks(*([replace(rank, shared_files="") for rank in ranks] for ranks in roles))

        vars(placer)["set_ranks"] = set_alone
        placer._hits.sharing = {}

    async def drain_another(self, turn: int) -> str:
        """Put the rank back that was drained before, and return the one that is now."""
        names: list[str] = sorted(self.cluster.ranks)
        before, drained = names[(turn - 1) % len(names)], names[turn % len(names)]
        if turn > 1:
            await self.cluster.ranks[before].intake.undrain()
        await self.cluster.ranks[drained].intake.drain()
        return drained

    async def ask(
        self, ids: Sequence[int], max_tokens: int, number: int, *, measured: bool, drained: str = ""
    ) -> list[int]:
        """Measure the turn; if a rank is drained, only of a conversation that was there."""
        tokens, finish = await self.cluster.generate(list(ids), max_tokens, timeout=120)
        if measured and (not drained or self.homes[number] == drained):
            self.turns.append(finish)
        home = finish.placement.decode
        self.homes[number] = f"{home.worker}/{home.rank}"
        return list(tokens)


class SharingPairs(FakeCluster):
    """Two of its ranks each have their files in one directory below `kv_tier`'s."""

    async def start_rank(self, role: str, worker: str, index: int, port: int = 0, **settings: Any) -> None:
        pair = int(worker.rpartition("-")[2]) // 2
        tier = (f"{self.base.kv_tier[0].partition(':')[0]}/{pair}:16MiB",)
        await super().start_rank(role, worker, index, port, kv_tier=tier, kv_tier_shared="on", **settings)


async def measure_routed(
    cell: Cell, load: Load, model: Path, directory: Path, prompt_token_s: float, seed: int
) -> Row:
    etcd = EmbeddedEtcd(directory / "etcd")
    await etcd.start()
    try:
        async with AsyncExitStack() as stack:
            sides: dict[str, RoutedSide] = {}
            for name in SIDES:
                place = str(directory / name) if cell.in_file else "memory"
                cluster = _cluster(cell, load, model, etcd.endpoint, name, place, prompt_token_s)
                sides[name] = RoutedSide(await stack.enter_async_context(cluster))
            if cell.moves:
                sides["without"].hear_of_no_sharing()
            else:
                sides["without"].hear_of_pools_alone()
            rng = random.Random(seed)
            contexts = [_ids(rng, load.context) for _ in range(load.conversations)]
            for turn in range(1 + load.turns):
                drained = dict.fromkeys(SIDES, "")
                if cell.moves and turn > 0:
                    drained = {name: await side.drain_another(turn) for name, side in sides.items()}
                for number, context in enumerate(contexts):
                    ids = [*context, *_ids(rng, load.delta)]
                    for name in SIDES if (turn + number) % 2 == 0 else SIDES[::-1]:
                        side, measured = sides[name], turn > 0
                        answer = await side.ask(
                            ids, load.answer, number, measured=measured, drained=drained[name]
                        )
                    contexts[number] = [*ids, *answer]
        return _routed_row(cell, sides)
    finally:
        await etcd.stop()


def _cluster(
    cell: Cell, load: Load, model: Path, etcd: str, side: str, place: str, prompt_token_s: float
) -> FakeCluster:
    return (SharingPairs if cell.moves else FakeCluster)(
        etcd,
        model,
        f"tiers-{side}",
        decode=(1, 1, 1, 1),
        prefill=(),
        plans=("local",),
        page_size=PAGE,
        index_block=BLOCK,
        chunk_size=512,
        kv_pages=max(load.pool_pages(4 * cell.working_set), 2 * -(-load.longest // PAGE)),
        kv_tier=(f"{place}:16MiB",),
        fake_prompt_token_s=prompt_token_s,
        pull="off",
    )


def _routed_row(cell: Cell, sides: dict[str, RoutedSide]) -> Row:
    row: Row = {"cell": cell.name, "requests": len(sides["with"].turns)}
    ttft_s = {name: mean(turn.stages.first_token_s for turn in side.turns) for name, side in sides.items()}
    for name, side in sides.items():
        usages = [turn.usage for turn in side.turns]
        prompted = sum(usage.prompt_tokens for usage in usages)
        row[f"{name}_ms"] = 1e3 * ttft_s[name]
        row[f"reused_{name}"] = sum(usage.reused_tokens for usage in usages) / prompted
        row[f"brought_{name}"] = sum(usage.brought_tokens for usage in usages) / prompted
    return row | {"ratio": ttft_s["without"] / ttft_s["with"]}


async def measure(cell: Cell, load: Load, model: Path, directory: Path, threads: int, seed: int) -> Row:
    # The pool is to have room for one and a quarter.
    load = replace(load, conversations=max(load.conversations, math.ceil(1.25 * cell.working_set)))
    ThrottledConfig.throttle.delay_s = 0.0
    settings = (ThrottledConfig if cell.is_slow else EngineConfig)(
        model=str(model),
        num_threads=threads,
        self_check="off",
        pull="off",
        transport="local",
        page_size=PAGE,
        index_block=BLOCK,
        kv_pages=load.pool_pages(cell.working_set),
    )
    fd = os.memfd_create("bench-tier")
    where = f"{directory}/{secrets.token_hex(4)}" if cell.in_file else "memory"
    tier = {"kv_tier": (f"{where}:2GiB",), "kv_tier_fd": None if cell.in_file else fd}
    tiered: EngineConfig = replace(settings, **tier)  # type: ignore[arg-type]
    apart: EngineConfig = replace(tiered, kv_tier=(f"{where}-apart:2GiB",)) if cell.moves else settings
    tiered = replace(tiered, kv_tier_shared="on") if cell.moves else tiered
    count = 1 + load.turns if cell.moves else 1
    ranks = {
        name: [Side(config, index) for index in range(count)]
        for name, config in zip(SIDES, (apart, tiered), strict=True)
    }
    every = [side for sides in ranks.values() for side in sides]
    for side in every:
        await side.start()
    rng = random.Random(seed)
    contexts = [_ids(rng, load.context) for _ in range(load.conversations)]
    for number, context in enumerate(contexts):
        contexts[number] = await _turn(_at(ranks, 0), SIDES, context, load, rng, measured=False)
    if cell.is_slow:
        rate = ranks["with"][0].engine.load().prefill_tokens_per_s
        ThrottledConfig.throttle.delay_s = 2 * BLOCK / rate
    for turn in range(load.turns):
        if cell.restarts:
            for side in every:
                await side.stop()
                await side.start()
        for number, context in enumerate(contexts):
            order = SIDES if (turn + number) % 2 == 0 else SIDES[::-1]
            contexts[number] = await _turn(_at(ranks, 1 + turn), order, context, load, rng, measured=True)
    stored = sum(side.counted("isthmus_tier_bytes") for side in ranks["with"])
    for side in every:
        await side.stop()
    os.close(fd)
    return _row(cell, {name: _together(sides) for name, sides in ranks.items()}, stored)


def _at(ranks: dict[str, list[Side]], turn: int) -> dict[str, Side]:
    return {name: sides[turn % len(sides)] for name, sides in ranks.items()}


def _together(sides: Sequence[Side]) -> Side:
    """Return what all the ranks of a side have answered, as if one had."""
    whole = Side(sides[0].settings)
    for side in sides:
        whole.ttft_s += side.ttft_s
        whole.answers += side.answers
        whole.reused += side.reused
        whole.prompted += side.prompted
    return whole


async def _turn(
    sides: dict[str, Side],
    order: Sequence[str],
    ids: list[int],
    load: Load,
    rng: random.Random,
    measured: bool,
) -> list[int]:
    """Ask both sides the same; the conversation goes on from what the first has answered."""
    ids = [*ids, *_ids(rng, load.delta)]
    answers = {name: await sides[name].ask(ids, load.answer, measured=measured) for name in order}
    return [*ids, *answers["without"]]


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def _row(cell: Cell, sides: dict[str, Side], stored: float) -> Row:
    without, with_ = sides["without"], sides["with"]
    differing = sum(a != b for a, b in zip(without.answers, with_.answers, strict=True))
    return {
        "cell": cell.name,
        "requests": len(with_.ttft_s),
        "without_ms": 1e3 * mean(without.ttft_s),
        "with_ms": 1e3 * mean(with_.ttft_s),
        "ratio": mean(without.ttft_s) / mean(with_.ttft_s),
        "reused_without": without.reused / without.prompted,
        "reused_with": with_.reused / with_.prompted,
        "tier_MiB": stored / 2**20,
        "differing": differing,
    }


def verdicts(rows: Sequence[Row]) -> list[Row]:
    by_name = {row["cell"]: row for row in rows}
    found = [
        verdict(f"{cell.name}: mean TTFT", ">=", cell.goal, by_name[cell.name]["ratio"])
        for cell in CELLS
        if cell.name in by_name
    ]
    if "all fits" in by_name:
        found.append(verdict("all fits: MiB stored and read", "<=", 0.0, by_name["all fits"]["tier_MiB"]))
    return found


async def run(arguments: argparse.Namespace) -> list[Row]:
    load = Load(arguments.conversations, arguments.context, 128, 16, arguments.turns)
    if arguments.quick:
        load = Load(4, 512, 64, 4, 2)
    size = Size(layers=2, hidden=64) if arguments.quick else Size(arguments.layers, arguments.hidden)
    rows = []
    with checkpoint(size, arguments.checkpoint) as model, TemporaryDirectory(dir=arguments.directory) as tier:
        for cell in CELLS:
            if arguments.only in cell.name:
                if cell in (KNOWS, KNOWS_SHARED):
                    routed = replace(load, conversations=12 if arguments.quick else 24)
                    row = await measure_routed(cell, routed, model, Path(tier), 0.0005, arguments.seed)
                else:
                    row = await measure(cell, load, model, Path(tier), arguments.threads, arguments.seed)
                print(table([row]), flush=True)
                rows.append(row)
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="cells with this in their name")
    parser.add_argument("--quick", action="store_true", help="a smoke test, whose ratios say nothing")
    parser.add_argument("--checkpoint", type=Path, help="one that bench.checkpoint wrote")
    parser.add_argument("--directory", type=Path, help="where the tier's file is to be")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    rows = asyncio.run(run(arguments))
    goals = verdicts(rows)
    print(table(rows), table(goals), sep="\n\n")
    if arguments.json:
        settings = {name: str(value) for name, value in vars(arguments).items() if name != "json"}
        write_json(arguments.json, "tiers", dict(settings), rows, {"goals": goals})


if __name__ == "__main__":
    main()
