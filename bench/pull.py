"""This measures what pulls of KV between ranks gain and cost: on against off, in one run.

    OMP_NUM_THREADS=1 PYTHONPATH=.:tests python -m bench.pull --json FILE [--only "remote answers"] [--quick]

Each side is a whole cluster: a router, a prefill rank and two decode ranks, torch, in this process, with NIXL
between them. Both stand at the same time and take turns on requests of the same shape, off and on, on and off
...; of one side the router and its ranks have --pull=off. TTFT is the router's own, from a request's arrival
to its first token, of turns that follow a first one. Cells:

    remote answers   plans=remote; two clients, long answers: prefill pulls what decode generated
    all plans        the same under both plans, where the home may compute itself
    moved            4k contexts; the conversation's decode rank drains, and the other one goes on
    evicted          plans=remote; prefill's pool holds .3 of the contexts, decode's all of them
    short            plans=remote; answers of 16 tokens, which are not worth a pull
    cold             plans=remote; prompts that nobody holds
    hybrid           as remote answers, on a qwen3_5 model with recurrent layers
    lending          plans=remote; a rank streams an answer, and turns of others for whom it is the source
                     arrive at the same times on both sides

`itl` is the mean of each answer, p50; in the cell lending it is of the gaps between the tokens of the stream.
There alone both sides have the same load at the same time: elsewhere a client that is answered sooner asks
sooner, so that its answers have more beside them on two cores.
`computed` is what the ranks computed of prompts, over what nobody held of them in whole pages.
"""

import asyncio
import logging
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.checkpoint import Size, write
from bench.decode_cache.workload import Ids, TokenIds
from bench.families import FAMILIES
from bench.interrupts import end_as_by_ctrl_c
from bench.report import Row, parser_of, percentile, table, verdict, write_json
from cluster.harness import FakeCluster, ids_request
from services.cli import drain
from services.cli.model.make_model import make_model
from services.etcd.embedded import EmbeddedEtcd
from services.wire.isthmus.v1.generation_pb2 import Finish

SIDES = ("off", "on")
_PAGE = 16
_CLIENTS = 2
_EVERY_S = 4.0  # Without a source prefill computes for less than that, so turns do not pile up.
_STREAMED = 3_000  # tokens at most
_TIMEOUT_S = 1_200.0


@dataclass(frozen=True, slots=True)
class Shape:
    """The lengths of a cell, in tokens and turns."""

    first: int
    question: int
    answer: tuple[int, int]  # They are the shortest and the longest.
    conversations: int
    turns: int


@dataclass(frozen=True, slots=True)
class Turn:
    finish: Finish
    itl_s: float  # on average
    new_tokens: int  # that no rank held, where those that one held end with a page


@dataclass(slots=True)
class Side:
    cluster: FakeCluster
    turns: list[Turn] = field(default_factory=list)  # All count but the first ones of conversations.
    gaps_s: list[float] = field(default_factory=list)  # between tokens that are streamed, in the cell lending


