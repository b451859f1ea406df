"""This benchmark measures what it gains that a rank hands over what it has cached before it is stopped.

    OMP_NUM_THREADS=1 PYTHONPATH=.:tests python -m bench.drain --json FILE [--only all] [--quick]

Each side is a whole cluster: a router and three decode ranks that compute prompts themselves, torch, in this
process, with NIXL between them. Both stand at the same time. One rank has conversations that are idle; it is
drained, on one side with --hand-over-s=0, and stopped; then each conversation has its next turn, the newest
first, off and on, on and off ... TTFT is the router's own. Cells:

    all    the other two ranks have room for all
    half   their pools together hold half of it
    none   what they hold has been used since, and nothing may go for what comes

`computed` is what was computed of the prompts of the next turns, over their tokens that were cached: with
--hand-over-s=0 that is all. `found_ratio` is that of TTFT's medians over the conversations of which the most
was found, on the side that hands over. `hit_of_handed` is what the router finds at the other ranks right
after the drain, over what was handed over. `reused_of_handed` is what the next turns found of it, which need
pages of full pools themselves. `others_hit` is what the router finds right after the drain of what the others
held before. `drain_s` is the time that `isthmus drain` takes. The others' pools are touched before, as those
of ranks that have served are: the kernel needs longer for a first touch than a copy takes. `--untouched`
leaves that out.
"""

import asyncio
import ctypes
import logging
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.checkpoint import Size, write
from bench.decode_cache.workload import Ids, TokenIds
from bench.interrupts import end_as_by_ctrl_c
from bench.report import Row, parser_of, percentile, table, verdict, write_json
from cluster.harness import FakeCluster, ids_request
from services.cli import drain
from services.etcd.embedded import EmbeddedEtcd
from services.wire.isthmus.v1.generation_pb2 import ExplainRequest, Finish

SIDES = ("off", "on")
LEAVER, OTHERS = "decode-0/0", ("decode-1/0", "decode-2/0")
_PAGE = 16
_ANSWER, _QUESTION = 16, 64
_TIMEOUT_S = 1_200.0
_HEARD_S = 2.0  # The router hears within a beat of the index.


@dataclass(frozen=True, slots=True)
class Cell:
    name: str
    room: float  # The pools of the others hold this share of what is cached, together.
    are_used: bool  # What they hold has been used since.
    goals: tuple[tuple[str, str, float], ...]


_SOON = (("drain_s_on", "<=", 3.0),)
CELLS = (
    Cell(
        "all",
        2.0,
        False,
        (("ttft_p50_ratio", ">=", 5.0), ("computed_on", "<=", 0.05), *_SOON),
    ),
    Cell("half", 0.5, False, (("found_ratio", ">=", 5.0), ("hit_of_handed", ">=", 0.98), *_SOON)),
    Cell("none", 0.5, True, (("others_hit_on", ">=", 0.98), *_SOON)),
)


@dataclass(slots=True)
class Side:
    cluster: FakeCluster
    first: dict[str, TokenIds] = field(default_factory=dict)  # They are prompts of next turns.
    others: dict[str, TokenIds] = field(default_factory=dict)
    next_turns: list[Finish] = field(default_factory=list)
    others_hit: float = 1.0
    drain_s: float = 0.0
    handed_tokens: int = 0
    hit_tokens: int = 0


async def ask(side: Side, name: str, ids: TokenIds) -> tuple[TokenIds, Finish]:
    tokens, finish = await side.cluster.generate(ids, _ANSWER, timeout=_TIMEOUT_S, conversation_id=name)
    return (*ids, *tokens, *Ids(0).take(f"{name}/question", _QUESTION)), finish


async def command(side: Side, *arguments: str) -> None:
    router = f"--router=127.0.0.1:{side.cluster.routers[0].server.port}"
    assert await asyncio.to_thread(drain.run, [*arguments, router]) == 0


