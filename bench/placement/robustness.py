"""This benchmark measures what placement loses when what the router knows is wrong, late or gone.

    python -m bench.placement.robustness --cells agents:8,mixed:8 --json FILE

Each row is ours in a cell at 80 % of its capacity with one thing wrong; the last one is the least load with
nothing wrong. A router that starts again, when half of the requests have been placed, finds the index and the
pins in etcd, and has none of the speeds, predictions and requests in flight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.placement.cells import Cell, Fleet
from bench.placement.figures import figures_of
from bench.placement.simulation import Simulation
from bench.report import Row, parser_of, table, write_json
from services.router.replay.ours import Ours
from services.router.replay.ranks import Rank
from services.router.replay.replay import Policy
from services.router.replay.setting import Setting
from services.router.replay.workload import Job, TraceRequest
from services.values.kv import BlockHash, CacheEvents
from services.values.rank import RankId, RankKey
from services.values.rank_reports import RankLoad

_LOAD, _LENGTHS = 0.8, 0.5  # as in quick runs of bench.placement
_UNCOUNTED_SHARE = 0.2
_CELLS = "agents:8,agents:4+4,mixed:8,documents:8"


@dataclass(frozen=True, slots=True)
class Wrong:
    setting: Callable[[Setting], Setting] = lambda setting: setting
    prepare: Callable[[Simulation], None] = lambda simulation: None
    policy: str = "ours"


class Restarted:
    """This is a router that starts again. Each request's news go to the router that placed it."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        (self._now,) = simulation._policies
        self._left = len(simulation._requests) // 2
        self._placed: dict[int, Policy] = {}
        self._held: dict[RankId, dict[BlockHash, None]] = {rank.id: {} for rank in simulation.ranks}

    def choose(self, request: TraceRequest) -> tuple[int, int | None]:
        if not self._left:
            self._start_again()
        self._left -= 1
        self._placed[request.number] = self._now
        return self._now.choose(request)

    def _start_again(self) -> None:
        before, (again,) = self._now, self._simulation._make_policies("ours")
        assert isinstance(before, Ours) and isinstance(again, Ours)
        again._pins = before._pins
        for rank, held in self._held.items():
            again.index.apply_snapshot(rank, tuple(held))
        self._now = again

    def sent(self, job: Job) -> None:
        self._placed[job.request.number].sent(job)

    def first_token(self, job: Job) -> None:
        self._placed[job.request.number].first_token(job)

    def ended(self, job: Job) -> None:
        self._placed.pop(job.request.number).ended(job)

    def loaded(self, rank: Rank) -> None:
        self._now.loaded(rank)

    def told(self, rank: RankId, taken: CacheEvents) -> None:
        held = self._held[rank]
        for removed in taken.removed:
            held.pop(removed, None)
        held.update(dict.fromkeys(taken.stored))
        self._now.told(rank, taken)


def _restart(simulation: Simulation) -> None:
    simulation._policies[:] = [Restarted(simulation)]


def _speeds(even: float, odd: float) -> Callable[[Simulation], None]:
    """Let ranks report so many times their speed."""

    def tell(rank: Rank, times: float) -> None:
        real = rank.load

        def load() -> RankLoad:
            known = real()
            return replace(known, prefill_tokens_per_s=times * known.prefill_tokens_per_s)

        rank.load = load  # type: ignore[method-assign]

    def prepare(simulation: Simulation) -> None:
        for index, rank in enumerate(simulation.ranks):
            tell(rank, odd if index % 2 else even)

    return prepare


def _bandwidth(times: float) -> Callable[[Simulation], None]:
    def prepare(simulation: Simulation) -> None:
        (ours,) = simulation._policies
        assert isinstance(ours, Ours)
        balance = ours._balance
        real = balance.bandwidths

        def bandwidth(prefill: RankKey, decode: RankKey) -> float:
            return times * real()(prefill, decode)

        balance.bandwidths = lambda: bandwidth  # type: ignore[method-assign]

    return prepare


WRONG = {
    "nothing": Wrong(),
    "every second rank twice as fast": Wrong(prepare=_speeds(2.0, 1.0)),
    "every second rank half as fast": Wrong(prepare=_speeds(0.5, 1.0)),
    "all ranks twice as fast": Wrong(prepare=_speeds(2.0, 2.0)),
    "all ranks half as fast": Wrong(prepare=_speeds(0.5, 0.5)),
    "a tenth of the bandwidth": Wrong(prepare=_bandwidth(0.1)),
    "ten times the bandwidth": Wrong(prepare=_bandwidth(10.0)),
    "index 2 s late": Wrong(lambda setting: replace(setting, staleness_s=2.0)),
    "started again": Wrong(prepare=_restart),
    "2 routers": Wrong(lambda setting: replace(setting, routers=2)),
    "4 routers": Wrong(lambda setting: replace(setting, routers=4)),
    "least load": Wrong(policy="least-loaded"),
}


def measure(cell: Cell, wrong: Wrong) -> Row:
    requests = cell.requests()
    simulation = Simulation(wrong.setting(cell.fleet.setting), wrong.policy, requests)
    wrong.prepare(simulation)
    simulation.serve()
    first = int(_UNCOUNTED_SHARE * len(requests))
    jobs = [job for job in simulation.jobs if job.request.number >= first]
    return figures_of(sorted(jobs, key=lambda job: job.request.number))


def _rows(cell: Cell, names: Sequence[str]) -> list[Row]:
    return [{**cell.columns(), "wrong": name, **measure(cell, WRONG[name])} for name in names]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cells", default=_CELLS, help="WORKLOAD:LAYOUT,...")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for workload, layout in (name.split(":") for name in arguments.cells.split(",")):
        cell = Cell(Fleet(workload, layout), "open", _LOAD, _LENGTHS)
        rows += (of_cell := _rows(cell, list(WRONG)))
        shown = ("workload", "layout", "wrong", "ttft_mean_s", "ttft_p99_s", "goodput_per_s", "hits")
        print(table([{name: row[name] for name in shown} for row in of_cell]), flush=True)
    if arguments.json is not None:
        write_json(arguments.json, "placement-robustness", {"load": _LOAD}, rows)


if __name__ == "__main__":
    main()