Drive = Callable[[Side, Shape, str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Cell:
    name: str
    drive: Drive
    shape: Shape
    plans: tuple[str, ...]
    goals: tuple[tuple[str, str, float], ...]
    family: str = "llama"
    prefill_share: float | None = None  # Prefill's pool holds this much of all contexts; None: all of them.
    decode: tuple[int, ...] = (1, 1)

    @property
    def context_tokens(self) -> int:
        """Return what a conversation comes to at most."""
        shape = self.shape
        return shape.first + shape.turns * (shape.answer[1] + shape.question)

    @property
    def pool_pages(self) -> int:
        return (
            self.shape.conversations * -(-self.context_tokens // _PAGE)
            + 64
            + (_STREAMED // _PAGE if self.drive is lending else 0)
        )


@dataclass(slots=True)
class Talk:
    """A conversation has its prompt so far, of which somebody holds the first tokens."""

    name: str
    ids: TokenIds
    held: int = 0

    def go_on(self, tokens: TokenIds, question: TokenIds) -> None:
        self.held = len(self.ids) + len(tokens) - 1  # The newest token's KV was never computed.
        self.ids = (*self.ids, *tokens, *question)


async def ask(side: Side, talk: Talk, answer: int) -> tuple[TokenIds, Finish]:
    tokens, came_s, loop = list[int](), list[float](), asyncio.get_running_loop()
    request = ids_request(talk.ids, answer, conversation_id=talk.name)
    async for response in side.cluster.stubs[0].Generate(request, timeout=_TIMEOUT_S):
        tokens.extend(response.token_ids)
        came_s += [loop.time()] * len(response.token_ids)
        if response.HasField("finish"):
            if talk.held:
                itl_s = (came_s[-1] - came_s[0]) / max(1, len(came_s) - 1)
                new_tokens = len(talk.ids) - talk.held // _PAGE * _PAGE
                side.turns.append(Turn(response.finish, itl_s, new_tokens))
            return tuple(tokens), response.finish
    raise AssertionError("the stream ended without a finish")


async def converse(side: Side, shape: Shape, name: str) -> None:
    """Clients take conversations, each of which has one turn after the other."""
    waiting = [_talk(name, number, shape) for number in range(shape.conversations)]
    async with asyncio.TaskGroup() as clients:
        for _ in range(_CLIENTS):
            clients.create_task(_client(side, shape, waiting))


async def _client(side: Side, shape: Shape, waiting: list[Talk]) -> None:
    while waiting:
        talk = waiting.pop(0)
        for turn in range(shape.turns):
            await _turn(side, shape, talk, turn)


async def in_rounds(side: Side, shape: Shape, name: str) -> None:
    """All conversations have a turn before any has its next one."""
    talks = [_talk(name, number, shape) for number in range(shape.conversations)]
    for turn in range(shape.turns):
        for talk in talks:
            await _turn(side, shape, talk, turn)


async def moved(side: Side, shape: Shape, name: str) -> None:
    """The decode rank of each conversation drains after its first turn."""
    for number in range(shape.conversations):
        talk = _talk(name, number, shape)
        home = (await _turn(side, shape, talk, 0)).placement.decode
        # Nothing is handed over: bench.drain measures that.
        await _drain(side, f"{home.worker}/{home.rank}", "--hand-over-s=0")
        assert (await _turn(side, shape, talk, 1)).placement.decode != home
        await _drain(side, f"{home.worker}/{home.rank}", "--undo")


async def lending(side: Side, shape: Shape, name: str) -> None:
    """A turn of each conversation comes while an answer is streamed, always at the same times."""
    talks = [_talk(name, number, shape) for number in range(shape.conversations)]
    for talk in talks:
        await _turn(side, shape, talk, 0)
    stream = asyncio.create_task(_stream(side, Ids(0).take(f"{name}/stream", 64)))
    async with asyncio.TaskGroup() as arrivals:
        for talk in talks:
            await asyncio.sleep(_EVERY_S)
            arrivals.create_task(_turn(side, shape, talk, 1))
    assert not stream.done(), "the answer ended before the last turn"
    stream.cancel()
    await asyncio.wait({stream})


async def _stream(side: Side, ids: TokenIds) -> None:
    last_s, loop = None, asyncio.get_running_loop()
    request = ids_request(ids, _STREAMED)
    async for response in side.cluster.stubs[0].Generate(request, timeout=_TIMEOUT_S):
        now_s = loop.time()
        if last_s is not None and response.token_ids:
            side.gaps_s += [(now_s - last_s) / len(response.token_ids)] * len(response.token_ids)
        last_s = now_s


async def cold(side: Side, shape: Shape, name: str) -> None:
    """Nobody holds more than the first token of any prompt, which counts all the same."""
    for number in range(shape.conversations):
        talk = _talk(name, number, shape)
        talk.held = 1
        await ask(side, talk, shape.answer[1])


async def _turn(side: Side, shape: Shape, talk: Talk, turn: int) -> Finish:
    answer = random.Random(f"{talk.name}/{turn}").randint(*shape.answer)
    tokens, finish = await ask(side, talk, answer)
    talk.go_on(tokens, Ids(0).take(f"{talk.name}/{turn}", shape.question))
    return finish


def _talk(name: str, number: int, shape: Shape) -> Talk:
    talk = f"{name}/{number}"
    return Talk(talk, Ids(0).take(talk, shape.first))


async def _drain(side: Side, rank: str, *flags: str) -> None:
    router = f"--router=127.0.0.1:{side.cluster.routers[0].server.port}"
    assert await asyncio.to_thread(drain.run, [rank, router, *flags]) == 0


BOTH, REMOTE = ("remote", "local"), ("remote",)
_ANSWERS = Shape(first=300, question=100, answer=(800, 1_200), conversations=2, turns=5)
_NO_WORSE = (("ttft_p50_ratio", ">=", 0.98),)
_ITL = ("itl_p50_ratio", "<=", 1.05)
CELLS = (
    Cell(
        "remote answers",
        converse,
        _ANSWERS,
        REMOTE,
        (("ttft_p50_ratio", ">=", 2.0), ("computed_on", "<=", 1.02)),
    ),
    Cell("all plans", converse, _ANSWERS, BOTH, _NO_WORSE),
    Cell("moved", moved, Shape(4_000, 64, (16, 16), 4, 2), BOTH, (("ttft_p50_ratio", ">=", 5.0),)),
    Cell(
        "evicted",
        in_rounds,
        Shape(2_000, 64, (16, 16), 6, 3),
        REMOTE,
        (("ttft_p50_ratio", ">=", 3.0),),
        prefill_share=0.3,
    ),
    Cell(
        "lending",
        lending,
        Shape(2_000, 64, (16, 16), 6, 2),
        REMOTE,
        (("itl_p50_ratio", "<=", 1.05),),
        decode=(1,),
        prefill_share=0.3,
    ),
    Cell("short", converse, Shape(1_000, 100, (16, 16), 6, 4), REMOTE, (*_NO_WORSE, _ITL)),
    Cell("cold", cold, Shape(1_000, 0, (16, 16), 8, 1), REMOTE, (*_NO_WORSE, _ITL)),
    Cell(
        "hybrid",
        converse,
        replace(_ANSWERS, answer=(800, 800)),
        REMOTE,
        (("ttft_p50_ratio", ">=", 2.0),),
        family="qwen3_5",
    ),
)


def quick(cell: Cell) -> Cell:
    """Return a smoke test of the cell."""
    shape, (least, most) = cell.shape, cell.shape.answer
    shorter = replace(
        shape, first=shape.first // 4, answer=(least // 8 or 1, most // 8 or 1), turns=min(shape.turns, 3)
    )
    return replace(cell, shape=replace(shorter, conversations=min(shape.conversations, 3)))


async def measure(cell: Cell, model: Path, etcd: str, rounds: int, transport: str) -> Row:
    async with AsyncExitStack() as stack:
        sides = {}
        for name in SIDES:
            cluster = _cluster(cell, model, etcd, name, transport)
            sides[name] = Side(await stack.enter_async_context(cluster))
            await cold(sides[name], replace(cell.shape, first=600, conversations=3), "warm-up")
            sides[name].turns.clear()
        for round_ in range(rounds):
            for name in SIDES if round_ % 2 == 0 else reversed(SIDES):
                await cell.drive(sides[name], cell.shape, f"{cell.name}@{round_}")
        return _row(cell, sides)


def _cluster(cell: Cell, model: Path, etcd: str, side: str, transport: str) -> FakeCluster:
    pages, pools = cell.pool_pages, {}
    if cell.prefill_share is not None:
        # What runs must fit, too.
        pools["prefill-0"] = max(2 * cell.context_tokens // _PAGE, int(cell.prefill_share * pages))
    cluster = FakeCluster(
        etcd,
        model,
        f"pull-{cell.name.replace(' ', '-')}-{side}",
        decode=cell.decode,
        plans=cell.plans,
        pools=pools,
        engine="torch",
        self_check="off",
        model=str(model),
        page_size=_PAGE,
        index_block=_PAGE if cell.family == "llama" else 64,
        kv_pages=pages,
        chunk_size=512,
        num_threads=1,
        transport=transport,
        kv_digest_share=0.0,
        pull=side,
    )
    cluster.router_config = replace(cluster.router_config, pull=side)
    return cluster


def _row(cell: Cell, sides: dict[str, Side]) -> Row:
    row: Row = {"cell": cell.name, "turns": len(sides["on"].turns)}
    ttft, itl = {}, {}
    for name, side in sides.items():
        ttft[name] = percentile([turn.finish.stages.first_token_s for turn in side.turns], 0.5)
        itl[name] = percentile(side.gaps_s or [turn.itl_s for turn in side.turns], 0.5)
        new = sum(turn.new_tokens for turn in side.turns)
        computed = sum(turn.finish.usage.computed_tokens for turn in side.turns)
        row |= {f"ttft_p50_{name}": ttft[name], f"itl_p50_{name}": itl[name]}
        row[f"computed_{name}"] = computed / new
    placements = [turn.finish.placement for turn in sides["on"].turns]
    usages = [placement.usage for placement in placements]
    pulled, prompts = (sum(getattr(u, f"{which}_tokens") for u in usages) for which in ("pulled", "prompt"))
    refused = Counter(placement.pull_refused for placement in placements if placement.pull_refused)
    row["pulled_share"] = pulled / prompts
    row["refused"] = ",".join(f"{word}:{count}" for word, count in refused.items()) or "-"
    row["ttft_p50_ratio"] = ttft["off"] / ttft["on"]
    row["itl_p50_ratio"] = itl["on"] / itl["off"]
    return row


@contextmanager
def models(size: Size) -> Iterator[dict[str, Path]]:
    with TemporaryDirectory(prefix="isthmus-bench-") as directory:
        made = {family: Path(directory) / family for family in ("llama", "qwen3_5")}
        write(made["llama"], size)
        make_model(
            made["qwen3_5"],
            FAMILIES["qwen3_5"],
            hidden_size=size.hidden // 2,
            num_layers=size.layers,
            max_context_tokens=size.max_context_tokens,
        )
        yield made


async def measure_all(cells: Sequence[Cell], size: Size, rounds: int, transport: str) -> list[Row]:
    with TemporaryDirectory(prefix="isthmus-bench-") as directory, models(size) as made:
        etcd = EmbeddedEtcd(Path(directory))
        await etcd.start()
        try:
            rows = []
            for cell in cells:
                rows.append(await measure(cell, made[cell.family], etcd.endpoint, rounds, transport))
                print(table(rows[-1:]), flush=True)
            return rows
        finally:
            await etcd.stop()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=[cell.name for cell in CELLS], help="these cells")
    parser.add_argument("--rounds", type=int, default=1, help="of each side, on requests of their own")
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--quick", action="store_true", help="a smoke test: a tiny model, few requests")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("nixl").setLevel(logging.WARNING)
    load = os.getloadavg()[0]
    cells = [cell for cell in CELLS if not arguments.only or cell.name in arguments.only]
    size = Size(layers=2, hidden=128) if arguments.quick else Size()
    if arguments.quick:
        cells = list(map(quick, cells))
    rows = asyncio.run(measure_all(cells, size, arguments.rounds, arguments.transport))
    goals = [
        {"cell": cell.name} | verdict(name, sign, wanted, row[name])
        for cell, row in zip(cells, rows, strict=True)
        for name, sign, wanted in cell.goals
    ]
    print(f"load average at the start {load:.1f}\n\n{table(rows)}\n\n{table(goals)}")
    if arguments.json is not None:
        settings: Row = {k: v for k, v in vars(arguments).items() if k != "json"} | {"load_at_start": load}
        write_json(arguments.json, "pull", settings, rows, {"goals": goals})


if __name__ == "__main__":
    end_as_by_ctrl_c()
    main()
