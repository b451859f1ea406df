"""A cell is a workload, a layout, a kind of arrivals and a load; every policy is run in it.

The capacity of a layout is so many sessions a second for each prefill rank, or for each rank where there are
none: those of which the oracle still serves nine of ten requests within the targets of figures.py on eight
ranks that do both. --capacities measures what share it serves. A policy that also computes on decode ranks
can serve more. Closed arrivals have as many users as the open ones of that load have sessions at once, by
Little's law.

The sessions are so many that they take half as long again to come as one takes, or as one of 160 s; in a
quick run two fifths of one, so that fewer run at once than at that load in the long run. All of them run to
their end, and the first fifth is not counted.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from time import process_time

from bench.placement.figures import figures_of
from bench.placement.generators import WORKLOADS, closed_arrivals, open_arrivals
from bench.placement.peers import PEERS
from bench.placement.simulation import Simulation
from bench.report import Row
from services.router.replay.setting import Setting, Timing
from services.router.replay.workload import Job, TraceRequest

# A rank as large as a model of 70B needs, over eight devices: 320 KiB a token, a million tokens.
TIMING = Timing(
    tokens_per_s=4_000.0,
    chunk_tokens=1_024,
    kv_bytes_per_token=327_680,
    bytes_per_s=50e9,
    step_s=0.025,
    step_s_per_sequence=0.0005,
)
_BLOCKS = 2_000
_SLOW_SHARE = 1 / 3
_UNCOUNTED_SHARE = 0.2
_LENGTHS, _LEAST_S, _LEAST_REQUESTS, _MOST_REQUESTS = 1.5, 160.0, 600, 6_000
_QUICK_LENGTHS = 0.4
LAYOUTS = {"8": (0, 8), "4+4": (4, 4), "2+6": (2, 6), "16+48": (16, 48)}
LOADS = (0.5, 0.8, 0.95, 1.1)
PEER_POLICIES = ("round-robin", "least-loaded", "sticky", "cache-aware", *PEERS)
CELL_POLICIES = ("ours", *PEER_POLICIES, "oracle")


@dataclass(frozen=True, slots=True)
class Capacity:
    sessions_per_s: float  # of a rank
    session_s: float  # that one takes


CAPACITIES = {
    "agents": Capacity(0.050, 380.0),
    "documents": Capacity(0.6, 75.0),
    "giant": Capacity(0.46, 60.0),
    "burst": Capacity(0.046, 400.0),
    "mixed": Capacity(0.42, 105.0),
    "slow": Capacity(0.050, 380.0),
}


@dataclass(frozen=True, slots=True)
class Fleet:
    workload: str
    layout: str
    seed: int = 1
    others_shorter_first: float = 0.0  # as Simulation has it

    @property
    def setting(self) -> Setting:
        prefill, decode = LAYOUTS[self.layout]
        slow_share = _SLOW_SHARE if self.workload == "slow" else 1.0
        return Setting(
            prefill, decode, blocks=_BLOCKS, workload=self.workload, timing=TIMING, slow_share=slow_share
        )

    @property
    def sessions_per_s(self) -> float:
        """Return the capacity."""
        setting = self.setting
        timings = setting.timings(setting.prefill or setting.decode, 1)
        usual_ranks = sum(timing.tokens_per_s for timing in timings) / TIMING.tokens_per_s
        return usual_ranks * CAPACITIES[self.workload].sessions_per_s


@dataclass(frozen=True, slots=True)
class Cell:
    fleet: Fleet
    arrivals: str  # open or closed
    load: float
    lengths: float = _LENGTHS

    def columns(self) -> Row:
        fleet = self.fleet
        return {
            "workload": fleet.workload,
            "layout": fleet.layout,
            "arrivals": self.arrivals,
            "load": self.load,
        }

    @property
    def name(self) -> str:
        return "/".join(str(value) for value in self.columns().values())

    @property
    def is_busy(self) -> bool:
        """Return whether it is one of those of agents of which most is wanted."""
        return self.fleet.workload == "agents" and self.load in (0.8, 0.95)

    def requests(self) -> list[TraceRequest]:
        """Return those of a fleet and a length, which are the same whatever the load but for their times."""
        fleet, session_s = self.fleet, CAPACITIES[self.fleet.workload].session_s
        make = WORKLOADS[fleet.workload]
        sessions = make(fleet.seed, _LEAST_REQUESTS)
        per_session = sum(session.num_requests for session in sessions) / len(sessions)
        arrive_s = self.lengths * max(session_s, _LEAST_S)
        num_requests = int(arrive_s * fleet.sessions_per_s * per_session)
        if num_requests > _LEAST_REQUESTS:
            sessions = make(fleet.seed, min(_MOST_REQUESTS, num_requests))
        sessions_per_s = self.load * fleet.sessions_per_s
        if self.arrivals == "open":
            return open_arrivals(sessions, sessions_per_s, fleet.seed)
        return closed_arrivals(sessions, max(1, round(sessions_per_s * session_s)), fleet.seed)


def measured(workload: str) -> Row:
    """Return what the oracle serves at all of the capacity."""
    jobs = jobs_of(Cell(Fleet(workload, "8"), "open", 1.0), "oracle")
    return {"workload": workload, "session_s": fmean(_durations_s(jobs)), **figures_of(jobs)}


def _durations_s(jobs: Sequence[Job]) -> Iterator[float]:
    began: dict[str, float] = {}
    ended: dict[str, float] = {}
    for job in jobs:
        name = job.request.session.partition(".")[0]
        began[name] = min(began.get(name, job.request.arrival_s), job.request.arrival_s)
        ended[name] = max(ended.get(name, 0.0), job.ended_s)
    return (ended[name] - began[name] for name in began)


def jobs_of(cell: Cell, policy: str) -> list[Job]:
    """Return the requests that count, by number."""
    requests = cell.requests()
    simulation = Simulation(cell.fleet.setting, policy, requests, cell.fleet.others_shorter_first)
    simulation.serve()
    first = int(_UNCOUNTED_SHARE * len(requests))
    jobs = (job for job in simulation.jobs if job.request.number >= first)
    return sorted(jobs, key=lambda job: job.request.number)


def run_cell(cell: Cell, policy: str) -> Row:
    began = process_time()
    figures = figures_of(jobs_of(cell, policy))
    return {**cell.columns(), "policy": policy, **figures, "cpu_s": process_time() - began}


def run_cells(
    cells: Sequence[Cell], policies: Sequence[str], processes: int
) -> Iterator[tuple[Cell, dict[str, Row]]]:
    """Yield each with the rows of the policies, as they come."""
    runs = [(cell, policy) for cell in cells for policy in policies]
    with ProcessPoolExecutor(processes) as pool:
        rows = pool.map(run_cell, *zip(*runs, strict=True))
        for cell in cells:
            yield cell, {policy: next(rows) for policy in policies}


def cells_of(
    workloads: Sequence[str], layouts: Sequence[str], quick: bool, others_shorter_first: float = 0.0
) -> list[Cell]:
    """Return all loads of agents, and of the others those at which placement is hard."""
    cells: list[Cell] = []
    for layout in layouts:
        for workload in workloads:
            fleet = Fleet(workload, layout, others_shorter_first=others_shorter_first)
            lengths = _QUICK_LENGTHS if quick else _LENGTHS
            full, few = _OF_AGENTS if workload == "agents" else _OF_OTHERS
            grid = few if quick else full
            cells += [Cell(fleet, arrivals, load, lengths) for arrivals, load in grid]
    return cells


# All of them, and those of a quick run.
_OF_AGENTS = (
    tuple((kind, load) for kind in ("open", "closed") for load in LOADS),
    (("open", 0.8), ("open", 0.95)),
)
_OF_OTHERS = (("open", 0.8), ("closed", 0.95)), (("open", 0.8),)
