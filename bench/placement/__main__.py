"""This benchmark measures what placement is worth, beside other policies.

    python -m bench.placement --workloads all --json FILE
    python -m bench.placement --trace FILE --json FILE

Virtual time, real decisions: the router's own placer, balance and index, and the prefix cache and page
allocator of every rank, around a model of what prefill, transfer and decode take (ranks.Timing, in the JSON).

Workloads (generators.py) are sessions, in cells of a layout, arrivals and a load (cells.py). A table for each
cell and the means for each layout are ratios to ours; figures.py says what each figure is. The last line says
in how many cells ours leads, ties within 3 % or loses. --quick takes one load of each and fewer sessions.

Of a trace a page is one block. "ours" (for its pins) and "sticky" are given conversation ids worked out
from the trace, which has none. "ours-remote" may not compute prompts on decode ranks, as the others cannot.
"everywhere" is a bound: sessions on ranks that do both, each of which is taken to hold whatever is asked for.
"ours-alone" lets no rank pull from another; the oracle does not either.
"ours-held" takes ranks of a model with recurrent layers (workloads "hybrid-...") to go on wherever they hold.
The workload "shared" is one long prefix in all prompts; "spread" is the trace without its clock, which ticks
every three seconds, so that ten requests come at once. Of 200+800 ranks, which get 25 times the load for five
minutes, neither is replayed unless asked for: the clocks of its 25 copies tick 8 times a second anyway, and a
thousand ranks do not feel one shared prefix. Who reads no index is replayed once for all settings that differ
in its staleness alone.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

from bench.placement import cells
from bench.placement.figures import counts_of, goals_of, means_of, ratios, verdicts
from bench.placement.generators import WORKLOADS
from bench.placement.goals import PooledHits, goals
from bench.placement.settings import (
    LAYOUTS,
    SHARED_DURATION_S,
    SHARED_REQUESTS_PER_S,
    VARIATIONS,
    settings,
)
from bench.placement.simulation import ONE_PLAN, POLICIES, READ_INDEX, Simulation
from bench.placement.workload import pooled_lru_hits, read_trace, shared_prefix, spread
from bench.report import Row, table, write_json
from services.router.replay.ranks import Timing
from services.router.replay.setting import Setting
from services.router.replay.workload import TraceRequest


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.workloads:
        arguments.workloads = list(WORKLOADS) if "all" in arguments.workloads else arguments.workloads
        arguments.layouts = arguments.layouts or list(cells.LAYOUTS)
        _contend(arguments)
    else:
        _replay(arguments)


def _contend(arguments: argparse.Namespace) -> None:
    """Print a table for each layout, of the means over its cells, and how many cells ours leads."""
    if arguments.capacities:
        print(table([cells.measured(workload) for workload in arguments.workloads]))
        return
    layouts = [name for name in cells.LAYOUTS if name in arguments.layouts]
    policies = ["ours", *(name for name in arguments.policies or cells.CELL_POLICIES if name != "ours")]
    rows: list[Row] = []
    tables: dict[str, list[list[Row]]] = {layout: [] for layout in layouts}
    found: list[dict[str, str]] = []
    wanted: list[Row] = []
    chosen = cells.cells_of(arguments.workloads, layouts, arguments.quick)
    for cell, by_policy in cells.run_cells(chosen, policies, arguments.processes):
        rows += by_policy.values()
        compared = verdicts(by_policy, cells.PEER_POLICIES)
        found.append(compared)
        wanted += goals_of(cell.name, by_policy, cells.PEER_POLICIES, cell.is_busy)
        tables[cell.fleet.layout].append(ratios(by_policy))
        print(f"{cell.columns()} {compared}", table(tables[cell.fleet.layout][-1]), sep="\n", flush=True)
    for layout, of_layout in tables.items():
        print(f"layout {layout}: means over {len(of_layout)} cells, as ratios to ours", flush=True)
        print(table(means_of(of_layout)))
    if missed := [goal for goal in wanted if not goal["met"]]:
        print(f"{len(missed)} of {len(wanted)} goals are not met:", table(missed), sep="\n")
    print(counts_of(found))
    if arguments.json is not None:
        constants: Row = {"timing": asdict(cells.TIMING), "counts": counts_of(found), "goals": wanted}
        write_json(arguments.json, "placement", constants, rows)


def _replay(arguments: argparse.Namespace) -> None:
    arguments.layouts = arguments.layouts or LAYOUTS
    arguments.policies = arguments.policies or POLICIES
    chosen = list(settings(arguments.layouts, arguments.variations, duration_s=arguments.duration_s))
    rows = _rows(arguments.trace, chosen, arguments.policies, arguments.processes)
    print(table(rows))
    met = goals(rows, _pooled_hits(arguments.trace, chosen))
    if met:
        print(table(met))
    if arguments.json is not None:
        constants: Row = {"timing": asdict(Timing()), "duration_s": arguments.duration_s, "goals": met}
        write_json(arguments.json, "placement", constants, rows)


def _rows(trace: Path, chosen: Sequence[Setting], policies: Sequence[str], processes: int) -> list[Row]:
    """One of each setting and policy; printed as they come."""
    wanted = [(setting, policy) for setting in chosen for policy in policies]
    wanted = [(setting, policy) for setting, policy in wanted if setting.prefill or policy != "ours-remote"]
    wanted = [(setting, policy) for setting, policy in wanted if setting.states or policy != "ours-held"]
    runs = list(dict.fromkeys(_seen(setting, policy) for setting, policy in wanted))
    rows: dict[tuple[Setting, str], Row] = {}
    with ProcessPoolExecutor(processes) as pool:
        for run, row in zip(runs, pool.map(partial(_run, trace), *zip(*runs, strict=True)), strict=True):
            rows[run] = row
            print(row, flush=True)
    return [rows[_seen(setting, policy)] | setting.columns() for setting, policy in wanted]


def _seen(setting: Setting, policy: str) -> tuple[Setting, str]:
    return (setting if policy in READ_INDEX else setting.without_index), policy


def _run(trace: Path, setting: Setting, policy: str) -> Row:
    requests = _requests(trace, setting)
    began = time.perf_counter()
    row = Simulation(setting, policy, requests).run()
    simulated_s = requests[-1].arrival_s - requests[0].arrival_s
    return {
        **setting.columns(),
        "policy": policy,
        **row,
        "simulated_s": simulated_s,
        "times_real": simulated_s / (time.perf_counter() - began),
    }


def _pooled_hits(trace: Path, chosen: Sequence[Setting]) -> PooledHits:
    by_columns = {tuple(setting.columns().values()): setting for setting in chosen}

    def pooled_hits(row: Row, num_ranks: int) -> float:
        setting = by_columns[tuple(row[name] for name in chosen[0].columns())]
        return _hits(trace, setting.copies, setting.duration_s, num_ranks * setting.blocks)

    @cache
    def _hits(trace: Path, copies: int, duration_s: float | None, num_blocks: int) -> float:
        return pooled_lru_hits(read_trace(trace, duration_s, copies), num_blocks)

    return pooled_hits


def _requests(trace: Path, setting: Setting) -> Sequence[TraceRequest]:
    if setting.workload == "shared":
        duration_s = min(setting.duration_s or SHARED_DURATION_S, SHARED_DURATION_S)
        return shared_prefix(SHARED_REQUESTS_PER_S, duration_s)
    requests = read_trace(trace, setting.duration_s, setting.copies)
    return spread(requests) if setting.workload == "spread" else requests


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="JSON lines as the Mooncake traces have them")
    source.add_argument(
        "--workloads", type=_names_of(("all", *WORKLOADS)), help=f"all, or some of {', '.join(WORKLOADS)}"
    )
    parser.add_argument("--capacities", action="store_true", help="of workloads: what the oracle can serve")
    parser.add_argument("--quick", action="store_true", help="of workloads: one load, and shorter")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument(
        "--layouts",
        type=_names_of(dict.fromkeys((*LAYOUTS, *cells.LAYOUTS))),
        help="PREFILL+DECODE, or ranks that do both; default: all that are for a trace, or for workloads",
    )
    known = dict.fromkeys((*POLICIES, *ONE_PLAN, *cells.CELL_POLICIES, "everywhere"))
    parser.add_argument("--policies", type=_names_of(known), help=", ".join(known))
    parser.add_argument(
        "--variations",
        type=_names_of(VARIATIONS),
        default=(),
        help=f"of each layout: {', '.join(VARIATIONS)} (default: all but what is left out above)",
    )
    parser.add_argument("--duration-s", type=float, help="replay only the trace's beginning")
    parser.add_argument("--processes", type=int, default=2)
    return parser


def _names_of(known: Iterable[str]) -> Callable[[str], Sequence[str]]:
    def names(text: str) -> Sequence[str]:
        if unknown := set(text.split(",")) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not of {', '.join(known)}")
        return text.split(",")

    return names


if __name__ == "__main__":
    main()
