"""This benchmark measures what the decode rank's radix cache gains and costs: on against off, on the same
requests, in one run.

    python -m bench.decode_cache --json FILE --workload shared|groups|turns|idle

Each side is a prefill rank in a process of its own and a decode rank, both our torch engine, KV between them
over a real transport; prefill's cache is on in both. Clients work in a closed loop at a fixed concurrency and
see tokens as they leave the engine; TTFT counts from the submission. Both sides stand at the same time and
take turns: off, on, on, off, ... each time with fresh requests of the same shape. Outputs have the same
lengths on both sides.

Lengths are scaled down so that a run stays below ten minutes on two cores: contexts of one to two thousand
tokens on a model of 8 layers, hidden 512, float32; `--quick` is a smoke test on a tiny one. Where there is a
GPU: `--device cuda --layers 32 --hidden 3072 --heads 24 --kv-heads 8` is a model of 2.6 billion parameters in
bfloat16. All four ranks are on that one GPU, and only one side works at a time.
Prefill computes every prompt (plan remote), as in the runs that this follows; but in `turns` the price that
routers use decides who computes a tail (services/router/placement/decision.py).

The runs that this follows had machines of their own for prefill. Here both ranks have one processor, so the
side that answers more also has more computed beside it.
"""

import argparse
import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.checkpoint import Size, checkpoint
from bench.decode_cache import workload as workloads
from bench.decode_cache.load import Run, drive
from bench.decode_cache.ranks import DecodeSide, RankSettings, open_side
from bench.decode_cache.summary import figures, ratios, verdicts, worst
from bench.decode_cache.workload import Workload
from bench.device import CPU, device_named
from bench.interrupts import end_as_by_ctrl_c
from bench.report import Row, parser_of, table, write_json
from services.values.rank import Plan