async def prepare(side: Side, cell: Cell, conversations: int, length: int) -> None:
    """The leaver has all the conversations, and the others what is used, in the cell none."""
    await command(side, *OTHERS, "--hand-over-s=0")
    for number in range(conversations):
        name = f"{cell.name}/{number}"
        side.first[name], _ = await ask(side, name, Ids(0).take(name, length))
    await command(side, *OTHERS, "--undo")
    for other in OTHERS if cell.are_used else ():
        away = {LEAVER, *OTHERS} - {other}
        await command(side, *away, "--hand-over-s=0")
        for number in range(max(1, int(0.4 * cell.room * conversations))):
            name = f"{other}/{number}"
            side.others[name], _ = await ask(side, name, Ids(0).take(name, length))
        await command(side, *away, "--undo")


def touch(side: Side) -> None:
    """Have the kernel give the others' pools their memory."""
    for rank in map(side.cluster.ranks.__getitem__, OTHERS):
        for memory, unit_bytes in zip(rank.engine.memories, rank.engine.layout.unit_bytes, strict=True):
            ctypes.memset(memory.base_address, 0, memory.num_pages * unit_bytes)


async def _hit_tokens(side: Side) -> int:
    """Return how much of the conversations the router finds at the others, once it has heard of all of it."""
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + _HEARD_S
    while True:
        hit_tokens = sum([await _most_hit(side, ids) for ids in side.first.values()])
        if hit_tokens >= side.handed_tokens or clock() >= deadline_s:
            return hit_tokens
        await asyncio.sleep(0.05)


async def _others_held(side: Side) -> int:
    return sum([await _most_hit(side, ids) for ids in side.others.values()])


async def _most_hit(side: Side, ids: TokenIds) -> int:
    explanation = await side.cluster.stubs[0].Explain(ExplainRequest(request=ids_request(ids)))
    hits: list[int] = [candidate.decode_hit_tokens for candidate in explanation.candidates]
    return max(hits)


async def leave(side: Side, *, hands_over: bool) -> None:
    before = await _others_held(side)
    began = time.perf_counter()
    await command(side, LEAVER, *(() if hands_over else ("--hand-over-s=0",)))
    side.drain_s = time.perf_counter() - began
    told = side.cluster.ranks[LEAVER].leaving.told()
    side.handed_tokens = 0 if told is None else told.handed_tokens
    await side.cluster.stop_rank(LEAVER)
    await asyncio.sleep(_HEARD_S)
    side.others_hit = await _others_held(side) / before if before else 1.0
    side.hit_tokens = await _hit_tokens(side)


async def measure(
    cell: Cell, model: Path, etcd: str, conversations: int, length: int, transport: str, untouched: bool
) -> Row:
    async with AsyncExitStack() as stack:
        sides = {}
        for name in SIDES:
            cluster = _cluster(cell, model, etcd, name, conversations, length, transport)
            sides[name] = Side(await stack.enter_async_context(cluster))
            if not untouched:
                touch(sides[name])
            await prepare(sides[name], cell, conversations, length)
        for name, side in sides.items():
            await leave(side, hands_over=name == "on")
        for number, conversation in enumerate(reversed(sides["on"].first)):
            for name in SIDES if number % 2 == 0 else reversed(SIDES):
                _, finish = await ask(sides[name], conversation, sides[name].first[conversation])
                sides[name].next_turns.append(finish)
        return _row(cell, sides)


