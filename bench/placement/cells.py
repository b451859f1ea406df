"""A cell is a workload, a layout, a kind of arrivals and a load; every policy is run in it.

The capacity of a layout is what its computing ranks can compute: the sum of their tokens a second over the
tokens that a session takes under the oracle. The oracle may not compute on decode ranks where there are
prefill ranks, for this is what such a layout is split for. How much a session takes depends on the load; so
it is measured twice, the second time at four fifths of what the first time gave. Closed arrivals have as many
users as the open ones of that load have sessions at once, by Little's law.

All sessions run to their end, and the first tenth of them is not counted.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from time import process_time

from bench.placement.figures import figures_of
from bench.placement.generators import WORKLOADS, closed_arrivals, open_arrivals
from bench.placement.peers import PEERS
from bench.placement.ranks import Job, Timing
from bench.placement.settings import Setting
from bench.placement.simulation import Simulation
from bench.placement.workload import TraceRequest
from bench.report import Row

# A rank as large as a model of 70B needs, over eight devices: 320 KiB a token, 600,000 tokens.
TIMING = Timing(
    tokens_per_s=4_000.0,
    chunk_tokens=1_024,
    kv_bytes_per_token=327_680,
    bytes_per_s=50e9,
    step_s=0.025,
    step_s_per_sequence=0.0005,
)
_BLOCKS = 1_200
_SLOW_SHARE = 1 / 3
_UNCOUNTED_SHARE = 0.1
_PROBED_LOAD = 0.8
LAYOUTS = {"8": (0, 8), "4+4": (4, 4), "2+6": (2, 6), "16+48": (16, 48)}
LOADS = (0.5, 0.8, 0.95, 1.1)
PEER_POLICIES = ("round-robin", "least-loaded", "sticky", "cache-aware", *PEERS)
CELL_POLICIES = ("ours", *PEER_POLICIES, "oracle")


@dataclass(frozen=True, slots=True)
class Fleet:
    workload: str
    layout: str
    length_s: float  # that the sessions' arrivals take at all of the capacity
    seed: int = 1

    @property
    def setting(self) -> Setting:
        prefill, decode = LAYOUTS[self.layout]
        slow_share = _SLOW_SHARE if self.workload == "slow" else 1.0
        return Setting(
            prefill, decode, blocks=_BLOCKS, workload=self.workload, timing=TIMING, slow_share=slow_share
        )

    @property
    def tokens_per_s(self) -> float:
        """Return the sum of those that compute where there are prefill ranks."""
        setting = self.setting
        return sum(timing.tokens_per_s for timing in setting.timings(setting.prefill or setting.decode, 1))


@dataclass(frozen=True, slots=True)
class Capacity:
    num_requests: int
    sessions_per_s: float
    session_s: float  # that one takes


@dataclass(frozen=True, slots=True)
class Cell:
    fleet: Fleet
    arrivals: str  # open or closed
    load: float

    def columns(self) -> Row:
        fleet = self.fleet
        return {
            "workload": fleet.workload,
            "layout": fleet.layout,
            "arrivals": self.arrivals,
            "load": self.load,
        }

    def requests(self, capacity: Capacity) -> list[TraceRequest]:
        return _requests(self, capacity)


def _requests(cell: Cell, capacity: Capacity) -> list[TraceRequest]:
    fleet = cell.fleet
    sessions = WORKLOADS[fleet.workload](fleet.seed, capacity.num_requests)
    sessions_per_s = cell.load * capacity.sessions_per_s
    if cell.arrivals == "open":
        return open_arrivals(sessions, sessions_per_s, fleet.seed)
    return closed_arrivals(sessions, max(1, round(sessions_per_s * capacity.session_s)), fleet.seed)


def capacity_of(fleet: Fleet) -> Capacity:
    policy = "oracle-remote" if fleet.setting.prefill else "oracle"
    num_requests, tokens = 400, 0.0
    sessions = WORKLOADS[fleet.workload](fleet.seed, num_requests)
    tokens = sum(turn.new_tokens for session in sessions for turn in session.turns) / len(sessions)
    session_s = 0.0
    for _ in range(2):
        sessions_per_s = fleet.tokens_per_s / tokens
        per_session = fmean(session.num_requests for session in sessions)
        num_requests = max(_LEAST_REQUESTS, int(fleet.length_s * sessions_per_s * per_session))
        probe = Capacity(num_requests, sessions_per_s, session_s)
        jobs = _jobs(Cell(fleet, "open", _PROBED_LOAD), probe, policy)
        names = {job.request.session.partition(".")[0] for job in jobs}
        tokens = sum(job.computed_tokens for job in jobs) / len(names)
        session_s = fmean(_durations_s(jobs))
    return Capacity(num_requests, fleet.tokens_per_s / tokens, session_s)


_LEAST_REQUESTS = 1_500


def _durations_s(jobs: Sequence[Job]) -> Iterator[float]:
    began: dict[str, float] = {}
    ended: dict[str, float] = {}
    for job in jobs:
        name = job.request.session.partition(".")[0]
        began[name] = min(began.get(name, job.request.arrival_s), job.request.arrival_s)
        ended[name] = max(ended.get(name, 0.0), job.ended_s)
    return (ended[name] - began[name] for name in began)


def _jobs(cell: Cell, capacity: Capacity, policy: str) -> list[Job]:
    """Return the requests that count, by number."""
    requests = cell.requests(capacity)
    simulation = Simulation(cell.fleet.setting, policy, requests)
    simulation.serve()
    first = int(_UNCOUNTED_SHARE * len(requests))
    return sorted(
        (job for job in simulation.jobs if job.request.number >= first), key=lambda job: job.request.number
    )


def run_cell(cell: Cell, capacity: Capacity, policy: str) -> Row:
    began = process_time()
    figures = figures_of(_jobs(cell, capacity, policy))
    return {**cell.columns(), "policy": policy, **figures, "cpu_s": process_time() - began}


def run_cells(
    cells: Sequence[Cell], policies: Sequence[str], processes: int
) -> Iterator[tuple[Cell, dict[str, Row]]]:
    """Yield each with the rows of the policies, as they come."""
    fleets = list(dict.fromkeys(cell.fleet for cell in cells))
    with ProcessPoolExecutor(processes) as pool:
        capacities = dict(zip(fleets, pool.map(capacity_of, fleets), strict=True))
        runs = [(cell, capacities[cell.fleet], policy) for cell in cells for policy in policies]
        rows = pool.map(run_cell, *zip(*runs, strict=True))
        for cell in cells:
            yield cell, {policy: next(rows) for policy in policies}


def cells_of(workloads: Sequence[str], layouts: Sequence[str], quick: bool) -> list[Cell]:
    """Return all loads of agents, and of the others those at which placement is hard."""
    cells: list[Cell] = []
    for layout in layouts:
        for workload in workloads:
            fleet = Fleet(workload, layout, _QUICK_S if quick else _LENGTH_S)
            grid = _QUICK if quick else _OF_AGENTS if workload == "agents" else _OF_OTHERS
            cells += [Cell(fleet, arrivals, load) for arrivals, load in grid]
    return cells


_LENGTH_S, _QUICK_S = 600.0, 150.0
_QUICK = (("open", 0.8),)
_OF_AGENTS = (*(("open", load) for load in LOADS), ("closed", 0.8), ("closed", 0.95))
_OF_OTHERS = (("open", 0.8), ("closed", 0.95))