SIDES = ("off", "on")
LARGE = Size()
QUICK = Size(layers=2, hidden=64, max_context_tokens=4096)


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell is compared by itself: a workload of which every round has its own requests."""

    name: str
    make: Callable[[int], Workload]


def cells(name: str, quick: bool) -> list[Cell]:
    if name == "idle":
        return [
            Cell(f"{concurrency} {'with' if hits else 'without'} hits", _idle(concurrency, hits, quick))
            for concurrency in (1, 4)
            for hits in (False, True)
        ]
    make = {
        "shared": workloads.shared,
        "groups": workloads.groups,
        "turns": workloads.turns,
    }[name]
    return [Cell(name, lambda seed: make(seed, quick))]


def _idle(concurrency: int, hits: bool, quick: bool) -> Callable[[int], Workload]:
    return lambda seed: workloads.idle(seed, concurrency, hits, quick)


async def measure(
    settings: RankSettings,
    cells: Sequence[Cell],
    rounds: int,
    seed: int,
    *,
    quick: bool,
    chosen: Sequence[str] = SIDES,
) -> dict[str, dict[str, list[Run]]]:
    """The runs of each side that is chosen, by cell."""
    runs: dict[str, dict[str, list[Run]]] = {cell.name: {side: [] for side in chosen} for cell in cells}
    async with AsyncExitStack() as stack:
        sides = {
            name: await stack.enter_async_context(open_side(settings, decode_cache=name == "on"))
            for name in chosen
        }
        for side in sides.values():  # the first steps are slow: caches, kernels, the connection
            for plan in Plan:
                await drive(side, workloads.warm_up(seed, plan, quick), seed)
        for round_ in range(rounds):
            for cell in cells:
                for name in chosen if round_ % 2 == 0 else reversed(chosen):
                    runs[cell.name][name].append(await _run(sides[name], cell, round_, seed))
    return runs


async def _run(side: DecodeSide, cell: Cell, round_: int, seed: int) -> Run:
    workload = cell.make(seed + round_)
    return await drive(side, workloads.renamed(workload, f"@{round_}"), seed + round_)


def pool_pages(cells: Sequence[Cell], page_size: int, seed: int) -> int:
    return max(cell.make(seed).pool_pages(page_size) for cell in cells)


def report(workload: str, runs: dict[str, dict[str, list[Run]]]) -> tuple[Row, list[Row]]:
    """Return the ratios, none where a side is missing, and the raw figures of each cell and side."""
    raw: list[Row] = []
    compared = []
    for cell, by_side in runs.items():
        rows = {side: figures(of_side) for side, of_side in by_side.items()}
        raw += [{"cell": cell, "cache": side} | row for side, row in rows.items()]
        if len(rows) == len(SIDES):
            compared.append(ratios(rows["on"], rows["off"]))
    if not compared:
        return {}, raw
    return (worst(compared) if workload == "idle" else compared[0]), raw


def model_size(arguments: argparse.Namespace) -> Size:
    """Return the sizes that were asked for; the others are those of `--quick`, or the default."""
    wanted = {name: getattr(arguments, name) for name in ("layers", "hidden", "heads", "kv_heads")}
    return replace(QUICK if arguments.quick else LARGE, **{k: v for k, v in wanted.items() if v is not None})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workload", choices=("shared", "groups", "turns", "idle"), required=True)
    parser.add_argument("--rounds", type=int, help="of each side; default 2, idle 12")
    parser.add_argument("--quick", action="store_true", help="a smoke test: tiny model, few requests")
    parser.add_argument("--pages", type=int, help="of the decode rank's pool; default: as the workload says")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--chunk-size", type=int, default=512)
    parser.add_argument("--num-threads", type=int, default=1, help="torch threads of each rank")
    parser.add_argument("--itl-target-ms", type=float, help="of the decode ranks, as in isthmus-decode")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="the cache off, or on")
    parser.add_argument("--graph-mib", type=int, help="of each rank, as in isthmus-decode; 0: no graphs")
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", type=device_named, default=CPU, help="cpu (default), cuda or cuda:N")
    parser.add_argument("--dtype", help="default: float32 on the CPU, else bfloat16")
    parser.add_argument(
        "--model", "--checkpoint", dest="checkpoint", type=Path, help="run this one, not one made for the run"
    )
    parser.add_argument("--layers", type=int, help=f"of the model; default {LARGE.layers}")
    parser.add_argument("--hidden", type=int, help=f"default {LARGE.hidden}")
    parser.add_argument("--heads", type=int, help=f"query heads; default {LARGE.heads}")
    parser.add_argument("--kv-heads", type=int, help=f"default {LARGE.kv_heads}")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("nixl").setLevel(logging.WARNING)
    page_size = 16 if arguments.quick else arguments.page_size
    chosen = cells(arguments.workload, arguments.quick)
    rounds = arguments.rounds or (1 if arguments.quick else 12 if arguments.workload == "idle" else 2)
    load = os.getloadavg()[0]
    pages = arguments.pages or pool_pages(chosen, page_size, arguments.seed)
    size = model_size(arguments)
    with checkpoint(size, arguments.checkpoint) as directory:
        settings = RankSettings(
            model_path=str(directory),
            decode_pages=pages,
            prefill_pages=max(65_536 // page_size, 2 * pages),
            page_size=page_size,
            chunk_size=arguments.chunk_size,
            max_running_requests=64,
            num_threads=arguments.num_threads,
            transport=arguments.transport,
            itl_target_s=arguments.itl_target_ms / 1e3 if arguments.itl_target_ms else None,
            graph_mib=arguments.graph_mib,
            device=str(arguments.device),
            dtype=arguments.dtype or ("bfloat16" if arguments.device.type == "cuda" else None),
        )
        runs = asyncio.run(
            measure(
                settings,
                chosen,
                rounds,
                arguments.seed,
                quick=arguments.quick,
                chosen=arguments.sides,
            )
        )
    compared, raw = report(arguments.workload, runs)
    sample = chosen[0].make(arguments.seed)
    print(
        f"workload {arguments.workload}: {sample.num_turns} turns a round, concurrency {sample.concurrency}"
    )
    print(f"pool of {pages} pages of {page_size}; rounds {rounds}; load average at the start {load:.1f}\n")
    print(table(raw))
    if compared:
        print(f"\n{table([compared])}\n\n{table(verdicts(arguments.workload, compared))}")
    if arguments.json is not None:
        settings_row: Row = {k: v for k, v in vars(arguments).items() if k not in ("json", "checkpoint")} | {
            "device": str(arguments.device)
        }
        settings_row |= {"decode_pages": pages, "rounds": rounds, "load_at_start": load}
        settings_row |= {"device": settings.device, "dtype": settings.dtype} | asdict(size)
        write_json(arguments.json, "decode_cache", settings_row, raw, compared)


if __name__ == "__main__":
    end_as_by_ctrl_c()
    main()