def _cluster(
    cell: Cell, model: Path, etcd: str, side: str, conversations: int, length: int, transport: str
) -> FakeCluster:
    pages = conversations * -(-(length + 2 * (_ANSWER + _QUESTION)) // _PAGE) + 64
    least = 2 * (length // _PAGE) + 32  # What runs must fit, too.
    pools = dict.fromkeys(("decode-1", "decode-2"), max(least, int(cell.room * pages / 2)))
    return FakeCluster(
        etcd,
        model,
        f"drain-{cell.name}-{side}",
        decode=(1, 1, 1),
        prefill=(),
        plans=("local",),
        pools=pools,
        engine="torch",
        self_check="off",
        model=str(model),
        page_size=_PAGE,
        index_block=_PAGE,
        kv_pages=pages,
        chunk_size=512,
        num_threads=1,
        transport=transport,
        kv_digest_share=0.0,
    )


def _row(cell: Cell, sides: dict[str, Side]) -> Row:
    row: Row = {"cell": cell.name, "turns": len(sides["on"].next_turns)}
    ttft = {}
    for name, side in sides.items():
        turns = side.next_turns
        ttft[name] = percentile([turn.stages.first_token_s for turn in turns], 0.5)
        cached = sum(len(ids) - _QUESTION - _PAGE for ids in side.first.values())
        reused = sum(turn.usage.prompt_tokens - turn.usage.computed_tokens for turn in turns)
        row |= {
            f"ttft_p50_{name}": ttft[name],
            f"computed_{name}": max(0.0, 1 - reused / cached),
            f"drain_s_{name}": side.drain_s,
        }
        row[f"others_hit_{name}"] = side.others_hit
        if name == "on":
            row["handed"] = side.handed_tokens / cached
            handed_tokens = side.handed_tokens
            row["hit_of_handed"] = side.hit_tokens / handed_tokens if handed_tokens else 1.0
            row["reused_of_handed"] = reused / handed_tokens if handed_tokens else 1.0
    row["ttft_p50_ratio"] = ttft["off"] / ttft["on"]
    pairs = list(zip(*(sides[name].next_turns for name in SIDES), strict=True))
    found = [pair for pair in pairs if 2 * pair[1].usage.computed_tokens < pair[1].usage.prompt_tokens]
    p50s = [
        percentile([turn.stages.first_token_s for turn in turns], 0.5) for turns in zip(*found, strict=True)
    ]
    row["found_ratio"] = p50s[0] / p50s[1] if p50s else 1.0
    return row


async def measure_all(
    cells: Sequence[Cell], size: Size, conversations: int, length: int, transport: str, untouched: bool
) -> list[Row]:
    with TemporaryDirectory(prefix="isthmus-bench-") as directory:
        model = Path(directory) / "model"
        write(model, size)
        etcd = EmbeddedEtcd(Path(directory) / "etcd")
        await etcd.start()
        try:
            rows = []
            for cell in cells:
                row = await measure(cell, model, etcd.endpoint, conversations, length, transport, untouched)
                rows.append(row)
                print(table(rows[-1:]), flush=True)
            return rows
        finally:
            await etcd.stop()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=[cell.name for cell in CELLS], help="these cells")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument(
        "--length", type=int, default=2_000, help="of a conversation's first prompt, in tokens"
    )
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--untouched", action="store_true", help="the others' pools were never touched")
    parser.add_argument("--quick", action="store_true", help="a smoke test: a tiny model, few conversations")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("nixl").setLevel(logging.WARNING)
    load = os.getloadavg()[0]
    cells = [cell for cell in CELLS if not arguments.only or cell.name in arguments.only]
    size = Size(layers=2, hidden=128) if arguments.quick else Size()
    conversations = min(6, arguments.conversations) if arguments.quick else arguments.conversations
    shape = conversations, arguments.length, arguments.transport, arguments.untouched
    rows = asyncio.run(measure_all(cells, size, *shape))
    goals = [
        {"cell": cell.name} | verdict(name, sign, wanted, row[name])
        for cell, row in zip(cells, rows, strict=True)
        for name, sign, wanted in cell.goals
    ]
    print(f"load average at the start {load:.1f}\n\n{table(rows)}\n\n{table(goals)}")
    if arguments.json is not None:
        settings: Row = {k: v for k, v in vars(arguments).items() if k != "json"} | {"load_at_start": load}
        write_json(arguments.json, "drain", settings, rows, {"goals": goals})


if __name__ == "__main__":
    end_as_by_ctrl_c()
    main()
