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
"ours-alone" lets no rank pull from another; the oracle does not either. Ranks of ours and of the bounds let
shorter prompts overtake longer ones (--shorter-first of ranks); those of the others do not.
The 200+800 ranks get 25 copies of the trace at once, for five minutes.
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
from bench.placement.simulation import ONE_PLAN, POLICIES, Simulation
from bench.placement.workload import pooled_lru_hits, read_trace
from bench.report import Row, parser_of, table, write_json
from services.router.replay.setting import Setting, Timing

_LAYOUTS = {"8": (0, 8), "4+4": (4, 4), "2+6": (2, 6), "8+64": (8, 64), "200+800": (200, 800)}
# A thousand ranks get 25 times the requests, for five minutes.
_LARGE, _LARGE_COPIES, _LARGE_DURATION_S = "200+800", 25, 300.0


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
    chosen = cells.cells_of(arguments.workloads, layouts, arguments.quick, arguments.others_shorter_first)
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
    arguments.policies = arguments.policies or POLICIES
    chosen = [_setting(layout, arguments.duration_s) for layout in arguments.layouts or _LAYOUTS]
    rows = _rows(arguments.trace, chosen, arguments.policies, arguments.processes)
    print(table(rows))
    met = goals(rows, _pooled_hits(arguments.trace, chosen))
    if met:
        print(table(met))
    if arguments.json is not None:
        constants: Row = {"timing": asdict(Timing()), "duration_s": arguments.duration_s, "goals": met}
        write_json(arguments.json, "placement", constants, rows)


def _setting(layout: str, duration_s: float | None) -> Setting:
    prefill, decode = _LAYOUTS[layout]
    if layout != _LARGE:
        return Setting(prefill, decode, duration_s=duration_s)
    shorter_s = min(duration_s or _LARGE_DURATION_S, _LARGE_DURATION_S)
    return Setting(prefill, decode, copies=_LARGE_COPIES, duration_s=shorter_s)


def _rows(trace: Path, chosen: Sequence[Setting], policies: Sequence[str], processes: int) -> list[Row]:
    """One of each setting and policy; printed as they come."""
    runs = [(setting, policy) for setting in chosen for policy in policies]
    runs = [(setting, policy) for setting, policy in runs if setting.prefill or policy != "ours-remote"]
    rows: list[Row] = []
    with ProcessPoolExecutor(processes) as pool:
        for row in pool.map(partial(_run, trace), *zip(*runs, strict=True)):
            rows.append(row)
            print(row, flush=True)
    return rows


def _run(trace: Path, setting: Setting, policy: str) -> Row:
    requests = read_trace(trace, setting.duration_s, setting.copies)
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
    by_layout = {setting.layout: setting for setting in chosen}

    @cache
    def hits(layout: str, num_ranks: int) -> float:
        setting = by_layout[layout]
        requests = read_trace(trace, setting.duration_s, setting.copies)
        return pooled_lru_hits(requests, num_ranks * setting.blocks)

    return lambda row, num_ranks: hits(str(row["layout"]), num_ranks)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="JSON lines as the Mooncake traces have them")
    source.add_argument(
        "--workloads", type=_names_of(("all", *WORKLOADS)), help=f"all, or some of {', '.join(WORKLOADS)}"
    )
    parser.add_argument("--capacities", action="store_true", help="of workloads: what the oracle can serve")
    parser.add_argument("--quick", action="store_true", help="of workloads: one load, and shorter")
    parser.add_argument(
        "--layouts",
        type=_names_of(dict.fromkeys((*_LAYOUTS, *cells.LAYOUTS))),
        help="PREFILL+DECODE, or ranks that do both; default: all that are for a trace, or for workloads",
    )
    known = dict.fromkeys((*POLICIES, *ONE_PLAN, *cells.CELL_POLICIES, "everywhere"))
    parser.add_argument("--policies", type=_names_of(known), help=", ".join(known))
    parser.add_argument(
        "--others-shorter-first",
        type=float,
        default=0.0,
        help="of workloads: what the ranks of other policies do, as ours do by 2; "
        "default: 0, since vLLM and SGLang compute in the order of arrival",
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
